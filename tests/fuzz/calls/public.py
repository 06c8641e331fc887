"""All right calls of public functions, classes and methods."""

from __future__ import annotations

import functools

from tests.fuzz.calls import (
    datasets,
    distributed,
    inference,
    metrics,
    modules,
    optim,
    planner,
    sparse,
    training,
)
from tests.fuzz.calls.call import Call


@functools.cache
def all_calls() -> list[Call]:
    """All calls, in order of their folder."""
    rooms = sparse, optim, modules, datasets, metrics, planner, distributed, training, inference
    return [call for room in rooms for call in room.CALLS]

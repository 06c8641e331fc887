"""All right calls of public functions, classes and methods."""

from __future__ import annotations

import functools
import importlib

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
from tests.without_compat import HAS_COMPAT


@functools.cache
def all_calls() -> list[Call]:
    """All calls, in order of their folder; calls of `recsys.compat` at the end, if it exists."""
    rooms = [sparse, optim, modules, datasets, metrics, planner, distributed, training, inference]
    if HAS_COMPAT:
        rooms.append(importlib.import_module("tests.compat.calls"))
    return [call for room in rooms for call in room.CALLS]

"""Checks of shards, and the gap of a placement."""

from __future__ import annotations

import math

import pytest

from recsys.distributed.planner.placement import SearchResult
from tests.distributed.planner.search_cases import shards


def placement(load: float, bound: float) -> SearchResult:
    return SearchResult(
        choices=(),
        load_ms=(load,),
        bound_ms=bound,
        method="heuristic",
        seconds=0.0,
        timed_out=False,
    )


def test_gap() -> None:
    assert placement(3.0, 2.0).gap == 0.5
    assert placement(0.0, 0.0).gap == 0.0
    assert placement(1.0, 0.0).gap == math.inf
    assert placement(2.0, 2.0).optimal
    assert not placement(2.1, 2.0).optimal


def test_refuses_bad_shards() -> None:
    with pytest.raises(ValueError, match=r"count must be .*1; received 0"):
        shards(count=0, cost_ms=(1.0,))
    with pytest.raises(ValueError, match="finite and not negative; received"):
        shards(cost_ms=(math.nan,))
    with pytest.raises(ValueError, match=r"storage must not be negative; .*host=-1"):
        shards(cost_ms=(1.0,), memory=(0, -1))

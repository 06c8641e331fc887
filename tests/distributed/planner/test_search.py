"""The search against brute force where that is possible, and against its own rules where not."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings

from recsys.distributed.planner.placement import (
    InfeasibleError,
    Option,
    Pieces,
    Placement,
    Problem,
    Ranks,
    Reach,
)
from recsys.distributed.planner.search import search
from tests.distributed.planner.search_cases import (
    brute_force,
    check,
    option,
    problems,
    realistic,
)

ROOM = (1000, 0)


def answer(found: Placement) -> Placement:
    """The placement without what depends on the machine."""
    return dataclasses.replace(found, seconds=0.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_equals_brute_force(problem: Problem) -> None:
    best = brute_force(problem)
    try:
        found = search(problem, tolerance=0.0)
    except InfeasibleError as error:
        assert error.proven
        assert best == math.inf
        return
    check(problem, found)
    assert found.slowest_ms == pytest.approx(best, rel=1e-5, abs=1e-9)
    assert found.bound_ms <= best
    assert found.optimal


@pytest.mark.parametrize(
    ("num_tables", "num_ranks", "fullness", "most"),
    [(26, 8, 0.1, 0.02), (100, 8, 0.1, 0.001), (100, 16, 0.85, 0.02), (100, 16, 0.1, 0.01)],
)
def test_gap_of_realistic_problems(
    num_tables: int, num_ranks: int, fullness: float, most: float
) -> None:
    problem = realistic(num_tables, num_ranks, fullness=fullness)
    found = search(problem)
    check(problem, found)
    assert found.gap <= most

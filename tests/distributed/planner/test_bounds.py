"""The bound is never above the optimum, and tight where it should be."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings

from recsys.distributed.planner.bounds import Relaxation
from recsys.distributed.planner.placement import Problem, Ranks
from recsys.distributed.planner.shard_arrays import ShardArrays
from tests.distributed.planner.search_cases import (
    brute_force,
    option,
    problems,
    realistic,
    shards,
    way,
)


def relaxation(problem: Problem) -> Relaxation:
    return Relaxation(ShardArrays(problem))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_is_never_above_the_optimum(problem: Problem) -> None:
    best = brute_force(problem)
    if best == math.inf:
        return
    relaxed = relaxation(problem)
    assert relaxed.check_memory() <= 1 + 1e-9
    assert relaxed.lower_bound().bound_ms <= best + 1e-9
    assert relaxed.lower_bound(deadline=0.0).bound_ms <= best + 1e-9


def test_is_the_mean_where_work_can_be_spread() -> None:
    ranks = Ranks(memory_caps=[(9, 9)] * 2, base_ms=(1.0, 0.0))
    problem = Problem(ranks=ranks, tables=[[option(2.0)], [option(3.0)]])
    assert relaxation(problem).lower_bound().bound_ms == pytest.approx(3.0)


def test_is_the_longest_shard_where_that_cannot_be_split() -> None:
    ranks = Ranks(memory_caps=[(9, 9)] * 4)
    problem = Problem(ranks=ranks, tables=[[option(8.0), option(7.0, 7.0)], [option(1.0)]])
    assert relaxation(problem).lower_bound().bound_ms == pytest.approx(7.0)


def test_memory_has_its_price() -> None:
    # all cheap options together take twice the memory
    tables = [[option(1.0, memory=8), option(3.0, memory=2)]] * 4
    problem = Problem(ranks=Ranks(memory_caps=[(10, 0)] * 2), tables=tables)
    relaxed = relaxation(problem).lower_bound()
    assert relaxed.bound_ms == pytest.approx(4.0)
    # half of the tables each
    assert sorted(relaxed.option_T % 2) == [0, 0, 1, 1]


def test_kinds_share_by_speed() -> None:
    slow_and_fast = Ranks(memory_caps=[(9, 9)] * 2, kinds=(0, 1))
    one = way(shards(cost_ms=(3.0, 1.0)))
    tables = [[one]] * 8
    bound = relaxation(Problem(ranks=slow_and_fast, tables=tables)).lower_bound().bound_ms
    assert bound == pytest.approx(6.0)


def test_a_deadline_is_kept() -> None:
    relaxed = relaxation(realistic(60, 16, fullness=0.85))
    start = time.monotonic()
    hasty = relaxed.lower_bound(deadline=start)
    assert time.monotonic() - start < 2  # a busy machine
    assert 0 < hasty.bound_ms <= relaxed.lower_bound().bound_ms
    assert np.isfinite(hasty.price_O).any()

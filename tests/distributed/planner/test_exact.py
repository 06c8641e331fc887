"""The mixed-integer program against brute force, without any help of the heuristics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from recsys.distributed.planner.exact import count_variables, solve_exactly
from recsys.distributed.planner.placement import Problem, Ranks
from recsys.distributed.planner.shard_arrays import ShardArrays
from tests.distributed.planner.search_cases import brute_force, option, problems, realistic


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems())
def test_equals_brute_force(problem: Problem) -> None:
    arrays = ShardArrays(problem)
    best = brute_force(problem)
    most = arrays.most_ms() or 1.0
    options = np.flatnonzero(arrays.misses_O == 0)
    if (arrays.free_RM < 0).any() or len({*arrays.table_O[options]}) < arrays.num_tables:
        assert best == math.inf
        return
    solved = solve_exactly(arrays, options, bound_ms=0.0, known_ms=most)
    assert solved.finished
    assert (solved.assignment is None) == (best == math.inf)
    if solved.assignment is not None:
        slowest = float(solved.assignment.exact_loads()[0].max())
        assert slowest == pytest.approx(best, rel=1e-4, abs=1e-4 * most)
        assert solved.bound_ms <= best + 1e-9


def test_a_limit_leaves_a_true_bound() -> None:
    arrays = ShardArrays(realistic(12, 4))
    options = np.arange(len(arrays.options))
    known = arrays.most_ms()
    limited = solve_exactly(arrays, options, bound_ms=0.0, known_ms=known, max_nodes=1)
    assert not limited.finished
    hasty = solve_exactly(arrays, options, bound_ms=0.0, known_ms=known, seconds=0.0)
    assert not hasty.finished
    if limited.assignment is not None:
        assert limited.bound_ms <= limited.assignment.exact_loads()[0].max()


def test_counts_variables() -> None:
    ranks = Ranks(memory_caps=[(9, 9)] * 3)
    arrays = ShardArrays(Problem(ranks=ranks, tables=[[option(1.0), option(0.5, 0.6)]]))
    assert count_variables(arrays, np.array([0])) == 4
    assert count_variables(arrays, np.array([0, 1])) == 11

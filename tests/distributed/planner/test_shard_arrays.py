"""Options that cannot be part of a best placement are left out, and no others."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings

from recsys.distributed.planner.options import Reach, TableOption
from recsys.distributed.planner.placement import Problem, Ranks
from recsys.distributed.planner.shard_arrays import ShardArrays
from tests.distributed.planner.search_cases import brute_force, option, problems


def kept(*options: TableOption) -> list[int]:
    ranks = Ranks(memory_caps=[(10, 10)] * 4)
    return ShardArrays(Problem(ranks=ranks, tables=[options])).index_O.tolist()


def test_leaves_out_what_another_option_beats() -> None:
    assert kept(option(2.0, memory=1), option(1.0, memory=1)) == [1]
    assert kept(option(2.0, memory=1), option(1.0, memory=2)) == [0, 1]
    assert kept(option(1.0, 3.0), option(1.0, 2.0), option(2.0, 1.0)) == [1, 2]
    assert kept(option(1.0), option(1.0)) == [0]


def test_compares_only_options_that_may_go_to_the_same_ranks() -> None:
    one, other = (option(cost, reach=Reach.FIXED) for cost in (1.0, 2.0))
    assert kept(option(2.0), one, other) == [0, 1]
    assert kept(option(1.0), option(1.0, 1.0)) == [0, 1]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(problems())
def test_the_optimum_stays(problem: Problem) -> None:
    arrays = ShardArrays(problem)
    tables = [
        [problem.tables[t][i] for i in arrays.index_O[arrays.table_O == t]]
        for t in range(arrays.num_tables)
    ]
    assert all(tables)
    left = brute_force(dataclasses.replace(problem, tables=tables))
    best = brute_force(problem)
    assert left == best or math.isclose(left, best)


def test_fixed_options_add_to_their_ranks() -> None:
    fixed = option(1.0, 2.0, reach=Reach.FIXED, memory=3)
    ranks = Ranks(memory_caps=[(10, 10)] * 4)
    arrays = ShardArrays(Problem(ranks=ranks, tables=[[fixed]]))
    cost_N, memory_NM = arrays.fixed(0)
    assert cost_N.tolist() == [1.0, 2.0]
    assert memory_NM.tolist() == [[3.0], [3.0]]  # nothing takes host memory


def test_bytes_that_miss() -> None:
    ranks = Ranks(memory_caps=[(10, 0), (20, 0)])
    options = [option(1.0, memory=25), option(1.0, reach=Reach.FIXED, memory=13)]
    arrays = ShardArrays(Problem(ranks=ranks, tables=[options]))
    assert arrays.misses_O.tolist() == [5.0, 3.0]
    assert arrays.most_ms() == pytest.approx(1.0)

"""The search against brute force where that is possible, and against its own rules where not."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
from hypothesis import given, settings

from recsys.distributed.planner.options import Reach
from recsys.distributed.planner.placement import (
    InfeasibleError,
    Problem,
    Ranks,
    SearchResult,
)
from recsys.distributed.planner.search import search
from tests.distributed.planner.search_cases import (
    brute_force,
    check,
    option,
    problems,
    realistic,
    search_or_none,
    shards,
    way,
)

ROOM = (1000, 0)


def answer(found: SearchResult) -> SearchResult:
    """The placement without what depends on the machine."""
    return dataclasses.replace(found, seconds=0.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_equals_brute_force(problem: Problem) -> None:
    best = brute_force(problem)
    found = search_or_none(problem)
    if found is None:
        assert best == math.inf
        return
    check(problem, found)
    assert found.slowest_ms == pytest.approx(best, rel=1e-5, abs=1e-9)
    assert found.bound_ms <= best
    assert found.optimal


@pytest.mark.parametrize(
    ("num_tables", "num_ranks", "fullness", "most"),
    [(26, 8, 0.1, 0.02), (100, 8, 0.1, 0.002), (100, 16, 0.85, 0.02), (120, 32, 0.1, 0.015)],
)
def test_gap_of_realistic_problems(
    num_tables: int, num_ranks: int, fullness: float, most: float
) -> None:
    problem = realistic(num_tables, num_ranks, fullness=fullness)
    found = search(problem)
    check(problem, found)
    assert found.gap <= most


def test_two_kinds_of_rank() -> None:
    one_kind = realistic(60, 16)
    twice = [
        [
            way(
                *(
                    shards(count=s.count, cost_ms=(s.cost_ms[0], 2 * s.cost_ms[0]), memory=s.memory)
                    for s in one.shards
                ),
                reach=one.reach,
            )
            for one in options
        ]
        for options in one_kind.tables
    ]
    ranks = dataclasses.replace(one_kind.ranks, kinds=[0] * 8 + [1] * 8)
    problem = Problem(ranks=ranks, tables=twice)
    found = search(problem)
    check(problem, found)
    assert found.gap <= 0.02
    assert found.slowest_ms > search(one_kind).slowest_ms


def test_same_seed_same_answer() -> None:
    problem = realistic(40, 8, fullness=0.85)
    assert answer(search(problem, seed=3)) == answer(search(problem, seed=3))


def test_time_limit_returns_the_best_so_far() -> None:
    problem = realistic(60, 16, fullness=0.85)
    start = time.monotonic()
    found = search(problem, time_limit=0.3, tolerance=0.0)
    assert time.monotonic() - start < 3  # a busy machine
    check(problem, found)
    assert found.timed_out
    hasty = search(problem, time_limit=0.0)
    check(problem, hasty)
    assert hasty.timed_out


def test_time_is_not_used_up_once_the_best_is_known() -> None:
    problem = Problem(ranks=Ranks(memory_caps=[ROOM] * 2), tables=[[option(1.0)]] * 3)
    found = search(problem, time_limit=60.0)
    assert found.seconds < 10
    assert found.optimal
    assert not found.timed_out
    assert found.method == "exact"
    assert found.slowest_ms == 2.0


def test_no_tables() -> None:
    found = search(Problem(ranks=Ranks(memory_caps=[ROOM] * 2, base_ms=(1.0, 3.0)), tables=[]))
    assert found.choices == ()
    assert found.load_ms == (1.0, 3.0)
    assert found.bound_ms == 3.0
    assert found.optimal


def test_one_rank() -> None:
    tables = [[option(2.0), option(1.0, memory=600)], [option(3.0), option(1.0, memory=500)]]
    found = search(Problem(ranks=Ranks(memory_caps=[ROOM]), tables=tables))
    assert [choice.option for choice in found.choices] == [0, 1]
    assert found.slowest_ms == 3.0
    assert found.optimal


def test_shards_that_cost_nothing() -> None:
    tables = [[option(0.0, 0.0, memory=400)]] * 2
    found = search(Problem(ranks=Ranks(memory_caps=[ROOM] * 2), tables=tables))
    assert found.load_ms == (0.0, 0.0)
    assert found.gap == 0.0


def test_base_load_keeps_shards_away() -> None:
    ranks = Ranks(memory_caps=[ROOM] * 2, base_ms=(5.0, 0.0))
    found = search(Problem(ranks=ranks, tables=[[option(2.0)]] * 2))
    assert found.load_ms == (5.0, 4.0)
    assert found.bound_ms == 5.0


def test_nodes_and_order_of_shards() -> None:
    grid = way(
        shards(count=2, cost_ms=(3.0,), memory=(10, 0)),
        shards(count=2, cost_ms=(1.0,), memory=(20, 0)),
        reach=Reach.NODES,
    )
    ranks = Ranks(memory_caps=[(20, 0), (20, 0), (10, 0), (10, 0)], node_size=2)
    found = search(Problem(ranks=ranks, tables=[[grid]]))
    assert {*found.choices[0].ranks[:2]} == {2, 3}
    assert {*found.choices[0].ranks[2:]} == {0, 1}


def test_names_the_tables_that_fit_nowhere() -> None:
    tables = [
        [option(1.0, memory=1300), option(1.0, 1.0, memory=1100)],
        [option(1.0)],
        [option(1.0, reach=Reach.FIXED, memory=1001)],
    ]
    with pytest.raises(InfeasibleError) as caught:
        search(Problem(ranks=Ranks(memory_caps=[ROOM] * 2), tables=tables))
    assert caught.value.too_big == (0, 2)
    assert caught.value.ranks_needed is None


def test_says_how_many_ranks_would_do() -> None:
    ranks = Ranks(memory_caps=[ROOM] * 4, node_size=2)
    with pytest.raises(InfeasibleError) as caught:
        search(Problem(ranks=ranks, tables=[[option(1.0, memory=900)]] * 5))
    assert caught.value.bytes_over == (500, 0)
    assert caught.value.ranks_needed == 6
    assert caught.value.proven


def test_says_how_far_the_best_try_is_off() -> None:
    with pytest.raises(InfeasibleError) as caught:
        search(Problem(ranks=Ranks(memory_caps=[ROOM] * 2), tables=[[option(1.0, memory=600)]] * 3))
    assert caught.value.proven
    assert caught.value.bytes_over == (200, 0)
    assert caught.value.ranks_needed == 2


def test_the_base_alone_is_too_much() -> None:
    ranks = Ranks(memory_caps=[ROOM] * 2, base_memory=[(1010, 5), (0, 0)])
    with pytest.raises(InfeasibleError) as caught:
        search(Problem(ranks=ranks, tables=[]))
    assert caught.value.bytes_over == (10, 5)

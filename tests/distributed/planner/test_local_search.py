"""Every kind of step is taken where it helps, and none makes the highest rank higher."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from recsys.distributed.planner.assignment import OVERFULL, Assignment
from recsys.distributed.planner.local_search import LocalSearch
from recsys.distributed.planner.options import Reach, TableOption
from recsys.distributed.planner.placement import Problem, Ranks
from recsys.distributed.planner.shard_arrays import ShardArrays
from tests.distributed.planner.search_cases import option, realistic

TWO = Ranks(memory_caps=[(10, 0)] * 2)


def improved(
    tables: list[list[TableOption]], placed: list[tuple[int, list[int]]], ranks: Ranks = TWO
) -> Assignment:
    """Descends from options and ranks, each given per table."""
    arrays = ShardArrays(Problem(ranks=ranks, tables=tables))
    assignment = Assignment(arrays, 1.0)
    for one, where in placed:
        assignment.add(one, np.array(where))
    local = LocalSearch(arrays, np.zeros(len(arrays.options)), target=0.0, seed=0, deadline=np.inf)
    local.descend(assignment, 100)
    return assignment


def test_moves_a_shard() -> None:
    tables = [[option(2.0)], [option(3.0)]]
    assert improved(tables, [(0, [0]), (1, [0])]).peak == 3.0


def test_swaps_shards() -> None:
    tables = [[option(cost)] for cost in (5.0, 4.0, 2.0, 1.0)]
    assert improved(tables, [(0, [0]), (1, [0]), (2, [1]), (3, [1])]).peak == 6.0


def test_exchanges_two_for_one() -> None:
    tables = [[option(cost)] for cost in (3.0, 3.0, 2.0, 2.0, 2.0)]
    assert improved(tables, [(0, [0]), (2, [0]), (3, [0]), (1, [1]), (4, [1])]).peak == 6.0


def test_changes_an_option() -> None:
    tables = [[option(4.0), option(2.5, 2.5)]]
    assert improved(tables, [(0, [0])]).peak == 2.5


def test_leaves_options_that_are_fixed() -> None:
    fixed = option(2.0, 2.0, reach=Reach.FIXED)
    assert improved([[fixed, option(1.0)]], [(0, [0, 1])]).peak == 1.0


def test_makes_it_fit() -> None:
    tables = [[option(1.0, memory=6)], [option(1.0, memory=6)], [option(9.0, memory=4)]]
    assignment = improved(tables, [(0, [0]), (1, [0]), (2, [1])])
    assert assignment.peak < OVERFULL
    assert assignment.peak == 10.0


def test_shards_of_a_table_never_meet() -> None:
    tables = [[option(3.0, 3.0)], [option(2.0)]]
    assignment = improved(tables, [(0, [0, 1]), (1, [0])])
    assert assignment.peak == 5.0
    assert sorted(assignment.ranks_of(0).tolist()) == [0, 1]


def test_perturbations_never_make_it_worse() -> None:
    arrays = ShardArrays(realistic(40, 8, fullness=0.85))
    assignment = Assignment(arrays, 1.0)
    assignment.fill(arrays.first_T[:-1], np.ones(len(arrays.options)), even_memory=True)
    local = LocalSearch(arrays, np.ones(len(arrays.options)), target=0.0, seed=0, deadline=np.inf)
    local.descend(assignment, 200)
    local.cheapen(assignment)
    before = assignment.peak
    assert local.perturb(assignment, 10).peak <= before


def test_perturbations_find_what_steps_do_not() -> None:
    # too much on rank 0, and both tables in the dear option; the cheap ones fit just so
    tables = [[option(1.0, memory=6), option(2.0, memory=4)] for _ in range(2)]
    tables += [[option(0.1, memory=4)] for _ in range(2)]
    arrays = ShardArrays(Problem(ranks=TWO, tables=tables))
    assignment = Assignment(arrays, 1.0)
    for one, rank in ((1, 0), (3, 1), (4, 0), (5, 0)):
        assignment.add(one, np.array([rank]))
    price_O = np.array([option.shards[0].cost_ms[0] for option in arrays.options])
    local = LocalSearch(arrays, price_O, target=0.0, seed=0, deadline=np.inf)
    assert local.perturb(assignment, 20).peak == pytest.approx(1.1)


def test_a_deadline_ends_it() -> None:
    arrays = ShardArrays(realistic(40, 8))
    assignment = Assignment(arrays, 1.0)
    assignment.fill(arrays.first_T[:-1], np.ones(len(arrays.options)))
    local = LocalSearch(arrays, np.ones(len(arrays.options)), target=0.0, seed=0, deadline=0.0)
    assert local.descend(assignment, 100) == 0
    assert local.perturb(assignment, 100) is assignment


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_memory_does_not_grow_with_the_tables_per_rank(num_ranks: int) -> None:
    tables = [[option(1.0)]] * (200 * num_ranks + 1)
    arrays = ShardArrays(Problem(ranks=Ranks(memory_caps=[(9, 0)] * num_ranks), tables=tables))
    assignment = Assignment(arrays, 1.0)
    # no exchange of up to two shards lowers the peak, so all are tried
    for table in range(arrays.num_tables):
        assignment.add(table, np.array([table % num_ranks]))
    local = LocalSearch(arrays, np.ones(arrays.num_tables), target=0.0, seed=0, deadline=np.inf)
    tracemalloc.start()
    try:
        local.descend(assignment, 1)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 100e6


def test_samples_of_exchanges_balance_many_tables() -> None:
    random = np.random.default_rng(0)
    tables = [[option(cost)] for cost in random.uniform(0.5, 1.5, 2000).tolist()]
    placed = [(table, [int(table < 1050)]) for table in range(2000)]
    assignment = improved(tables, placed)
    assert assignment.peak == pytest.approx(assignment.load_R.mean(), rel=1e-3)

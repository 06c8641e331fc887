"""Assignments keep their books, and greedy choices take the lowest ranks that fit."""

from __future__ import annotations

import numpy as np

from recsys.distributed.planner.assignment import OVERFULL, Assignment
from recsys.distributed.planner.options import Reach, TableOption
from recsys.distributed.planner.placement import Problem, Ranks
from recsys.distributed.planner.shard_arrays import Floats, ShardArrays
from tests.distributed.planner.search_cases import option, realistic


def assignment(*tables: TableOption, ranks: Ranks) -> Assignment:
    return Assignment(ShardArrays(Problem(ranks=ranks, tables=[[one] for one in tables])), 1.0)


def free(arrays: ShardArrays) -> Floats:
    """Prices that make no option cheaper than another."""
    return np.zeros(len(arrays.options))


def test_books_are_true_after_many_changes() -> None:
    arrays = ShardArrays(realistic(30, 16, fullness=0.5))
    packed = Assignment(arrays, 1.0)
    rng = np.random.default_rng(0)
    packed.fill(arrays.first_T[:-1], free(arrays))
    for table in rng.integers(0, 30, 200).tolist():
        packed.remove(table)
        option = int(arrays.first_T[table] + rng.integers(np.diff(arrays.first_T)[table]))
        packed.add(option, packed.best_ranks(option)[0])
    load_R, free_RM = packed.exact_loads()
    np.testing.assert_allclose(packed.load_R, packed.loads(load_R, free_RM), rtol=1e-9)
    for rank in range(16):
        there = np.flatnonzero(packed.rank_P == rank)
        slots = packed.slots_RS[rank, : packed.count_R[rank]]
        assert sorted(slots) == there.tolist()
        assert (packed.slots_RS[rank, packed.count_R[rank] :] == -1).all()


def test_a_copy_is_independent() -> None:
    packed = assignment(option(1.0), ranks=Ranks(memory_caps=[(9, 9)] * 2))
    packed.fill(np.array([0]), free(packed.arrays))
    twin = packed.copy()
    twin.remove(0)
    assert packed.peak == 1.0
    assert twin.peak == 0.0
    assert packed.option_T.tolist() == [0]


def test_the_longest_shard_takes_the_lowest_rank() -> None:
    ranks = Ranks(memory_caps=[(9, 9)] * 3, base_ms=(2.0, 1.0, 0.0))
    packed = assignment(option(1.0, 3.0), ranks=ranks)
    chosen, peak = packed.best_ranks(0)
    assert chosen.tolist() == [1, 2]
    assert peak == 3.0


def test_a_full_rank_is_higher_than_any_load() -> None:
    ranks = Ranks(memory_caps=[(1, 0), (5, 0)], base_ms=(0.0, 50.0))
    packed = assignment(option(1.0, memory=4), option(1.0, memory=4), ranks=ranks)
    assert packed.best_ranks(0)[0].tolist() == [1]
    packed.fill(np.array([0, 1]), free(packed.arrays))
    assert packed.peak >= OVERFULL


def test_one_node_takes_the_lowest_node() -> None:
    ranks = Ranks(memory_caps=[(9, 9)] * 4, node_size=2, base_ms=(0.0, 5.0, 2.0, 2.0))
    packed = assignment(option(1.0, 2.0, reach=Reach.ONE_NODE), ranks=ranks)
    chosen, peak = packed.best_ranks(0)
    assert sorted(chosen.tolist()) == [2, 3]
    assert peak == 4.0


def test_memory_is_evened_where_asked_for() -> None:
    ranks = Ranks(memory_caps=[(10, 0)] * 2)
    tables = [option(5.0, memory=0), option(0.1, memory=6), option(0.1, memory=6)]
    packed = assignment(*tables, ranks=ranks)
    packed.fill(np.array([0, 1, 2]), free(packed.arrays), even_memory=True)
    assert packed.peak < OVERFULL


def test_what_does_not_fit_takes_the_cheapest_option_that_does() -> None:
    ranks = Ranks(memory_caps=[(10, 0)] * 2)
    of_table = [
        option(1.0, memory=12),
        option(3.0, memory=9),  # lower, but dearer
        option(4.0, 4.0, memory=9),
    ]
    arrays = ShardArrays(Problem(ranks=ranks, tables=[of_table]))
    packed = Assignment(arrays, 1.0)
    packed.fill(np.array([0]), np.array([1.0, 9.0, 5.0]))
    assert packed.option_T.tolist() == [2]

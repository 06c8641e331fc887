"""A cover of the matrix: every two values of any two axes are combined somewhere."""

from __future__ import annotations

import itertools

import pytest

from tests.conformance.compare import compare_all
from tests.conformance.matrix import (
    STRATEGIES,
    TOPOLOGIES,
    Cell,
    cells,
    matching,
    pairs,
    pairwise_cover,
    random_sample,
)
from tests.ranks import RankPool


def test_cover_has_every_pair_that_there_is() -> None:
    cover = pairwise_cover()
    assert set().union(*map(pairs, cover)) == set().union(*map(pairs, cells()))
    assert len(cover) < 70
    assert pairwise_cover.__wrapped__() == cover


def test_matrix_has_every_combination_but_wires_of_one_rank() -> None:
    everything = list(cells())
    assert len(set(everything)) == len(everything) == len(STRATEGIES) * 6 * 2 * 6 * (5 * 5 + 1)
    assert {c.wire for c in everything if c.topology == "1"} == {"fp32"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_sharded_models_equal_the_unsharded(ranks: RankPool, topology: str) -> None:
    _hold(ranks, matching(pairwise_cover() + random_sample(20), {"topology": topology}))


def _hold(ranks: RankPool, chosen: list[Cell]) -> None:
    world_size, _ = TOPOLOGIES[chosen[0].topology]
    by_rank = ranks(world_size, compare_all, [cell.case() for cell in chosen])
    found = {
        str(cell): problems
        for cell, *of_ranks in zip(chosen, *by_rank, strict=True)
        if (problems := list(itertools.chain(*of_ranks)))
    }
    assert found == {}

"""A cover of the checkpoint matrix: every two strategies, every two numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from torch import nn

from recsys.distributed.types import ShardingType
from tests.conformance import checkpoints
from tests.conformance.checkpoints import (
    OPTIMIZERS,
    WORLD_SIZES,
    Move,
    Place,
    cover,
    load_into,
    moves,
    save_from,
    try_moves,
)
from tests.ranks import RankPool


def test_cover_has_every_pair() -> None:
    chosen = cover()
    strategies = {(move.saved.strategy, move.loaded.strategy) for move in chosen}
    assert len(strategies) == len(ShardingType) ** 2
    world_sizes = {(move.saved.world_size, move.loaded.world_size) for move in chosen}
    assert len(world_sizes) == len(WORLD_SIZES) ** 2
    assert {(m.optimizer, m.loaded.strategy) for m in chosen} == {
        (optimizer, strategy) for optimizer in OPTIMIZERS for strategy in ShardingType
    }


def test_matrix_has_every_move() -> None:
    assert len(set(map(str, moves()))) == len(moves()) == 2 * (len(ShardingType) * 4) ** 2


@pytest.mark.parametrize("saved", list(ShardingType))
def test_training_goes_on_under_another_plan(ranks: RankPool, saved: ShardingType) -> None:
    chosen: list[Move] = [move for move in cover() if move.saved.strategy is saved]
    found = try_moves(ranks, chosen, timeout=60.0)
    assert {str(m): problems for m, problems in zip(chosen, found, strict=True) if problems} == {}


def _load_without_state(path: str, model: nn.Module, optimizer: object) -> None:
    from recsys.distributed.checkpoint import load_checkpoint

    load_checkpoint(path, model, allow_partial=True)


def _load_less(place: Place, path: str) -> list[str]:
    with mock.patch.object(checkpoints, "load_checkpoint", _load_without_state):
        return load_into(place, "Adam", path)


def test_a_dropped_optimizer_state_is_found(ranks: RankPool, tmp_path: Path) -> None:
    place = Place(strategy=ShardingType.ROW_WISE, world_size=2)
    ranks(2, save_from, place, "Adam", str(tmp_path / "c"))
    found = ranks(2, _load_less, place, str(tmp_path / "c"))
    assert all(any("exp_avg" in text for text in of_rank) for of_rank in found)
    assert all(any("output" in text for text in of_rank) for of_rank in found)

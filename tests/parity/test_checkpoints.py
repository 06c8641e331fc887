"""A few of the moves, so that the program that tries all is known to work."""

from __future__ import annotations

import pytest

from recsys.distributed.types import ShardingType
from tests.conformance.checkpoints import Move, Place
from tests.parity.checkpoints import try_moves
from tests.parity.peer import PeerPool


def _move(optimizer: str, saved: ShardingType, loaded: ShardingType, world_size: int) -> Move:
    return Move(
        optimizer=optimizer,
        saved=Place(strategy=saved, world_size=2),
        loaded=Place(strategy=loaded, world_size=world_size),
    )


@pytest.mark.parametrize(
    ("move", "outcome"),
    [
        (_move("RowWiseAdagrad", ShardingType.ROW_WISE, ShardingType.ROW_WISE, 3), "equal"),
        (
            _move("RowWiseAdagrad", ShardingType.ROW_WISE, ShardingType.COLUMN_WISE, 2),
            "raises: ValueError: Size mismatch",
        ),
        (
            _move("Adam", ShardingType.ROW_WISE, ShardingType.ROW_WISE, 2),
            "cannot run: AssertionError: Optimizer adam is not supported",
        ),
    ],
)
def test_outcomes(peer_ranks: PeerPool, move: Move, outcome: str) -> None:
    (found,) = try_moves(peer_ranks, [move])
    assert found.startswith(outcome)

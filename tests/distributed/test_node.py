"""Which ranks share a node."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from recsys.distributed.node import get_local_rank, get_local_size
from tests.ranks import RankPool


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_one_node_unless_torchrun_says_otherwise() -> None:
    assert get_local_size(8) == 8
    assert get_local_rank(8, 5) == 5
    assert (get_local_size(), get_local_rank()) == (1, 0)


def test_torchrun_says_how_many_ranks_share_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert get_local_size(8) == 4
    assert get_local_rank(8, 5) == 1
    assert get_local_size(2) == 2  # a part of the ranks of one node
    assert get_local_size(6) == 6  # nodes of unequal size
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get_local_rank(8, 5) == 3


def _default() -> tuple[int, int, int]:
    return dist.get_rank(), get_local_size(), get_local_rank()


def test_ranks_are_those_of_the_default_process_group(ranks: RankPool) -> None:
    assert ranks(2, _default) == [(0, 2, 0), (1, 2, 1)]

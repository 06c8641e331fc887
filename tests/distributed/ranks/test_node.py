"""The ranks of a node."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed as dist

from recsys.distributed.ranks.node import get_local_rank, get_local_size
from tests.ranks import RankPool


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_one_node_unless_torchrun_says_otherwise() -> None:
    assert get_local_size(8) == 8
    assert get_local_rank(8, 5) == 5
    assert (get_local_size(), get_local_rank()) == (1, 0)


def test_torchrun_says_how_many_ranks_share_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert get_local_size(8) == 4
    assert get_local_rank(8, 5) == 1
    assert get_local_size(2) == 2  # a part of the ranks of one node
    assert get_local_size(6) == 6  # more than this job has
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get_local_rank(8, 5) == 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "LOCAL_WORLD_SIZE must be positive; received 0"),
        ("-1", "LOCAL_WORLD_SIZE must be positive; received -1"),
        ("two", "LOCAL_WORLD_SIZE must .*received 'two'"),
        ("3", "LOCAL_WORLD_SIZE must .*received 3 for"),
    ],
)
def test_a_node_of_no_size(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    with pytest.raises(ValueError, match=message):
        get_local_size(2)


@pytest.mark.parametrize("value", ["-1", "one"])
def test_a_local_rank_that_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", value)
    with pytest.raises(ValueError, match=f"variable LOCAL_RANK must .*; received '?{value}"):
        get_local_rank(2, 1)


def _size_of_three() -> str:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3"):
        with pytest.raises(ValueError, match="must divide") as caught:
            get_local_size(dist.get_world_size())
        assert get_local_size(1) == 1  # one rank by itself
    return str(caught.value)


def test_nodes_of_unequal_size(ranks: RankPool) -> None:
    assert all("received 3 for 2 ranks" in text for text in ranks(2, _size_of_three))


def _default() -> tuple[int, int, int]:
    return dist.get_rank(), get_local_size(), get_local_rank()


def test_ranks_are_those_of_the_default_process_group(ranks: RankPool) -> None:
    assert ranks(2, _default) == [(0, 2, 0), (1, 2, 1)]

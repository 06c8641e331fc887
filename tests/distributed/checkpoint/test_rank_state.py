"""Each rank keeps its own progress, and finds it again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.checkpoint import (
    CheckpointError,
    RandomState,
    load_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
)
from tests.ranks import RankPool


class Loader:
    """Knows its position."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Sharing(Loader):
    """A loader that can resume on another number of ranks."""

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        self.position = sum(state["position"] for state in states)


def _save(path: str, wait: bool) -> None:
    loader = Sharing(10 + dist.get_rank())
    progress = {"loader": loader}
    if wait:
        save_checkpoint(path, nn.Linear(2, 1), progress=progress)
        return
    pending = save_checkpoint_async(path, nn.Linear(2, 1), progress=progress)
    loader.position = -1
    pending.wait()


def _load(path: str, kind: type[Loader]) -> Any:
    loader = kind(0)
    try:
        load_checkpoint(path, nn.Linear(2, 1), progress={"loader": loader})
    except CheckpointError as error:
        return str(error)
    return loader.position


@pytest.mark.parametrize("wait", [True, False])
def test_every_rank_finds_its_own(ranks: RankPool, tmp_path: Path, wait: bool) -> None:
    path = str(tmp_path / "c")
    ranks(2, _save, path, wait)
    assert ranks(2, _load, path, Loader) == [10, 11]
    assert ranks(3, _load, path, Sharing) == [21] * 3
    assert _load(path, Sharing) == 21
    refused = _load(path, Loader)
    assert "has the progress 'loader' of 2 ranks; received 1 ranks, and a Loader" in refused
    model = nn.Linear(2, 1)
    assert load_checkpoint(path, model) == {}  # who does not ask needs none
    with pytest.raises(CheckpointError, match="has no progress 'other'"):
        load_checkpoint(path, model, progress={"other": Loader(0)})


def test_one_rank_is_not_taken_for_more(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    save_checkpoint(path, nn.Linear(2, 1), progress={"loader": Loader(5)})
    assert _load(path, Loader) == 5
    assert all("of 1 ranks" in found for found in ranks(2, _load, path, Loader))
    assert ranks(2, _load, path, Sharing) == [5, 5]


def test_older_checkpoints_have_none(tmp_path: Path) -> None:
    model, loader = nn.Linear(2, 1), Loader(7)
    save_checkpoint(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match=r"has no progress 'loader'.*allow_partial=True"):
        load_checkpoint(tmp_path / "c", model, progress={"loader": loader})
    load_checkpoint(tmp_path / "c", model, progress={"loader": loader}, allow_partial=True)
    assert loader.position == 7


def test_what_has_no_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"progress\['loader'\] must have state_dict and"):
        save_checkpoint(tmp_path / "c", nn.Linear(2, 1), progress={"loader": [1, 2]})  # type: ignore[dict-item]
    loader: Any = Loader(1)
    loader.position = {1, 2}
    with pytest.raises(CheckpointError, match=r"progress\['loader'\]\['position'\] must be plain"):
        save_checkpoint(tmp_path / "c", nn.Linear(2, 1), progress={"loader": loader})


def _draw() -> list[Any]:
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random()]]


def test_random_generators_go_on(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    random.gauss(0, 1)  # leaves one over for the next call
    save_checkpoint(tmp_path / "c", model, progress={"random": RandomState()})
    first, second = _draw(), _draw()
    load_checkpoint(tmp_path / "c", model, progress={"random": RandomState()})
    assert [_draw(), _draw()] == [first, second]
    RandomState().load_state_dicts([])

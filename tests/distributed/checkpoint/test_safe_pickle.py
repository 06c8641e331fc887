"""Plain data and metadata are read back, and code in files is not run."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from recsys.distributed.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from recsys.distributed.checkpoint.safe_pickle import (
    check_plain,
    decode,
    decode_metadata,
    decode_pickle,
    encode,
)
from recsys.optim.keyed import KeyedOptimizerWrapper

PLAIN: dict[str, Any] = {
    "none": None,
    "numbers": [1, -2.5, True, float("inf"), 10**30],
    "text": "é\n\0",
    "bytes": b"\x80\x04",
    "nested": {"a.b": {"c": [(), (1, "x")]}, 3: OrderedDict(z=1)},
    "empty": {},
}


def test_plain_data_comes_back() -> None:
    check_plain("extra", PLAIN)
    assert decode("it", encode(PLAIN)) == PLAIN
    assert decode_pickle("it", pickle.dumps(PLAIN)) == PLAIN


def test_tensors_come_back() -> None:
    values = {
        "t": [torch.arange(6).view(2, 3).T, torch.zeros(0), torch.tensor(2.0)],
        "p": nn.Parameter(torch.ones(2)),
    }
    check_plain("extra", values)
    for found in (decode("it", encode(values)), decode_pickle("it", pickle.dumps(values))):
        torch.testing.assert_close(found["t"], values["t"], rtol=0, atol=0)
        assert torch.equal(found["p"], values["p"])


def _circle() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, {1}]}, r"extra\['a'\]\[1\] must .*received builtins\.set\. "),
        ({"f": print}, r"extra\['f'\] .* received builtins\.builtin_function_or_method"),
        ({"m": nn.Linear(1, 1)}, r"extra\['m'\] .* received torch\.nn\.modules\.linear\.Linear"),
        ({"n": np.float32(1)}, r"extra\['n'\] .* received numpy\.float32.* by \.item\(\)"),
        ({"d": defaultdict(int)}, r"extra\['d'\] .* received collections\.defaultdict"),
        ({"s": torch.eye(2).to_sparse()}, r"extra\['s'\] .* received torch\.Tensor"),
        ({"m": torch.ones(2, device="meta")}, r"extra\['m'\] .* received torch\.Tensor"),
        ({(1, 2): 3}, r"keys of extra .*received \(1, 2\)"),
        ({"c": _circle()}, r"extra\['c'\]\[0\] contains itself"),
    ],
)
def test_what_is_not_plain_is_named(value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_plain("extra", value)


def test_the_same_value_twice_is_no_circle() -> None:
    twice = [1]
    check_plain("extra", {"a": twice, "b": [twice, twice]})


class _Runs:
    """Hostile object: unpickling it creates a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


def _old_checkpoint(
    path: Path, model: nn.Module, extra: object = None, **more: dict[str, object]
) -> None:
    """Write a checkpoint without versions."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {"model": model.state_dict(), "extra": pickle.dumps(extra), **more}
    writer = FileSystemWriter(str(path))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save(state, storage_writer=writer, no_dist=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_reads_what_torch_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    save_checkpoint(tmp_path, nn.Linear(3, 2, dtype=dtype), extra={"a": 1})
    file = tmp_path / "step-1" / ".metadata"
    expected = FileSystemReader(file.parent).read_metadata()
    found = decode_metadata("it", file.read_bytes())
    assert isinstance(found, Metadata)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data


@pytest.mark.parametrize("where", ["alone", "inside"])
def test_a_hostile_pickle_is_not_run(tmp_path: Path, where: str) -> None:
    hostile: object = _Runs(tmp_path / "ran")
    if where == "inside":
        hostile = Metadata(state_dict_metadata={}, planner_data=hostile)
    with pytest.raises(CheckpointError, match=r"it is not the metadata .*posix.mkdir"):
        decode_metadata("it", pickle.dumps(hostile))
    with pytest.raises(CheckpointError, match="it holds a dict"):
        decode_metadata("it", pickle.dumps({}))
    assert not (tmp_path / "ran").exists()


def test_a_hostile_old_checkpoint_is_not_run(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    _old_checkpoint(tmp_path / "c", model, {"epoch": 3, "best": torch.ones(2)})
    extra = load_checkpoint(tmp_path / "c", model)
    assert extra["epoch"] == 3
    assert torch.equal(extra["best"], torch.ones(2))
    _old_checkpoint(tmp_path / "h", model, {"epoch": _Runs(tmp_path / "ran")})
    with pytest.raises(CheckpointError, match=r"posix.mkdir is not plain data"):
        load_checkpoint(tmp_path / "h", model)
    (tmp_path / "h" / ".metadata").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"/h/.metadata is not the metadata of"):
        load_checkpoint(tmp_path / "h", model)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("with_groups", [False, True])
def test_the_optimizer_of_an_old_checkpoint_loads(tmp_path: Path, with_groups: bool) -> None:
    model = nn.Linear(2, 1)

    def adam(lr: float) -> KeyedOptimizerWrapper:
        params = dict(model.named_parameters())
        optimizer = KeyedOptimizerWrapper(params, lambda given: torch.optim.Adam(given, lr=lr))
        optimizer.save_param_groups(with_groups)
        optimizer.init_state()
        return optimizer

    before, after = adam(0.5), adam(0.25)
    before.state[model.weight]["exp_avg"].fill_(3)
    state = before.state_dict()
    for group in state.get("param_groups", []):
        del group["eps"]  # was not there yet
    _old_checkpoint(tmp_path, model, {}, optimizer=state)
    load_checkpoint(tmp_path, model, after)
    assert bool((after.state[model.weight]["exp_avg"] == 3).all())
    assert after.param_groups[0]["lr"] == (0.5 if with_groups else 0.25)


class _KeepsAnObject(nn.Linear):
    kept: object = 7

    def get_extra_state(self) -> object:
        return self.kept

    def set_extra_state(self, state: object) -> None:
        self.kept = state


def test_a_hostile_value_is_not_run(tmp_path: Path) -> None:
    model = _KeepsAnObject(2, 1)
    save_checkpoint(tmp_path / "c", model)
    model.kept = None
    load_checkpoint(tmp_path / "c", model)
    assert model.kept == 7
    model.kept = _Runs(tmp_path / "ran")
    with pytest.raises(CheckpointError, match=r"model\._extra_state must be plain data"):
        save_checkpoint(tmp_path / "c", model)
    _old_checkpoint(tmp_path / "h", model)
    with pytest.raises(CheckpointError, match=r"model\._extra_state cannot be read as plain"):
        load_checkpoint(tmp_path / "h", model)
    assert not (tmp_path / "ran").exists()

"""Every byte of a version is under a CRC, which is checked as the byte is read."""

from __future__ import annotations

import io
import os
import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from recsys.distributed.checkpoint import (
    CheckpointError,
    blocks,
    load_checkpoint,
    save_checkpoint,
    state,
)
from recsys.distributed.checkpoint.blocks import BlockReader
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.optim import Adam
from tests.distributed.cases import CPU, EachType, train, whole


def _sharded() -> DistributedModelParallel:
    case = EachType(3, 1, optimizer=Adam)
    env = ShardingEnv.from_local()
    model = DistributedModelParallel(case.model(), env=env, device=CPU, plan=case.plan())
    train(case, model, range(2), rank=0)
    return model


def _values(model: DistributedModelParallel) -> dict[str, Tensor]:
    state = {name: whole(value).clone() for name, value in model.state_dict().items()}
    for param, states in model.fused_optimizer.state_dict()["state"].items():
        state |= {f"{param}/{name}": whole(value).clone() for name, value in states.items()}
    return state


def test_no_flipped_bit_is_loaded(tmp_path: Path) -> None:
    model = _sharded()
    save_checkpoint(tmp_path, model, model.fused_optimizer, {"epoch": 1})
    chance = random.Random(0)
    files = sorted((tmp_path / "step-1").iterdir())
    assert [file.suffix for file in files] == ["", ".distcp", ".json"]
    for file in files:
        data = file.read_bytes()
        places = {0, 8 * len(data) - 1} | {chance.randrange(8 * len(data)) for _ in range(60)}
        for bit in places:
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=rf"/step-1/{file.name} is damaged"):
                load_checkpoint(tmp_path, model, model.fused_optimizer)
        file.write_bytes(data)
    load_checkpoint(tmp_path, model, model.fused_optimizer)


@pytest.mark.parametrize("change", ["cut off", "missing", "of another version"])
def test_a_changed_file_is_named(tmp_path: Path, change: str) -> None:
    model = nn.Linear(100, 10)
    save_checkpoint(tmp_path, model)
    (file,) = (tmp_path / "step-1").glob("*.distcp")
    if change == "cut off":
        file.write_bytes(file.read_bytes()[:-1])
    elif change == "missing":
        file.unlink()
    else:
        with torch.no_grad():
            model.weight.add_(1)
        save_checkpoint(tmp_path, model)
        (other,) = (tmp_path / "step-2").glob("*.distcp")
        file.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointError, match=rf"rank 0: .*{file}"):
        load_checkpoint(tmp_path / "step-1", model)


def test_each_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _sharded()
    save_checkpoint(tmp_path, model, model.fused_optimizer)
    read: Counter[str] = Counter()
    read_block = BlockReader._read

    def count(
        reader: BlockReader, file: io.FileIO, name: str, start: int, parts: list[memoryview | int]
    ) -> None:
        read_block(reader, file, name, start, parts)
        read[name] += sum(part if isinstance(part, int) else len(part) for part in parts)

    monkeypatch.setattr(BlockReader, "_read", count)
    load_checkpoint(tmp_path, model, model.fused_optimizer)
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "step-1").glob("*.distcp")}
    assert dict(read) == sizes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0)[2:7],
        torch.arange(3, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.tensor(3.5),
        torch.zeros(0, 4),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_tensors_of_all_kinds_come_back(tmp_path: Path, tensor: Tensor) -> None:
    model = nn.Module()
    model.register_buffer("value", tensor.clone())
    assert isinstance(model.value, Tensor)
    model.value = tensor
    save_checkpoint(tmp_path, model)
    model.value = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    load_checkpoint(tmp_path, model)
    assert torch.equal(model.value, tensor)


def test_torch_reads_a_version_too(tmp_path: Path) -> None:
    model, other = nn.Linear(5, 3), nn.Linear(5, 3)
    save_checkpoint(tmp_path, model)
    state: dict[str, Any] = {"model": other.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("step", [1, 2])
def test_torchs_tensors_load_however_they_lie_in_memory(tmp_path: Path, step: int) -> None:
    values = {
        "transposed": torch.arange(12.0).view(3, 4).T,
        "strided": torch.arange(24.0).view(6, 4)[::step],
        "shared": torch.arange(9, dtype=torch.int16)[3:],
        "reduced": torch.randn(5, 2, dtype=torch.bfloat16),
        "one": torch.tensor(2.5),
    }
    model = nn.Module()
    for name, value in values.items():
        model.register_buffer(name, torch.zeros_like(value, memory_format=torch.contiguous_format))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": values}, checkpoint_id=tmp_path, no_dist=True)
    assert load_checkpoint(tmp_path, model, allow_partial=True) == {}
    torch.testing.assert_close(dict(model.named_buffers()), values, rtol=0, atol=0)


def test_the_disk_is_told_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_BLOCK_BYTES", 10 << 10)
    monkeypatch.setattr(blocks, "_AHEAD_BYTES", 8 << 10)
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *what: told.append(what), raising=False)
    model = nn.Embedding(480, 16)  # three blocks
    save_checkpoint(tmp_path, model)
    (file,) = (tmp_path / "step-1").glob("*.distcp")
    written = [(start, length) for start, length, what in told if what == os.POSIX_FADV_DONTNEED]
    assert len(written) == 3
    assert [start for start, _ in written] == [0, *(sum(part) for part in written[:-1])]
    assert file.stat().st_size - sum(written[-1]) < 8 << 10
    told.clear()
    load_checkpoint(tmp_path, model)
    assert told == [(0, 0, os.POSIX_FADV_SEQUENTIAL)]

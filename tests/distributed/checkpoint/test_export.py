"""The weights of a checkpoint as one file that the safetensors library reads."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from recsys.distributed.checkpoint import (
    CheckpointError,
    export,
    export_safetensors,
    load_checkpoint,
    read,
    save_checkpoint,
    save_checkpoint_async,
    state,
)
from recsys.optim import Adam
from tests.distributed.cases import EachType, shard, train, whole_state
from tests.ranks import RankPool


def _save(path: str, asynchronously: bool) -> dict[str, Tensor]:
    case = EachType(3, dist.get_world_size(), optimizer=Adam)
    model = shard(case)
    train(case, model, range(2), rank=dist.get_rank())
    with mock.patch.object(state, "_BLOCK_BYTES", 100):
        if asynchronously:
            save_checkpoint_async(path, model, model.fused_optimizer, consolidated=True).wait()
        else:
            save_checkpoint(path, model, model.fused_optimizer, consolidated=True)
    load_checkpoint(path, model, model.fused_optimizer)
    return whole_state(model)


@pytest.mark.parametrize(("num_ranks", "asynchronously"), [(1, False), (2, False), (3, True)])
def test_a_consolidated_save_has_all_tables_whole(
    ranks: RankPool, tmp_path: Path, num_ranks: int, asynchronously: bool
) -> None:
    saved = ranks(num_ranks, _save, str(tmp_path), asynchronously)[0]
    found = load_file(tmp_path / "step-1" / "model.safetensors")
    torch.testing.assert_close(found, saved, rtol=0, atol=0)
    export_safetensors(tmp_path, tmp_path / "later" / "film.safetensors")
    assert (tmp_path / "later" / "film.safetensors").read_bytes() == (
        tmp_path / "step-1" / "model.safetensors"
    ).read_bytes()
    names = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert not {name for name in names if name.endswith((".tmp", ".lock"))}


def test_values_of_all_kinds(tmp_path: Path) -> None:
    model = nn.Module()
    values = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        "reduced": torch.randn(5, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "narrow": torch.randn(4, 2).to(torch.float8_e4m3fn),
        "transposed": torch.arange(6, dtype=torch.int16).view(2, 3).T,
        "one": torch.tensor(3),
        "none": torch.zeros(0, 4),
    }
    for name, value in values.items():
        model.register_buffer(name, value)
    save_checkpoint(tmp_path, model)
    export_safetensors(tmp_path, tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].float(), value.float())
    with safe_open(tmp_path / "all.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("wide")[1:2].shape == (1, 3)


def test_what_such_files_cannot_hold_is_named(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    save_checkpoint(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"one of \['F64', .*'phase'.* torch.complex128"):
        export_safetensors(tmp_path, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"'phase' of torch.complex128"):
        save_checkpoint(tmp_path, model, consolidated=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]


def test_a_file_is_replaced_once_the_new_one_is_whole(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(30, 30), "b": nn.Linear(30, 30)})
    save_checkpoint(tmp_path / "c", model)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"before")
    (data,) = (tmp_path / "c" / "step-1").glob("*.distcp")
    sound = data.read_bytes()
    data.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        export_safetensors(tmp_path / "c", file)
    assert file.read_bytes() == b"before"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "model.safetensors"]
    data.write_bytes(sound)
    export_safetensors(tmp_path / "c", file)
    torch.testing.assert_close(load_file(file), dict(model.state_dict()), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be written: "):
        export_safetensors(tmp_path / "c", file / "x.safetensors")


def test_no_more_than_a_block_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_BLOCK_BYTES", 10 << 10)
    sizes: list[int] = []
    read_values = read.SavedValues.read

    def counted(saved: read.SavedValues, names: dict[str, range | None]) -> dict[str, Tensor]:
        found = read_values(saved, names)
        sizes.append(sum(value.nbytes for value in found.values()))
        return found

    monkeypatch.setattr(export.SavedValues, "read", counted)
    model = nn.Embedding(1000, 16)
    save_checkpoint(tmp_path, model, consolidated=True)
    assert max(sizes) <= 10 << 10
    assert sum(sizes) == 64_000

"""One process reads what many saved: all of it, or some tables, or some rows."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from recsys.distributed.checkpoint import CheckpointError, read_checkpoint, save_checkpoint, state
from recsys.distributed.checkpoint.blocks import BlockReader
from recsys.distributed.checkpoint.read import is_named
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recsys.optim import Adam, RowWiseAdagrad
from tests.distributed.cases import EachType, shard, train, whole, whole_state
from tests.ranks import RankPool


def _save(case: EachType, path: str, block_bytes: int) -> dict[str, Tensor]:
    model = shard(case)
    train(case, model, range(2), rank=dist.get_rank())
    with mock.patch.object(state, "_BLOCK_BYTES", block_bytes):
        save_checkpoint(path, model, model.fused_optimizer, {"epoch": 3})
    values = whole_state(model)
    for param, states in model.fused_optimizer.state_dict()["state"].items():
        values |= {f"optimizer.state.{param}.{k}": whole(v) for k, v in states.items()}
    return values


@pytest.mark.parametrize("optimizer", [Adam, RowWiseAdagrad])
@pytest.mark.parametrize(("num_ranks", "block_bytes"), [(1, 100), (2, 100), (3, 1 << 20)])
def test_what_ranks_saved_is_read_by_one_process(
    ranks: RankPool,
    tmp_path: Path,
    num_ranks: int,
    block_bytes: int,
    optimizer: type[torch.optim.Optimizer],
) -> None:
    case = EachType(3, num_ranks, optimizer=optimizer)
    saved = ranks(num_ranks, _save, case, str(tmp_path), block_bytes)[0]
    weights = {name: v for name, v in saved.items() if not name.startswith("optimizer.")}
    torch.testing.assert_close(read_checkpoint(tmp_path), weights, rtol=0, atol=0)
    found = read_checkpoint(str(tmp_path), optimizer=True)
    torch.testing.assert_close(found, saved, rtol=0, atol=0)
    rows = {kind.value: slice(i, 12 - 2 * i) for i, kind in enumerate(case.types)}
    expected = {}
    for name, value in saved.items():
        for table, part in rows.items():
            if is_named(name, table):
                expected[name] = value if value.dim() == 0 else value[part]
    found = read_checkpoint(tmp_path / "step-1", rows, optimizer=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_names_of_tables_parameters_and_modules(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "a1": nn.Linear(3, 1)})
    save_checkpoint(tmp_path, model)
    assert list(read_checkpoint(tmp_path, ["a"])) == ["a.weight", "a.bias"]
    assert list(read_checkpoint(tmp_path, ("a1.bias",))) == ["a1.bias"]
    assert list(read_checkpoint(tmp_path, "a1")) == ["a1.weight", "a1.bias"]
    assert read_checkpoint(tmp_path, []) == {}
    assert read_checkpoint(tmp_path, {"a": slice(1, None)})["a.bias"].tolist() == [
        *model["a"].bias[1:]
    ]


def test_errors_say_what_there_is(tmp_path: Path) -> None:
    model = nn.ModuleDict({"t_user": nn.Embedding(10, 2), "t_item": nn.Embedding(5, 2)})
    save_checkpoint(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"step-1 holds no 't_usr'; .*\['t_user'"):
        read_checkpoint(tmp_path, ["t_usr"])
    with pytest.raises(CheckpointError, match=r"holds no 'x'; .*\['t_user.weight', 't_item"):
        read_checkpoint(tmp_path, ["x"])
    for rows in (slice(4, 11), slice(-2, None), slice(0, 4, 2), slice(4, 3)):
        with pytest.raises(CheckpointError, match=r"'t_user.weight' must .* its 10 rows"):
            read_checkpoint(tmp_path, {"t_user": rows})
    with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
        read_checkpoint(tmp_path / "nothing")


def _count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the bytes of blocks that later calls read, and the bytes that they keep."""
    counts = [0, 0]
    read_block = BlockReader._read

    def read(
        reader: BlockReader, file: io.FileIO, name: str, start: int, parts: list[memoryview | int]
    ) -> None:
        read_block(reader, file, name, start, parts)
        kept = sum(len(part) for part in parts if not isinstance(part, int))
        skipped = sum(part for part in parts if isinstance(part, int))
        counts[0] += kept + (skipped if reader._blocks is not None else 0)
        counts[1] += kept

    monkeypatch.setattr(BlockReader, "_read", read)
    return counts


def test_rows_are_read_without_the_rest_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_BLOCK_BYTES", 40 << 10)
    model = nn.ModuleDict({"t": nn.Embedding(10_000, 16)})  # 640 KB
    save_checkpoint(tmp_path / "ours", model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    for folder, most in (("ours", 90 << 10), ("torchs", 6400)):
        counts = _count(monkeypatch)
        found = read_checkpoint(tmp_path / folder, {"t": slice(1250, 1350)})["t.weight"]
        assert torch.equal(found, model["t"].weight[1250:1350])
        assert counts[1] == 6400
        assert 6400 <= counts[0] <= most


def test_damage_outside_the_rows_is_found_within_their_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_BLOCK_BYTES", 10 << 10)
    model = nn.ModuleDict({"t": nn.Embedding(320, 16)})  # blocks of 160 rows
    save_checkpoint(tmp_path, model)
    (file,) = (tmp_path / "step-1").glob("*.distcp")
    data = bytearray(file.read_bytes())
    place = data.index(np.asarray(model["t"].weight[100].detach()).tobytes())
    data[place] ^= 1
    file.write_bytes(data)
    read_checkpoint(tmp_path, {"t": slice(160, 170)})
    with pytest.raises(CheckpointError, match=r"is damaged: the block.*byte 0"):
        read_checkpoint(tmp_path, {"t": slice(0, 10)})


def test_a_folder_of_torch_is_read_by_its_own_names(tmp_path: Path) -> None:
    values = {"net": {"w": torch.randn(4, 3).T, "b": torch.ones(3)}, "epoch": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    found = read_checkpoint(tmp_path, ["net"])
    torch.testing.assert_close(
        found, {"net.w": values["net"]["w"], "net.b": values["net"]["b"]}, rtol=0, atol=0
    )
    assert torch.equal(read_checkpoint(tmp_path, {"w": slice(1, 3)})["net.w"], found["net.w"][1:3])
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path, ["net"])


class _Uneven(EachType):
    """Rank 0 holds two parts of the columns, rank 1 three."""

    def configs(self) -> list[Any]:
        (config,) = super().configs()
        return [replace(config, embedding_dim=20)]

    def plan(self, seed: int = 0) -> ShardingPlan:
        sharding = parameter_sharding(ShardingType.COLUMN_WISE, 12, 20, [1, 0, 1, 0, 1])
        return ShardingPlan({"ebc": EmbeddingModuleShardingPlan(column_wise=sharding)})


def test_ranks_with_unlike_numbers_of_parts(ranks: RankPool, tmp_path: Path) -> None:
    case = _Uneven(3, 2, types=(ShardingType.COLUMN_WISE,), optimizer=Adam)
    saved = ranks(2, _save, case, str(tmp_path), 1 << 20)[0]
    torch.testing.assert_close(read_checkpoint(tmp_path, optimizer=True), saved, rtol=0, atol=0)

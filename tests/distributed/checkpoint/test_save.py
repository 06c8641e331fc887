"""A save that fails raises the same error on every rank, and leaves the version before.

Processes that are killed while they save are in `kills.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.checkpoint import (
    CheckpointError,
    blocks,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.data_parallel import DefaultDataParallelWrapper
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tests.distributed.cases import EachType, shard
from tests.ranks import RankPool


def _save(path: str, extra: dict[str, Any] | None = None, **arguments: Any) -> str:
    """Save, and return the text of an `Exception`; another error ends the test."""
    model = _filled(2.0)
    try:
        save_checkpoint(path, model, model.fused_optimizer, extra, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _filled(value: float) -> DistributedModelParallel:
    model = shard(EachType(1, dist.get_world_size()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _save_with_bad_extra(path: str) -> str:
    save_checkpoint(path, _filled(1.0), extra={"epoch": 1})
    kept = {1, 2} if dist.get_rank() == 1 else [1, 2]
    before = sorted(os.listdir(path))
    error = _save(path, {"seen": {"ids": kept}})
    dist.barrier()
    assert sorted(os.listdir(path)) == before  # nothing was begun
    return error


def test_extra_that_one_rank_cannot_save_is_refused_on_all(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks(2, _save_with_bad_extra, str(tmp_path / "c"), timeout=20.0)
    assert one == other
    assert one.startswith(
        "CheckpointError: On rank 1: extra['seen']['ids'] must be plain data to be saved: "
    )


@contextlib.contextmanager
def _no_more_than(num_bytes: int) -> Iterator[None]:
    """Has the system refuse to make files larger, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _save_on_a_full_disk(path: str, full_on: int, num_bytes: int) -> tuple[str, list[str]]:
    model = _filled(1.0)
    save_checkpoint(path, model, model.fused_optimizer, {"epoch": 1})
    full = _no_more_than(num_bytes) if dist.get_rank() == full_on else contextlib.nullcontext()
    with full:
        error = _save(path)
    dist.barrier()
    left = sorted(os.listdir(path))
    dist.barrier()
    other = _filled(3.0)
    assert load_checkpoint(path, other, other.fused_optimizer) == {"epoch": 1}
    assert all(bool((parameter == 1.0).all()) for parameter in other.parameters())
    assert _save(path) == ""
    return error, left


@pytest.mark.parametrize(("full_on", "num_bytes"), [(0, 0), (0, 900), (1, 0), (1, 900)])
def test_a_full_disk_leaves_the_version_before(
    ranks: RankPool, tmp_path: Path, full_on: int, num_bytes: int
) -> None:
    path = tmp_path / "c"
    found = ranks(2, _save_on_a_full_disk, str(path), full_on, num_bytes, timeout=20.0)
    assert found[0] == found[1]
    error, left = found[0]
    assert left == ["step-1"]
    assert error.startswith(f"CheckpointError: {path}/step-2 cannot be saved. rank {full_on}: ")
    assert "File too large" in error


@pytest.mark.parametrize(("savers", "how"), [(1, []), (2, []), (1, ["--aside"]), (1, ["--delta"])])
def test_killed_jobs_leave_the_last_version(savers: int, how: list[str]) -> None:
    """A short form of what ``python -m tests.distributed.checkpoint.kills`` does at length."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.checkpoint.kills"]
    done = subprocess.run(
        [*command, "--kills", "3", "--savers", str(savers), "--seed", str(savers), *how],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loaded"] == 3


def _save_where_a_file_is(path: str) -> str:
    return _save(path)


def test_a_path_that_is_a_file_is_named(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.write_text("notes")
    one, other = ranks(2, _save_where_a_file_is, str(path), timeout=20.0)
    assert one == other
    assert one.startswith(f"CheckpointError: On rank 0: Saving {path}: FileExistsError: ")


def _save_elsewhere(path: str) -> str:
    """Rank 1 does not see the files of rank 0."""
    rank = dist.get_rank()
    from unittest import mock

    from recsys.distributed.checkpoint.blocks import BlockWriter

    write, folder = BlockWriter.write_data, Path(path) / "not mounted"

    def write_data(writer: BlockWriter, *args: Any) -> Any:
        if rank == 1:
            writer._folder = folder
        return write(writer, *args)

    with mock.patch.object(BlockWriter, "write_data", write_data):
        return _save(path)


def test_a_rank_that_does_not_see_the_folder_is_named(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks(2, _save_elsewhere, str(tmp_path), timeout=20.0)
    assert one == other
    assert "step-1 cannot be saved. rank 1: FileNotFoundError: " in one
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_checked(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"step must not be negative.* -1"):
        save_checkpoint(tmp_path, model, step=-1)
    with pytest.raises(ValueError, match="keep must be positive; received 0"):
        save_checkpoint(tmp_path, model, keep=0)
    for step in (2.0, "2", True):
        with pytest.raises(TypeError, match="step must be a whole number"):
            save_checkpoint(tmp_path, model, step=step)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match=r"extra must be a dict.*list"):
        save_checkpoint(tmp_path, model, extra=[1])  # type: ignore[arg-type]


def test_an_interrupt_stays_one_and_leaves_the_version_before(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Linear(9, 9))
    write = blocks.crc32
    calls = iter([None, None, None])

    def interrupted(*args: Any) -> int:
        if next(calls, 0) == 0:
            raise KeyboardInterrupt
        return write(*args)

    with mock.patch.object(blocks, "crc32", interrupted), pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, nn.Linear(9, 9))
    assert os.listdir(tmp_path) == ["step-1"]


def test_whole_numbers_of_numpy_are_steps(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Linear(1, 1), step=np.int64(3))  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["step-3"]


@pytest.mark.parametrize("function", [save_checkpoint, save_checkpoint_async, load_checkpoint])
def test_path_and_model_in_the_wrong_order_are_named(function: Any, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    name = function.__name__
    with pytest.raises(TypeError, match=rf"{name}.path must be .*: {name}\(path, model\)"):
        function(model, tmp_path)
    with pytest.raises(TypeError, match=f"{name}.path must be a path.*3"):
        function(3, model)
    with pytest.raises(ValueError, match=rf"{name}.path must not be empty"):
        function("", model)
    with pytest.raises(TypeError, match=f"{name}.model must be .*Module; .*'m'"):
        function(tmp_path, "m")
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(TypeError, match=f"{name}.optimizer must be a KeyedOptimizer.*Adam"):
        function(tmp_path, model, adam)
    assert list(tmp_path.iterdir()) == []


def _save_without_table_states(path: str) -> list[str]:
    case = EachType(1, dist.get_world_size(), optimizer=RowWiseAdagrad)
    model = shard(case)
    dense = KeyedOptimizerWrapper(
        dict(model.module.over.named_parameters()), lambda ps: torch.optim.Adam(ps)
    )
    told = []
    both = CombinedOptimizer([model.fused_optimizer, dense])
    for optimizer in (None, dense, model.fused_optimizer, both):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save_checkpoint(path, model, optimizer)
        told += [str(warning.message) for warning in caught] or [""]
    return told


def test_optimizer_states_of_tables_are_not_left_out_silently(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, second = ranks(2, _save_without_table_states, str(tmp_path))
    for message in first[:2]:
        assert "lacks the optimizer state of 4 tables, ['ebc." in message
    assert first[2:] == ["", ""]
    assert second == [""] * 4  # rank 0 warns for all


def test_states_of_unsharded_tables_are_not_left_out_silently(tmp_path: Path) -> None:
    def tables() -> list[EmbeddingBagConfig]:
        return [EmbeddingBagConfig(9, 4, "films", feature_names=["film"])]

    owner = FusedEmbeddingBagCollection(tables(), torch.optim.Adam, {"lr": 0.1})
    given = EmbeddingBagCollection(tables=tables())
    apply_optimizer_in_backward(torch.optim.Adam, given.parameters(), {"lr": 0.1})
    for module in (owner, given):
        with pytest.warns(
            UserWarning, match=r"lacks .* 1 tables, \['0.embedding_bags.films.weight'"
        ):
            save_checkpoint(tmp_path, nn.Sequential(module))
    stateless = EmbeddingBagCollection(tables=tables())
    apply_optimizer_in_backward(torch.optim.SGD, stateless.parameters(), {"lr": 0.1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path, owner, owner.fused_optimizer())
        save_checkpoint(tmp_path, stateless)
        save_checkpoint(tmp_path, EmbeddingBagCollection(tables=tables()))


def test_versions_are_numbered_and_kept(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for epoch in range(4):
        save_checkpoint(tmp_path, model, extra={"epoch": epoch})
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]
    save_checkpoint(tmp_path, model, extra={"epoch": 9}, step=10, keep=None)
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-3", "step-4"]
    assert load_checkpoint(tmp_path, model) == {"epoch": 9}
    assert load_checkpoint(tmp_path / "step-3", model) == {"epoch": 2}
    with pytest.raises(CheckpointError, match=r"newest version, .*/step-10, .*received 10"):
        save_checkpoint(tmp_path, model, step=10)


def _save_extra_by_rank(path: str) -> dict[str, Any]:
    model = _filled(1.0)
    save_checkpoint(path, model, extra={"rank": dist.get_rank(), "t": torch.ones(2)})
    extra = load_checkpoint(path, model)
    assert torch.equal(extra.pop("t"), torch.ones(2))
    return extra


def test_the_extra_of_rank_0_is_kept(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, _save_extra_by_rank, str(tmp_path), timeout=20.0) == [{"rank": 0}] * 2


class _Counting(nn.Module):
    """A layer with values that differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.ignored = nn.Parameter(torch.zeros(5))
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(3), persistent=False)
        self.note = 0.0

    def get_extra_state(self) -> float:
        return self.note

    def set_extra_state(self, state: float) -> None:
        self.note = state


def _save_own_values(path: str, form: str) -> None:
    rank = dist.get_rank()
    model: Any = _Counting()
    if form == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif form == "sharded":
        tables = [EmbeddingBagConfig(9, 4, "t", feature_names=["t"])]
        both = nn.ModuleList([model, EmbeddingBagCollection(tables=tables)])
        model = DistributedModelParallel(
            both,
            device=torch.device("cpu"),
            data_parallel_wrapper=DefaultDataParallelWrapper(params_to_ignore=["0.ignored"]),
        )
    inner = next(module for module in model.modules() if isinstance(module, _Counting))
    with torch.no_grad():
        inner.note = float(rank)
        inner.ignored.fill_(rank if form == "sharded" else 0.0)
        for buffer in inner.buffers():
            buffer.fill_(rank)
    optimizer = KeyedOptimizerWrapper(
        {name: p for name, p in model.named_parameters() if "weight" not in name},
        lambda params: torch.optim.Adam(params, lr=0.1),
    )
    optimizer.init_state()
    if form == "sharded":
        for name, parameter in optimizer.params.items():
            if "ignored" in name:
                optimizer.state[parameter]["exp_avg"].fill_(rank)
    for _ in range(2):
        save_checkpoint(path, model, optimizer)
    save_checkpoint_async(path, model, optimizer).wait()
    inner.note = -1.0
    load_checkpoint(path, model, optimizer)
    assert inner.note == 0.0
    assert [int(b.sum()) for b in inner.buffers()] == [0, 3 * rank, 0, 0, 0]


@pytest.mark.parametrize("form", ["plain", "ddp", "sharded"])
def test_values_that_differ_between_ranks_are_those_of_rank_0(
    ranks: RankPool, tmp_path: Path, form: str
) -> None:
    for world_size in (2, 3):
        path = tmp_path / str(world_size)
        ranks(world_size, _save_own_values, str(path), form)
        for version in path.iterdir():
            for name, value in read_checkpoint(version, optimizer=True).items():
                if any(word in name for word in ("running", "tracked", "steps", "ignored")):
                    assert value.count_nonzero() == 0, (version, name)

"""Deltas: base and deltas equal the full checkpoint, on any ranks, also after a failed save."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys import EmbeddingBagCollection, EmbeddingBagConfig
from recsys.distributed.checkpoint import (
    CheckpointError,
    blocks,
    delta,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.checkpoint.versions import read_manifest
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.state.table_shards import TableShards
from recsys.distributed.types import ShardingEnv, ShardingType
from recsys.modules.hashed_ids import LFU, AtLeast, HashedIds
from recsys.optim import Adam, RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import Case, assert_same, shard, train, whole
from tests.distributed.test_hashed_ids import CrowdedCase, HashedCase
from tests.ranks import RankPool


def state_of(model: Any) -> dict[str, Tensor]:
    """All values of the model and of its tables' optimizer."""
    state = {name: whole(value) for name, value in model.state_dict().items()}
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        state |= {f"{name}/{key}": whole(value) for key, value in states.items()}
    return state


def kinds(path: Path) -> str:
    """The kind of each version: `fdd` for a full one and two deltas."""
    steps = sorted(path.iterdir(), key=lambda version: int(version.name.removeprefix("step-")))
    return "".join(read_manifest(step).get("kind", "full")[0] for step in steps)


def always_deltas() -> Any:
    """Tables of a test are so small that headers exceed half of them."""
    return mock.patch.object(delta, "_MOST_OF_BASE", 1e9)


# -- over ranks ------------------------------------------------------------------------------------


def _save(case: Case, path: Path, num_deltas: int) -> int:
    rank, model = dist.get_rank(), shard(case)
    with always_deltas():
        for step in range(num_deltas + 1):
            train(case, model, range(step, step + 1), rank=rank, with_dense=False)
            if step == num_deltas // 2:
                model.reshard(case.plan(3))
            save = save_checkpoint_async if step % 2 else save_checkpoint
            pending = save(
                path / "chain",
                model,
                model.fused_optimizer,
                {"step": step},
                delta=True,
                keep=None,
            )
            if pending is not None:
                pending.wait()
    save_checkpoint(path / "full", model, model.fused_optimizer, {"step": num_deltas})
    shards = [m for m in model.modules() if isinstance(m, TableShards)]
    return sum(index.stats().evicted for shard in shards for index in shard.indexes())


def _load(case: Case, path: Path) -> None:
    found = []
    for name in ("chain", "full"):
        torch.manual_seed(len(name))
        model = shard(case, plan=case.plan(2))
        extra = load_checkpoint(path / name, model, model.fused_optimizer)
        found.append((state_of(model), extra))
    assert_same(found[0][0], found[1][0], rtol=0, atol=0)
    assert found[0][1] == found[1][1]


CASES = {
    "hashed, row-wise Adagrad": CrowdedCase(0, 2, num_ids=3000, optimizer=RowWiseAdagrad),
    "hashed, Adam": HashedCase(1, 3, optimizer=Adam),
    "hashed, sequences": HashedCase(2, 2, optimizer=RowWiseAdagrad, pooled=False),
    "static, Adam": Case(4, 2, optimizer=Adam),
    "static, row-wise Adagrad": Case(5, 3, optimizer=RowWiseAdagrad),
    "two nodes": HashedCase(
        4,
        4,
        types=(ShardingType.GRID_SHARD, ShardingType.TABLE_ROW_WISE),
        optimizer=RowWiseAdagrad,
        node_size=2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_base_and_deltas_are_the_full_checkpoint(
    ranks: RankPool, name: str, tmp_path: Path
) -> None:
    case, num_deltas = CASES[name], 50 if "Adagrad" in name else 8
    evicted = ranks(case.world_size, _save, case, tmp_path, num_deltas, timeout=240.0)
    assert isinstance(case, CrowdedCase) <= (sum(evicted) > 100)
    assert kinds(tmp_path / "chain") == "f" + "d" * num_deltas
    for world_size in (1, 4 if case.world_size == 2 else 2):
        types = CASES["static, Adam"].types if world_size < 4 else case.types
        if isinstance(case, HashedCase):
            types = tuple(t for t in types if t is not ShardingType.DATA_PARALLEL)
        other = replace(case, world_size=world_size, types=types, node_size=None)
        ranks(world_size, _load, other, tmp_path)
    chain = read_checkpoint(tmp_path / "chain", optimizer=True)
    full = read_checkpoint(tmp_path / "full", optimizer=True)
    assert_same(chain, full, rtol=0, atol=0)
    for key in chain:
        if key.endswith("weight") and not key.startswith("optimizer"):
            rows = {key: slice(1, max(len(chain[key]) - 1, 1))}
            assert torch.equal(read_checkpoint(tmp_path / "chain", rows)[key], full[key][rows[key]])


def _save_after_one_rank_marked_all(case: Case, path: Path) -> None:
    rank, model = dist.get_rank(), shard(case)
    with always_deltas():
        for number in range(3):
            train(case, model, range(number, number + 1), rank=rank, with_dense=False)
            if rank == 0 and number == 2:
                for module in model.modules():
                    for own in module.shards if isinstance(module, TableShards) else ():
                        own.kernel.marks.mark_all()
            save_checkpoint(path / "c", model, model.fused_optimizer, delta=True, keep=None)
    save_checkpoint(path / "full", model, model.fused_optimizer)


def test_owners_of_columns_that_disagree_save_all_rows(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(6, 2, types=(ShardingType.COLUMN_WISE,), optimizer=Adam)
    ranks(2, _save_after_one_rank_marked_all, case, tmp_path)
    assert kinds(tmp_path / "c") == "fdd"
    chain = read_checkpoint(tmp_path / "c", optimizer=True)
    assert_same(chain, read_checkpoint(tmp_path / "full", optimizer=True), rtol=0, atol=0)
    rows = read_manifest(tmp_path / "c" / "step-3")["rows"]
    assert any(saved["count"] == len(chain[name]) for name, saved in rows.items())


# -- in one process --------------------------------------------------------------------------------

ROWS = 4096


def make(optimizer: Any = RowWiseAdagrad) -> DistributedModelParallel:
    torch.manual_seed(0)
    rules = HashedIds(admission=AtLeast(2), eviction=LFU())
    tables = [
        EmbeddingBagConfig(ROWS, 16, "static", feature_names=["static"]),
        EmbeddingBagConfig(ROWS, 16, "hashed", feature_names=["hashed"], ids=rules),
    ]
    collection = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.1})
    env = ShardingEnv.from_local()
    return DistributedModelParallel(collection, env=env, device=torch.device("cpu"))


def step(model: nn.Module, seed: int, size: int = 40) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ROWS, (2 * size,), generator=generator)
    batch = KeyedJaggedTensor(
        ["static", "hashed"], ids, lengths=torch.ones(2 * size, dtype=torch.int64)
    )
    model(batch).values().square().sum().backward()


def save(path: Path, model: Any, **options: Any) -> None:
    given: dict[str, Any] = {"delta": True, "keep": None} | options
    save_checkpoint(path, model, model.fused_optimizer, **given)


def check_load(path: Path, model: Any) -> None:
    other = make()
    load_checkpoint(path, other, other.fused_optimizer)
    assert_same(state_of(other), state_of(model), rtol=0, atol=0)


def test_a_delta_has_the_changed_rows(tmp_path: Path) -> None:
    model = make()
    save(tmp_path, model)
    step(model, 1)
    save(tmp_path, model)
    assert kinds(tmp_path) == "fd"
    rows = read_manifest(tmp_path / "step-2")["rows"]
    ids = torch.randint(0, ROWS, (80,), generator=torch.Generator().manual_seed(1))[:40]
    weight = "embedding_bags.static.weight"
    values = [f"model.{weight}", f"optimizer.state.{weight}.sum"]
    assert rows[weight] == {"count": len(ids.unique()), "values": values}
    names = {name.split("hashed.")[1] for name in rows["embedding_bags.hashed.weight"]["values"]}
    assert names == {"weight", "weight.sum", "index.ids", "index.last_used", "index.seen"}
    size = [sum(f.stat().st_size for f in (tmp_path / s).iterdir()) for s in ("step-1", "step-2")]
    assert size[1] < size[0] / 8
    save(tmp_path, model)  # nothing has changed
    assert all(saved["count"] == 0 for saved in read_manifest(tmp_path / "step-3")["rows"].values())
    check_load(tmp_path, model)


def test_every_so_many_saves_one_is_full(tmp_path: Path) -> None:
    model = make()
    for seed in range(7):
        step(model, seed)
        save(tmp_path, model, full_every=3)
        check_load(tmp_path, model)
    assert kinds(tmp_path) == "fddfddf"


def test_deltas_stay_below_half_of_their_base(tmp_path: Path) -> None:
    model = make()
    for seed in range(7):
        step(model, seed, size=600)
        save(tmp_path, model)
        check_load(tmp_path, model)
    assert kinds(tmp_path) == "fdddfdd"
    sizes = [sum(f.stat().st_size for f in (tmp_path / f"step-{n}").iterdir()) for n in (1, 2)]
    assert 3 < sizes[0] / 2 / sizes[1] < 4
    step(model, 7, size=20_000)
    save(tmp_path, model)
    assert kinds(tmp_path) == "fdddfddf"
    check_load(tmp_path, model)


def test_saves_that_cannot_be_deltas_are_full(tmp_path: Path) -> None:
    model, path = make(), tmp_path / "c"
    save(path, model)
    save(path, model)
    load_checkpoint(path / "step-1", model, model.fused_optimizer)
    save(path, model)
    assert kinds(path) == "fdf"
    with pytest.warns(UserWarning, match="lacks the optimizer state"):
        save_checkpoint(path, model, delta=True, keep=None)
    save(path, model)
    assert kinds(path) == "fdfff"
    save(path, make())  # another model
    save(path, model)
    assert kinds(path) == "fdfffff"
    save(tmp_path / "best", model, delta=False)
    save(path, model)
    step(model, 2)
    save(path, model, delta=False)
    step(model, 3)
    save(path, model)
    assert kinds(path) == "fdfffffdfd"
    rows = read_manifest(path / "step-10")["rows"]["embedding_bags.static.weight"]
    assert rows["count"] <= 40  # the rows of one step
    check_load(path, model)
    save(tmp_path / "other", model)
    save(path, model)
    assert kinds(tmp_path / "other") == "f"
    assert kinds(path) == "fdfffffdfdf"


@pytest.mark.parametrize("is_async", [False, True])
def test_after_a_failure_the_next_save_is_full(tmp_path: Path, is_async: bool) -> None:
    model = make()
    save(tmp_path, model)
    step(model, 1)
    broken = mock.patch.object(blocks.os, "fsync", side_effect=OSError(28, "No space left"))
    optimizer = model.fused_optimizer

    def save_async() -> None:
        save_checkpoint_async(tmp_path, model, optimizer, delta=True, keep=None).wait()

    failing = save_async if is_async else lambda: save(tmp_path, model)
    with broken, pytest.raises(CheckpointError, match="No space left"):
        failing()
    if is_async:
        with pytest.raises(CheckpointError, match="No space left"):
            save(tmp_path, model)  # reports it again
    save(tmp_path, model)
    assert kinds(tmp_path) == "ff"
    check_load(tmp_path, model)
    step(model, 2)
    save(tmp_path, model)
    assert kinds(tmp_path) == "ffd"
    check_load(tmp_path, model)


def test_training_goes_on_during_an_asynchronous_delta(tmp_path: Path) -> None:
    model = make()
    save(tmp_path, model)
    for seed in range(1, 6):
        step(model, seed)
        expected = state_of(model)
        pending = save_checkpoint_async(
            tmp_path, model, model.fused_optimizer, delta=True, keep=None
        )
        step(model, seed + 100)
        folder = pending.wait()
        other = make()
        load_checkpoint(folder, other, other.fused_optimizer)
        assert_same(state_of(other), expected, rtol=0, atol=0)
    assert kinds(tmp_path) == "fddddd"


def test_versions_that_a_kept_delta_needs_are_kept(tmp_path: Path) -> None:
    model = make()
    for seed in range(9):
        step(model, seed)
        save(tmp_path, model, keep=2, full_every=4)
        names = sorted(int(folder.name.removeprefix("step-")) for folder in tmp_path.iterdir())
        first = max(seed - 1, 0) // 4 * 4 + 1  # the base of the second newest
        assert names == list(range(first, seed + 2))
        check_load(tmp_path, model)
        load_checkpoint(tmp_path / f"step-{names[-2:][0]}", make())


def test_an_unsharded_model_saves_deltas(tmp_path: Path) -> None:
    """Its tables are trained by torch's optimizer: a step changes all of their rows."""
    table = EmbeddingBagConfig(64, 4, "t", feature_names=["t"])
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table]), "over": nn.Linear(4, 2)})
    named = dict(model.named_parameters())
    optimizer = CombinedOptimizer(
        [KeyedOptimizerWrapper(named, lambda params: torch.optim.Adam(params, lr=0.1))]
    )
    batch = KeyedJaggedTensor(["t"], torch.tensor([3, 9]), lengths=torch.tensor([1, 1]))
    with always_deltas():
        for is_trained in (True, True, True, False):
            if is_trained:
                optimizer.zero_grad()
                model["over"](model["ebc"](batch).values()).square().sum().backward()
                optimizer.step()
            save_checkpoint(tmp_path, model, optimizer, delta=True, keep=None)
    assert kinds(tmp_path) == "fddd"
    counts = [
        read_manifest(tmp_path / f"step-{n}")["rows"]["ebc.embedding_bags.t.weight"]["count"]
        for n in (2, 3, 4)
    ]
    assert counts == [64, 64, 0]
    save_checkpoint(tmp_path / "full", model, optimizer)
    chain = read_checkpoint(tmp_path / "step-4", optimizer=True)
    assert_same(chain, read_checkpoint(tmp_path / "full", optimizer=True), rtol=0, atol=0)


def test_a_chain_does_not_keep_its_model_alive(tmp_path: Path) -> None:
    model = make()
    save(tmp_path, model)
    found = weakref.ref(model)
    del model
    gc.collect()
    assert found() is None


def test_options_are_checked(tmp_path: Path) -> None:
    model = make()
    with pytest.raises(ValueError, match="consolidated must be False with delta=True"):
        save(tmp_path, model, consolidated=True)
    with pytest.raises(ValueError, match="full_every must be"):
        save(tmp_path, model, full_every=0)
    save(tmp_path, model, full_every=1)
    save(tmp_path, model, full_every=1)
    assert kinds(tmp_path) == "ff"

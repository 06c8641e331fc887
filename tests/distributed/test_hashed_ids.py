"""Sharded tables with hashed ids have the rows, ids and scores of the unsharded model."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.checkpoint import load_checkpoint, load_table, save_checkpoint
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.layout import IdHash
from recsys.distributed.placement.plan_layout import layout_of_plan
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.shard import shard as shard_module
from recsys.distributed.stages.bags import rows_of_regions
from recsys.distributed.types import ShardingEnv, ShardingType
from recsys.kernels.hashed import build
from recsys.kernels.hashed.index import IdIndex
from recsys.kernels.hashed.twin import locate
from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.hashed_ids import LFU, LRU, AtLeast, DistanceLFU, HashedIds, Probability
from recsys.optim import Adagrad, Adam, RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import FEATURES, Case, assert_same, shard, train, whole
from tests.ranks import RankPool

RULES = (
    HashedIds(),
    HashedIds(eviction=LFU(3), admission=AtLeast(2), unknown="zero"),
    HashedIds(eviction=DistanceLFU(), ttl=6, seed=5),
    HashedIds(eviction=LRU(), admission=Probability(0.5), unknown="zero", ttl=9),
    HashedIds(eviction=None),
)
TYPES = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.GRID_SHARD,
)


@dataclass(frozen=True)
class HashedCase(Case):
    """Tables with hashed ids, and some with row numbers, which share no feature with them."""

    sizes = (0, 3, 6, 12)
    num_ids: int = 300
    rows: tuple[int, ...] = (256, 512)
    hyperparameters: tuple[tuple[str, float], ...] = (("lr", 0.01),)
    types: tuple[ShardingType, ...] = TYPES
    rules: tuple[HashedIds, ...] = RULES

    def configs(self) -> list[Any]:
        rng = random.Random(self.seed)
        configs = super().configs()
        for config in configs:
            config.ids = rng.choice(self.rules)
            config.num_embeddings = rng.choice(self.rows)
            config.feature_names = rng.sample(FEATURES[:3], rng.randint(1, 2))
            config.__post_init__()
        static = replace(
            configs[0], name="rows", ids=None, num_embeddings=20, feature_names=[FEATURES[3]]
        )
        return [*configs, static]

    def batches(self, step: int) -> list[KeyedJaggedTensor]:
        generator = torch.Generator().manual_seed(self.seed * 17 + step)
        batches = []
        for batch in super().batches(step):
            parts = []
            for name, bags in batch.to_dict().items():
                ids = bags.values().long()
                if name != FEATURES[3]:
                    ids = torch.randint(0, self.num_ids, ids.shape, generator=generator)
                    ids = ids * 0x5851F42D4C957F2D - 2**63
                parts.append(ids)
            found = batch.parts()._replace(values=torch.cat(parts))
            batches.append(KeyedJaggedTensor.from_parts(**found._asdict()))
        return batches


def state_of(model: Any) -> dict[str, Tensor]:
    """The state of the tables; ids of free rows have no meaning."""
    state = {n: whole(v) for n, v in model.state_dict().items() if n.startswith("ebc.")}
    for name in [n for n in state if n.endswith("index.ids")]:
        used = state[name.replace("index.ids", "index.last_used")] > 0
        state[name] = state[name].masked_fill(~used, 0)
    return state


def assert_equal_index(received: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_same(received, expected, rtol=1e-4, atol=1e-5)
    for name, value in expected.items():
        if ".index." in name:
            assert torch.equal(received[name], value), name


def _train_both(case: HashedCase, folder: Path) -> None:
    rank = dist.get_rank()
    reference, sharded = case.model(), shard(case)
    expected = train(case, reference, range(12), rank=None, with_dense=False)
    received = train(case, sharded, range(12), rank=rank, with_dense=False)
    for step, (joined, own) in enumerate(zip(expected, received, strict=True)):
        torch.testing.assert_close(own, case.parts(joined, step)[rank], rtol=1e-4, atol=1e-5)
    assert_equal_index(state_of(sharded), state_of(reference))
    save_checkpoint(folder, sharded, sharded.fused_optimizer)
    other = shard(case, plan=case.plan(seed=1))
    load_checkpoint(folder, other, other.fused_optimizer)
    assert_equal_index(state_of(other), state_of(reference))
    expected = train(case, reference, range(12, 18), rank=None, with_dense=False)
    received = train(case, other, range(12, 18), rank=rank, with_dense=False)
    for step, (joined, own) in enumerate(zip(expected, received, strict=True), 12):
        torch.testing.assert_close(own, case.parts(joined, step)[rank], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad, Adam])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_they_train_as_the_unsharded_model(
    ranks: RankPool, seed: int, pooled: bool, optimizer: Any, tmp_path: Path
) -> None:
    case = HashedCase(seed, 2, pooled=pooled, optimizer=optimizer)
    ranks(2, _train_both, case, tmp_path / "c")


CASES = {
    "one rank": HashedCase(0, 1, optimizer=RowWiseAdagrad),
    "one rank, sequences": HashedCase(0, 1, optimizer=RowWiseAdagrad, pooled=False),
    "three ranks": HashedCase(1, 3, optimizer=RowWiseAdagrad),
    "three ranks, sequences": HashedCase(2, 3, optimizer=Adam, pooled=False),
    "four ranks": HashedCase(3, 4, types=TYPES[:3]),
    "two nodes": HashedCase(4, 4, types=TYPES[3:], optimizer=RowWiseAdagrad, node_size=2),
    "deduplicated": HashedCase(5, 2, pooled=False, use_index_dedup=True),
    "own batch sizes": HashedCase(6, 2, variable_batch=True, optimizer=RowWiseAdagrad),
    "weighted": HashedCase(7, 2, weighted=True),
    "mean": HashedCase(8, 3, pooling=PoolingType.MEAN, types=TYPES[1:2]),
}


@pytest.mark.parametrize("name", CASES)
def test_they_train_as_the_unsharded_model_on_other_ranks(
    ranks: RankPool, name: str, tmp_path: Path
) -> None:
    ranks(CASES[name].world_size, _train_both, CASES[name], tmp_path / "c")


def _move(case: HashedCase) -> None:
    rank = dist.get_rank()
    reference, moved = case.model(), shard(case)
    for first, seed in ((0, 1), (6, 2), (12, 0)):
        expected = train(case, reference, range(first, first + 6), rank=None, with_dense=False)
        received = train(case, moved, range(first, first + 6), rank=rank, with_dense=False)
        for step, (joined, own) in enumerate(zip(expected, received, strict=True), first):
            torch.testing.assert_close(own, case.parts(joined, step)[rank], rtol=1e-4, atol=1e-5)
        moved.reshard(case.plan(seed))
        assert_equal_index(state_of(moved), state_of(reference))


@pytest.mark.parametrize(("seed", "pooled"), [(0, True), (1, True), (2, False)])
def test_training_goes_on_after_a_move(ranks: RankPool, seed: int, pooled: bool) -> None:
    ranks(3, _move, HashedCase(seed, 3, pooled=pooled, optimizer=RowWiseAdagrad))


def _load_one(case: HashedCase) -> None:
    """A table that has ids before the first batch counts other steps than the others."""
    reference, sharded = case.model(), shard(case)
    configs = case.configs()
    loaded = configs[case.seed % (len(configs) - 1)]
    rng = np.random.default_rng(case.seed)
    numbers = torch.from_numpy(rng.choice(case.num_ids, 40, replace=False))
    ids = (numbers * 0x5851F42D4C957F2D - 2**63).numpy()
    values = rng.random((40, loaded.embedding_dim), dtype=np.float32)
    for model in (reference, sharded):
        load_table(model, loaded.name, values, ids=ids)
    train(case, reference, range(12), rank=None, with_dense=False)
    train(case, sharded, range(12), rank=dist.get_rank(), with_dense=False)
    state = state_of(sharded)
    assert_equal_index(state, state_of(reference))
    steps = {name: int(value) for name, value in state.items() if name.endswith("index.steps")}
    assert sorted(set(steps.values())) == ([12, 13] if len(steps) > 1 else [13])
    assert [step for name, step in steps.items() if f".{loaded.name}." in name] == [13]


@pytest.mark.parametrize("seed", range(6))
def test_a_table_loaded_alone_counts_alike_on_all_owners(ranks: RankPool, seed: int) -> None:
    """Also for rules that draw by the step, on the owners of columns and of rows."""
    rules = (RULES[2], RULES[3], HashedIds(admission=Probability(0.5)))
    types = (ShardingType.COLUMN_WISE, ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
    ranks(2, _load_one, HashedCase(seed, 2, types=types, optimizer=Adagrad, rules=rules))


def _load_partly(case: HashedCase, folder: Path) -> None:
    reference, sharded = case.model(), shard(case)
    for model in (reference, sharded):
        load_checkpoint(folder, model, allow_partial=True)
    train(case, reference, range(12), rank=None, with_dense=False)
    train(case, sharded, range(12), rank=dist.get_rank(), with_dense=False)
    state = state_of(sharded)
    assert_equal_index(state, state_of(reference))
    steps = [int(value) for name, value in state.items() if name.endswith("index.steps")]
    assert sorted(set(steps)) == [12, 19]


@pytest.mark.filterwarnings("ignore:.*lacks the optimizer state")
@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_new_tables_train_beside_those_of_a_checkpoint(
    ranks: RankPool, seed: int, tmp_path: Path
) -> None:
    rules = (RULES[2], RULES[3], HashedIds(admission=Probability(0.5)))
    types = (ShardingType.COLUMN_WISE, ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
    case = HashedCase(seed, 2, types=types, optimizer=Adagrad, rules=rules)
    torch.manual_seed(seed)
    first = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=case.configs()[:1])})
    apply_optimizer_in_backward(Adagrad, first.parameters(), {"lr": 0.01})
    for step in range(7):
        first["ebc"](case.batches(step)[0]).values().sum().backward()
    save_checkpoint(tmp_path / "c", first)
    ranks(2, _load_partly, case, tmp_path / "c")


class CrowdedCase(HashedCase):
    """A batch has about as many ids as a table has rows."""

    sizes = (12, 24)


def _map_ahead(case: HashedCase) -> None:
    batches = [case.batches(step)[dist.get_rank()] for step in range(300)]
    found: list[dict[str, Tensor]] = []
    for depth in range(4):
        model = shard(case)
        tables = model.module.ebc
        ahead: deque[Any] = deque()
        for step in range(len(batches)):
            while len(ahead) <= depth and step + len(ahead) < len(batches):
                ctx = tables.create_context()
                ids = tables.input_dist(ctx, batches[step + len(ahead)])
                ahead.append((ctx, ids.wait().wait()))
            out = tables.compute_and_output_dist(*ahead.popleft()).wait()
            pooled = out.values() if case.pooled else torch.cat([j.values() for j in out.values()])
            (pooled * pooled.detach().sin()).sum().backward()
        shards = [i for table in tables._stages.tables.values() for i in table.indexes()]
        assert sum(index.stats().evicted for index in shards) > 500
        found.append(state_of(model))
        assert_same(found[-1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("pooled", [True, False])
def test_batches_mapped_ahead_train_as_in_a_plain_loop(ranks: RankPool, pooled: bool) -> None:
    """300 batches, up to three ahead: no update of an id changes the row of another."""
    case = CrowdedCase(5, 2, pooled=pooled, num_ids=2000, rows=(128,), optimizer=RowWiseAdagrad)
    ranks(2, _map_ahead, case)


def _evaluate(case: HashedCase) -> None:
    model = shard(case)
    train(case, model, range(4), rank=dist.get_rank(), with_dense=False)
    model.eval()
    model(case.batches(6)[dist.get_rank()])  # also restores the zeros of unknown ids
    before = state_of(model)
    model(case.batches(7)[dist.get_rank()])
    model.train()
    with torch.no_grad():
        model(case.batches(8)[dist.get_rank()])
    assert_same(state_of(model), before, rtol=0, atol=0)
    model.train(dist.get_rank() == 0)  # not all ranks train
    model(case.batches(9)[dist.get_rank()])
    assert_same(state_of(model), before, rtol=0, atol=0)


def test_evaluation_writes_nothing(ranks: RankPool) -> None:
    ranks(2, _evaluate, HashedCase(1, 2, optimizer=RowWiseAdagrad))


def _without_optimizer() -> list[str]:
    """Only rank 0 has tables with hashed ids."""
    tables = [
        EmbeddingBagConfig(64, 4, "h", feature_names=["a"], ids=HashedIds()),
        EmbeddingBagConfig(64, 4, "rows", feature_names=["b"]),
    ]
    ebc = EmbeddingBagCollection(tables=tables)
    plan = {
        table.name: parameter_sharding(ShardingType.TABLE_WISE, 64, 4, ranks=[rank])
        for rank, table in enumerate(tables)
    }
    sharded = shard_module(ebc, plan, device=torch.device("cpu"))
    found = []
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([-7, 5]), lengths=torch.ones(2).long())
    for _ in range(2):
        with pytest.raises(ValueError, match="'h' with HashedIds needs an optimizer") as info:
            sharded(batch)
        found.append(str(info.value))
    sharded.train(dist.get_rank() == 0)  # the error of one rank is raised on both
    with pytest.raises(ValueError, match=r"On rank 0: .*'h'.*needs an optimizer"):
        sharded(batch)
    sharded.eval()
    sharded(batch).values()
    sharded.train()
    with torch.no_grad():
        sharded(batch).values()
    return found


def test_training_without_an_optimizer_fails_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks(2, _without_optimizer)
    assert first == second


def _eval_first(case: HashedCase) -> None:
    for mode in (False, True):
        model = case.model().train(mode)
        sharded = DistributedModelParallel(
            model, env=ShardingEnv.default(), device=torch.device("cpu"), plan=case.plan()
        )
        assert {module.training for module in sharded.modules()} == {mode}
        before = {name: value.clone() for name, value in state_of(sharded).items()}
        sharded.module.ebc(case.batches(0)[dist.get_rank()])
        after = state_of(sharded)
        steps = {int(value) for name, value in after.items() if name.endswith("index.steps")}
        assert steps == {int(mode)}
        arrays = [name for name in before if ".index." in name]
        assert all(torch.equal(after[name], before[name]) for name in arrays) != mode


def test_a_model_in_evaluation_stays_in_it(ranks: RankPool) -> None:
    ranks(2, _eval_first, HashedCase(1, 2, optimizer=RowWiseAdagrad))


def _load_between(case: HashedCase, folder: Path) -> None:
    fused = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.1, "update_mode": "deferred"}
    sharders = [EmbeddingBagCollectionSharder(fused)]
    model, hashed = shard(case, sharders=sharders), case.configs()[0]
    save_checkpoint(folder, model, model.fused_optimizer)
    ends = model.fused_optimizer.step, model.fused_optimizer.zero_grad
    for step, end in enumerate(ends):
        output = model.module.ebc(case.batches(step)[dist.get_rank()])
        output.values().sum().backward()
        before = {name: value.clone() for name, value in state_of(model).items()}
        values = np.ones((3, hashed.embedding_dim), np.float32)
        for load in (
            lambda: load_table(model, hashed.name, values, ids=np.arange(3)),  # noqa: B023
            lambda: load_checkpoint(folder, model, model.fused_optimizer),
        ):
            with pytest.raises(ValueError, match=r"'.*' with HashedIds wait for a"):
                load()
            assert_same(state_of(model), before, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="with HashedIds wait for a step"):
            model.load_state_dict(model.state_dict())
        end()
        model.load_state_dict(model.state_dict())
        load_table(model, hashed.name, values, ids=np.arange(3))
        load_checkpoint(folder, model, model.fused_optimizer)


def test_gradients_do_not_go_to_the_ids_of_a_load(ranks: RankPool, tmp_path: Path) -> None:
    case = HashedCase(3, 2, types=TYPES[:3], optimizer=None)
    ranks(2, _load_between, case, tmp_path / "c")


def test_plans_that_do_not_fit_are_named() -> None:
    tables = [EmbeddingBagConfig(64, 4, "t", feature_names=["a"], ids=HashedIds())]
    ebc = EmbeddingBagCollection(tables=tables)
    ranks = list(range(2))
    for kind, message in (
        (ShardingType.DATA_PARALLEL, "'t' with HashedIds must not be data_parallel"),
        (ShardingType.ROW_WISE, "a region for each of its 2 row blocks; received 1 regions"),
    ):
        with pytest.raises(ValueError, match=message):
            layout_of_plan(ebc, {"t": parameter_sharding(kind, 64, 4, ranks)}, 2)


@pytest.mark.parametrize("kind", ["C", "torch"])
def test_regions_are_those_of_the_index(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "torch":
        monkeypatch.setattr(build, "library", lambda: None)
    rng = random.Random(2)
    for number in range(20):
        hashes: list[IdHash | None] = [
            IdHash(
                seed=rng.randrange(2**64),
                num_regions=2 ** rng.randrange(15),
                region_rows=64 * rng.randint(1, 9),
            )
            for _ in range(4)
        ]
        if number % 2:
            hashes[rng.randrange(4)] = None
        ids = [[rng.randrange(-(2**63), 2**63) for _ in range(rng.randrange(9))] for _ in hashes]
        counts = torch.tensor([len(own) for own in ids])
        flat = torch.tensor([one for own in ids for one in own], dtype=torch.int64)
        rows, is_hashed = rows_of_regions(flat, counts, hashes)
        expected = []
        for own, one in zip(ids, hashes, strict=True):
            if one is None:
                expected += own
                continue
            lines = one.region_rows // 64
            index = IdIndex.empty(
                HashedIds().settings(), one.region_rows * one.num_regions, one.num_regions,
                0, one.num_regions, one.seed, "meta",
            )  # fmt: skip
            found = locate(index, torch.tensor(own, dtype=torch.int64)).lines // lines
            expected += (found * one.region_rows).tolist()
        assert rows.tolist() == expected
        of_ids = [one is not None for own, one in zip(ids, hashes, strict=True) for _ in own]
        assert is_hashed.tolist() == ([] if None not in hashes else of_ids)

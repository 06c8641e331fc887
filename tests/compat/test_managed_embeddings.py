"""Managed collision collections train as plain collections with the same `HashedIds`."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.compat.eviction_policies import (
    DistanceLFU_EvictionPolicy,
    HashZchEvictionPolicyName,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    average_threshold_filter,
)
from recsys.compat.managed_collisions import (
    HashZchManagedCollisionModule,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from recsys.compat.managed_embeddings import (
    ManagedCollisionCollectionSharder,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingBagCollection,
)
from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.default_sharders import get_module_to_default_sharders
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import ShardedEmbeddingBagCollection
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.planner import EmbeddingShardingPlanner, Topology
from recsys.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from recsys.distributed.train_pipeline import TrainPipelineSparseDist
from recsys.distributed.types import ShardingPlan, ShardingType
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import (
    CPU,
    FEATURES,
    assert_same,
    concat_batches,
    shard,
    train,
    whole_state,
)
from tests.distributed.test_hashed_ids import TYPES, HashedCase
from tests.ranks import RankPool

MODULES = (
    lambda rows: MCHManagedCollisionModule(rows, CPU, LFU_EvictionPolicy(), 1),
    lambda rows: MCHManagedCollisionModule(
        rows, CPU, LRU_EvictionPolicy(2.0, average_threshold_filter), 3, name="t"
    ),
    lambda rows: MCHManagedCollisionModule(rows, CPU, DistanceLFU_EvictionPolicy(2), 2),
    lambda rows: HashZchManagedCollisionModule(rows, CPU, 4, disable_fallback=True),
    lambda rows: HashZchManagedCollisionModule(
        rows,
        CPU,
        total_num_buckets=4,
        eviction_policy_name=HashZchEvictionPolicyName.LRU_EVICTION,
        opt_in_prob=50,
        percent_reserved_slots=1,
    ),
)


class ManagedModel(nn.Module):
    """`cases.Model` with a managed collection; ``rows`` are the last batch's rows."""

    def __init__(self, case: ManagedCase) -> None:
        super().__init__()
        configs = [replace(config, ids=None) for config in case.configs()]
        modules = {
            config.name: module(config.num_embeddings)
            for config, module in zip(configs, case.modules(), strict=True)
        }
        collisions = ManagedCollisionCollection(modules, configs)
        if case.pooled:
            bags = EmbeddingBagCollection(tables=configs, is_weighted=case.is_weighted)
            self.ebc: Any = ManagedCollisionEmbeddingBagCollection(bags, collisions, True)
            width = sum(c.embedding_dim * len(c.feature_names) for c in configs)
        else:
            sequences = EmbeddingCollection(tables=configs)
            self.ebc = ManagedCollisionEmbeddingCollection(sequences, collisions, True)
            width = configs[0].embedding_dim
        self.over = nn.Linear(width, 3)
        self.is_pooled = case.pooled

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        found, self.rows = self.ebc(features)
        if self.is_pooled:
            values = found.values()
        else:
            values = torch.cat([jagged.values() for jagged in dict(found.items()).values()])
        return values, self.over(values)


@dataclass(frozen=True)
class ManagedCase(HashedCase):
    """Tables with managed collision modules, which share no feature."""

    is_managed: bool = True

    def modules(self) -> list[Any]:
        rng = random.Random(self.seed + 9)
        return [rng.choice(MODULES) for _ in super().configs()[:-1]]

    def configs(self) -> list[Any]:
        rng = random.Random(self.seed + 5)
        features = rng.sample(FEATURES, len(FEATURES))
        configs = super().configs()[:-1]
        for i, (config, module) in enumerate(zip(configs, self.modules(), strict=True)):
            config.ids = module(config.num_embeddings).ids
            config.feature_names = features[i :: len(configs)]
        return configs

    def model(self) -> Any:
        if not self.is_managed:
            return super().model()
        torch.manual_seed(self.seed)
        model = ManagedModel(self)
        optimizer: Any = self.optimizer
        apply_optimizer_in_backward(optimizer, model.ebc.parameters(), dict(self.hyperparameters))
        return model

    def plain(self) -> ManagedCase:
        return replace(self, is_managed=False)


def state_of(model: Any) -> dict[str, Tensor]:
    """The state of the tables, by the names of the plain model; ids of free rows mean nothing."""
    state = {
        name.replace("_embedding_module.", ""): value
        for name, value in whole_state(model).items()
        if name.startswith("ebc.")
    }
    for name in [n for n in state if n.endswith("index.ids")]:
        used = state[name.replace("index.ids", "index.last_used")] > 0
        state[name] = state[name].masked_fill(~used, 0)
    return state


def check_rows(case: ManagedCase, model: Any, given: KeyedJaggedTensor) -> int:
    """Known ids have the rows where the tables have them, others the first row of a region."""
    received, state, num_known = model.rows, state_of(model), 0
    if hasattr(received, "wait"):
        received = received.wait()
    assert received.keys() == [f for config in case.configs() for f in config.feature_names]
    tables = "ebc.embedding_bags" if case.pooled else "ebc.embeddings"
    for config in case.configs():
        prefix = f"{tables}.{config.name}.index."
        ids, last_used = state[f"{prefix}ids"], state[f"{prefix}last_used"]
        for name in config.feature_names:
            rows, wanted = received[name].values(), given[name].values().long()
            assert torch.equal(received[name].lengths(), given[name].lengths())
            assert rows.dtype is torch.int64
            is_known = (ids[rows] == wanted) & (last_used[rows] > 0)
            assert not torch.isin(wanted[~is_known], ids[last_used > 0]).any()
            assert (rows[~is_known] % 64 == 0).all()
            num_known += int(is_known.sum())
    return num_known


def _train_all(case: ManagedCase, folder: Path, moves: bool) -> None:
    rank, num_known = dist.get_rank(), 0
    plain, joined = case.plain().model(), case.model()
    registered: list[Any] = []
    if case.use_index_dedup:
        sharder = EmbeddingCollectionSharder(use_index_dedup=True)
        registered = [ManagedCollisionEmbeddingCollectionSharder(sharder)]
    sharders = registered or list(get_module_to_default_sharders().values())
    sharded = shard(case, sharders=sharders)
    for step in range(8):
        steps = range(step, step + 1)
        [expected] = train(case.plain(), plain, steps, rank=None, with_dense=False)
        [unsharded] = train(case, joined, steps, rank=None, with_dense=False)
        assert torch.equal(unsharded, expected)
        [received] = train(case, sharded, steps, rank=rank, with_dense=False)
        wanted = case.parts(expected, step)[rank]
        torch.testing.assert_close(received, wanted, rtol=1e-4, atol=1e-5)
        num_known += check_rows(case, sharded.module, case.batches(step)[rank])
        check_rows(case, joined, concat_batches(case.batches(step)))
        if moves and step == 4:
            sharded.reshard(case.plan(seed=1))
    assert num_known > 0
    for model in (joined, sharded):
        assert_same(state_of(model), state_of(plain), rtol=1e-4, atol=1e-5)
    save_checkpoint(folder, sharded, sharded.fused_optimizer)
    other = shard(case, case.plan(seed=1), sharders)
    load_checkpoint(folder, other, other.fused_optimizer)
    assert_same(state_of(other), state_of(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_they_train_as_plain_collections(
    ranks: RankPool, seed: int, pooled: bool, tmp_path: Path
) -> None:
    case = ManagedCase(seed, 2, pooled=pooled, optimizer=RowWiseAdagrad)
    ranks(2, _train_all, case, tmp_path / "c", seed == 1)


CASES = {
    "one rank": ManagedCase(0, 1, optimizer=RowWiseAdagrad),
    "one rank, sequences": ManagedCase(0, 1, optimizer=RowWiseAdagrad, pooled=False),
    "three ranks": ManagedCase(1, 3),
    "two nodes": ManagedCase(4, 4, types=TYPES[3:], optimizer=RowWiseAdagrad, node_size=2),
    "deduplicated": ManagedCase(5, 2, pooled=False, use_index_dedup=True),
    "own batch sizes": ManagedCase(6, 2, variable_batch=True, optimizer=RowWiseAdagrad),
    "weighted": ManagedCase(7, 2, weighted=True),
}


@pytest.mark.parametrize("name", CASES)
def test_they_train_as_plain_collections_in_other_ways(
    ranks: RankPool, name: str, tmp_path: Path
) -> None:
    ranks(CASES[name].world_size, _train_all, CASES[name], tmp_path / "c", False)


# -- uses as in scripts ---------------------------------------------------------------------------


def tables(sizes: dict[str, int], kind: Any = EmbeddingBagConfig) -> list[Any]:
    """A table by name, read by the feature of that name."""
    return [kind(rows, 4, name, feature_names=[name]) for name, rows in sizes.items()]


def managed(configs: list[Any], returns: bool = False, **options: Any) -> Any:
    """A collection whose ids may be taken modulo 5."""
    modules: dict[str, ManagedCollisionModule] = {
        config.name: MCHManagedCollisionModule(
            config.num_embeddings, CPU, LFU_EvictionPolicy(), 1, **options
        )
        for config in configs
    }
    collisions = ManagedCollisionCollection(modules, configs)
    if isinstance(configs[0], EmbeddingConfig):
        sequences = EmbeddingCollection(tables=configs)
        return ManagedCollisionEmbeddingCollection(sequences, collisions, returns)
    bags = EmbeddingBagCollection(tables=configs)
    return ManagedCollisionEmbeddingBagCollection(bags, collisions, returns)


def batch_of(rng: torch.Generator, names: list[str], size: int = 4) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (size * len(names),), generator=rng)
    ids = torch.randint(-(2**63), 2**63 - 1, (int(lengths.sum()),), generator=rng)
    return KeyedJaggedTensor(names, ids % 50 * 0x5851F42D4C957F2D, lengths=lengths)


class Dense(nn.Module):
    """The output of a managed collection without its rows, for models of plain collections."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: KeyedJaggedTensor) -> Any:
        embeddings, self.rows = self.inner(features)
        return embeddings


class Network(nn.Module):
    """A DLRM over a managed collection."""

    def __init__(self, configs: list[Any]) -> None:
        super().__init__()
        torch.manual_seed(7)
        bags = EmbeddingBagCollection(tables=[replace(config) for config in configs])
        self.dlrm = DLRM(bags, 3, [8, 4], [8, 1])
        self.dlrm.sparse_arch.embedding_bag_collection = Dense(managed(configs, returns=True))

    def forward(self, batch: tuple[Tensor, KeyedJaggedTensor]) -> tuple[Tensor, Tensor]:
        logits = self.dlrm(*batch)
        return logits.square().mean(), logits


def network() -> Network:
    model = Network(tables({"a": 100, "b": 300}))
    sparse = model.dlrm.sparse_arch.embedding_bag_collection.inner
    apply_optimizer_in_backward(RowWiseAdagrad, sparse.parameters(), {"lr": 0.1})
    return model


def _train_dlrm() -> None:
    rank = dist.get_rank()
    rng = torch.Generator().manual_seed(5)
    batches = [[(torch.rand(4, 3, generator=rng), batch_of(rng, ["a", "b"]))] * 2 for _ in range(9)]
    joined, model = network(), network()
    plan = EmbeddingShardingPlanner(Topology(2, "cpu")).collective_plan(model)
    [path] = plan.plan
    assert path == "dlrm.sparse_arch.embedding_bag_collection.inner"
    model = DistributedModelParallel(model, device=CPU, plan=plan)
    sharded = model.module.dlrm.sparse_arch.embedding_bag_collection.inner
    assert isinstance(sharded, ShardedManagedCollisionEmbeddingBagCollection)
    assert isinstance(sharded._embedding_module, ShardedEmbeddingBagCollection)
    dense, own = [
        torch.optim.SGD([p for n, p in m.named_parameters() if "embedding_bags" not in n], lr=0.1)
        for m in (joined, model)
    ]
    pipeline: Any = TrainPipelineSparseDist(model, own, CPU)
    own_batches = iter([parts[rank] for parts in batches])
    for parts in batches:
        floats, features = parts[0]
        dense.zero_grad()
        loss, logits = joined((floats, features))
        loss.backward()
        dense.step()
        received = pipeline.progress(own_batches)
        torch.testing.assert_close(received, logits, rtol=1e-3, atol=1e-4)
        rows = [m.dlrm.sparse_arch.embedding_bag_collection.rows for m in (joined, model.module)]
        assert torch.equal(rows[1].wait().values(), rows[0].values())


def test_a_dlrm_trains_in_a_pipeline(ranks: RankPool) -> None:
    ranks(2, _train_dlrm)


def _train_one_table() -> None:
    configs = tables({"a": 16}, EmbeddingConfig)
    configs[0].feature_names = ["a", "b"]
    module = managed(configs, returns=True)
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    plan = EmbeddingShardingPlanner(Topology(dist.get_world_size(), "cpu")).collective_plan(module)
    model = DistributedModelParallel(module, device=CPU, plan=plan)
    rng = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        batch = batch_of(rng, ["b", "a"])
        found, rows = model(batch)
        assert rows.keys() == ["a", "b"]
        assert {name: len(f.values()) for name, f in found.items()} == {
            name: len(rows[name].values()) for name in ("a", "b")
        }
        torch.cat([f.values() for f in found.values()]).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_table_trains_with_a_plan_of_the_planner(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, _train_one_table)


def _run_stages() -> None:
    module = managed(tables({"a": 256}), returns=False, input_hash_func=lambda ids, size: ids % 5)
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(
        mc_sharder=ManagedCollisionCollectionSharder(),
        fused_params={"optimizer": "SGD", "learning_rate": 0.5},
    )
    plan = construct_module_sharding_plan(module, {"a": row_wise()}, sharder, device_type="cpu")
    model = DistributedModelParallel(
        nn.ModuleDict({"mc": module}),
        device=CPU,
        plan=ShardingPlan({"mc": plan}),
        sharders=[sharder],
    )
    sharded: Any = model.module["mc"]
    batch = KeyedJaggedTensor(
        ["a"], torch.arange(-10, 10), lengths=torch.ones(20, dtype=torch.int64)
    )
    ctx = sharded.create_context()
    received = sharded.input_dist(ctx, batch).wait().wait()
    pooled, rows = sharded.output_dist(ctx, sharded.compute(ctx, received))
    assert rows.wait() is None
    values = pooled.values()
    values.sum().backward()
    assert torch.equal(values[:5], values[5:10])
    assert torch.equal(values[:5], values[10:15])
    ctx = sharded.create_context()
    received = sharded.input_dist(ctx, batch).wait().wait()
    pooled, _ = sharded.compute_and_output_dist(ctx, received)
    # each rank read each of five ids four times
    torch.testing.assert_close(pooled.values(), values - 0.5 * 4, rtol=1e-5, atol=1e-5)
    with pytest.raises(AttributeError, match="'int' object has no attribute"):
        sharded(5)


def test_stages_of_a_batch_and_functions_of_ids(ranks: RankPool) -> None:
    ranks(2, _run_stages)


def test_evaluation_writes_nothing() -> None:
    module = managed(tables({"a": 100, "b": 100}), returns=True)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    rng = torch.Generator().manual_seed(0)
    known = batch_of(rng, ["a", "b"])
    embeddings, trained = module(known)
    embeddings.values().sum().backward()
    before = copy.deepcopy(module.state_dict())
    module.eval()
    _, rows = module(known)
    assert torch.equal(rows.values(), trained.values())
    module(batch_of(rng, ["a", "b"]))
    module.train()
    with torch.no_grad():
        module(batch_of(rng, ["a", "b"]))
    assert_same(module.state_dict(), before, rtol=0, atol=0)


def test_the_collection_keeps_its_parameters_and_optimizers() -> None:
    configs = tables({"a": 100, "b": 128})
    bags = EmbeddingBagCollection(tables=configs)
    parameters = dict(bags.named_parameters())
    apply_optimizer_in_backward(torch.optim.SGD, [parameters["embedding_bags.a.weight"]], {"lr": 1})
    modules = {c.name: HashZchManagedCollisionModule(c.num_embeddings, CPU, 1) for c in configs}
    module = ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection(modules, configs)
    )
    assert module._embedding_bag_collection is bags
    apply_optimizer_in_backward(torch.optim.SGD, [parameters["embedding_bags.b.weight"]], {"lr": 1})
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([-1, 2**62]), lengths=torch.tensor([1, 1]))
    first, rows = module(batch)
    first.values().sum().backward()
    assert rows is None
    torch.testing.assert_close(module(batch)[0].values(), first.values() - 1)
    assert dict(bags.named_parameters()).keys() == parameters.keys()
    for name, parameter in bags.named_parameters():
        assert parameter is parameters[name]
    assert [c.num_embeddings for c in bags.embedding_bag_configs()] == [128, 128]


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_copies_train_alike(way: str) -> None:
    modules = [managed(tables({"a": 100, "b": 100}), returns=True) for _ in range(2)]
    for module in modules:
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    rng = torch.Generator().manual_seed(1)
    batches = [batch_of(rng, ["a", "b"]) for _ in range(9)]
    for batch in batches[:4]:
        modules[0](batch)[0].values().sum().backward()
    if way == "deepcopy":
        modules[1] = copy.deepcopy(modules[0])
    elif way == "pickle":
        modules[1] = pickle.loads(pickle.dumps(modules[0]))
    else:
        modules[1].load_state_dict(modules[0].state_dict())
    for batch in batches[4:]:
        (first, rows), (second, others) = [module(batch) for module in modules]
        assert torch.equal(first.values(), second.values())
        assert torch.equal(rows.values(), others.values())
        (first.values().sum() + second.values().sum()).backward()
    slots = [module._managed_collision_collection.open_slots() for module in modules]
    assert slots[0] == slots[1]
    assert slots[0]["a"] < 126


def test_tables_may_be_on_meta() -> None:
    configs = tables({"a": 100})
    meta = torch.device("meta")
    bags = EmbeddingBagCollection(tables=configs, device=meta)
    modules = {"a": MCHManagedCollisionModule(100, meta, LFU_EvictionPolicy(), 1)}
    module = ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection(modules, configs)
    )
    assert all(value.is_meta for name, value in module.state_dict().items() if "ids" in name)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(nn.ModuleDict({"mc": module}), device=CPU)
    batch = batch_of(torch.Generator().manual_seed(0), ["a"])
    model.module["mc"](batch)[0].values().sum().backward()
    assert model.state_dict()["mc._embedding_module.embedding_bags.a.weight"].shape == (128, 4)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="'a' with HashedIds needs an optimizer in backward"):
        managed(tables({"a": 100}))(batch_of(torch.Generator().manual_seed(0), ["a"]))
    configs = tables({"a": 100, "b": 100})
    modules = {c.name: HashZchManagedCollisionModule(100, CPU, 1) for c in configs}
    collisions = ManagedCollisionCollection(modules, configs)
    bags = EmbeddingBagCollection(tables=configs[:1])
    with pytest.raises(ValueError, match=r"in its order; received \['a', 'b'\] for \['a'\]"):
        ManagedCollisionEmbeddingBagCollection(bags, collisions)
    configs[1].feature_names = ["a"]
    bags = EmbeddingBagCollection(tables=configs)
    with pytest.raises(ValueError, match="must be False if two tables read a feature"):
        ManagedCollisionEmbeddingBagCollection(bags, collisions, return_remapped_features=True)
    sharder = ManagedCollisionEmbeddingBagCollectionSharder()
    assert ShardingType.DATA_PARALLEL.value not in sharder.sharding_types("cpu")

"""Sharding in place, and sharders of users' own modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.planner import EmbeddingShardingPlanner, Topology
from recsys.distributed.shard import (
    exclude_sharded_from_ddp,
    shard,
    shard_modules,
)
from recsys.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.keyed import KeyedOptimizer
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import (
    CPU,
    FEATURES,
    Case,
    EachType,
    assert_same,
    concat_batches,
    train,
    whole_state,
)
from tests.ranks import RankPool

META = torch.device("meta")


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_one_of_several_processes_is_not_alone_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it; no process group
    case = EachType(0, 1)
    builds = (
        lambda model, **env: DistributedModelParallel(model, device=CPU, **env),
        lambda model, **env: shard_modules(model, device=CPU, **env),
        lambda model, **env: shard(model.ebc, row_wise(), device=CPU, **env),
    )
    for build in builds:
        with pytest.raises(ValueError, match=r'init_process_group\("gloo"\).*from_local\(\)'):
            build(case.model())
        build(case.model(), env=ShardingEnv.from_local())
        build(case.model(), env=ShardingEnv(world_size=1, rank=0))


# -- one module, and all modules of a model --------------------------------------------------------


def _train_under_ddp(how: str) -> None:
    """Tables without an optimizer in backward: one torch optimizer trains everything."""
    case, rank = EachType(1, 2, optimizer=None), dist.get_rank()
    reference = case.model()
    model: nn.Module = case.model()
    if how == "shard_modules":
        assert shard_modules(model, device=CPU, plan=case.plan()) is model
    else:
        plan: Any = case.plan().plan["ebc"]
        if how == "generators":
            kinds = [table_wise(rank=1), row_wise(), row_wise(), table_wise(rank=0)]
            plan = dict(zip((config.name for config in case.configs()), kinds, strict=True))
        model.ebc = shard(model.ebc, plan, device=CPU)  # type: ignore[assignment]
        exclude_sharded_from_ddp(model)
    wrapped = DistributedDataParallel(model)
    ours = torch.optim.Adagrad(model.parameters(), lr=0.1)
    theirs = torch.optim.Adagrad(reference.parameters(), lr=0.1)
    for step in range(3):
        batches = case.batches(step)
        for net, batch, optimizer, scale in (
            (wrapped, batches[rank], ours, 1.0),
            (reference, concat_batches(batches), theirs, 0.5),
        ):
            optimizer.zero_grad()
            pooled, logits = net(batch)
            (scale * (pooled.sin().sum() + logits.pow(2).sum())).backward()
            optimizer.step()
    expected = reference.state_dict()
    assert list(model.state_dict()) == list(expected)
    assert_same(whole_state(model), expected, atol=1e-6)


@pytest.mark.parametrize("how", ["shard_modules", "plan", "generators"])
def test_trains_under_plain_data_parallel(ranks: RankPool, how: str) -> None:
    ranks(2, _train_under_ddp, how)


def _train_in_backward() -> None:
    case, rank = EachType(1, 2, optimizer=RowWiseAdagrad), dist.get_rank()
    model = case.model()
    sharded = case.model()
    sharded.ebc = shard(sharded.ebc, row_wise(), device=CPU)  # type: ignore[assignment]
    expected = train(case, model, range(3), rank=None, with_dense=False)
    found = train(case, sharded, range(3), rank=rank, with_dense=False)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        close(one, case.parts(other, step)[rank])
    assert list(sharded.ebc.fused_optimizer.params) == [
        f"embedding_bags.{config.name}.weight" for config in case.configs()
    ]


def test_tables_update_themselves_without_a_wrapper(ranks: RankPool) -> None:
    ranks(2, _train_in_backward)


def tables(dim: int = 8) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=30, feature_names=[f])
        for i, f in enumerate(FEATURES[:2])
    ]


def test_the_root_may_be_the_collection() -> None:
    one = EmbeddingBagCollection(tables=tables())
    weights = {name: value.clone() for name, value in one.state_dict().items()}
    sharded = shard_modules(one, device=CPU)
    assert type(sharded) is ShardedEmbeddingBagCollection
    assert sharded.state_dict().keys() == weights.keys()
    name = "embedding_bags.t0.weight"
    close(sharded.state_dict()[name].full_tensor(), weights[name])


def test_dense_parts_are_left_alone_unless_asked() -> None:
    def model() -> nn.Module:
        ebc = EmbeddingBagCollection(tables=tables(), device=META)
        return nn.Sequential(ebc, nn.Linear(2, 2, device=META), nn.Linear(2, 2))

    assert shard_modules(model(), device=CPU)[1].weight.is_meta
    assert shard_modules(model(), device=CPU, init_params=True)[1].weight.device == CPU
    dense = nn.Sequential(nn.Linear(1, 1))
    assert shard_modules(dense, device=CPU) is dense


def test_plans_and_modules_that_do_not_fit() -> None:
    ebc = EmbeddingBagCollection(tables=tables(), device=META)
    with pytest.raises(ValueError, match=r"missing: \['t1'\], not in .*module: \[\]"):
        shard(ebc, {"t0": row_wise()}, device=CPU)
    placed = construct_module_sharding_plan(ebc, {"t0": row_wise(), "t1": row_wise()})
    with pytest.raises(ValueError, match=r"placements for \['t0'\] and .*\['t1'\]"):
        shard(ebc, {"t0": placed["t0"], "t1": row_wise()}, device=CPU)
    with pytest.raises(ValueError, match=r"received a Linear"):
        shard(nn.Linear(1, 1), row_wise(), device=CPU)
    with pytest.raises(ValueError, match=r"missing: \['0'\]"):
        shard_modules(nn.Sequential(ebc), device=CPU, plan=ShardingPlan({}))


# -- a user's own module ---------------------------------------------------------------------------


class Tower(nn.Module):
    """Tables and a dense layer over them."""

    def __init__(self, ebc: nn.Module, over: nn.Linear) -> None:
        super().__init__()
        self.ebc = ebc
        self.over = over

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(self.ebc(features).values())
        return logits


class ShardedTower(ShardedModule):
    """The same tower as a sharded module of its own, which names its sharded parts."""

    def __init__(self, ebc: ShardedEmbeddingBagCollection, over: nn.Linear) -> None:
        super().__init__()
        self.ebc = ebc
        self.over = over

    forward = Tower.forward

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        inner = self.ebc.fused_optimizer
        return KeyedOptimizer(
            {f"ebc.{name}": value for name, value in inner.params.items()},
            inner.state,
            inner.param_groups,
        )

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        yield from self.ebc.sharded_parameter_names(f"{prefix}.ebc" if prefix else "ebc")


class TowerSharder(ModuleSharder[Tower]):
    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind
        self.inner = EmbeddingBagCollectionSharder()

    @property
    def module_type(self) -> type[Tower]:
        return Tower

    def shardable_parameters(self, module: Tower) -> dict[str, nn.Parameter]:
        return self.inner.shardable_parameters(module.ebc)  # type: ignore[arg-type]

    def shard(
        self,
        module: Tower,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> nn.Module:
        ebc = self.inner.shard(module.ebc, params, env, device)  # type: ignore[arg-type]
        return self.kind(ebc, module.over)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = (
            Tower(EmbeddingBagCollection(tables=tables()), nn.Linear(16, 3)) for _ in range(2)
        )
        for tower in (self.a, self.b):
            apply_optimizer_in_backward(RowWiseAdagrad, tower.ebc.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        scores: Tensor = (self.a(features) * self.b(features)).sum(1)
        return scores


TOWER_NAMES = [
    f"{tower}.{name}"
    for tower in "ab"
    for name in (
        "ebc.embedding_bags.t0.weight",
        "ebc.embedding_bags.t1.weight",
        "over.weight",
        "over.bias",
    )
]


def _train_towers(model: nn.Module, steps: range, rank: int | None) -> None:
    """Ranks have batches of their own: a dense layer that is not replicated drifts apart."""
    bare = model.module if isinstance(model, DistributedModelParallel) else model
    dense = torch.optim.SGD([*bare.a.over.parameters(), *bare.b.over.parameters()], lr=0.1)
    case = Case(5, 2)
    for step in steps:
        batches = case.batches(step)
        batch = concat_batches(batches) if rank is None else batches[rank]
        dense.zero_grad()
        (model(batch).sin().sum() * (0.5 if rank is None else 1.0)).backward()
        dense.step()


def _shard_towers(kind: type[nn.Module], by_planner: bool, path: str) -> None:
    rank = dist.get_rank()
    reference, model = TwoTowers(), TwoTowers()
    sharders = [TowerSharder(kind), EmbeddingBagCollectionSharder()]
    if by_planner:
        plan = EmbeddingShardingPlanner(topology=Topology(2, "cpu")).plan(model, sharders)
        assert {name: list(tables) for name, tables in plan.plan.items()} == {
            "a": ["t0", "t1"],
            "b": ["t0", "t1"],
        }
    else:
        generators = {"t0": row_wise(), "t1": table_wise(rank=1)}
        plan = ShardingPlan(
            {
                name: construct_module_sharding_plan(tower, generators, TowerSharder(kind))
                for name, tower in (("a", model.a), ("b", model.b))
            }
        )
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    assert type(sharded.module.a) is kind
    assert type(sharded.module.a.ebc) is ShardedEmbeddingBagCollection
    assert list(sharded.state_dict()) == TOWER_NAMES
    assert list(sharded.fused_optimizer.params) == [n for n in TOWER_NAMES if ".ebc." in n]

    _train_towers(reference, range(3), None)
    _train_towers(sharded, range(3), rank)
    expected = {name: value.clone() for name, value in reference.state_dict().items()}
    assert_same(whole_state(sharded), expected, atol=1e-6)

    save_checkpoint(path, sharded, sharded.fused_optimizer)
    copied = sharded.copy(CPU)
    copied.init_data_parallel()
    _train_towers(sharded, range(3, 5), rank)
    assert_same(whole_state(copied), expected, atol=1e-6)
    _train_towers(reference, range(3, 5), None)
    _train_towers(copied, range(3, 5), rank)
    trained = reference.state_dict()
    assert_same(whole_state(copied), trained, atol=1e-6)
    load_checkpoint(path, sharded, sharded.fused_optimizer)
    _train_towers(sharded, range(3, 5), rank)
    assert_same(whole_state(sharded), trained, atol=1e-6)


@pytest.mark.parametrize("kind", [Tower, ShardedTower])
@pytest.mark.parametrize("by_planner", [False, True])
def test_a_module_of_ones_own(
    ranks: RankPool, tmp_path: Any, kind: type[nn.Module], by_planner: bool
) -> None:
    ranks(2, _shard_towers, kind, by_planner, str(tmp_path / "checkpoint"))


def test_tables_are_named_by_the_outermost_module_with_a_sharder() -> None:
    sharders = [TowerSharder(Tower), EmbeddingBagCollectionSharder()]
    tables_of = EmbeddingModuleShardingPlan()
    with pytest.raises(ValueError, match=r"missing: \['a', 'b'\], .* model: \['a\.ebc'\]"):
        DistributedModelParallel(
            TwoTowers(),
            env=ShardingEnv.from_local(),
            device=CPU,
            plan=ShardingPlan({"a.ebc": tables_of}),
            sharders=sharders,
        )


class NamedSharder(EmbeddingBagCollectionSharder):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str | None] = []

    def shard(self, *args: Any, module_fqn: str | None = None, **kwargs: Any) -> Any:
        self.seen.append(module_fqn)
        return super().shard(*args, module_fqn=module_fqn, **kwargs)


def test_a_sharder_is_told_the_path_of_its_module() -> None:
    sharder = NamedSharder()
    model = nn.ModuleDict({"a": nn.ModuleList([EmbeddingBagCollection(tables=tables())])})
    shard_modules(model, sharders=[sharder])
    assert sharder.seen == ["a.0"]


@pytest.mark.parametrize(
    ("sharder", "module"),
    [
        (EmbeddingBagCollectionSharder(), EmbeddingBagCollection(tables=tables())),
        (
            EmbeddingCollectionSharder(),
            EmbeddingCollection(tables=[EmbeddingConfig(8, 4, "t", feature_names=["f"])]),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_name_the_path(sharder: Any, module: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"plan of module 'model\.tables' must name"):
        sharder.shard(module, {}, ShardingEnv.from_local(), module_fqn="model.tables")

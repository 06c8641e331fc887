"""Weighed and pooled bags train under any plan as they do unsharded, processors included."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.ranks.wire import CommType, QCommsConfig, get_qcomm_codecs_registry
from recsys.distributed.types import ShardedModule, ShardingEnv, ShardingPlan, ShardingType
from recsys.kernels.types import EmbOptimType
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.feature_processor import (
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import JaggedTensor, KeyedJaggedTensor
from tests.distributed.cases import (
    CPU,
    FEATURES,
    Case,
    assert_same,
    concat_batches,
    samples_of,
    shard,
    whole_state,
)
from tests.distributed.pipeline_client import in_turn, interleave
from tests.ranks import RankPool

LONGEST = 3  # of the bags of `Case`


class ByValue(FeatureProcessor):
    """Weighs an id by its value; every kind of processor is a dense module like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        ids = features.values()
        return JaggedTensor(ids, 1 + self.scale * ids.float().cos(), features.lengths())


class FpModel(nn.Module):
    """A processed collection under a dense layer."""

    def __init__(self, case: FpCase) -> None:
        super().__init__()
        configs = case.configs()
        read = sorted({f for c in configs for f in c.feature_names})
        processors: Any = PositionWeightedModuleCollection({f: LONGEST for f in FEATURES})
        if case.seed % 3 == 1:
            processors = {f: PositionWeightedModule(LONGEST) for f in read}
        elif case.seed % 3 == 2:
            processors = {f: PositionWeightedModule(LONGEST) for f in read} | {read[0]: ByValue()}
        tables = EmbeddingBagCollection(tables=configs, is_weighted=True, device=CPU)
        self.fp = FeatureProcessedEmbeddingBagCollection(tables, processors)
        for parameter in self.fp.split()[0].parameters():
            nn.init.normal_(parameter)
        self.over = nn.Linear(sum(c.embedding_dim * len(c.feature_names) for c in configs), 3)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        values = self.fp(features).values()
        return values, self.over(values)


class FpCase(Case):
    """`Case` with feature processors."""

    is_weighted = True

    def model(self) -> FpModel:  # type: ignore[override]
        torch.manual_seed(self.seed)
        model = FpModel(self)
        if self.optimizer is not None:
            tables = model.fp.split()[1]
            apply_optimizer_in_backward(self.optimizer, tables.parameters(), {"lr": 0.1})
        return model

    def plan(self, seed: int = 0) -> ShardingPlan:
        return ShardingPlan({"fp": super().plan(seed).plan["ebc"]})


# the second sharder also shards the tables inside, so the first one has no module left
SHARDERS = [EmbeddingBagCollectionSharder(), FeatureProcessedEmbeddingBagCollectionSharder()]


def _train(case: FpCase, model: nn.Module, steps: range, rank: int | None) -> list[Tensor]:
    """Trains the unsharded model on all batches joined (rank None), or a sharded one on its own."""
    updated = {
        name
        for name, parameter in case.model().named_parameters()
        if case.optimizer is not None and ".embedding_bags." in name
    }
    dense = [p for name, p in model.named_parameters() if name not in updated]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    outputs = []
    for step in steps:
        batches = case.batches(step)
        pooled, logits = model(concat_batches(batches) if rank is None else batches[rank])
        outputs.append(pooled.detach().clone())
        loss = (pooled * pooled.detach().sin()).sum() + logits.pow(2).sum()
        optimizer.zero_grad()
        (loss / case.world_size if rank is None else loss).backward()
        optimizer.step()
    return outputs


def _train_both(case: FpCase) -> None:
    rank = dist.get_rank()
    reference, sharded = case.model(), shard(case, sharders=SHARDERS)
    start = {name: value.clone() for name, value in reference.state_dict().items()}
    expected = _train(case, reference, range(3), None)
    received = _train(case, sharded, range(3), rank)
    for step, (joined, own) in enumerate(zip(expected, received, strict=True)):
        mine = joined.split([samples_of(batch) for batch in case.batches(step)])[rank]
        torch.testing.assert_close(own, mine, rtol=1e-5, atol=1e-5)
    state = whole_state(sharded)
    assert list(state) == list(start)
    assert_same(state, reference.state_dict())
    if sum(samples_of(batch) for step in range(3) for batch in case.batches(step)):
        processors = [name for name in start if "_feature_processors" in name]
        assert any(not torch.equal(start[name], state[name]) for name in processors)


@pytest.mark.parametrize("kind", list(ShardingType))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_sharding_type_trains_as_unsharded(
    ranks: RankPool, kind: ShardingType, world_size: int
) -> None:
    seed = 10 * world_size + list(ShardingType).index(kind)
    ranks(world_size, _train_both, FpCase(seed, world_size, types=(kind,)))


@pytest.mark.parametrize("seed", range(400, 412))
def test_mixed_plans_train_as_unsharded(ranks: RankPool, seed: int) -> None:
    rng = random.Random(seed)
    world_size = rng.randint(1, 4)
    case = FpCase(
        seed,
        world_size,
        node_size=rng.choice([size for size in (1, 2, 4) if world_size % size == 0]),
        types=tuple(ShardingType),
        variable_batch=rng.random() < 0.3,
        optimizer=rng.choice([torch.optim.SGD, None]),
    )
    ranks(world_size, _train_both, case)


def _use(case: FpCase) -> None:
    """Check the optimizer's tables, and the training of a copy and of a loaded model."""
    rank = dist.get_rank()
    model = shard(case, sharders=SHARDERS)
    _train(case, model, range(1), rank)
    tables = [
        f"fp._embedding_bag_collection.embedding_bags.{c.name}.weight" for c in case.configs()
    ]
    assert [g["params"] for g in model.fused_optimizer.param_groups if g["params"]]
    assert list(model.fused_optimizer.params) == tables
    outer, inside = (m for m in model.modules() if isinstance(m, ShardedModule))
    assert outer is model.module.fp
    assert inside is outer._embedding_bag_collection
    copied, loaded = model.copy(CPU), shard(case, sharders=SHARDERS)
    copied.init_data_parallel()
    loaded.load_state_dict(whole_state(model))
    expected = _train(case, model, range(1, 3), rank)
    for other in (copied, loaded):
        for one, another in zip(_train(case, other, range(1, 3), rank), expected, strict=True):
            torch.testing.assert_close(one, another)


def test_copies_and_loads_train_on(ranks: RankPool) -> None:
    ranks(2, _use, FpCase(7, 2))


def _start_apart(case: FpCase) -> list[Tensor]:
    model = case.model()
    with torch.no_grad():
        for parameter in model.fp.split()[0].parameters():
            parameter.fill_(dist.get_rank() + 1)
    with mock.patch.object(FpCase, "model", return_value=model):
        return [
            p.detach()
            for p in shard(case, sharders=SHARDERS).module.fp._feature_processors.parameters()
        ]


def test_processors_start_as_on_rank_0(ranks: RankPool) -> None:
    for parameters in ranks(2, _start_apart, FpCase(3, 2)):
        assert all(bool(p.eq(1).all()) for p in parameters)


def _one_rank_fails(case: FpCase) -> None:
    lengths = torch.ones(len(FEATURES)).long()
    if dist.get_rank() == 1:
        lengths[FEATURES.index(case.configs()[0].feature_names[0])] = LONGEST + 1
    ids = torch.zeros(int(lengths.sum())).long()
    with pytest.raises(ValueError, match=r"received 4 ids.*0 of feature 'f\d'"):
        shard(case, sharders=SHARDERS)(KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths))


def test_an_error_of_one_rank_is_raised_on_all(ranks: RankPool) -> None:
    ranks(2, _one_rank_fails, FpCase(0, 2), timeout=20)


def _plan_it(case: FpCase) -> None:
    model = DistributedModelParallel(case.model(), device=CPU, sharders=SHARDERS)
    assert set(model.plan.plan) == {"fp"}
    _train(case, model, range(1), dist.get_rank())


def test_the_planner_plans_the_tables(ranks: RankPool) -> None:
    ranks(2, _plan_it, FpCase(0, 2))


def test_meta_models_are_materialised() -> None:
    case = FpCase(0, 1)
    with torch.device("meta"):
        configs = case.configs()
        model = nn.ModuleDict(
            {
                "fp": FeatureProcessedEmbeddingBagCollection(
                    EmbeddingBagCollection(tables=configs, is_weighted=True),
                    PositionWeightedModuleCollection({f: LONGEST for f in FEATURES}),
                )
            }
        )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_local(),
        device=CPU,
        plan=case.plan(),
        sharders=[FeatureProcessedEmbeddingBagCollectionSharder()],
    )
    assert all(p.eq(1).all() for n, p in sharded.named_parameters() if "_feature_processors" in n)


def test_the_sharder_of_the_tables_is_the_users() -> None:
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused))
    case = FpCase(0, 1, optimizer=None)
    model = case.model()
    assert dict(sharder.fused_params) == fused
    assert list(sharder.shardable_parameters(model.fp)) == [c.name for c in case.configs()]
    assert sharder.sharding_types("cpu") == EmbeddingBagCollectionSharder().sharding_types("cpu")
    assert "fused" in sharder.compute_kernels("table_wise", "cpu")
    sharded = sharder.shard(model.fp, case.plan().plan["fp"], ShardingEnv.from_local(), CPU)
    inner = sharded._embedding_bag_collection
    assert {group["lr"] for group in inner.fused_optimizer.param_groups} == {0.5}


def test_the_registry_belongs_to_one_sharder() -> None:
    registry = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    assert sharder._ebc_sharder.qcomm_codecs_registry is registry
    with pytest.raises(ValueError, match="received both"):
        FeatureProcessedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(), registry)


def _by_stages(case: FpCase) -> None:
    batches = [case.batches(step)[dist.get_rank()] for step in range(2)]
    states, outputs, gradients = [], [], []
    for look_up in (interleave, in_turn):
        model = shard(case, sharders=SHARDERS)
        fp: Any = model.module.fp
        found = look_up(fp, (batches[0],), (batches[1],))
        sum((values * values.detach().sin()).sum() for values in found).backward()  # type: ignore[union-attr]
        outputs.append(found)
        gradients.append([p.grad for p in fp._feature_processors.parameters()])
        states.append(whole_state(model))
    assert all(map(torch.equal, *outputs))
    assert any(grad.any() for grad in gradients[0])
    assert all(map(torch.equal, *gradients))
    assert_same(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_two_batches_at_once_train_as_in_turn(ranks: RankPool, seed: int) -> None:
    ranks(2, _by_stages, FpCase(seed, 2))


def _fail_by_stages(case: FpCase) -> None:
    fp = shard(case, sharders=SHARDERS).module.fp
    batch = case.batches(0)[dist.get_rank()]
    counts = fp.input_dist(fp.create_context(), "no features" if dist.get_rank() else batch)
    with pytest.raises((AttributeError, TypeError), match="On rank 1"):
        counts.wait()
    fp(batch).wait()  # the ranks are in step


def test_what_a_processor_raises_is_raised_on_all_where_headers_are_read(ranks: RankPool) -> None:
    ranks(2, _fail_by_stages, FpCase(0, 2))

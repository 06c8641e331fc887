"""Memory that is predicted against memory that is allocated, on two ranks."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlannerError,
    Topology,
)
from recsys.distributed.planner.storage import StorageModel
from recsys.distributed.planner.tables import PlannedTable, ShardSpec
from recsys.distributed.ranks import comm
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.types import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.kernels.types import EmbOptimType, OptimizerSpec
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import LAMB, LarsSGD, PartialRowWiseAdam, RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.specs import TableOptimizer
from recsys.sparse import KeyedJaggedTensor
from tests.ranks import RankPool

CPU, META = torch.device("cpu"), torch.device("meta")
FUSED = EmbeddingComputeKernel.FUSED
BATCH, POOLING = 256, 4
SHARDERS = {
    EmbeddingBagCollection: EmbeddingBagCollectionSharder(),
    EmbeddingCollection: EmbeddingCollectionSharder(),
}


@final
class Tables(NamedTuple):
    """A collection to be built on each rank."""

    sizes: Mapping[str, tuple[int, int]]
    optimizer: type[torch.optim.Optimizer] | None = RowWiseAdagrad
    pooling: PoolingType | None = PoolingType.SUM
    is_weighted: bool = False
    settings: Mapping[str, str] = {}

    def build(self) -> EmbeddingBagCollection | EmbeddingCollection:
        module: EmbeddingBagCollection | EmbeddingCollection
        if self.pooling is None:
            sequences = [
                EmbeddingConfig(rows, dim, name, feature_names=[f"f_{name}"])
                for name, (rows, dim) in self.sizes.items()
            ]
            module = EmbeddingCollection(tables=sequences, device=META)
        else:
            bags = [
                EmbeddingBagConfig(
                    rows, dim, name, feature_names=[f"f_{name}"], pooling=self.pooling
                )
                for name, (rows, dim) in self.sizes.items()
            ]
            module = EmbeddingBagCollection(tables=bags, is_weighted=self.is_weighted, device=META)
        if self.optimizer is not None:
            apply_optimizer_in_backward(
                self.optimizer, module.parameters(), {"lr": 0.1}, **self.settings
            )
        return module

    def batch(self, seed: int) -> KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(seed)
        ids = [
            torch.randint(rows, (BATCH * POOLING,), generator=generator)
            for rows, _ in self.sizes.values()
        ]
        count = BATCH * POOLING * len(ids)
        return KeyedJaggedTensor.from_lengths_sync(
            [f"f_{name}" for name in self.sizes],
            torch.cat(ids),
            torch.full((BATCH * len(ids),), POOLING),
            torch.rand(count, generator=generator) if self.is_weighted else None,
        )


def planner(tables: Tables, world_size: int, **more: Any) -> EmbeddingShardingPlanner:
    constraints = {
        name: ParameterConstraints(pooling_factors=[float(POOLING)]) for name in tables.sizes
    }
    topology = Topology(world_size, "cpu", ddr_cap=1 << 30)
    return EmbeddingShardingPlanner(topology, BATCH, constraints=constraints, **more)


Case: TypeAlias = tuple[Tables, EmbeddingModuleShardingPlan]


@final
class Found(NamedTuple):
    """Bytes of one rank."""

    weights: int
    state: int
    buffers: int


def all_predicted_and_allocated(cases: Sequence[Case], node_size: int) -> list[tuple[Found, Found]]:
    """Called on each rank."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(node_size)):
        return [predicted_and_allocated(*case) for case in cases]


def predicted_and_allocated(
    tables: Tables, plan: EmbeddingModuleShardingPlan
) -> tuple[Found, Found]:
    env = ShardingEnv.default()
    module = tables.build()
    sharder: ModuleSharder[Any] = SHARDERS[type(module)]  # type: ignore[index]
    rated = planner(tables, env.world_size).rate(module, [sharder], ShardingPlan({"": plan}))
    assert rated.rating is not None
    storage, own = rated.rating.storage[env.rank], rated.rating.batch
    rest = storage.total.device - storage.weights.device - storage.state.device
    predicted = Found(storage.weights.device, storage.state.device, rest + own.total.device)

    sharded = sharder.shard(module, plan, env, CPU)
    assert isinstance(sharded, ShardedCollection)
    batch = tables.batch(env.rank)
    batch.offsets()

    def step() -> None:
        output = sharded(batch)
        if tables.pooling is None:
            values = [part.values() for part in output.wait().values()]
        else:
            values = [output.wait().values()]
        torch.autograd.backward(values, [torch.ones_like(part) for part in values])

    step()
    sharded.zero_grad(set_to_none=True)
    sharded.fused_optimizer.step()
    with mock.patch.object(comm.Pending, "wait", wait_longer):
        peak = min(peak_bytes(step) for _ in range(8))
    held = [batch.values(), batch.lengths(), batch.offsets()]
    held += [batch.weights()] if tables.is_weighted else []
    own_bytes = sum(tensor.nbytes for tensor in held)
    states = [
        part for of_table in sharded.fused_optimizer.state.values() for part in of_table.values()
    ]
    return predicted, Found(
        sum(part.nbytes for part in sharded.parameters()),
        sum(_local_bytes(part) for part in states),
        peak + own_bytes,
    )


def _local_bytes(tensor: Tensor) -> int:
    shards = getattr(tensor, "local_shards", None)
    return tensor.nbytes if shards is None else sum(part.nbytes for _, part in shards())


_wait = comm.Pending.wait


def wait_longer(pending: comm.Pending, *how: bool, **named: bool) -> Tensor:
    """Wait until gloo's threads, too, have released the sent tensors."""
    result = _wait(pending, *how, **named)
    time.sleep(0.002)
    return result


def peak_bytes(step: Callable[[], None]) -> int:
    """Returns the most bytes of tensors that a call holds at a time, beyond those before it."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


def plan_of(
    tables: Tables, kinds: Mapping[str, tuple[str, list[int]]], node_size: int
) -> EmbeddingModuleShardingPlan:
    """Places each table by a sharding type and ranks."""
    plan = EmbeddingModuleShardingPlan()
    for name, (kind, ranks) in kinds.items():
        rows, dim = tables.sizes[name]
        plan[name] = parameter_sharding(ShardingType(kind), rows, dim, ranks, local_size=node_size)
    return plan


EVERY_WAY = {
    "whole": ("table_wise", [1]),
    "rows": ("row_wise", [0, 1]),
    "some_rows": ("row_wise", [1]),
    "columns": ("column_wise", [0, 1]),
    "columns_of_one": ("column_wise", [1, 1]),
    "copies": ("data_parallel", [0, 1]),
    "rows_of_node": ("table_row_wise", [0, 1]),
}
SIZES = dict(zip(EVERY_WAY, [(n, 16) for n in (1000, 501, 77, 300, 301, 90, 1001)], strict=True))


def of_ranks(
    ranks: RankPool, cases: Sequence[Case], world_size: int = 2, node_size: int = 2
) -> list[list[tuple[Found, Found]]]:
    """Return the predicted and the allocated bytes, by case and rank."""
    by_rank = ranks(world_size, all_predicted_and_allocated, cases, node_size, timeout=120.0)
    return [list(of_case) for of_case in zip(*by_rank, strict=True)]


def test_weights_and_state_to_the_byte(ranks: RankPool) -> None:
    per_shard, deferred = {"row_state": "per_shard"}, {"update_mode": "deferred"}
    cases = []
    for optimizer, settings in (
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
        (RowWiseAdagrad, {}),
        (RowWiseAdagrad, per_shard),
        (RowWiseAdagrad, deferred),
        (torch.optim.Adam, {}),
        (PartialRowWiseAdam, deferred),
        (LAMB, per_shard),
        (LarsSGD, per_shard),
        (None, {}),
    ):
        tables = Tables(SIZES, optimizer, settings=settings)
        cases.append((tables, plan_of(tables, EVERY_WAY, 2)))
    for (tables, _), of_case in zip(cases, of_ranks(ranks, cases), strict=True):
        for predicted, found in of_case:
            assert predicted[:2] == found[:2], tables


def test_a_grid_over_two_nodes(ranks: RankPool) -> None:
    tables = Tables({"grid": (1001, 64), "node": (1001, 32)}, torch.optim.Adam)
    kinds = {"grid": ("grid_shard", [0, 1, 2, 3]), "node": ("table_row_wise", [2, 3])}
    ((*of_case,),) = of_ranks(ranks, [(tables, plan_of(tables, kinds, 2))], world_size=4)
    for predicted, found in of_case:
        assert predicted[:2] == found[:2]
        assert sum(predicted) == pytest.approx(sum(found), rel=0.1)


def random_kind(random_: random.Random) -> tuple[str, list[int]]:
    kind = random_.choice(["table_wise", "row_wise", "column_wise", "data_parallel"])
    if kind == "table_wise":
        return kind, [random_.randrange(2)]
    if kind == "column_wise":
        return kind, [random_.randrange(2) for _ in range(random_.choice([2, 4]))]
    return kind, [0, 1]


def test_all_bytes_of_ten_random_plans(ranks: RankPool) -> None:
    """Plans of one model: weights and state exactly, all together within 10 %."""
    sizes = {"a": (20_000, 32), "b": (5_000, 64), "c": (500, 16), "d": (10_000, 32), "e": (50, 64)}
    tables = Tables(sizes)
    random_ = random.Random(0)
    plans = [plan_of(tables, {name: random_kind(random_) for name in sizes}, 2) for _ in range(10)]
    for of_case in of_ranks(ranks, [(tables, plan) for plan in plans]):
        for predicted, found in of_case:
            assert predicted[:2] == found[:2]
            assert sum(predicted) == pytest.approx(sum(found), rel=0.1)


def test_buffers_of_every_kind_of_batch(ranks: RankPool) -> None:
    sizes = {"a": (4_000, 32), "b": (4_000, 32)}
    cases = []
    for tables in (
        Tables(sizes, pooling=None),
        Tables(sizes, is_weighted=True),
        Tables(sizes, pooling=PoolingType.MEAN),
        Tables(sizes, pooling=PoolingType.MEAN, is_weighted=True),
        Tables(sizes, torch.optim.Adam),
    ):
        for kind in ("table_wise", "row_wise", "column_wise", "data_parallel"):
            whole = kind == "table_wise"
            both = {"a": (kind, [0] if whole else [0, 1]), "b": (kind, [1] if whole else [0, 1])}
            cases.append((tables, plan_of(tables, both, 2)))
    for (tables, plan), of_case in zip(cases, of_ranks(ranks, cases), strict=True):
        for predicted, found in of_case:
            assert predicted.buffers == pytest.approx(found.buffers, rel=0.15), (tables, plan)


TABLE = PlannedTable(
    path="",
    name="t",
    rows=1000,
    dim=64,
    element_bytes=4,
    optimizer=None,
    trains=True,
    ids_per_sample=3.0,
    num_features=2,
    constraints=ParameterConstraints(),
    kernels={},
)


def test_a_pipeline_holds_the_ids_of_several_batches() -> None:
    topology = Topology(4, "cpu", ddr_cap=1 << 30)
    one, three = (StorageModel(topology, BATCH, count) for count in (1, 3))
    of_ids = 4 * BATCH * (3 * 4 + 2 * 2 * 4)
    more = three.shard_storage(TABLE, ShardSpec(1000, 64, FUSED)).buffers.device
    assert more - one.shard_storage(TABLE, ShardSpec(1000, 64, FUSED)).buffers.device == 2 * of_ids
    own = BATCH * (3 * 8 + 2 * 2 * 8)
    assert (
        three.batch_storage([TABLE]).buffers.device - one.batch_storage([TABLE]).buffers.device
        == 2 * own
    )


def test_rows_of_short_bags_take_buffers_of_ids() -> None:
    topology, quarter = Topology(4, "cpu", ddr_cap=1 << 30), ShardSpec(250, 64, FUSED, row_parts=4)
    storage = StorageModel(topology, BATCH).shard_storage(TABLE, quarter)
    ids = 4 * BATCH * 3 // 4  # of all ranks' samples, that are in a quarter of the rows
    of_ids = ids * 4 + 2 * ids * 4  # with lengths, which are not sent, and offsets
    sent_back = BATCH * 3 * 64 * 4  # of its own samples, in place of the rows of two bags
    # the gradients of looked-up rows arrive in the order of the lookups
    expected = of_ids + ids * 64 * 4 + sent_back - BATCH * 2 * 64 * 4
    assert storage.buffers.device == expected
    # fewer ids than bags: less is sent back than the gradients of the embeddings, which counts not
    rare = dataclasses.replace(TABLE, ids_per_sample=1.0)
    ids = 4 * BATCH // 4
    storage = StorageModel(topology, BATCH).shard_storage(rare, quarter)
    saved = BATCH * 64 * 4
    assert storage.buffers.device == 3 * ids * 4 + ids * 64 * 4
    # means are divided in a copy of those
    mean = dataclasses.replace(rare, is_mean=True)
    storage = StorageModel(topology, BATCH).shard_storage(mean, quarter)
    assert storage.buffers.device == 3 * ids * 4 + ids * 64 * 4 - saved + BATCH * 2 * 64 * 4


@pytest.mark.parametrize("algorithm", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.SGD])
def test_shards_of_columns_sum_their_rows_first(algorithm: EmbOptimType) -> None:
    optimizer = TableOptimizer(spec=OptimizerSpec(algorithm=algorithm))
    table = dataclasses.replace(TABLE, rows=1, optimizer=optimizer)
    model = StorageModel(Topology(4, "cpu", ddr_cap=1 << 30), BATCH)
    buffers = model.shard_storage(table, ShardSpec(1, 32, FUSED)).buffers.device
    ids = 4 * BATCH * 3
    given = ids * 4 + 2 * 4 * BATCH * 2 * 4 + 4 * BATCH * 2 * 32 * 4
    # the sum of the one row, and the ids with their positions, sorted by row
    summed = 32 * 4 + ids * 12 if algorithm is EmbOptimType.EXACT_ROWWISE_ADAGRAD else 0
    assert buffers == given + summed


@pytest.mark.parametrize("is_mean", [False, True])
def test_sums_that_are_added_up_on_the_way_take_one_share(is_mean: bool) -> None:
    quarter = ShardSpec(250, 64, FUSED, row_parts=4)
    long = dataclasses.replace(TABLE, ids_per_sample=8.0, is_mean=is_mean)
    found = [
        StorageModel(Topology(4, device, hbm_cap=1 << 30, ddr_cap=1 << 30), BATCH)
        .shard_storage(dataclasses.replace(long, is_alone=is_alone), quarter)
        .buffers.device
        for device, is_alone in (("cuda", True), ("cuda", False), ("cpu", True))
    ]
    own = BATCH * 2 * 64 * 4
    given = 4 * BATCH * 8 // 4 * 4 + 2 * 4 * BATCH * 2 * 4  # ids, lengths and offsets
    of_lookup = 4 * own
    assert found[0] == given + of_lookup + is_mean * own
    assert found[1] == found[2] == found[0] + 3 * own


def test_sums_of_a_node_are_received_once_on_a_gpu() -> None:
    half = ShardSpec(500, 64, FUSED, in_node=True, row_parts=2)
    on_cpu, on_gpu = (
        StorageModel(
            Topology(4, device, hbm_cap=1 << 30, ddr_cap=1 << 30, local_world_size=2), BATCH
        )
        .shard_storage(TABLE, half)
        .buffers.device
        for device in ("cpu", "cuda")
    )
    of_lookup = 4 * BATCH * 2 * 64 * 4
    given = 4 * BATCH * 3 // 2 * 4 + 2 * 4 * BATCH * 2 * 4
    assert on_cpu == given + 3 * of_lookup  # looked up, in the order of the ranks, received
    assert on_gpu == given + 2 * of_lookup + of_lookup // 2


def test_host_memory_has_no_buffers() -> None:
    topology = Topology(4, "cuda", hbm_cap=1 << 30)
    table = dataclasses.replace(TABLE, trains=False)
    storage = StorageModel(topology, BATCH).shard_storage(
        table, ShardSpec(1000, 64, EmbeddingComputeKernel.FUSED_UVM)
    )
    assert storage.total.host == storage.weights.host == 1000 * 64 * 4
    assert storage.total.device == storage.buffers.device > 0


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    tables = Tables({"a": (10_000_000, 128), "b": (1_000, 16)})  # 4.8 GiB
    refusing = planner(tables, 1)

    def build() -> None:
        with pytest.raises(PlannerError, match=r"'a'.* fit.* 1 cpu ranks.* 1,024"):
            DistributedModelParallel(
                tables.build(), env=ShardingEnv.from_local(), device=CPU, planner=refusing
            )

    build()  # memory that is allocated once, such as for imports
    assert peak_bytes(build) < 10_000
    fitting = Tables({"b": (1_000, 16)})
    assert peak_bytes(lambda: _shard(fitting)) >= 1_000 * 16 * 4  # so it would have been seen


def _shard(tables: Tables) -> None:
    DistributedModelParallel(
        tables.build(), env=ShardingEnv.from_local(), device=CPU, planner=planner(tables, 1)
    )

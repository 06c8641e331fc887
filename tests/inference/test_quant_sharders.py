from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.distributed.default_sharders import get_default_sharders, sharder_of
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.plan import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardMetadata,
)
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlannerError,
    Topology,
)
from recsys.distributed.shard import materialize_dense, move_dense, shard, shard_modules
from recsys.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from recsys.distributed.types import BoundsCheckMode, ShardingEnv
from recsys.inference import export_torchscript, quantize_embeddings, quantize_inference_model
from recsys.inference.quant_sharders import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor
from tests.inference.quant.test_modules import _batch, _flat, _pooled, _processed, _sequence
from tests.inference.test_export import inputs_of, plain_tensors

CPU = torch.device("cpu")
SHARDERS = (
    QuantEmbeddingBagCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
)


class _Score(nn.Module):
    """A score of pooled bags, of sequences and of dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled, self.rows = _pooled(), _sequence()

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.pooled(features).values()
        rows = sum(bags.values().sum() for bags in self.rows(features).values())
        return torch.cat([dense, pooled], dim=1) + rows


PLACED: dict[str, Any] = {
    "a": row_wise(([20, 10, 20], "cpu")),
    "b": column_wise(ranks=[2, 0]),
    "c": table_wise(rank=1),
}


def _plan(model: nn.Module, world_size: int = 3) -> ShardingPlan:
    return ShardingPlan(
        {
            path: construct_module_sharding_plan(
                child, PLACED, local_size=world_size, world_size=world_size, device_type="cpu"
            )
            for path, child in model.named_children()
        }
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_quantized_model_is_sharded_in_place(tmp_path: Path, world_size: int) -> None:
    model = quantize_inference_model(_Score())
    whole: Any = copy.deepcopy(model)
    env = ShardingEnv.from_local(world_size, 0)
    plan = _plan(model) if world_size == 3 else None
    found: Any = shard_modules(model, env, CPU, plan)
    assert found is model
    text = str(model)
    assert ("shards: 20 x 8 on 0, 10 x 8 on 1, 20 x 8 on 2" in text) == (world_size == 3)
    assert "(c): QuantizedTable(20, 4, INT8)" in text
    scripted = None
    for size in (6, 0):
        dense, features = inputs_of(size)
        features = features.with_values(features.values() % 20)
        scripted = scripted or export_torchscript(found, tmp_path / "model.pt", [dense, features])
        expected = whole(dense, features)
        assert torch.equal(found(dense, features), expected)
        assert torch.equal(scripted(*plain_tensors(dense, features)), expected)


@pytest.mark.parametrize("make", [_pooled, _sequence, _processed])
def test_a_collection_alone_is_sharded(make: Any) -> None:
    quantized = quantize_inference_model(make())
    sharded = shard(quantized, PLACED, ShardingEnv.from_local(3), CPU)
    assert torch.equal(_flat(sharded(_batch())), _flat(quantized(_batch())))
    assert type(sharder_of(quantized)) in SHARDERS
    assert {type(sharder) for sharder in get_default_sharders()} > {*SHARDERS}


def test_other_collections_are_sharded_as_ever() -> None:
    model = nn.ModuleDict({"quantized": quantize_embeddings(_pooled()), "trained": _sequence()})
    outputs = [_flat(child(_batch())) for child in model.values()]
    shard_modules(model, device=CPU)
    assert type(model["trained"]).__name__ == "ShardedEmbeddingCollection"
    assert torch.equal(_flat(model["quantized"](_batch())), outputs[0])
    torch.testing.assert_close(_flat(model["trained"](_batch()).wait()), outputs[1])


def test_several_devices_of_one_process_serve_quantized_models_only() -> None:
    model = nn.ModuleDict({"trained": _pooled()})
    env = ShardingEnv.from_local(2)
    with pytest.raises(ValueError, match="needs a process group for world_size=2"):
        shard_modules(model, env, CPU)
    assert type(model["trained"]) is EmbeddingBagCollection
    with pytest.raises(ValueError, match=r"rank must be in .*received rank=2"):
        ShardingEnv.from_local(2, 2)
    quantized = nn.ModuleDict({"tables": quantize_embeddings(_pooled())})
    with pytest.raises(ValueError, match="needs a process group for world_size=2"):
        DistributedModelParallel(copy.deepcopy(quantized), env, CPU)
    wrapped = DistributedModelParallel(quantized, env, CPU, init_data_parallel=False)
    assert wrapped.plan.plan.keys() == {"tables"}


def test_the_dense_parts_of_a_model_move_without_its_quantized_tables() -> None:
    model = nn.ModuleDict({"tables": quantize_embeddings(_pooled()), "over": nn.Linear(2, 1)})
    shard_modules(model, ShardingEnv.from_local(3), CPU, _plan(nn.ModuleDict([*model.items()][:1])))
    move_dense(model, torch.device("meta"))
    assert model["over"].weight.is_meta
    assert {buffer.device for buffer in model["tables"].buffers()} == {CPU}
    materialize_dense(model, CPU)
    assert model["over"].weight.device == CPU


def test_processes_are_refused() -> None:
    group = torch.distributed.ProcessGroup(0, 2)  # none of its ranks is asked for anything
    env = ShardingEnv(world_size=2, rank=0, pg=group)
    sharder = QuantEmbeddingBagCollectionSharder()
    with pytest.raises(ValueError, match=r"one process; received 2 processes"):
        sharder.shard(quantize_embeddings(_pooled()), EmbeddingModuleShardingPlan(), env, CPU)


def test_sharders_refuse_what_means_nothing() -> None:
    with pytest.raises(ValueError, match=r"fused_params must be empty.* {'output_dtype': 1}"):
        QuantEmbeddingBagCollectionSharder(fused_params={"output_dtype": 1})
    quantized = quantize_embeddings(_pooled())
    with pytest.raises(ValueError, match=r"received \['a'\] of \['a', 'b', 'c'\]"):
        QuantEmbeddingBagCollectionSharder(shardable_params=["a"]).shardable_parameters(quantized)
    named = QuantEmbeddingBagCollectionSharder({}, ["c", "b", "a", "other"])
    assert [*named.shardable_parameters(quantized)] == ["a", "b", "c"]
    assert QuantEmbeddingBagCollectionSharder(None, ["other"]).shardable_parameters(quantized) == {}
    assert EmbeddingBagCollectionSharder().sharding_types("cpu") != named.sharding_types("cpu")


def _spec(*shards: list[int]) -> EnumerableShardingSpec:
    return EnumerableShardingSpec(
        [ShardMetadata(shard[:2], shard[2:4], f"rank:{shard[4]}/cpu") for shard in shards]
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ParameterSharding("data_parallel", "quant"), "received sharding_type='data_parallel' for"),
        (ParameterSharding("grid_shard", "quant", [0, 1]), "received sharding_type='grid_shard'"),
        (ParameterSharding("row_wise", "fused_uvm", [0]), "received compute_kernel='fused_uvm'"),
        (
            ParameterSharding(
                "table_wise", "quant", [0], cache_params=CacheParams(load_factor=0.1)
            ),
            "received cache_params=CacheParams",
        ),
        (
            ParameterSharding("table_wise", "quant", [0], stochastic_rounding=True),
            "received stochastic_rounding=True",
        ),
        (
            ParameterSharding("table_wise", "quant", [0], bounds_check_mode=BoundsCheckMode.IGNORE),
            "received bounds_check_mode=",
        ),
        (
            ParameterSharding("table_wise", "quant", [0], output_dtype=torch.float16),
            r"received output_dtype=torch\.float16",
        ),
        (ParameterSharding("table_wise", "quant", [2]), r"there are 2 ranks \(0\.\.1\)"),
        (ParameterSharding("table_wise", "quant"), "must name its ranks or"),
        (
            ParameterSharding(
                "row_wise", "quant", [0, 1], _spec([0, 0, 5, 16, 0], [6, 0, 4, 16, 1])
            ),
            "must cover its rows",
        ),
        (
            ParameterSharding(
                "column_wise", "quant", [0, 1], _spec([0, 0, 10, 6, 0], [0, 6, 10, 10, 1])
            ),
            "split at .*received column 6",
        ),
    ],
)
def test_plans_that_cannot_be_are_refused(entry: ParameterSharding, message: str) -> None:
    tables = [EmbeddingBagConfig(10, 16, "t", feature_names=["x"])]
    quantized = quantize_embeddings(EmbeddingBagCollection(tables=tables))
    sharder = QuantEmbeddingBagCollectionSharder()
    with pytest.raises(ValueError, match=message):
        sharder.shard(
            quantized, EmbeddingModuleShardingPlan({"t": entry}), ShardingEnv.from_local(2), CPU
        )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_planned_tables_count_and_have_no_optimizer(device: str) -> None:
    table = EmbeddingBagConfig(100_000, 64, "a", feature_names=["f"])  # 6.1 MiB
    model = quantize_embeddings(EmbeddingBagCollection(tables=[table]))

    def plan(mib: int, **constraints: Any) -> None:
        caps = {"ddr_cap" if device == "cpu" else "hbm_cap": mib << 20}
        planner = EmbeddingShardingPlanner(
            Topology(1, device, **caps), constraints={"a": ParameterConstraints(**constraints)}
        )
        planner.plan(model, [QuantEmbeddingBagCollectionSharder()])

    plan(8)
    with pytest.raises(PlannerError, match=r"100000 x 64, 6\.1 MiB\) .*fit") as caught:
        plan(4)
    assert "optimizer" not in str(caught.value)
    with pytest.raises(PlannerError, match="may only be sharded data_parallel, which") as caught:
        plan(8, sharding_types=["data_parallel"])
    assert "optimizer" not in str(caught.value)
    with pytest.raises(PlannerError, match=r"stochastic_rounding of table 'a'"):
        plan(8, stochastic_rounding=True)

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan, ShardingType
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.planner import ParameterConstraints
from recsys.distributed.types import ShardingPlan
from recsys.inference import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    export_torchscript,
    quantize_inference_model,
    shard_quant_model,
)
from recsys.inference.quantized_collection import QuantizedCollection
from recsys.inference.quantized_tables import rows_left
from recsys.kernels import ops
from recsys.kernels.quantized import quantize_rows
from recsys.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from recsys.sparse import KeyedJaggedTensor
from tests.inference.test_export import _eager, _inputs, _model
from tests.inference.test_quant_modules import _batch, _flat, _pooled, _processed, _sequence

CPU = torch.device("cpu")
KEYS = ["x", "y", "z"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_model_equals_the_unsharded_one(tmp_path: Path, world_size: int) -> None:
    model = _model()
    sharded: Any
    sharded, plan = shard_quant_model(model, world_size, "cpu")
    inputs = _inputs(6)
    expected = _eager(model, inputs, KEYS)
    torch.testing.assert_close(_eager(sharded, inputs, KEYS), expected, rtol=0, atol=0)
    scripted = export_torchscript(sharded, tmp_path / "model.pt", KEYS)
    torch.testing.assert_close(scripted(*inputs), expected, rtol=0, atol=0)
    ranks = [entry.ranks for tables in plan.plan.values() for entry in tables.values()]
    assert sorted(rank for [rank] in filter(None, ranks)) == [0, min(world_size, 2) - 1]


def test_bad_plans_are_refused() -> None:
    model = _model()
    _, plan = shard_quant_model(model, 2, "cpu")
    with pytest.raises(ValueError, match=r"on rank 1, but there are 1 ranks \(0\.\.0\)"):
        shard_quant_model(model, 1, "cpu", sharding_plan=plan)
    with pytest.raises(ValueError, match=r"missing: \['sparse_arch\."):
        shard_quant_model(model, 1, "cpu", sharding_plan=ShardingPlan())
    with pytest.raises(ValueError, match="Call quantize_embeddings first"):
        shard_quant_model(torch.nn.Linear(1, 1), 1, "cpu")


def test_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="must be 'cuda' or 'cpu'; received 'gpu'"):
        shard_quant_model(_model(), 1, "gpu")
    with pytest.raises(ValueError, match=r"sharding_device must be .* received 'gpu'"):
        shard_quant_model(_model(), 1, "cpu", "gpu")
    with pytest.raises(ValueError, match="at least 1; received 0"):
        shard_quant_model(_model(), 0, "cpu")
    with pytest.raises(ValueError, match=r"must not exceed the CUDA devices, \d+ here"):
        shard_quant_model(_model(), 99)


def test_sharding_takes_the_rows_that_were_loaded() -> None:
    model, other = _model(), _model()
    state = {
        name: value.flip(0) if name.endswith(".embedding_bags.a.weight") else value
        for name, value in model.state_dict().items()
    }
    other.load_state_dict(state)
    sharded: Any = shard_quant_model(other, 2, "cpu")[0]
    loaded, moved, original = (
        list(each.sparse_arch.embedding_bag_collection.state_dict().values())
        for each in (other, sharded, model)
    )
    assert not torch.equal(loaded[0], original[0])
    for one, another in zip(moved, loaded, strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize("make", [_pooled, _sequence, _processed])
@pytest.mark.parametrize("device", ["meta", "cpu", torch.device("cpu")])
def test_a_collection_alone_is_sharded(make: Any, device: str | torch.device) -> None:
    quantized = quantize_inference_model(make())
    compute = device if isinstance(device, torch.device) else "cpu"
    sharded, plan = shard_quant_model(quantized, 2, compute, device)
    assert type(sharded) is type(quantized)
    assert list(plan.plan) == [""]
    assert {str(entry.ranks) for entry in plan.plan[""].values()} == {"[0]", "[1]"}
    for each in (sharded, copy.deepcopy(sharded), pickle.loads(pickle.dumps(sharded))):
        assert torch.equal(_flat(each(_batch())), _flat(quantized(_batch())))
        assert list(each.state_dict()) == list(quantized.state_dict())


BITS = {8: DataType.INT8, 4: DataType.INT4, 2: DataType.INT2, 16: DataType.FP16, 32: DataType.FP32}
KINDS = [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE]


def _weights(draw: random.Random, tables: list[Any]) -> dict[str, tuple[Tensor, None]]:
    """Random rows: per table its quantized rows."""
    torch.manual_seed(draw.randrange(1 << 30))
    bits = {data_type: bits for bits, data_type in BITS.items()}
    return {
        t.name: (
            quantize_rows(torch.randn(rows_left(t), t.embedding_dim) * 9, bits[t.data_type]),
            None,
        )
        for t in tables
    }


def _random_collection(draw: random.Random) -> Any:
    """A collection of one to four tables over features x, y and z."""
    is_pooled, dim = draw.random() < 0.6, 4 * draw.randint(1, 8)
    tables: list[Any] = []
    for name in "abcd"[: draw.randint(1, 4)]:
        rows = draw.randint(5, 40)
        made: Any = (EmbeddingBagConfig if is_pooled else EmbeddingConfig)(
            rows,
            4 * draw.randint(1, 8) if is_pooled else dim,
            name,
            data_type=draw.choice(list(BITS.values())),
            feature_names=draw.sample("xyz", draw.randint(1, 3)),
            num_embeddings_post_pruning=draw.choice([None, rows - 1]),
        )
        if is_pooled:
            made.pooling = draw.choice([PoolingType.SUM, PoolingType.MEAN])
        tables.append(made)
    options: dict[str, Any] = {
        "output_dtype": draw.choice([torch.float32, torch.float16, torch.bfloat16]),
        "table_name_to_quantized_weights": _weights(draw, tables),
        "quant_state_dict_split_scale_bias": draw.random() < 0.3,
        "row_alignment": draw.choice([2, 16]),
    }
    if is_pooled:
        weighted = draw.random() < 0.5
        return QuantEmbeddingBagCollection(tables, weighted, CPU, **options)
    needs_ids = draw.random() < 0.5
    return QuantEmbeddingCollection(tables, CPU, need_indices=needs_ids, **options)


def _random_plan(draw: random.Random, collection: Any, world_size: int) -> ShardingPlan:
    placed = EmbeddingModuleShardingPlan()
    for config in collection.configs():
        kind = draw.choice(KINDS)
        count = 1 if kind is ShardingType.TABLE_WISE else draw.randint(1, world_size)
        ranks = draw.sample(range(world_size), count)
        placed[config.name] = parameter_sharding(
            kind, rows_left(config), config.embedding_dim, ranks
        )
    return ShardingPlan({"": placed})


def _random_batch(draw: random.Random, size: int) -> KeyedJaggedTensor:
    keys = draw.sample(["x", "y", "z", "unread"], 4)
    lengths = torch.tensor([draw.choice([0, 0, 1, 2, 7]) for _ in range(4 * size)])
    num_ids = int(lengths.sum())
    values = torch.tensor([draw.randrange(4) for _ in range(num_ids)], dtype=torch.int64)
    dtype = draw.choice([torch.int64, torch.int32])
    weights = torch.tensor([draw.uniform(-2, 2) for _ in range(num_ids)])
    return KeyedJaggedTensor(keys, values.to(dtype), weights, lengths.to(dtype), stride=size)


@pytest.mark.parametrize("seed", range(40))
def test_random_models_under_random_plans_are_the_same_to_the_bit(seed: int) -> None:
    draw = random.Random(seed)
    whole, world_size = _random_collection(draw), draw.randint(1, 4)
    plan = _random_plan(draw, whole, world_size)
    sharded: Any = shard_quant_model(whole, world_size, "cpu", sharding_plan=plan)[0]
    for size in (5, 0, 1):
        batch = _random_batch(draw, size)
        one, other = whole(batch), sharded(batch)
        assert torch.equal(_flat(one), _flat(other)), plan
        assert list(one.keys()) == list(other.keys())
    mine, theirs = sharded.state_dict(), whole.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_random_models_in_plain_pytorch(kind: ShardingType, monkeypatch: Any) -> None:
    monkeypatch.setattr(ops, "FBGEMM_DEVICES", frozenset())
    for seed in range(5):
        draw = random.Random(seed)
        whole = _random_collection(draw)
        sharded, plan = _sharded(whole, kind)
        batch = _random_batch(draw, 4)
        assert torch.equal(_flat(whole(batch)), _flat(sharded(batch))), plan


def _sharded(model: Any, kind: ShardingType, world_size: int = 3) -> tuple[Any, ShardingPlan]:
    constraints = {
        config.name: ParameterConstraints(sharding_types=[kind.value], min_partition=4)
        for child in model.modules()
        if isinstance(child, QuantizedCollection)
        for config in child.configs()
    }
    return shard_quant_model(model, world_size, "cpu", constraints=constraints)

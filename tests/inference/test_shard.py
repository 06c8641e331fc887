from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from recsys.distributed.types import ShardingPlan
from recsys.inference import export_torchscript, quantize_inference_model, shard_quant_model
from tests.inference.test_export import _eager, _inputs, _model
from tests.inference.test_quant_modules import _batch, _flat, _pooled, _processed, _sequence

KEYS = ["x", "y", "z"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_model_equals_the_unsharded_one(tmp_path: Path, world_size: int) -> None:
    model = _model()
    sharded, plan = shard_quant_model(model, world_size, "cpu")
    inputs = _inputs(6)
    expected = _eager(model, inputs, KEYS)
    torch.testing.assert_close(_eager(sharded, inputs, KEYS), expected, rtol=0, atol=0)
    scripted = export_torchscript(sharded, tmp_path / "model.pt", KEYS)
    torch.testing.assert_close(scripted(*inputs), expected, rtol=0, atol=0)
    ranks = [entry.ranks[0] for tables in plan.plan.values() for entry in tables.values()]
    assert set(ranks) == set(range(min(world_size, 2)))


def test_bad_plans_are_refused() -> None:
    model = _model()
    _, plan = shard_quant_model(model, 2, "cpu")
    with pytest.raises(ValueError, match=r"on device 1; there are 1 devices"):
        shard_quant_model(model, 1, "cpu", sharding_plan=plan)
    with pytest.raises(ValueError, match="has None for table 'a' of module"):
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
    sharded, _ = shard_quant_model(other, 2, "cpu")
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
    assert {entry.ranks[0] for entry in plan.plan[""].values()} == {0, 1}  # type: ignore[attr-defined]
    for each in (sharded, copy.deepcopy(sharded), pickle.loads(pickle.dumps(sharded))):
        assert torch.equal(_flat(each(_batch())), _flat(quantized(_batch())))
        assert list(each.state_dict()) == list(quantized.state_dict())

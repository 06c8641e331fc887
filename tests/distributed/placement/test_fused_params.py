"""Settings of tables that fused_params and plans carry."""

from __future__ import annotations

import warnings
from enum import Enum
from typing import Any

import pytest
import torch

from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.placement.fused_params import (
    optimizer_from_fused_params,
    with_table_settings,
)
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
)
from recsys.kernels.types import BoundsCheckMode, EmbOptimType
from recsys.modules.embedding_configs import DataType, EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recsys.distributed.placement.plan._warned_of", set())


def entry(**settings: Any) -> ParameterSharding:
    return ParameterSharding("table_wise", "fused", ranks=[0], **settings)


def test_a_plan_takes_over_what_it_does_not_say() -> None:
    plan = EmbeddingModuleShardingPlan(
        a=entry(), b=entry(bounds_check_mode=BoundsCheckMode.WARNING)
    )
    said = {"bounds_check_mode": BoundsCheckMode.IGNORE, "learning_rate": 1.0}
    result = with_table_settings(plan, said)
    assert [e.bounds_check_mode for e in result.values()] == [
        BoundsCheckMode.IGNORE,
        BoundsCheckMode.WARNING,
    ]
    assert plan["a"].bounds_check_mode is None


def collection(data_type: DataType = DataType.FP32) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(4, 8, "t", data_type=data_type, feature_names=["f"])
    return EmbeddingBagCollection(tables=[table])


def sharded(
    fused_params: dict[str, Any], data_type: DataType = DataType.FP32, **settings: Any
) -> Any:
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params)
    plan = EmbeddingModuleShardingPlan(t=entry(**settings))
    return sharder.shard(collection(data_type), plan, ShardingEnv.from_local())


def test_a_sharder_honours_settings_of_tables_beside_the_optimizers() -> None:
    ids = KeyedJaggedTensor(["f"], torch.tensor([9]), lengths=torch.tensor([1]))
    optimizer = {"optimizer": "EXACT_SGD", "learning_rate": 0.5}
    with pytest.raises(IndexError):
        sharded(optimizer)(ids).wait()
    lenient = sharded({**optimizer, "bounds_check_mode": BoundsCheckMode.IGNORE})
    assert lenient(ids).wait().values().shape == (1, 8)
    assert lenient.fused_optimizer.param_groups[0]["lr"] == 0.5
    # without an optimizer the table stays a plain parameter
    assert sharded({"output_dtype": DataType.FP32}).fused_optimizer.params == {}
    good = KeyedJaggedTensor(["f"], torch.tensor([3]), lengths=torch.tensor([1]))
    fbgemms = Enum("SparseType", {"FP16": "fp16"})  # its elements have the names of ours
    for dtype in (DataType.FP16, torch.float16, fbgemms.FP16):
        half = sharded({**optimizer, "output_dtype": dtype})
        assert half(good).wait().values().dtype is torch.float16


def updated(module: Any) -> torch.Tensor:
    ids = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    with torch.no_grad():
        module.embedding_bags["t"].weight.fill_(1.0)
    for _ in range(64):
        module(ids).wait().values().sum().backward()
    weight: torch.Tensor = module.embedding_bags["t"].weight[1].float()
    return weight


def test_a_plan_turns_stochastic_rounding_on_and_off() -> None:
    """Steps of 2**-13 from 1 are lost when rounded to nearest: fp16 has steps of 2**-11 there."""
    torch.manual_seed(0)
    sgd = {"optimizer": "EXACT_SGD", "learning_rate": 2.0**-13}
    nearest = updated(sharded(sgd, DataType.FP16))
    assert nearest.tolist() == [1.0] * 8
    rounded = updated(sharded(sgd, DataType.FP16, stochastic_rounding=True))
    assert abs(rounded.mean().item() - (1 - 64 * 2.0**-13)) < 2.0**-9
    assert rounded.mean().item() < 1.0
    off = sharded({**sgd, "stochastic_rounding": True}, DataType.FP16, stochastic_rounding=False)
    assert updated(off).tolist() == [1.0] * 8


def test_rounding_that_means_nothing_warns_once() -> None:
    sgd = {"optimizer": "EXACT_SGD", "learning_rate": 0.5}
    with pytest.warns(UserWarning, match="stochastic_rounding is ignored"):
        sharded(sgd, stochastic_rounding=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded(sgd, stochastic_rounding=True)


@pytest.mark.parametrize("field", ["enforce_hbm", "key_value_params"])
def test_settings_without_meaning_warn_once(field: str) -> None:
    with pytest.warns(UserWarning, match=f"{field} is ignored; received True"):
        entry(**{field: True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry(**{field: True})


def test_optimizers_that_fbgemm_alone_has_say_what_to_do() -> None:
    names = pytest.importorskip("fbgemm_gpu.split_embedding_configs").EmbOptimType
    for optimizer in names:
        served = optimizer.name in EmbOptimType.__members__
        if served:
            made = optimizer_from_fused_params({"optimizer": optimizer, "learning_rate": 0.5})
            assert made.spec.learning_rate == 0.5
            continue
        with pytest.raises(ValueError, match=r"must be one of ADAM.* (\.grad|EXACT_ROWWISE)"):
            optimizer_from_fused_params({"optimizer": optimizer})


def test_fused_params_must_name_an_optimizer() -> None:
    with pytest.raises(ValueError, match="must name the optimizer"):
        optimizer_from_fused_params({"learning_rate": 0.1})
    with pytest.raises(ValueError, match=r"no optimizer reads: \['max_gradient'\].*Clip gradients"):
        optimizer_from_fused_params({"optimizer": "EXACT_SGD", "max_gradient": 1.0})

"""Planner settings: reservations of memory, and a user's demands of a plan."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch

from recsys.distributed.planner.types import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    ParameterConstraints,
)
from recsys.distributed.types import CacheParams, ParameterSharding
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import DataType


def test_reservations_leave_memory_free() -> None:
    assert FixedPercentageStorageReservation(0.25).usable(1000, dense_bytes=300) == 750
    assert HeuristicalStorageReservation(0.25).usable(1000, dense_bytes=100) == 750 - 600
    assert HeuristicalStorageReservation(0.25, 2.5).usable(1000, dense_bytes=100) == 750 - 250
    estimated = HeuristicalStorageReservation(0.25, dense_tensor_estimate=70)
    assert estimated.usable(1000, dense_bytes=100) == 750 - 70
    # host memory beside a GPU has no dense parts
    assert estimated.usable(1000, dense_bytes=None) == 750


@pytest.mark.parametrize("kind", [FixedPercentageStorageReservation, HeuristicalStorageReservation])
@pytest.mark.parametrize("share", [-0.1, 1.0, 15])
def test_a_share_lies_between_0_and_1(kind: type, share: float) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}.percentage must be finite and >="):
        kind(share)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharding_types": ["tw"]}, r"sharding_types must .*received \['tw'\]"),
        ({"sharding_types": []}, r"sharding_types must .*received \[\]"),
        ({"compute_kernels": ["gpu"]}, r"compute_kernels must .*received \['gpu'\]"),
        ({"min_partition": 0}, "min_partition must be positive; received 0"),
        (
            {"pooling_factors": [1.0, -1.0]},
            r"pooling_factors\[1\] must .*received -1.0",
        ),
        ({"pooling_factors": [float("nan")]}, r"pooling_factors\[0\] must be finite .* nan"),
        ({"num_poolings": [float("inf")]}, r"num_poolings\[0\] must be finite .* inf"),
        ({"batch_sizes": [0]}, r"batch_sizes\[0\] must .*received 0"),
        ({"bounds_check_mode": "loud"}, "must be a .*of FATAL, .*'loud'"),
        ({"output_dtype": torch.float16}, "must be None or torch.float32.*torch.float16"),
        ({"output_dtype": DataType.FP16}, "must be None or torch.float32.*FP16"),
        ({"device_group": "tpu"}, "device_group must .*received 'tpu'"),
        ({"key_value_params": object()}, "key-value store, which are not supported"),
        ({"use_virtual_table": True}, "key-value store, which are not supported.*True"),
        (
            {"cache_params": CacheParams(load_factor=0.1), "compute_kernels": ["fused"]},
            "Add 'fused_uvm_caching' to it",
        ),
        (
            {"enforce_hbm": True, "compute_kernels": ["fused_uvm_caching"]},
            "enforce_hbm=True is not supported with fused_uvm_caching",
        ),
    ],
)
def test_unknown_demands_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterConstraints(**arguments)


class TheirMode(enum.IntEnum):
    """FBGEMM's enum has these names."""

    WARNING = 1
    V2_FATAL = 6


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (BoundsCheckMode.IGNORE, BoundsCheckMode.IGNORE),
        (TheirMode.WARNING, BoundsCheckMode.WARNING),
        (TheirMode.V2_FATAL, BoundsCheckMode.FATAL),
    ],
)
def test_modes_are_known_by_name(given: Any, ours: BoundsCheckMode) -> None:
    assert ParameterConstraints(bounds_check_mode=given).bounds_check_mode is ours


@pytest.mark.parametrize("dtype", [torch.float32, DataType.FP32])
def test_what_concerns_execution_goes_into_the_plan(dtype: Any) -> None:
    cache = CacheParams(load_factor=0.1)
    demands = ParameterConstraints(
        compute_kernels=["fused", "fused_uvm_caching"],
        cache_params=cache,
        bounds_check_mode=BoundsCheckMode.WARNING,
        output_dtype=dtype,
        enforce_hbm=False,
    )
    placed = demands.apply_to(ParameterSharding("table_wise", "fused_uvm_caching", [0]))
    assert placed.bounds_check_mode is BoundsCheckMode.WARNING
    assert placed.output_dtype is torch.float32
    assert placed.cache_params == cache
    assert demands.apply_to(ParameterSharding("table_wise", "fused", [0])).cache_params is None


def test_the_order_of_arguments_is_torchrecs() -> None:
    demands = ParameterConstraints(
        ["row_wise"],
        ["fused_uvm_caching"],
        16,
        [2.0],
        [1.0],
        [32],
        True,
        CacheParams(None, 0.3),
        None,
        None,
        BoundsCheckMode.NONE,
        ["f"],
        torch.float32,
        "cuda",
        None,
        False,
    )
    assert demands.batch_sizes == [32]
    assert demands.cache_params is not None
    assert demands.cache_params.load_factor == 0.3
    assert demands.device_group == "cuda"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"parameter_multiplier": -1.0},
            "parameter_multiplier must .*received -1.0",
        ),
        (
            {"dense_tensor_estimate": -1},
            "dense_tensor_estimate must .*received -1",
        ),
    ],
)
def test_reservations_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeuristicalStorageReservation(0.1, **arguments)

"""Helpers for `fused_params`, under TorchRec's names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from recsys.base.checked import checked
from recsys.distributed.placement.fused_params import (
    CACHE_SETTINGS,
    TABLE_SETTINGS,
    optimizer_params,
)
from recsys.distributed.placement.plan import EmbeddingComputeKernel, ParameterSharding
from recsys.kernels.support import fbgemm_element_type
from recsys.kernels.types import EmbOptimType
from recsys.modules.embedding_configs import DataType


def settings_as_in_torchrec(
    fused_params: Mapping[str, Any], sharding: ParameterSharding | None
) -> Mapping[str, Any]:
    """Return a sharder's settings for a table, with their meaning in TorchRec.

    They do not apply to a table with the kernel `dense`. Settings without an optimizer select SGD,
    with a warning.

    Args:
        fused_params: Settings of the sharder; not changed.
        sharding: Placement of the table; None if it is not placed yet.

    Example:
        >>> plan = ParameterSharding("data_parallel", "dense", [0])
        >>> settings_as_in_torchrec({"optimizer": "ADAM"}, plan)
        {}
    """
    if sharding is not None and sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value:
        return {}
    if not optimizer_params(fused_params) or fused_params.get("optimizer") is not None:
        return fused_params
    default = EmbOptimType.EXACT_SGD
    warnings.warn(
        f"fused_params name no optimizer, and so mean {default.name}, as in TorchRec. Add "
        "'optimizer' to name it.",
        stacklevel=2,
    )
    return {**fused_params, "optimizer": default}


@checked
def merge_fused_params(
    fused_params: Mapping[str, Any] | None = None,
    param_fused_params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the settings of a sharder merged with the settings of one table, which have priority.

    Args:
        fused_params: Settings of the sharder; not changed.
        param_fused_params: Settings of the table.

    Example:
        >>> merge_fused_params({"learning_rate": 0.1, "eps": 1e-6}, {"learning_rate": 0.2})
        {'learning_rate': 0.2, 'eps': 1e-06}
    """
    return {**(fused_params or {}), **(param_fused_params or {})}


@checked
def add_params_from_parameter_sharding(
    fused_params: dict[str, Any] | None, parameter_sharding: ParameterSharding
) -> dict[str, Any]:
    """Return `fused_params` with the settings of a plan's entry added.

    Args:
        fused_params: Changed in place; a new dict if None.
        parameter_sharding: Placement of a table. Its fields that are None are omitted.

    Example:
        >>> from recsys.distributed.types import CacheParams
        >>> entry = ParameterSharding(
        ...     "table_wise", "fused_uvm_caching", cache_params=CacheParams(load_factor=0.1)
        ... )
        >>> add_params_from_parameter_sharding({"learning_rate": 0.5}, entry)
        {'learning_rate': 0.5, 'cache_load_factor': 0.1}
    """
    params = {} if fused_params is None else fused_params
    cache = parameter_sharding.cache_params
    settings = (
        {name: getattr(cache, field) for name, field in CACHE_SETTINGS.items()} if cache else {}
    )
    for name in ("stochastic_rounding", *TABLE_SETTINGS):
        settings[name] = getattr(parameter_sharding, name)
    params.update((name, value) for name, value in settings.items() if value is not None)
    return params


@checked
def convert_to_fbgemm_types(fused_params: dict[str, Any]) -> dict[str, Any]:
    """Return `fused_params` in the format of FBGEMM's modules: element types are `SparseType`.

    Args:
        fused_params: `cache_precision` and `output_dtype` are changed in place, if present.

    Raises:
        ImportError: FBGEMM is not installed.
        ValueError: FBGEMM has no such element type.

    Example:
        >>> convert_to_fbgemm_types({"output_dtype": DataType.FP16, "eps": 1e-8})
        {'output_dtype': <SparseType.FP16: 'fp16'>, 'eps': 1e-08}
    """
    for name in ("cache_precision", "output_dtype"):
        value = fused_params.get(name)
        if isinstance(value, DataType | torch.dtype):
            name_of = value.value if isinstance(value, DataType) else value
            fused_params[name] = fbgemm_element_type(name_of)
    return fused_params

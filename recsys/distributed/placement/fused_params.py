"""Settings in a sharder's `fused_params`: the optimizer, and settings of tables.

Settings of tables are fields of a plan's entries under the names of FBGEMM. The plan's entry has
priority.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from recsys.base.lazy import moved_names
from recsys.distributed.placement.plan import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
)
from recsys.kernels.types import EmbOptimType, OptimizerSpec, RowState, UpdateMode
from recsys.optim.apply_optimizer_in_backward import attached_optimizer
from recsys.optim.specs import TableOptimizer, to_row_state, to_update_mode

__all__ = [
    "CACHE_SETTINGS",
    "TABLE_SETTINGS",
    "optimizer_from_fused_params",
    "optimizer_of_table",
    "optimizer_params",
    "with_table_settings",
]

_INSTEAD = {
    "NONE": "Remove it, and give the table no optimizer: backward fills its .grad.",
    "ROWWISE_ADAGRAD": "FBGEMM has deprecated it: use EXACT_ROWWISE_ADAGRAD.",
    **dict.fromkeys(
        (
            *("EMAINPLACE_ROWWISE_ADAGRAD", "ENSEMBLE_ROWWISE_ADAGRAD", "MADGRAD", "SHAMPOO"),
            *("EXACT_ROWWISE_WEIGHTED_ADAGRAD", "SHAMPOO_V2"),
        ),
        "It has no kernel here: give the table no optimizer, and step your own optimizer on its "
        ".grad (docs/optimizers.md).",
    ),
}
"""Replacements for optimizers that only FBGEMM has."""
_CLIPPING = ("gradient_clipping", "max_gradient", "max_norm")
TABLE_SETTINGS = ("enforce_hbm", "bounds_check_mode", "output_dtype")
"""Names of settings of tables, which are fields of ParameterSharding."""
CACHE_SETTINGS = {
    "cache_algorithm": "algorithm",
    "cache_load_factor": "load_factor",
    "cache_reserved_memory": "reserved_memory",
    "cache_precision": "precision",
    "prefetch_pipeline": "prefetch_pipeline",
    "multipass_prefetch_config": "multipass_prefetch_config",
}
"""Fields of CacheParams by their names in fused_params."""


def optimizer_params(fused_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the optimizer.

    Args:
        fused_params: Settings of a sharder.

    Example:
        >>> import torch
        >>> optimizer_params({"optimizer": "ADAM", "output_dtype": torch.float32})
        {'optimizer': 'ADAM'}
    """
    return {
        k: v for k, v in fused_params.items() if k not in TABLE_SETTINGS and k not in CACHE_SETTINGS
    }


def with_table_settings(
    plan: EmbeddingModuleShardingPlan, fused_params: Mapping[str, Any]
) -> EmbeddingModuleShardingPlan:
    """Return a plan whose entries include the table settings of a sharder's `fused_params`.

    Args:
        plan: The plan; not changed.
        fused_params: Settings of the sharder.

    Example:
        >>> plan = EmbeddingModuleShardingPlan(t=ParameterSharding("table_wise", "fused", [0]))
        >>> with_table_settings(plan, {"cache_load_factor": 0.1})["t"].cache_params.load_factor
        0.1
    """
    settings = {name: fused_params[name] for name in TABLE_SETTINGS if name in fused_params}
    cache = {
        field: fused_params[name] for name, field in CACHE_SETTINGS.items() if name in fused_params
    }
    if cache:
        settings["cache_params"] = CacheParams(**cache)
    if not settings:
        return plan
    return EmbeddingModuleShardingPlan(
        {
            name: replace(entry, **{k: v for k, v in settings.items() if getattr(entry, k) is None})
            for name, entry in plan.items()
        }
    )


def optimizer_from_fused_params(fused_params: Mapping[str, Any]) -> TableOptimizer:
    """Return the optimizer in a sharder's `fused_params`.

    Its `weight_decay` is applied to the rows of the batch, never to the rest of the table. On
    MovieLens 100K a DLRM reaches an AUC of 0.7821 this way, and of 0.7877 with `torch.optim.Adam`,
    which decays all rows (1e-4; docs/optimizers.md). To decay all rows, give the table no optimizer
    and step `torch.optim.Adam` on it.

    Args:
        fused_params: `optimizer` (an `EmbOptimType`, FBGEMM's enum of the same name, or its name)
            and its hyperparameters, which are the fields of `OptimizerSpec`; `update_mode` and
            `row_state` as for `apply_optimizer_in_backward`. Settings of tables, such as
            `cache_load_factor`, are ignored.

    Raises:
        ValueError: No optimizer is named, or the optimizer or a hyperparameter does not exist.

    Example:
        >>> optimizer = optimizer_from_fused_params(
        ...     {"optimizer": "EXACT_SGD", "learning_rate": 0.5, "update_mode": "deferred"}
        ... )
        >>> optimizer.spec.learning_rate, optimizer.is_deferred
        (0.5, True)
    """
    params = optimizer_params(fused_params)
    chosen = params.pop("optimizer", None)
    update_mode = to_update_mode(params.pop("update_mode", UpdateMode.FUSED))
    # `RowState.PER_SHARD` trains other weights, so it must be requested:
    # docs/decisions/optimizers.md, "A row state per shard is named by its columns"
    row_state = to_row_state(params.pop("row_state", RowState.EXACT))
    names = sorted(EmbOptimType.__members__)
    if chosen is None:
        raise ValueError(
            f"fused_params must name the optimizer that its other settings {sorted(params)} are "
            f"for; add 'optimizer': one of EmbOptimType.{{{', '.join(names)}}}. No table gets an "
            "optimizer by default."
        )
    # FBGEMM's enum has the same names
    name = chosen if isinstance(chosen, str) else getattr(chosen, "name", str(chosen))
    if name not in EmbOptimType.__members__:
        raise ValueError(
            f"fused_params['optimizer'] must be one of {', '.join(names)}; received {chosen!r}. "
            f"{_INSTEAD.get(name, '')}".rstrip()
        )
    known = {field.name for field in fields(OptimizerSpec)} - {"algorithm"}
    unknown = sorted(params.keys() - known)
    if unknown:
        is_clipping = not {*_CLIPPING}.isdisjoint(unknown)
        clip = " Clip gradients by a GradientClippingOptimizer, with update_mode='deferred'."
        raise ValueError(
            f"fused_params has settings that no optimizer reads: {unknown}; known are "
            f"{sorted({*known, 'update_mode', 'row_state'})}.{clip * is_clipping}"
        )
    return TableOptimizer(
        spec=OptimizerSpec(algorithm=EmbOptimType[name], **params),
        update_mode=update_mode,
        row_state=row_state,
    )


def _unchanged(
    fused_params: Mapping[str, Any], sharding: ParameterSharding | None
) -> Mapping[str, Any]:
    """Return the settings as they are."""
    return fused_params


adapt_settings: Callable[[Mapping[str, Any], ParameterSharding | None], Mapping[str, Any]] = (
    _unchanged
)
"""Hook of `optimizer_of_table` for another meaning of `fused_params`.

It returns the settings of a table without an attached optimizer, from the settings of its sharder
and its placement, which is None in the planner.
"""


def optimizer_of_table(
    weight: nn.Parameter,
    fused_params: Mapping[str, Any],
    sharding: ParameterSharding | None = None,
) -> TableOptimizer | None:
    """Return a table's optimizer: the attached one, otherwise the sharder's.

    Args:
        weight: Weight of the table.
        fused_params: Settings of its sharder, for tables without an attached optimizer; may be
            empty.
        sharding: Placement of the table; None if it is not placed yet.

    Returns:
        The optimizer; None for a frozen table and for a table that any torch optimizer may train.
    """
    if not weight.requires_grad:
        return None
    attached = attached_optimizer(weight)
    if attached is not None:
        return attached.table_optimizer()
    settings = adapt_settings(fused_params, sharding)
    # None: backward fills the `.grad` of the table:
    # docs/decisions/optimizers.md, "A table without an optimizer is a plain parameter"
    return optimizer_from_fused_params(settings) if optimizer_params(settings) else None


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)

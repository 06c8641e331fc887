"""Properties of tables that a sharded collection takes from the unsharded one and from the plan."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from recsys.distributed.placement.layout import Layout, Rect
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    compute_kernel_to_embedding_location,
    warn_once,
)
from recsys.distributed.placement.strategies import pooling_of_parts
from recsys.distributed.ranks.agreement import in_words
from recsys.distributed.stages.lookup import GroupSettings
from recsys.distributed.state.fused_optimizer import optimizer_of_table
from recsys.kernels.support import shared_optimizer
from recsys.kernels.types import BoundsCheckMode, EmbeddingLocation, PoolingType
from recsys.optim.apply_optimizer_in_backward import attached_optimizer, mark_in_backward


@final
class TableOptions:
    """Properties of an unsharded table that its shards keep: dtype, training, optimizer.

    Args:
        weight: The table's weight.
        fused_params: Optimizer settings for a table without an attached optimizer.
        sharding: Placement of the table.
    """

    def __init__(
        self, weight: nn.Parameter, fused_params: Mapping[str, Any], sharding: ParameterSharding
    ) -> None:
        # keeps the attached optimizer without the memory of the table
        self.source: nn.Parameter | None = None
        if attached_optimizer(weight) is not None:
            self.source = nn.Parameter(torch.empty(0))
            mark_in_backward(self.source, weight)
        self.dtype = weight.dtype
        self.is_meta = weight.is_meta
        self.requires_grad = weight.requires_grad
        self.optimizer = optimizer_of_table(weight, fused_params, sharding)
        rounds = sharding.stochastic_rounding
        if self.optimizer is not None and weight.dtype in (torch.float16, torch.bfloat16):
            self.optimizer = self.optimizer.rounding(rounds)
        elif rounds:
            warn_once(
                "ParameterSharding.stochastic_rounding",
                rounds,
                "It is for tables of float16 or bfloat16 that own an optimizer.",
            )


def options_of_tables(
    weights: Mapping[str, nn.Parameter],
    plan: Mapping[str, ParameterSharding],
    fused_params: Mapping[str, Any] | None,
) -> list[TableOptions]:
    """Return the properties of each table of a plan."""
    return [
        TableOptions(weight, fused_params or {}, plan[name]) for name, weight in weights.items()
    ]


def facts_of_tables(
    layout: Layout, configs: Sequence[Any], options: Sequence[TableOptions]
) -> dict[str, str]:
    """Return the properties of each table that must be the same on all ranks.

    Args:
        layout: The compiled placement.
        configs: The tables.
        options: Their properties.
    """
    facts: dict[str, str] = {}
    spoken: dict[Hashable, str] = {}  # properties that many tables share
    for placed, config, option in zip(layout.tables, configs, options, strict=True):
        shared = (placed.group, option.optimizer)
        alike = spoken.get(shared)
        if alike is None:
            alike = spoken[shared] = "; ".join(map(in_words, shared))
        shards = [
            f"rows {r.row_start}-{r.row_end} and columns {r.col_start}-{r.col_end} on {r.rank}"
            for r in placed.rects
        ]
        facts[f"table {config.name!r}"] = "; ".join(
            (
                in_words(config),
                # only tables with values are exchanged at the start, so ranks must agree
                "on the meta device" if option.is_meta else "with values",
                f"trains {option.requires_grad}",
                alike,
                f"shards {', '.join(shards) or 'on every rank'}",
            )
        )
    return facts


def bounds_check_mode_of(
    plan: EmbeddingModuleShardingPlan, default: BoundsCheckMode
) -> BoundsCheckMode:
    """Return the mode in a plan, or the default of the collection.

    Raises:
        ValueError: If tables of the plan have different modes.
    """
    asked = {s.bounds_check_mode.name for s in plan.values() if s.bounds_check_mode is not None}
    if len(asked) > 1:
        raise ValueError(
            "The tables of one collection must share one bounds_check_mode; received "
            f"{sorted(asked)}."
        )
    return BoundsCheckMode[asked.pop()] if asked else default


def output_dtype_of(plan: EmbeddingModuleShardingPlan) -> torch.dtype:
    """Return the dtype of the embeddings in a plan, float32 by default.

    Raises:
        ValueError: If tables of the plan have different dtypes, or one that cannot be returned.
    """
    asked = {sharding.output_dtype or torch.float32 for sharding in plan.values()}
    served = (torch.float32, torch.float16, torch.bfloat16)
    if len(asked) > 1 or not asked <= {*served}:
        raise ValueError(
            f"The tables of one collection must share one output_dtype of {[*served]}; received "
            f"{sorted(map(str, asked))}."
        )
    return asked.pop() if asked else torch.float32


def group_settings(
    name: str,
    sharding: ParameterSharding,
    option: TableOptions,
    rects: Sequence[Rect],
    pooling: PoolingType,
    device: torch.device,
) -> GroupSettings:
    """Return the settings that a table shares with all tables of its lookup.

    Args:
        name: Name of the table.
        sharding: Its entry of the plan.
        option: Its properties.
        rects: Its shards; none if it is replicated.
        pooling: Its pooling.
        device: Device of the tables.

    Raises:
        ValueError: If the optimizer or the engine does not support the plan's entry.
    """
    if sharding.compute_kernel == EmbeddingComputeKernel.QUANT.value:
        raise ValueError(
            f"compute_kernel 'quant' is for inference; received it for table {name!r}. Shard a "
            "quantized model by recsys.inference.shard_quant_model."
        )
    splits_columns = len({rect.col_start for rect in rects}) > 1
    owned = option.optimizer
    if owned is not None and splits_columns and not owned.may_split_columns:
        raise ValueError(
            f"Table {name!r} is split by columns, but its optimizer "
            f"{owned.spec.algorithm.name} needs the norm of whole rows. Place it table_wise, "
            "row_wise or data_parallel, or set row_state='per_shard' for norms of column shards."
        )
    reads_rows = owned is not None and splits_columns and owned.spec.rule.reduces_rows
    # see docs/decisions/optimizers.md, "Column shards keep the fused row-wise Adagrad"
    exchanges = owned is not None and splits_columns and owned.exchanges_row_state
    if owned is not None and not rects and not owned.may_replicate:
        raise ValueError(
            f"Table {name!r} is data_parallel and must not have stochastic_rounding: its replicas "
            "would diverge. Use another sharding type, or disable the rounding."
        )
    location = compute_kernel_to_embedding_location(EmbeddingComputeKernel(sharding.compute_kernel))
    return GroupSettings(
        pooling=pooling_of_parts(pooling, rects),
        weights_dtype=option.dtype,
        # see docs/decisions/optimizers.md, "Tables of one lookup have their own learning rates"
        optimizer=owned and shared_optimizer(owned.spec, device, owned.update_mode),
        requires_grad=option.requires_grad,
        # None lets the lookup choose: host memory on a CPU, the device elsewhere
        location=None if location is EmbeddingLocation.DEVICE else location,
        deferred=owned is not None and owned.is_deferred,
        exchanges_row_statistics=exchanges,
        # see docs/decisions/optimizers.md, "A row state per shard is named by its columns"
        splits_row_state=reads_rows and not exchanges,
        cache_load_factor=sharding.cache_params and sharding.cache_params.load_factor,
    )

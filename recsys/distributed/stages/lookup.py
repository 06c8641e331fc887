"""Lookup stage: one fused lookup per group of tables.

Rows that one rank owns are updated in backward. Gradients of replicated rows and of rows split by
columns are kept until the end of backward, when `row_updates` exchanges and applies them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from recsys.distributed.placement.layout import LookupGroup, PlacedTable, Rect
from recsys.distributed.stages.routes import reads_by_rank
from recsys.kernels.support import choose_backend
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.types import (
    EmbeddingLocation,
    EmbOptimType,
    LookupSettings,
    OptimizerSpec,
    PoolingType,
    TableSpec,
    UpdateMode,
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """Settings that all tables of one lookup share.

    Attributes:
        pooling: Pooling of the shards. Shards of a row-split table sum; means divide the total.
        weights_dtype: dtype of the tables.
        optimizer: Optimizer of the tables; None for plain parameters. Its learning rate is left out
            if tables of one lookup may have different ones.
        requires_grad: Whether the tables train.
        location: Memory of the weights.
        deferred: Whether backward accumulates gradients for `step()`.
        exchanges_row_statistics: Whether row statistics are added up over column owners.
        splits_row_state: Whether column owners keep their own row states instead.
        cache_load_factor: Share of the rows in a device cache; None for FBGEMM's default.
    """

    pooling: PoolingType
    weights_dtype: torch.dtype
    optimizer: OptimizerSpec | None
    requires_grad: bool
    location: EmbeddingLocation | None
    deferred: bool
    exchanges_row_statistics: bool
    splits_row_state: bool
    cache_load_factor: float | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LocalShard:
    """A rectangle on this rank: its parameter, and its optimizer state (live tensors)."""

    table: int
    rect: Rect
    parameter: nn.Parameter
    states: dict[str, Tensor]
    kernel: TableBatchedEmbedding
    place: int  # of the table in the kernel


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """One lookup of this rank, or of replicated tables: what serves it, and its parameters."""

    group: LookupGroup
    settings: GroupSettings
    kernel: TableBatchedEmbedding
    parameters: list[nn.Parameter]

    def __repr__(self) -> str:
        return repr(self.kernel)

    def shards(self) -> Iterator[LocalShard]:
        """Yield every rectangle that it serves."""
        for i, (table, rect) in enumerate(zip(self.group.tables, self.group.rects, strict=True)):
            yield LocalShard(
                table=table,
                rect=rect,
                parameter=self.parameters[i],
                states=self.kernel.states[i] if self.settings.optimizer is not None else {},
                kernel=self.kernel,
                place=i,
            )


def build_lookups(
    groups: Sequence[LookupGroup],
    tables: Sequence[PlacedTable],
    device: torch.device,
    num_sources: int = 1,
    *,
    replicated: bool = False,
    known: Sequence[Lookup] = (),
) -> list[Lookup]:
    """Allocate the tables of one rank's lookups, or of the replicated tables'.

    Args:
        groups: from the layout; each `key` is a `GroupSettings`.
        tables: the layout's tables, for names.
        device: where the tables are allocated.
        num_sources: ranks whose batches are looked up.
        replicated: whether gradients are those of this rank's batch only, to be added up later.
        known: lookups of the same tables elsewhere; what serves here too is taken over.
    """
    found = []
    served = {_served_by(lookup.group): lookup for lookup in known}
    for group in groups:
        if _served_by(group) in served:
            found.append(replace(served[_served_by(group)], group=group))
            continue
        settings: GroupSettings = group.key  # type: ignore[assignment]
        pooled = settings.pooling is not PoolingType.NONE
        optimizer, mode = _updates(settings, replicated)
        kernel = TableBatchedEmbedding(
            [
                TableSpec(name=tables[t].name, num_rows=r.num_rows, dim=r.num_cols)
                for t, r in zip(group.tables, group.rects, strict=True)
            ],
            feature_table_map=group.feature_table_map
            * (num_sources if reads_by_rank(group, pooled=pooled) else 1),
            pooling=settings.pooling,
            weights_dtype=settings.weights_dtype,
            optimizer=optimizer,
            update_mode=mode,
            device=device,
            location=settings.location,
            cache_load_factor=settings.cache_load_factor,
            keeps_batch=replicated or (settings.exchanges_row_statistics and not settings.deferred),
        )
        parameters = [nn.Parameter(w, requires_grad=settings.requires_grad) for w in kernel.weights]
        found.append(Lookup(group=group, settings=settings, kernel=kernel, parameters=parameters))
    return found


def _served_by(group: LookupGroup) -> Hashable:
    """Return all that a lookup's kernel depends on."""
    return group.key, group.tables, group.rects, group.feature_table_map


def needs_one_width(
    settings: GroupSettings, dims: Sequence[int], device: torch.device, *, replicated: bool
) -> bool:
    """Return whether a lookup on a GPU must serve rectangles of one width, lest it wait for it.

    All but FBGEMM's kernels take a lookup of several widths apart, and the host must then know how
    many ids read each.

    Args:
        settings: of the lookup.
        dims: columns of its rectangles.
        device: the GPU.
        replicated: whether the tables are replicated.
    """
    if settings.pooling is PoolingType.NONE:  # no kernel takes several
        return True
    optimizer, mode = _updates(settings, replicated)
    choice = choose_backend(
        LookupSettings(
            device=device,
            weights_dtype=settings.weights_dtype,
            output_dtype=torch.float32,
            dims=list(dims),
            feature_table_map=list(range(len(dims))),
            pooling=settings.pooling,
            optimizer=optimizer,
            update_mode=mode,
            location=settings.location or EmbeddingLocation.DEVICE,
        )
    )
    return choice.backend != "fbgemm"


_PLACEHOLDER = OptimizerSpec(algorithm=EmbOptimType.SGD)


def _updates(settings: GroupSettings, replicated: bool) -> tuple[OptimizerSpec | None, UpdateMode]:
    """Return what a lookup's kernel is told of the optimizer, and when it uses it."""
    if not settings.requires_grad:
        return None, UpdateMode.GRADIENT
    if replicated:  # row gradients are collected; without an optimizer they are put into `.grad`
        return settings.optimizer or _PLACEHOLDER, UpdateMode.DEFERRED
    if settings.deferred or settings.exchanges_row_statistics:
        return settings.optimizer, UpdateMode.DEFERRED
    own = settings.optimizer
    return own, UpdateMode.GRADIENT if own is None else UpdateMode.FUSED

"""Lookup stage: one fused lookup per group of tables.

Rows that one rank owns are updated in backward. Gradients are kept until the end of backward, when
`row_updates` exchanges and applies them, for replicated tables, and for tables split by columns
whose optimizer needs statistics of whole rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from recsys.distributed.placement.layout import PlacedLookup, PlacedTable, Rect
from recsys.distributed.stages.batch import LookupInput
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
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.ids.hashed_group import HashedGroup
from recsys.modules.ids.table_index import TableIndex


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
    """A shard on this rank: its parameter, and its optimizer state (live tensors)."""

    table: int
    rect: Rect
    parameter: nn.Parameter
    states: dict[str, Tensor]
    kernel: TableBatchedEmbedding
    place: int  # position of the table in the kernel
    index: TableIndex | None  # of a table with hashed ids


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """One lookup of this rank or of replicated tables: its kernel and its parameters.

    `hashed` has the indexes of tables with hashed ids.
    """

    group: PlacedLookup
    settings: GroupSettings
    kernel: TableBatchedEmbedding
    parameters: list[nn.Parameter]
    hashed: HashedGroup | None

    def __repr__(self) -> str:
        return repr(self.kernel)

    def shards(self) -> Iterator[LocalShard]:
        """Yield the lookup's shards."""
        for i, (table, rect) in enumerate(zip(self.group.tables, self.group.rects, strict=True)):
            yield LocalShard(
                table=table,
                rect=rect,
                parameter=self.parameters[i],
                states=self.kernel.states[i] if self.settings.optimizer is not None else {},
                kernel=self.kernel,
                place=i,
                index=None if self.hashed is None else self.hashed.indexes[i],
            )


@contextmanager
def rows_found(group: HashedGroup, bags: LookupInput) -> Iterator[LookupInput]:
    """Yield the bags of a lookup with the rows of hashed ids, as long as it reads them."""
    group.prepare_lookup()
    if not bags.are_ids:
        yield bags
        return
    assert bags.ids_of_tables is not None
    with group.rows_to_read(bags.indices, bags.ids_of_tables) as rows:
        yield bags._replace(indices=rows, ids_of_tables=None)


def build_lookups(
    groups: Sequence[PlacedLookup],
    tables: Sequence[PlacedTable],
    configs: Sequence[BaseEmbeddingConfig],
    device: torch.device,
    num_sources: int = 1,
    *,
    replicated: bool = False,
    known: Sequence[Lookup] = (),
) -> list[Lookup]:
    """Allocate the tables of one rank's lookups, or of replicated tables.

    Args:
        groups: Lookup groups of the layout; each `key` is a `GroupSettings`.
        tables: The layout's tables, for names.
        configs: Their configs.
        device: Device of the tables.
        num_sources: Number of ranks whose batches are looked up.
        replicated: Whether the tables are replicated. Their gradients are then of this rank's batch
            only, and are added up over the ranks later.
        known: Existing lookups. Those with the same tables, shards and settings are reused.
    """
    lookups = []
    served = {_served_by(lookup.group): lookup for lookup in known}
    for group in groups:
        if _served_by(group) in served:
            lookups.append(replace(served[_served_by(group)], group=group))
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
            # rows then return in the order of arrival
            # docs/decisions/row_split.md, "Sums inside a node; sequences return by id"
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
        hashed = _hashed_group(group, configs, kernel, device) if group.is_hashed else None
        lookup = Lookup(
            group=group, settings=settings, kernel=kernel, parameters=parameters, hashed=hashed
        )
        lookups.append(lookup)
    return lookups


def _hashed_group(
    group: PlacedLookup,
    configs: Sequence[BaseEmbeddingConfig],
    kernel: TableBatchedEmbedding,
    device: torch.device,
) -> HashedGroup:
    """Return indexes without ids of the shards of a lookup."""
    group_configs = [configs[t] for t in group.tables]
    indexes = [
        TableIndex(config, device, range(rect.row_start, rect.row_end))
        for config, rect in zip(group_configs, group.rects, strict=True)
    ]
    columns = [slice(rect.col_start, rect.col_end) for rect in group.rects]
    return HashedGroup(group_configs, indexes, columns, kernel)


def _served_by(group: PlacedLookup) -> Hashable:
    """Return the properties that identify a lookup's kernel."""
    return group.key, group.tables, group.rects, group.feature_table_map


def needs_one_width(
    settings: GroupSettings, dims: Sequence[int], device: torch.device, *, replicated: bool
) -> bool:
    """Return whether all shards of a lookup on a GPU must have one width.

    Only FBGEMM's kernels read shards of several widths at once. Other kernels split such a lookup,
    for which the host would have to wait for the number of ids of each width.

    Args:
        settings: Settings of the lookup.
        dims: Columns of its shards.
        device: The GPU.
        replicated: Whether the tables are replicated.
    """
    if settings.pooling is PoolingType.NONE:  # no kernel supports several widths
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


def can_train(settings: GroupSettings) -> bool:
    """Return whether a lookup with hashed ids has an optimizer in backward or in a step."""
    return _updates(settings, replicated=False)[1] is not UpdateMode.GRADIENT


_PLACEHOLDER = OptimizerSpec(algorithm=EmbOptimType.SGD)


def _updates(settings: GroupSettings, replicated: bool) -> tuple[OptimizerSpec | None, UpdateMode]:
    """Return the optimizer of a lookup's kernel, and its update mode."""
    if not settings.requires_grad:
        return None, UpdateMode.GRADIENT
    if replicated:  # row gradients are accumulated; without an optimizer they go into `.grad`
        return settings.optimizer or _PLACEHOLDER, UpdateMode.DEFERRED
    if settings.deferred or settings.exchanges_row_statistics:
        return settings.optimizer, UpdateMode.DEFERRED
    optimizer = settings.optimizer
    return optimizer, UpdateMode.GRADIENT if optimizer is None else UpdateMode.FUSED

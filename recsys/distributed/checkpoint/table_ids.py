"""Weights of the ids of a table with hashed ids, from an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from recsys.distributed.state.table_shards import TableShards
from recsys.kernels.hashed.placement import choose_rows
from recsys.kernels.hashed.twin import FRACTION, locate, scores_of
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.modules.ids.table_index import TableIndex
from recsys.modules.tables.embedding_tables import TableCollection

_BLOCK_ROWS = 1 << 16


@final
class HashedPart(NamedTuple):
    """A shard of a table with hashed ids."""

    kernel: TableBatchedEmbedding
    place: int
    """Position of the table in the kernel."""
    rows: TableIndex
    first_row: int
    columns: slice


def hashed_parts(model: nn.Module, weight: TableShards | Tensor) -> list[HashedPart] | None:
    """Return this rank's shards of a table; None for a table of row numbers.

    Args:
        model: The model.
        weight: The sharded table, or the weight of an unsharded one.
    """
    if isinstance(weight, TableShards):
        if weight.rules is None:
            return None
        return [
            HashedPart(
                s.kernel,
                s.place,
                s.index,
                s.rect.row_start,
                slice(s.rect.col_start, s.rect.col_end),
            )
            for s in weight.shards
            if s.index is not None
        ]
    for module in model.modules():
        if not isinstance(module, TableCollection):
            continue
        configs = module.configs()
        for group in module.marked_lookups():
            for place, (table, parameter) in enumerate(
                zip(group.tables, group.parameters, strict=True)
            ):
                if parameter is weight and configs[table].ids is not None:
                    index = module.table(configs[table].name).index
                    return [HashedPart(group.tbe, place, index, 0, slice(None))]
    return None


def check_ids(name: str, ids: Any, *, is_hashed: bool) -> Tensor:
    """Return ids as a tensor.

    Raises:
        ValueError: They are missing, given for a table of row numbers, not int64, or repeat.
    """
    if not is_hashed:
        raise ValueError(
            f"ids must be None for {name!r}, whose ids are its row numbers; received an array. "
            "Leave it out."
        )
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        kind = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else repr(ids)
        raise ValueError(
            f"ids must be an array of int64 [rows] for {name!r}, a table with HashedIds; received "
            f"{kind}. Pass the id of each row of the values."
        )
    distinct, counts = np.unique(ids, return_counts=True)
    if len(distinct) < len(ids):
        raise ValueError(
            f"ids must be distinct; received id {distinct[counts > 1][0]} "
            f"{counts[counts > 1][0]} times. Keep one row of it."
        )
    return torch.from_numpy(np.ascontiguousarray(ids))


@torch.no_grad()
def load_ids(part: HashedPart, ids: Tensor, read: Callable[[np.ndarray[Any, Any]], Tensor]) -> int:
    """Give rows to ids, and set their weights.

    Args:
        part: A shard.
        ids: int64 [N], distinct, of all shards.
        read: Returns the weights of positions in `ids`, of all columns.

    Returns:
        Number of ids of the shard's regions that have no row.
    """
    kernel, index, device = part.kernel, part.rows, part.rows.ids.device
    index.step = max(index.step, 1)  # a row of step 0 is free
    shard_index, step = index.index, index.step
    regions = locate(shard_index, ids.to(device)).regions
    at = (
        ((regions >= shard_index.first_region) & (regions < shard_index.last_region))
        .nonzero()
        .flatten()
    )
    shard_ids = ids.to(device)[at]
    first_count = FRACTION if shard_index.settings.eviction == "lfu" else 1
    used = torch.full(shard_ids.shape, step, dtype=torch.int32, device=device)
    seen = torch.full_like(used, first_count)
    scores = scores_of(shard_index.settings, step + 1, used, seen)
    rows, was_there = choose_rows(shard_index, shard_ids, scores, step + 1)
    has_row = rows >= 0
    at, shard_ids, rows, was_there = (
        at[has_row],
        shard_ids[has_row],
        rows[has_row],
        was_there[has_row],
    )
    shard_index.ids[rows] = shard_ids
    shard_index.last_used[rows] = step
    shard_index.digests[rows] = locate(shard_index, shard_ids).digests
    if shard_index.seen.numel():
        shard_index.seen[rows[~was_there]] = first_count
    for is_new in (True, False):
        chosen = (was_there != is_new).nonzero().flatten()
        for block in chosen.split(_BLOCK_ROWS):
            if block.numel():
                values = read(at[block].cpu().numpy())[:, part.columns].to(device)
                kernel.write_rows(part.place, rows[block], values, is_new=is_new)
    return int((~has_row).sum())

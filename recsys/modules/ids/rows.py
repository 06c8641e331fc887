"""Rows of ids: the calls that map the ids of an index to rows.

Shapes: `N` ids, `T` tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from recsys.kernels.hashed.index import IdIndex, map_ids
from recsys.modules.ids.table_index import TableIndex

__all__ = ["PINNED_BATCHES", "rows_of_table", "stored_rows"]

PINNED_BATCHES: Final = 4
"""Batches, with the current one, whose rows keep their ids. It is constant, so that pipelines,
which map ids up to three batches ahead, give the same ids rows as a plain loop."""


def stored_rows(indexes: Sequence[IdIndex], ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the row of each id and change nothing; an unknown id has the first row of its region.

    Args:
        indexes: `[T]`, the index of each table.
        ids: `[N]` integers, ordered by table.
        sizes: `[T]` number of ids of each table.

    Returns:
        int64 `[N]`.
    """
    return map_ids(indexes, ids.long(), sizes, step=1, pin=1, is_training=False).rows


def rows_of_table(index: TableIndex, ids: Tensor, is_training: bool) -> Tensor:
    """Return the row of each id of one table; in training, give rows to new ids.

    Args:
        index: The index of the table.
        ids: `[N]` integers.
        is_training: Whether the batch is trained on.

    Returns:
        int64 `[N]`.
    """
    # at least 1, since 0 in `last_used` marks a free row
    step = max(index.step + is_training, 1)
    pin = step - PINNED_BATCHES + 1
    mapped = map_ids([index.index], ids.long(), [ids.numel()], step, pin, is_training)
    if is_training:
        index.step = step
        index.counts += mapped.counts[0]
    return mapped.rows

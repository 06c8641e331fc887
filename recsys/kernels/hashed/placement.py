"""Rows of many ids at once, chosen without a batch: for loads of ids from elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.kernels.hashed.index import LINE, IdIndex
from recsys.kernels.hashed.twin import WAYS, locate, scores_of


def choose_rows(index: IdIndex, ids: Tensor, scores: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return rows for ids of a shard; ids that the index has keep their rows.

    An id gets a row of its line, in its home bucket if there is one. If a line has too many ids,
    its own ids of the lowest scores lose their rows first, by the eviction rule, and then the given
    ids of the lowest scores. The result does not depend on the order of the ids, nor on the
    split of regions over shards. The index is not changed.

    Args:
        index: The shard.
        ids: int64 [N], distinct, of the shard's regions.
        scores: [N] int64, or float64 of eviction "distance_lfu", as of `scores_of`.
        step: Current step, after the last use of all rows.

    Returns:
        int64 [N] row of each id, -1 for ids without a row; and bool [N], whether the id had the row
        before.

    Example:
        >>> from recsys.kernels.hashed.index import IndexSettings
        >>> settings = IndexSettings(
        ...     eviction="lru", half_life=0, exponent=1, ttl=0,
        ...     admission="always", admission_value=0, is_shared=True,
        ... )
        >>> index = IdIndex.empty(settings, 64, 1, 0, 1, seed=0)
        >>> rows, was_there = choose_rows(index, torch.arange(70), torch.arange(70), 1)
        >>> (rows < 0).nonzero().flatten().tolist(), sorted(rows[rows >= 0].tolist())[:2]
        ([0, 1, 2, 3, 4, 5, 6], [1, 2])
    """
    spots = locate(index, ids)
    known = (index.last_used > 0).nonzero().flatten()
    known_ids = index.ids[known]
    order = known_ids.argsort()
    at = torch.searchsorted(known_ids[order], ids).clamp(max=max(len(known) - 1, 0))
    rows = torch.full_like(ids, -1)
    if len(known):
        chosen = known[order[at]]
        rows = torch.where(index.ids[chosen] == ids, chosen, rows)
    was_there = rows >= 0
    is_other = torch.ones_like(index.ids, dtype=torch.bool)
    is_other[rows[was_there]] = False
    others = known[is_other[known]]
    seen = index.seen[others] if index.seen.numel() else None
    other_scores = scores_of(index.settings, step, index.last_used[others], seen)
    lines = torch.cat([spots.lines, others // LINE])
    # stable sorts from the last key to the first: id, score, given or not, line
    order = torch.cat([ids, index.ids[others]]).argsort(stable=True)
    order = order[torch.cat([scores, other_scores])[order].argsort(descending=True, stable=True)]
    order = order[(order >= len(ids)).long().argsort(stable=True)]  # given ids first
    order = order[lines[order].argsort(stable=True)]
    capacity = LINE - (lines % index.lines == 0).long()  # without the shared row
    is_kept = torch.empty_like(order, dtype=torch.bool)
    is_kept[order] = _rank_in_group(lines[order]) < capacity[order]

    is_free = torch.ones_like(index.ids, dtype=torch.bool)
    # shared rows, the first of each region
    is_free[:: index.lines * LINE] = False
    is_free[others[is_kept[len(ids) :]]] = False
    rows = rows.masked_fill(~is_kept[: len(ids)], -1)
    is_free[rows[rows >= 0]] = False
    order = order[order < len(ids)]
    order = order[is_kept[order] & (rows[order] < 0)]
    # all ids try their home buckets before any id gets another row of its line
    for size, group in ((WAYS, spots.lines * (LINE // WAYS) + spots.homes), (LINE, spots.lines)):
        order = order[group[order].argsort(stable=True)]
        new_rows = _free_rows(is_free, group[order], size)
        rows[order] = new_rows
        is_free[new_rows[new_rows >= 0]] = False
        order = order[new_rows < 0]
    return rows, was_there & (rows >= 0)


def _rank_in_group(groups: Tensor) -> Tensor:
    """Return the position of each item in its group; [N] groups, sorted."""
    _, sizes = groups.unique_consecutive(return_counts=True)
    starts: Tensor = sizes.cumsum(0) - sizes
    return torch.arange(len(groups), device=groups.device) - starts.repeat_interleave(sizes)


def _free_rows(is_free: Tensor, groups: Tensor, size: int) -> Tensor:
    """Return a free row for each item of sorted groups, -1 if its group has no more.

    Args:
        is_free: bool [rows].
        groups: int64 [N] group of each item: the rows from `group * size` on.
        size: Rows of a group.
    """
    counts = is_free.view(-1, size).sum(1)
    rows = is_free.nonzero().flatten()
    rank = _rank_in_group(groups)
    at = (counts.cumsum(0) - counts)[groups] + rank
    has_one = rank < counts[groups]
    free_rows = torch.full_like(groups, -1)
    free_rows[has_one] = rows[at[has_one]]
    return free_rows

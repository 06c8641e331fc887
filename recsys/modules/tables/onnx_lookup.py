"""Lookup of a collection with operations of ONNX, for `torch.onnx.export`.

The exported program reads the number of ids of each feature from the lengths. It does not check
ids: the runtime's Gather operator reports an id outside its table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys.kernels.types import PoolingType


def look_up_plainly(
    tables: Sequence[Tensor],
    keys: Sequence[str],
    stride: int,
    values: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    read: Sequence[str],
    table_of: Sequence[int],
    poolings: Sequence[str],
    need_indices: bool,
) -> list[Tensor]:
    """Look up bags of several features, as `torch.ops.recsys.look_up` does.

    Args:
        tables: `[R, D]` weights.
        keys: `K` features of the batch.
        stride: `B`, the batch size.
        values: `[N]` ids.
        lengths: `[K * B]`.
        weights: `[N]`, or None.
        read: `F` features to look up.
        table_of: `F` positions of tables.
        poolings: Pooling of each table.
        need_indices: Return the ids too; only without pooling.

    Returns:
        With pooling, one fp32 tensor `[B, sum of D over F]`. Without, `[ids of the feature, D]` in
        fp32 per feature, then the ids per feature if `need_indices`.

    Example:
        >>> look_up_plainly([torch.eye(3)], ["a"], 2, torch.tensor([0, 2, 2]),
        ...     torch.tensor([1, 2]), None, ["a"], [0], ["SUM"], False)
        [tensor([[1., 0., 0.],
                [0., 0., 2.]])]
    """
    lengths_KB = lengths.long().view(len(keys), -1)
    sizes: list[int] = lengths_KB.sum(1).tolist()
    starts = [0]
    for size in sizes:
        torch._check(size >= 0)  # for `torch.export`
        starts.append(starts[-1] + size)
    pooled, ids_of = [], []
    for feature, table in zip(read, table_of, strict=True):
        key = keys.index(feature)
        start, size, lengths_B = starts[key], sizes[key], lengths_KB[key]
        torch._check(start + size <= values.shape[0])
        ids = values.narrow(0, start, size)
        rows = tables[table].index_select(0, ids).float()
        if poolings[table] == PoolingType.NONE.name:
            pooled.append(rows)
            ids_of.append(ids.clone())
            continue
        if weights is not None:
            rows = rows * weights.narrow(0, start, size).unsqueeze(1)
        summed = rows.new_zeros(stride, rows.shape[1])
        bags = _bags_of(lengths_B, size).unsqueeze(1).expand(-1, rows.shape[1])
        summed = summed.scatter_add(0, bags, rows)
        if poolings[table] == PoolingType.MEAN.name:
            summed = summed / lengths_B.clamp(min=1).unsqueeze(1)
        pooled.append(summed)
    if poolings[0] == PoolingType.NONE.name:
        return pooled + (ids_of if need_indices else [])
    return [torch.cat(pooled, dim=1)]


def _bags_of(lengths_B: Tensor, num_ids: int) -> Tensor:
    """Return the bag of each id, the number of bags that end at or before it: `[num_ids]`."""
    ends = lengths_B.new_zeros(num_ids + 1)
    ends = ends.scatter_add(0, lengths_B.cumsum(0), torch.ones_like(lengths_B))
    return ends.cumsum(0).narrow(0, 0, num_ids)

"""Batches that lookups read, with the parts of a batch that belong to some features.

Shapes: N ids, F features, B bags per feature, R ranks, D columns of one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recsys.kernels import ops
from recsys.kernels.ops import move_segments, permute_1d, swap_segments, upload
from recsys.kernels.tbe_layout import DimGroup, StorageLayout


@final
class RankedBags:
    """Number of bags of each feature on each of R ranks.

    Args:
        bags_FR: [F, R] int64, on the host. The bags of a feature are sorted by rank.

    Attributes:
        in_order: The batch sorted by rank for a kernel, kept from lookup to update.
    """

    def __init__(self, bags_FR: np.ndarray) -> None:
        self.bags_FR = bags_FR
        self.in_order: LookupBatch | None = None

    def rows_by_rank(self, rows: Tensor, dims_F: np.ndarray) -> Tensor:
        """Sort the flat output of a ragged lookup by rank.

        Args:
            rows: Rows sorted by feature.
            dims_F: Columns of each feature.
        """
        return swap_segments(rows, self.bags_FR * dims_F[:, None])

    def rows_by_feature(self, rows: Tensor, dims_F: np.ndarray) -> Tensor:
        """Invert `rows_by_rank`, for rows or their gradients."""
        return swap_segments(rows, (self.bags_FR * dims_F[:, None]).T)


class LookupBatch(NamedTuple):
    """Input of a lookup."""

    indices: Tensor
    """[N] int32 or int64, in range."""
    offsets: Tensor
    """[bags of all features + 1]; bag b of feature f is `indices[offsets[f * B + b]:...]`."""
    weights: Tensor | None = None
    """[N] fp32 per-sample weights."""
    bags: np.ndarray | None = None
    """[F] int64, on the host: number of bags of each feature; None: all have B.

    A batch with `bags` is ragged: the output and its gradient are flat, the concatenated [bags, D]
    of the features."""
    by_rank: RankedBags | None = None
    """Set if the bags are from several ranks: the output is then sorted by rank, then by feature.

    Only kernels with `takes_ranks`, and `look_up_and_update`, receive it."""


@final
class FeatureParts:
    """Split of a batch by feature."""

    def __init__(self, batch: LookupBatch, num_features: int) -> None:
        self.batch = batch
        self._lengths = batch.offsets.diff()
        if batch.bags is None:
            num_bags = self._lengths.numel() // num_features
            self._lengths = self._lengths.view(num_features, num_bags)
            self.ids_F = self._lengths.sum(1)
        else:
            self.ids_F = starts_of_features(batch.offsets, batch.bags).diff()
        self._place_N = torch.arange(batch.indices.numel(), device=batch.indices.device)

    def of(
        self, features: Tensor, num_ids: int | None = None, on_host: Sequence[int] = ()
    ) -> tuple[Tensor, LookupBatch]:
        """Return the positions of the ids of some features, and the batch of these features.

        Args:
            features: Numbers of the features.
            num_ids: Number of their ids, if the host knows it.
            on_host: `features` on the host, required for a ragged batch.
        """
        _, positions, _ = permute_1d(features, self.ids_F, self._place_N, None, num_ids)
        weights, bags = self.batch.weights, self.batch.bags
        if bags is None:
            lengths = self._lengths.index_select(0, features)
        else:
            order = np.array(on_host, dtype=np.int32)
            lengths, bags = move_segments(self._lengths, order, bags), bags[order]
        return positions, LookupBatch(
            self.batch.indices.index_select(0, positions),
            functional.pad(lengths.flatten().cumsum(0), (1, 0)),
            None if weights is None else weights.index_select(0, positions),
            bags,
        )


def row_ids_of(group: DimGroup, batch: LookupBatch) -> Tensor:
    """Convert ids of tables to rows of the group's matrix: [N] int64."""
    return rows_of_features(group.row_base_F, batch)


def rows_of_features(first_row_F: Tensor, batch: LookupBatch) -> Tensor:
    """Add the first row of its feature to each id: [N] int64.

    Args:
        first_row_F: [F] int64.
        batch: A batch of these features.
    """
    indices, offsets = batch.indices, batch.offsets
    if first_row_F.numel() == 1:  # the row of one feature can be non-zero
        return indices.long() + first_row_F
    if not indices.numel():
        return indices.long()
    if batch.bags is not None:  # all ids of a feature as one bag
        offsets = starts_of_features(offsets, batch.bags)
    num_bags = (offsets.numel() - 1) // first_row_F.numel()
    if indices.is_cuda and ops.HAS_TRITON:
        from recsys.kernels.ops_triton import row_ids

        return row_ids(indices, offsets, first_row_F)
    ids_F = offsets[::num_bags].diff()
    if indices.is_cpu:  # four times as fast as torch's
        return torch.from_numpy(np.repeat(first_row_F.numpy(), ids_F.numpy())).add_(indices)
    base = first_row_F.repeat_interleave(ids_F, output_size=indices.numel())
    return base.add_(indices)


def starts_of_features(offsets: Tensor, bags_F: np.ndarray) -> Tensor:
    """Return the start of the ids of each feature of a ragged batch, and the end: [F + 1]."""
    starts = np.zeros(len(bags_F) + 1, dtype=np.int64)
    np.cumsum(bags_F, out=starts[1:])
    return offsets.index_select(0, upload(starts, offsets.device))


def inverse_bag_length(offsets: Tensor, num_ids: int) -> Tensor:
    """Return 1 / (number of ids of its bag) for each id: [N] fp32."""
    lengths = offsets.diff()
    # an empty bag has 1 / 0, which is repeated zero times
    return lengths.float().reciprocal_().repeat_interleave(lengths, output_size=num_ids)


def sum_bags(matrix: Tensor, row_ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the (weighted) rows of each bag, in fp32: [bags, D]."""
    if row_ids.numel() == 0:
        return matrix.new_zeros(offsets.numel() - 1, matrix.shape[1], dtype=torch.float32)
    if matrix.dtype is not torch.float32:
        # embedding_bag would accumulate in, and round to, the dtype of the table.
        matrix = matrix.index_select(0, row_ids).float()
        row_ids = torch.arange(row_ids.numel(), device=row_ids.device)
    return functional.embedding_bag(
        row_ids,
        matrix,
        offsets.long(),
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=True,
    )


def as_rectangle(batch: LookupBatch) -> LookupBatch:
    """Pad the bags of each feature of a ragged batch with empty bags, to the longest feature."""
    bags_F, device = batch.bags, batch.offsets.device
    assert bags_F is not None
    ends_F = np.cumsum(bags_F)
    starts_F1, ends_F1 = upload(np.stack([ends_F - bags_F, ends_F]), device).unsqueeze(2).unbind()
    # behind its last bag a feature repeats the offset of its end: these bags are empty
    places_FB = torch.minimum(starts_F1 + torch.arange(int(bags_F.max()), device=device), ends_F1)
    offsets = batch.offsets.index_select(0, places_FB.flatten())
    offsets = torch.cat([offsets, batch.offsets[-1:]])
    return batch._replace(offsets=offsets, bags=None, by_rank=None)


def flat_blocks(pooled: Tensor, bags_F: np.ndarray, layout: StorageLayout) -> Tensor:
    """Convert the pooled output of `as_rectangle` to the flat output of the ragged batch."""
    columns = pooled.split(list(layout.feature_dims), 1)
    pieces = zip(columns, bags_F.tolist(), strict=True)
    return torch.cat([of_feature[:count].reshape(-1) for of_feature, count in pieces])

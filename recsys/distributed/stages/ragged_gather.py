"""Gather of the embeddings of a ragged batch, in which blocks have different numbers of rows.

A block contains the rows of one stream: one *row per bag* of its feature, or one *row per id* of
one segment. The output contains one row per sample, which is zero if no block has a row for it. It
is the sum of the rows of a bag's ids, and of blocks with the same columns: partial sums of
row-split tables.

Rows of ids are found by the offsets of the bags and the position of each id among the segments. A
list of the bags of each segment would be longer: ranks times bags, with or without ids.

Shapes: `K` blocks, `B` samples, `D` columns, `C` output chunks, `E` chunks in the blocks. `Q`
groups of blocks with the same columns, `M` chunks of the buffer. `N` ids of the bags, `F` features
of the bags, `W` buckets of each feature, `X` rounds in which ids are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recsys.distributed.placement.layout import Layout
from recsys.distributed.ranks.wire import EXACT
from recsys.distributed.stages.bags import joined
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.stages.column_gather import ColumnGather, MeanSlot
from recsys.distributed.stages.exchanged_rows import Codecs, Ranges
from recsys.kernels import ops
from recsys.modules.tables.batch_checker import NO_COUNTS

if TYPE_CHECKING:
    from recsys.kernels.ragged_triton import Ragged

NO_SEGMENT = -1
"""Segment number of a block with a row per bag."""


@final
class SplitIds(NamedTuple):
    """Positions of the ids of bags after they were split into segments, in rounds.

    Attributes:
        segment_K: `[K]` segment `[round][bucket][feature]` of a block with a row per id, else
            `NO_SEGMENT`.
        counts_XWF: Number of ids of each segment.
        places: `[X * N]` int32 or int64, for each round the position of each id among the round's
            segments.
        offsets: `[F * B + 1]` int32 or int64 offsets of the bags, the same in each round.
    """

    segment_K: np.ndarray
    counts_XWF: np.ndarray
    places: Tensor
    offsets: Tensor

    def starts(self) -> np.ndarray:
        """Return the number of ids before each segment."""
        counts: np.ndarray = self.counts_XWF.ravel()
        starts: np.ndarray = np.cumsum(counts) - counts
        return starts

    def samples(self, num_samples: int) -> Tensor:
        """Return `[X * N]` int32, the samples of all ids in the order of the segments (CPU only).

        Args:
            num_samples: B.
        """
        num_rounds = len(self.counts_XWF)
        places_XN = self.places.view(num_rounds, -1)
        sample_B = torch.arange(num_samples, dtype=torch.int32)
        lengths = self.offsets.diff()
        sample_N = sample_B.repeat(len(lengths) // num_samples).repeat_interleave(
            lengths, output_size=places_XN.shape[1]
        )
        samples = torch.empty(places_XN.shape, dtype=torch.int32)
        return samples.scatter_(1, places_XN.long(), sample_N.expand_as(samples)).view(-1)


NO_IDS = SplitIds(
    segment_K=np.zeros(0, dtype=np.int64),
    counts_XWF=np.zeros((0, 0, 0), dtype=np.int64),
    places=torch.empty(0, dtype=torch.int64),
    offsets=torch.empty(0, dtype=torch.int64),
)
"""Split of a batch whose blocks all have a row per bag."""


@final
class RaggedGather:
    """Columns of the blocks of ragged batches.

    Args:
        blocks: As for `ColumnGather`. Blocks that share any column have the same columns.
        width: D.
        device: Device of the buffers.
        mean_slots: Columns that are divided by the lengths of bags.
    """

    def __init__(
        self,
        blocks: Sequence[Ranges],
        width: int,
        device: torch.device,
        mean_slots: Sequence[MeanSlot] = (),
    ) -> None:
        self.columns = ColumnGather(blocks, width, device, mean_slots)
        self.width, self.chunk, self._device = width, self.columns.chunk or 1, device
        widths = [sum(end - start for start, end in block) for block in blocks]
        self.widths_K = np.array(widths, dtype=np.int64)
        # an entry's block follows from the number of chunks before the block
        chunks_K = self.widths_K // self.chunk
        first_K, self._filled = np.cumsum(chunks_K) - chunks_K, np.flatnonzero(chunks_K)
        first_E, _, place_E, chunk_E = self.columns.host_entries_4E
        # a block without columns shares its start with the next block and must not be found
        self._block_E: np.ndarray = self._filled[np.searchsorted(first_K[self._filled], first_E)]
        # on the host: chunks per row of each block, and of earlier blocks
        self.chunks_K = torch.from_numpy(chunks_K.astype(np.int32))
        self.first_K = torch.from_numpy(first_K.astype(np.int32))
        output_chunks = chunk_E[np.argsort(first_E + place_E)]
        self.output_chunks = torch.from_numpy(output_chunks.astype(np.int32))

    @cached_property
    def groups(self) -> BlockGroups:
        """Groups of blocks with the same columns."""
        _, width_E, place_E, chunk_E = self.columns.host_entries_4E
        # any entry of a chunk may stand for it: ColumnGather sorts entries by chunk
        chosen_C = np.searchsorted(chunk_E, np.arange(self.columns.num_chunks))
        _, group_C = np.unique(self._block_E[chosen_C], return_inverse=True)
        group_K = np.full(len(self.widths_K), -1)
        group_K[self._block_E] = group_C[chunk_E]
        of_entries = np.stack([group_K[self._block_E], width_E, place_E])
        of_chunks = np.stack([group_C, width_E[chosen_C], place_E[chosen_C]])
        assert np.array_equal(of_entries, of_chunks[:, chunk_E])  # blocks of a group are equal
        order = self._filled[np.argsort(group_K[self._filled], kind="stable")]
        sizes_Q = np.bincount(group_K[order])
        first_Q = np.cumsum(sizes_Q) - sizes_Q
        chunks_4C = np.concatenate([of_chunks, first_Q[None, group_C]])
        return BlockGroups(ops.upload(chunks_4C, self._device), group_K, order, first_Q)


@final
class BlockGroups(NamedTuple):
    """Groups of blocks with the same columns.

    Attributes:
        chunks_4C: `[4, C]` int64 on the device. Per output chunk: its group; chunks per row of the
            group's blocks; position in such a row; number of blocks in earlier groups.
        group_K: `[K]` group of each block, -1 for a block without columns.
        order: Blocks with columns, group by group.
        first_Q: `[Q]` number of blocks in earlier groups.
    """

    chunks_4C: Tensor
    group_K: np.ndarray
    order: np.ndarray
    first_Q: np.ndarray


@final
class RaggedBatch:
    """Gather of one batch.

    Args:
        gather: Columns of the blocks.
        rows_K: `[K]` number of rows of each block.
        num_samples: B.
        ids: Segments of the blocks with a row per id; `NO_IDS` if all blocks have a row per bag.

    Attributes:
        num_values: Number of values in the buffer.
    """

    def __init__(
        self,
        gather: RaggedGather,
        rows_K: np.ndarray,
        num_samples: int,
        ids: SplitIds = NO_IDS,
    ) -> None:
        self._columns, self._rows_K, self._num_samples = gather, rows_K, num_samples
        self._ids = ids
        self.num_values = int(rows_K @ gather.widths_K)

    @cached_property
    def _on_device(self) -> Ragged:
        """Descriptors of the columns and of the batch for Triton kernels."""
        from recsys.kernels.ragged_triton import Ragged, RaggedIds

        gather, ids, rows_K = self._columns, self._ids, self._rows_K
        chunks_4C, group_K, order, first_Q = gather.groups
        num_groups = len(first_Q)
        chunks_K = rows_K * (gather.widths_K // gather.chunk)
        before_K = np.cumsum(chunks_K) - chunks_K
        segment_Q, nothing = np.full(num_groups, NO_SEGMENT), np.zeros(0, dtype=np.int64)
        starts, of_buckets, goes_by_bag, known = nothing, nothing, rows_K > 0, None
        if len(ids.segment_K):
            _, num_buckets, num_features = ids.counts_XWF.shape
            starts, of_buckets = ids.starts(), np.full(len(order), -1)
            goes_by_id = ids.segment_K != NO_SEGMENT
            goes_by_bag &= ~goes_by_id
            blocks = order[goes_by_id[order]]
            groups, segments = group_K[blocks], ids.segment_K[blocks]
            # a group has a block for each bucket of its table, which are the first buckets
            buckets = segments // num_features % num_buckets
            of_buckets[first_Q[groups] + buckets] = before_K[blocks]
            segment_Q[groups] = segments - buckets * num_features
            known = RaggedIds(ids.places, ids.offsets, *ids.counts_XWF.shape)
        blocks = order[goes_by_bag[order]]
        by_bag = np.stack([before_K[blocks], rows_K[blocks]], axis=1).ravel()
        lists = np.bincount(group_K[blocks] + 1, minlength=num_groups + 1).cumsum() * 2
        parts = [lists, segment_Q, starts, of_buckets, by_bag]
        lists += sum(map(len, parts[:-1]))
        batch = ops.upload(np.concatenate(parts), chunks_4C.device)
        return Ragged(gather.columns.columns, chunks_4C, batch, num_groups, known)

    @cached_property
    def _targets_M(self) -> Tensor:
        """For each chunk of the buffer, the chunk of the output; on the host."""
        gather, ids, num_samples = self._columns, self._ids, self._num_samples
        num_chunks, rows_K = gather.columns.num_chunks, self._rows_K
        # a block's rows belong to all samples in turn, or to the samples of its segment's ids
        samples = torch.arange(num_samples, dtype=torch.int32)
        first_K = np.zeros_like(rows_K)
        if len(ids.segment_K):
            samples = torch.cat([samples, ids.samples(num_samples)])
            starts = num_samples + ids.starts()
            first_K = np.where(ids.segment_K == NO_SEGMENT, 0, starts[ids.segment_K])
        rows, num_rows = torch.from_numpy(rows_K.astype(np.int32)), int(rows_K.sum())
        shift_K = torch.from_numpy(first_K - (np.cumsum(rows_K) - rows_K))
        # running sums of chunks stay below num_values
        fits = max(num_samples * num_chunks, self.num_values) < 2**31
        dtype = torch.int32 if fits else torch.int64
        block_N = torch.repeat_interleave(rows, output_size=num_rows)
        sample_N = samples.index_select(
            0, shift_K.index_select(0, block_N) + torch.arange(num_rows)
        )
        chunks_N, num = gather.chunks_K.index_select(0, block_N), self.num_values // gather.chunk
        shift_N = (
            gather.first_K.index_select(0, block_N) + chunks_N - chunks_N.cumsum(0, dtype=dtype)
        )
        chunk_M = shift_N.repeat_interleave(chunks_N, output_size=num)
        chunk_M += torch.arange(num, dtype=dtype)
        targets_M = sample_N.to(dtype).mul_(num_chunks).repeat_interleave(chunks_N, output_size=num)
        self._ids = NO_IDS  # not needed again
        return targets_M.add_(gather.output_chunks.index_select(0, chunk_M))

    def gather(self, buffer: Tensor, counts: Tensor = NO_COUNTS) -> Tensor:
        """Return the output, `[B, D]`.

        Args:
            buffer: The receive buffer, flat.
            counts: `[row-split slots, B]` ids per bag, if any slot is averaged.
        """
        gather, num_samples = self._columns, self._num_samples
        if not num_samples:
            return buffer.new_zeros(0, gather.width)
        if buffer.is_cuda:
            from recsys.kernels.ragged_triton import gather_ragged

            of_means = counts if gather.columns.mean_slots else None
            return gather_ragged(buffer, num_samples, self._on_device, of_means)
        # concatenated lists: for each output chunk, the chunks of the buffer that add up to it
        targets_M, num_chunks = self._targets_M, num_samples * gather.columns.num_chunks
        numbers = torch.bincount(targets_M, minlength=num_chunks)
        offsets = functional.pad(numbers.cumsum(0, dtype=targets_M.dtype), (1, 0))
        # stable: parts of a chunk are added up in the order of the blocks, rank by rank
        # docs/decisions/row_split.md, "Short bags: rows return by id"
        index = torch.sort(targets_M, stable=True).indices.to(targets_M.dtype)
        rows = functional.embedding_bag(
            index, buffer.view(-1, gather.chunk), offsets, mode="sum", include_last_offset=True
        )
        output = rows.view(num_samples, gather.width)
        if gather.columns.mean_slots:
            gather.columns.divide(output, counts)
        return output

    def scatter_grad(self, grad_BD: Tensor, counts: Tensor = NO_COUNTS) -> Tensor:
        """Return the gradient of the buffer: the transpose of `gather`.

        Args:
            grad_BD: Gradient of the output.
            counts: As for `gather`.
        """
        gather = self._columns
        if not self.num_values:
            return grad_BD.new_empty(0)
        if grad_BD.is_cuda:
            from recsys.kernels.ragged_triton import scatter_grad_ragged

            of_means = counts if gather.columns.mean_slots else None
            return scatter_grad_ragged(grad_BD, self.num_values, self._on_device, of_means)
        if gather.columns.mean_slots:
            grad_BD = grad_BD.clone()
            gather.columns.divide(grad_BD, counts)
        return grad_BD.reshape(-1, gather.chunk).index_select(0, self._targets_M).view(-1)


@final
class RaggedRows:
    """Rows of a ragged batch, in which streams have their own numbers of rows.

    A stream has a row per bag of a feature with its own batch size, or a row per id if bags of a
    row-split table have few ids. Lookups produce these rows rank by rank, so the output of a single
    lookup is sent without a copy.

    Args:
        gather: Columns of the streams that arrive, then of replicated lookups.
        layout: The compiled placement.
        rank: This rank.
        ctx: The batch.
    """

    adds_up = scales_early = False
    read_codecs: Codecs = (EXACT, EXACT)

    def __init__(self, gather: RaggedGather, layout: Layout, rank: int, ctx: BatchContext) -> None:
        stage, shape = ctx.stage, ctx.shape
        received_RS, sent_D = shape.bags_received_RS, shape.bags_sent_D
        firsts = [group.streams.start for group in layout.groups[rank]]
        looked_up_RS = received_RS * stage.streams.own_dims
        self._looked_up_RL = np.add.reduceat(looked_up_RS, firsts, 1) if firsts else looked_up_RS
        batch_size, num_replicas = ctx.prepared.bags.stride, len(gather.widths_K) - len(sent_D)
        rows_K = np.concatenate([sent_D, np.full(num_replicas, batch_size)])
        ids = split_ids(ctx, len(rows_K)) if shape.is_by_id else NO_IDS
        self._batch = RaggedBatch(gather, rows_K, batch_size, ids)
        self.sends: list[int] = self._looked_up_RL.sum(1).tolist()
        self.receives = stage.per_rank(sent_D * stage.streams.dims_D)
        self._counts, self._device = ctx.prepared.bag_counts, stage.module.device

    def pack(self, lookups: Sequence[Tensor]) -> Tensor:
        """Return the send buffer, flat."""
        if not lookups:
            return torch.empty(0, device=self._device)
        sent = joined(lookups)
        return ops.swap_segments(sent, self._looked_up_RL.T) if len(lookups) > 1 else sent

    def gather(self, buffer: Tensor, _: Tensor) -> Tensor:
        """Return the output `[B, D]`."""
        return self._batch.gather(buffer, self._counts)

    def scatter_grad(self, grad_BD: Tensor, num_received: int) -> tuple[Tensor, Tensor]:
        """Return the gradient of the buffer, and of its `num_received` received elements."""
        grad = self._batch.scatter_grad(grad_BD, self._counts)
        return grad, grad[:num_received]

    def unpack(self, grad: Tensor) -> list[Tensor]:
        """Return the gradients of the lookups, given the gradient of the send buffer."""
        sizes = self._looked_up_RL.sum(0).tolist()
        if len(sizes) > 1:
            grad = ops.swap_segments(grad, self._looked_up_RL)
        return list(grad.split(sizes))


def split_ids(ctx: BatchContext, num_blocks: int) -> SplitIds:
    """Return the segments of ids that return as rows."""
    routes, segment_K = ctx.routes, np.full(num_blocks, NO_SEGMENT)
    by_id_D, prepared = ctx.shape.by_id_D, ctx.prepared
    of_streams = routes.segments - routes.num_keys  # whole features are before the others
    segment_K[: len(by_id_D)] = np.where(by_id_D, of_streams, NO_SEGMENT)
    shape = len(routes.rounds), ctx.stage.module.layout.num_buckets, -1
    counts_XWF = ctx.header.counts_G[routes.num_keys :].reshape(shape)
    return SplitIds(
        segment_K, counts_XWF, joined(prepared.segments.moved_to), prepared.split_offsets
    )

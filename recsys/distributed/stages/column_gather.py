"""Gather of the received embeddings into the columns of the unsharded module, and its transpose.

The receive buffer consists of blocks `[B, columns of the block]`, one or more from each rank. One
gather produces `[B, D]`; it also adds up and averages the partial sums of row-split tables. Its
transpose produces the gradient of the buffer. The column descriptors do not depend on the batch.

Shapes: `B` samples, `D` output columns, `C` chunks of them, `E` chunks in the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recsys.distributed.ranks.wire import EXACT, WireFormat
from recsys.distributed.stages.bags import in_order
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.stages.exchanged_rows import Codecs, PooledStage, Ranges
from recsys.kernels import ops
from recsys.modules.tables.batch_checker import NO_COUNTS

if TYPE_CHECKING:
    from recsys.kernels.output_triton import GatherColumns

_MAX_CACHED_INDEXES = 4  # one per batch size seen; datasets have few
_MAX_UNIT = 32

MeanSlot: TypeAlias = tuple[int, int, int]
"""A position among the row-split slots, and the first and last column of its output."""


@final
class _ChunkIndex:
    """Index tensors for one batch size, computed on the device from descriptors of the columns.

    Attributes:
        sources: For each chunk of the output `[B, D]` the chunks of the buffer that add up to it.
        offsets: Start of each list in `sources`; empty if every list has one entry.
    """

    def __init__(self, gather: ColumnGather, batch_size: int) -> None:
        self._gather = gather
        first_E, width_E, place_E, _ = gather.entries_4E
        self.sample_B1 = torch.arange(batch_size, device=first_E.device).unsqueeze(1)
        sources_BE = first_E * batch_size + place_E
        sources_BE = sources_BE + self.sample_B1 * width_E
        # entries cover the buffer exactly once, so their number bounds the indexes
        fits = sources_BE.numel() < 2**31
        self._dtype = torch.int32 if fits else torch.int64
        self.sources = sources_BE.flatten().to(self._dtype)
        self.offsets = self.sources[:0]
        if gather.lists_C1 is not None:
            offsets_BC = gather.lists_C1[:-1] + self.sample_B1 * first_E.numel()
            ends = functional.pad(offsets_BC.flatten(), (0, 1), value=sources_BE.numel())
            self.offsets = ends.to(self._dtype)

    @cached_property
    def targets(self) -> Tensor:
        """For each chunk of the buffer, the chunk of the output it is added to."""
        target_BE = self._gather.entries_4E[3] + self.sample_B1 * self._gather.num_chunks
        targets = torch.empty_like(self.sources)
        return targets.scatter_(0, self.sources.long(), target_BE.flatten().to(self._dtype))


@final
class ColumnGather:
    """Gathers `[B, D]` from a buffer of blocks `[B, columns of the block]`.

    Columns of several blocks are added up, in the order of the blocks. The buffer is read in chunks
    of `chunk` columns, the largest width that divides every range of columns. An entry describes a
    chunk of a block: the number of chunks per sample in earlier blocks and in this block, the
    position in this block, and the chunk of the output. Entries are sorted by output chunk, then by
    block.

    On CUDA, Triton kernels read the entries. Without Triton, index tensors are made for each batch
    size.

    Args:
        blocks: Per block its output columns (start, end), from left to right. Together they cover
            every output column.
        width: Number of output columns.
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
        self._width, self._device, self.mean_slots = width, device, mean_slots
        # the widest rows that divide every block: few rows make a short index
        # docs/decisions/output.md, "One gather for the output"
        self.chunk = gcd(
            width, *(edge for block in blocks for stretch in block for edge in stretch)
        )
        self.num_chunks = width // self.chunk if width else 0
        none = np.zeros(0, dtype=np.int64)
        of_blocks = [
            np.concatenate([none, *(np.arange(a // self.chunk, b // self.chunk) for a, b in block)])
            for block in blocks
        ]
        widths = np.array([len(chunks) for chunks in of_blocks], dtype=np.int64)
        chunks = np.concatenate([none, *of_blocks])
        firsts = np.cumsum(widths) - widths
        # stable: partial sums of a chunk are added up in the order of the blocks
        # docs/decisions/output.md, "One kernel on a GPU"
        order = np.argsort(chunks, kind="stable")
        entries = np.stack(  # as kernels read it: row after row
            [
                np.repeat(firsts, widths),
                np.repeat(widths, widths),
                np.arange(len(chunks)) - np.repeat(firsts, widths),
                chunks,
            ]
        ).take(order, axis=1)
        self.host_entries_4E = entries
        self.entries_4E = ops.upload(entries, device)
        self.lists_C1: Tensor | None = None  # first entry of each output chunk, if any has several
        if len(chunks) != self.num_chunks:
            lists = np.searchsorted(chunks[order], np.arange(self.num_chunks + 1))
            self.lists_C1 = ops.upload(lists, device)
        self._indexes: dict[int, _ChunkIndex] = {}

    def of_codecs(self, codecs: Codecs, num_ranks: int) -> Codecs:
        """Return the wire formats that `gather` reads and `scatter_grad` writes by themselves.

        Args:
            codecs: Wire formats of embeddings and of gradients.
            num_ranks: Number of ranks of the exchange; one rank encodes nothing.
        """
        may = self.entries_4E.is_cuda and ops.HAS_TRITON and num_ranks > 1
        # values of fp8 and int8 share scales: their formats have no cast, and are decoded first
        forward, backward = (wire if may and wire.cast else EXACT for wire in codecs)
        return forward, backward

    def gather(
        self,
        buffer: Tensor,
        batch_size: int,
        counts: Tensor = NO_COUNTS,
        arrived: Tensor | None = None,
        wire: WireFormat = EXACT,
    ) -> Tensor:
        """Return the output, `[B, D]`.

        Args:
            buffer: The receive buffer, flat.
            batch_size: B.
            counts: `[row-split slots, B]` ids per bag, int32 or int64, if any slot is averaged.
            arrived: First values of the buffer in their wire format; `wire` is given too.
            wire: Wire format of `arrived`.
        """
        if not batch_size:
            return buffer.new_empty(0, self._width)
        if buffer.is_cuda and ops.HAS_TRITON:
            from recsys.kernels.output_triton import gather

            of_means = counts if self.mean_slots else None
            return gather(buffer, batch_size, self.columns, of_means, arrived, wire.loss_scale)
        index = self._indexes.get(batch_size) or self._index(batch_size)
        rows = buffer.view(-1, self.chunk)
        if not index.offsets.numel():
            output = rows.index_select(0, index.sources)
        else:
            output = functional.embedding_bag(
                index.sources, rows, index.offsets, mode="sum", include_last_offset=True
            )
        output = output.view(batch_size, self._width)
        if self.mean_slots:
            self.divide(output, counts)
        return output

    def scatter_grad(
        self,
        grad_BD: Tensor,
        counts: Tensor = NO_COUNTS,
        scale: float = 1.0,
        num_sent: int = 0,
        wire: WireFormat = EXACT,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the buffer, and the values to send: the transpose of `gather`.

        Args:
            grad_BD: Gradient of the output.
            counts: As for `gather`.
            scale: Factor of the values to send.
            num_sent: Number of first values of the buffer that are sent.
            wire: Wire format of the values to send. If it is given, the gradient of the buffer does
                not have these values.
        """
        if grad_BD.is_cuda and ops.HAS_TRITON and grad_BD.numel():
            from recsys.kernels.output_triton import scatter_grad

            of_means = counts if self.mean_slots else None
            narrow = wire.cast, wire.loss_scale
            return scatter_grad(grad_BD, self.columns, of_means, scale, num_sent, *narrow)
        if self.mean_slots:
            # autograd may pass the same tensor to other nodes
            grad_BD = grad_BD.clone()
            self.divide(grad_BD, counts)
        index = self._index(grad_BD.shape[0])
        grad_N = grad_BD.reshape(-1, self.chunk).index_select(0, index.targets).view(-1)
        sent = grad_N[:num_sent]
        if scale != 1.0:
            # gradients of replicas, behind `sent`, are not scaled
            # docs/decisions/output.md, "One kernel on a GPU"
            sent.mul_(scale)
        return grad_N, sent

    def divide(self, values_BD: Tensor, counts: Tensor) -> None:
        """Divide the columns of averaged slots by the lengths of bags, in place."""
        scales = counts.clamp(min=1).float().reciprocal_().unsqueeze(2)
        for place, start, end in self.mean_slots:
            values_BD[:, start:end].mul_(scales[place])

    @cached_property
    def columns(self) -> GatherColumns:
        """Descriptors of the columns for Triton kernels."""
        from recsys.kernels.output_triton import GatherColumns

        edges = (edge for _, *columns in self.mean_slots for edge in columns)
        # a unit must not contain columns of two slots: it has one divisor
        unit = gcd(self.chunk, _MAX_UNIT, *edges)
        means_U: Tensor | None = None
        if self.mean_slots:
            means = np.full(self._width // unit, -1, dtype=np.int32)
            for place, start, end in self.mean_slots:
                means[start // unit : end // unit] = place
            means_U = ops.upload(means, self._device)
        sizes = self._width, self.chunk, unit
        return GatherColumns(self.entries_4E, self.lists_C1, means_U, *sizes)

    def _index(self, batch_size: int) -> _ChunkIndex:
        if batch_size not in self._indexes:
            if len(self._indexes) >= _MAX_CACHED_INDEXES:
                self._indexes.pop(next(iter(self._indexes)))
            self._indexes[batch_size] = _ChunkIndex(self, batch_size)
        return self._indexes[batch_size]


@final
class PooledRows:
    """Rows of a batch with one row per sample, among all ranks or within a node.

    Args:
        stage: The stage or hop.
        rank: This rank.
        ctx: The batch.
        samples: Samples of each rank; within a node, of all its `sample_ranks`.
    """

    def __init__(
        self, stage: PooledStage, rank: int, ctx: BatchContext, samples: np.ndarray
    ) -> None:
        self._stage, self._batch_sizes = stage, ctx.shape.batch_sizes_R
        self._num_samples, self._counts = int(samples[rank]), ctx.prepared.bag_counts
        self._gather, receives = stage.gather, stage.widths * self._num_samples
        # a reduce-scatter needs blocks of one size; all ranks decide by the same sizes
        # docs/decisions/row_split.md, "Reduce-scatter over NCCL"
        self.adds_up = bool(stage.adds_up and self._num_samples and np.ptp(samples) == 0)
        if self.adds_up:
            self._gather, receives = stage.sums, receives[:1]
        self.sends: list[int] = (samples * stage.sent.widths_R).tolist()
        self.receives: list[int] = receives.tolist()
        self.read_codecs = stage.read_codecs
        # in a narrow format scaled gradients may underflow: they are scaled after the exchange
        self.scales_early = stage.codecs[1] is EXACT

    def pack(self, lookups: Sequence[Tensor]) -> Tensor:
        """Return the send buffer, flat.

        Args:
            lookups: Outputs `[T, C_g]` of the lookups, then of further blocks.
        """
        sent, num_groups = self._stage.sent, len(self._stage.sent.group_widths)
        if num_groups > 1:
            # columns side by side: the samples of each rank are then one contiguous block
            values = torch.cat(tuple(lookups[:num_groups]), dim=1).reshape(-1)
        elif num_groups:
            values = lookups[0].reshape(-1)
        else:
            values = torch.empty(0, device=self._stage.device)
        if sent.order.size:
            blocks = [values, *(block.reshape(-1) for block in lookups[num_groups:])]
            values = in_order(blocks, self._block_sizes(), sent.order)
        return values

    def _block_sizes(self) -> list[np.ndarray]:
        """Return per block the number of values for each of its ranks."""
        return [self._batch_sizes[ranks] * width for ranks, width in self._stage.sent.blocks]

    def gather(self, buffer: Tensor, arrived: Tensor) -> Tensor:
        """Return the output `[B, D]`.

        Args:
            buffer: The receive buffer, flat.
            arrived: Its received elements in their wire format.
        """
        wire = self.read_codecs[0]
        read = () if wire is EXACT else (arrived, wire)
        return self._gather.gather(buffer, self._num_samples, self._counts, *read)

    def scatter_grad(self, grad_BD: Tensor, num_received: int) -> tuple[Tensor, Tensor]:
        """Return the gradient of the buffer, and of its `num_received` received elements."""
        scale = self._stage.grad_scale if self.scales_early else 1.0
        to_send = num_received, self.read_codecs[1]
        return self._gather.scatter_grad(grad_BD, self._counts, scale, *to_send)

    def unpack(self, grad: Tensor) -> list[Tensor]:
        """Return the gradients of the lookups, given the gradient of the send buffer."""
        sent, sums = self._stage.sent, []
        if sent.order.size:
            sizes, back = self._block_sizes(), np.argsort(sent.order).astype(np.int32)
            whole = in_order([grad], [np.concatenate(sizes)[sent.order]], back)
            grad, *others = whole.split([int(of_block.sum()) for of_block in sizes])
            sums = [x.view(-1, w) for x, (_, w) in zip(others, sent.blocks[1:], strict=True)]
        parts: Sequence[Tensor] = ()
        if sent.group_widths:
            parts = grad.view(-1, sent.blocks[0][1]).split(sent.group_widths, dim=1)
        return [*(part.contiguous() for part in parts), *sums]

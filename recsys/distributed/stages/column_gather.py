"""Lays out what arrived in an output stage as the unsharded module would have it, and back.

What arrives is one buffer of blocks `[B, columns of the block]`, one or more from each rank. One
gather gives `[B, D]`; parts of row-split tables are added up by the way, and averaged. Its
transpose gives the gradient of the buffer. All that is known of the columns does not depend on the
batch.

Shape names: `B` samples, `D` output columns, `C` chunks of them, `E` chunks in the blocks.
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

from recsys.distributed.ranks.wire import WireFormat
from recsys.distributed.stages.batch import NO_COUNTS
from recsys.kernels import ops

if TYPE_CHECKING:
    from recsys.kernels.output_triton import Columns

_MAX_CACHED_PLACEMENTS = 4  # one per batch size seen; datasets have few
_MAX_UNIT = 32

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Ranges of columns, half open."""
MeanSlot: TypeAlias = tuple[int, int, int]
"""A position among the row-split slots, and the first and last column of its output."""


@final
class _Placement:
    """The gathers for one batch size, computed on the device from descriptors of the columns.

    `collect` lists, for each chunk of the output `[B, D]`, the chunks of the buffer that add up
    to it; `offsets` is where each list begins, empty if every list has one entry.
    """

    def __init__(self, gather: ColumnGather, batch_size: int) -> None:
        self._gather = gather
        first_E, width_E, place_E, _ = gather.entries_4E
        self.sample_B1 = torch.arange(batch_size, device=first_E.device).unsqueeze(1)
        collect_BE = first_E * batch_size + place_E
        collect_BE = collect_BE + self.sample_B1 * width_E
        fits = collect_BE.numel() < 2**31
        self._dtype = torch.int32 if fits else torch.int64
        self.collect = collect_BE.flatten().to(self._dtype)
        self.offsets = self.collect[:0]
        if gather.lists_C1 is not None:
            offsets_BC = gather.lists_C1[:-1] + self.sample_B1 * first_E.numel()
            ends = functional.pad(offsets_BC.flatten(), (0, 1), value=collect_BE.numel())
            self.offsets = ends.to(self._dtype)

    @cached_property
    def spread(self) -> Tensor:
        """For each chunk of the buffer, the chunk of the output it goes to."""
        target_BE = self._gather.entries_4E[3] + self.sample_B1 * self._gather.num_chunks
        spread = torch.empty_like(self.collect)
        return spread.scatter_(0, self.collect.long(), target_BE.flatten().to(self._dtype))


@final
class ColumnGather:
    """Lays out a buffer of blocks `[B, columns of the block]` as `[B, D]`.

    Columns that several blocks hold are added up, in the order of the blocks. The buffer is read as
    rows of `chunk` columns, the largest width that divides every stretch of columns. Entry `e` of
    `E` is a chunk that a block holds of each sample: chunk `place` of `width` in the block, before
    which are `first` chunks of each sample; it goes to a chunk of the output. Entries are in the
    order of the output, then of the blocks.

    On CUDA, Triton's kernels read the entries themselves, where Triton is; else an index of them is
    made for each batch size.

    Args:
        blocks: per block the output columns (start, end) it holds, from left to right; together
            they hold every output column.
        width: output columns.
        device: of the buffers.
        mean_slots: what is divided by the lengths of bags.
    """

    def __init__(
        self,
        blocks: Sequence[Ranges],
        width: int,
        device: torch.device,
        mean_slots: Sequence[MeanSlot] = (),
    ) -> None:
        self._width, self._device, self.mean_slots = width, device, mean_slots
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
        self.lists_C1: Tensor | None = None  # where the entries of each chunk of the output begin
        if len(chunks) != self.num_chunks:
            lists = np.searchsorted(chunks[order], np.arange(self.num_chunks + 1))
            self.lists_C1 = ops.upload(lists, device)
        self._placements: dict[int, _Placement] = {}

    def of_codecs(
        self, codecs: tuple[WireFormat | None, WireFormat | None], num_ranks: int
    ) -> tuple[WireFormat | None, WireFormat | None]:
        """Return the formats, there and back, that `collect` reads and `spread` writes.

        Args:
            codecs: those in which values travel.
            num_ranks: that exchange them; with one nothing is encoded.
        """
        may = self.entries_4E.is_cuda and ops.HAS_TRITON and num_ranks > 1
        there, back = (
            wire if may and wire is not None and wire.cast is not None else None for wire in codecs
        )
        return there, back

    def collect(
        self,
        buffer: Tensor,
        batch_size: int,
        counts: Tensor = NO_COUNTS,
        arrived: Tensor | None = None,
        wire: WireFormat | None = None,
    ) -> Tensor:
        """Return the output.

        Args:
            buffer: flat.
            batch_size: B.
            counts: `[row-split slots, B]` ids per bag, int32 or int64, if any slot is averaged.
            arrived: what the first values of the buffer are, as they travel, if it reads them.
            wire: in which they travel.

        Returns:
            `[B, D]`.
        """
        if not batch_size:
            return buffer.new_empty(0, self._width)
        if buffer.is_cuda and ops.HAS_TRITON:
            from recsys.kernels.output_triton import collect

            loss_scale = None if wire is None else wire.loss_scale
            return collect(buffer, batch_size, self.columns, counts, arrived, loss_scale)
        placement = self._placements.get(batch_size) or self._placement(batch_size)
        rows = buffer.view(-1, self.chunk)
        if not placement.offsets.numel():
            output = rows.index_select(0, placement.collect)
        else:
            output = functional.embedding_bag(
                placement.collect, rows, placement.offsets, mode="sum", include_last_offset=True
            )
        output = output.view(batch_size, self._width)
        if self.mean_slots:
            self.divide(output, counts)
        return output

    def spread(
        self,
        grad_BD: Tensor,
        counts: Tensor = NO_COUNTS,
        scale: float = 1.0,
        num_sent: int = 0,
        wire: WireFormat | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the buffer, by the transpose of `collect`, and what is sent.

        Args:
            grad_BD: the output's.
            counts: as for `collect`.
            scale: multiplies what is sent.
            num_sent: how many of the buffer's first values are sent.
            wire: in which they travel, if it writes it; the gradient of the buffer does not have
                them then.
        """
        if grad_BD.is_cuda and ops.HAS_TRITON and grad_BD.numel():
            from recsys.kernels.output_triton import spread

            narrow = (None, None) if wire is None else (wire.cast, wire.loss_scale)
            return spread(grad_BD, self.columns, counts, scale, num_sent, *narrow)
        if self.mean_slots:
            grad_BD = grad_BD.clone()
            self.divide(grad_BD, counts)
        placement = self._placement(grad_BD.shape[0])
        spread_N = grad_BD.reshape(-1, self.chunk).index_select(0, placement.spread).view(-1)
        sent = spread_N[:num_sent]
        if scale != 1.0:
            sent.mul_(scale)
        return spread_N, sent

    def divide(self, values_BD: Tensor, counts: Tensor) -> None:
        """Divide the columns of averaged slots by the lengths of bags, in place."""
        scales = counts.clamp(min=1).float().reciprocal_().unsqueeze(2)
        for place, start, end in self.mean_slots:
            values_BD[:, start:end].mul_(scales[place])

    @cached_property
    def columns(self) -> Columns:
        """What kernels are told of the columns."""
        from recsys.kernels.output_triton import Columns

        edges = (edge for _, *columns in self.mean_slots for edge in columns)
        unit = gcd(self.chunk, _MAX_UNIT, *edges)
        means_U: Tensor | None = None
        if self.mean_slots:
            means = np.full(self._width // unit, -1, dtype=np.int32)
            for place, start, end in self.mean_slots:
                means[start // unit : end // unit] = place
            means_U = ops.upload(means, self._device)
        sizes = self._width, self.chunk, unit
        return Columns(self.entries_4E, self.lists_C1, means_U, *sizes)

    def _placement(self, batch_size: int) -> _Placement:
        if batch_size not in self._placements:
            if len(self._placements) >= _MAX_CACHED_PLACEMENTS:
                self._placements.pop(next(iter(self._placements)))
            self._placements[batch_size] = _Placement(self, batch_size)
        return self._placements[batch_size]

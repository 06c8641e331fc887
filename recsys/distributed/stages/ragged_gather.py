"""Lays out what arrived of a batch whose blocks do not all have a row for each of its samples.

A block is what comes of one stream. It has a *row per bag*, for the bags that its feature has in
the batch, and nothing in place of those that it has not. Or it has a *row per id*: the ids of all
bags, one after the other, whose rows are added up here. Laid out, there is a row for each sample,
which is 0 where nothing came. Columns that several blocks hold, parts of row-split tables, are
added up in the order of the blocks.

Shape names: `K` blocks, `B` samples, `D` columns, `E` chunks in the blocks, `P` parts of which
lengths are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recsys.distributed.stages.column_gather import ColumnGather, MeanSlot, Ranges
from recsys.kernels import ops

if TYPE_CHECKING:
    from recsys.kernels.output_triton import Columns

NO_PART = -1
"""In place of a part, where a block has a row per bag."""


@final
class RaggedGather:
    """The blocks of such batches, and where their columns go.

    Args:
        blocks: as for `ColumnGather`.
        width: D.
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
        self.columns = ColumnGather(blocks, width, device, mean_slots)
        self.width, self.chunk = width, self.columns.chunk or 1
        widths = [sum(end - start for start, end in block) for block in blocks]
        self.widths_K = np.array(widths, dtype=np.int64)
        # the chunks before an entry's block tell which it is
        chunks_K = self.widths_K // self.chunk
        first_K, filled = np.cumsum(chunks_K) - chunks_K, np.flatnonzero(chunks_K)
        first_E, _, place_E, chunk_E = self.columns.host_entries_4E
        self.block_E: np.ndarray = filled[np.searchsorted(first_K[filled], first_E)]
        # on a host: the chunks of one row of each block, block by block, and how many before each
        self.chunks_K = torch.from_numpy(chunks_K)
        self.first_K = torch.from_numpy(first_K)
        self.output_chunks = torch.from_numpy(chunk_E[np.argsort(first_E + place_E)])

    @cached_property
    def block_on_device_E(self) -> Tensor:
        """The block of each entry."""
        return ops.upload(self.block_E, self.columns.entries_4E.device)


@final
class RaggedBatch:
    """A batch as blocks in a buffer, and as a rectangle.

    Args:
        gather: whose blocks it has.
        rows_K: `[K]` rows of each block.
        num_samples: B.
        part_K: `[K]` the part that a block with a row per id is of, else `NO_PART`.
        lengths_PB: `[P * B]` int32 or int64: ids of each part in each bag; None: all blocks have a
            row per bag.

    Attributes:
        num_values: of the buffer.
    """

    def __init__(
        self,
        gather: RaggedGather,
        rows_K: np.ndarray,
        num_samples: int,
        part_K: np.ndarray,
        lengths_PB: Tensor | None = None,
    ) -> None:
        self._gather, self._rows_K, self._num_samples = gather, rows_K, num_samples
        self._part_K, self._lengths_PB = part_K, lengths_PB
        self.num_values = int(rows_K @ gather.widths_K)
        chunks_K = rows_K * (gather.widths_K // gather.chunk)
        self._before_K = np.cumsum(chunks_K) - chunks_K

    @cached_property
    def _on_device(self) -> tuple[Columns, Tensor, Tensor, Tensor | None]:
        """What kernels are told of the columns, of their blocks, and of the batch."""
        gather, parts = self._gather, (self._before_K, self._rows_K, self._part_K)
        columns = gather.columns.columns
        uploaded = ops.upload(np.concatenate(parts), columns.entries_4E.device)
        lengths = self._lengths_PB
        offsets = None if lengths is None else ops.complete_cumsum(lengths)
        return columns, gather.block_on_device_E, uploaded, offsets

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gathers in PyTorch, on the host.

        For each chunk of the rectangle, the chunks of the buffer that add up to it, end to end;
        where each list begins; and for each chunk of the buffer, the chunk of the rectangle.
        """
        gather, num_samples = self._gather, self._num_samples
        num_chunks, rows_K = gather.columns.num_chunks, torch.from_numpy(self._rows_K)
        sample_B = torch.arange(num_samples)
        if self._lengths_PB is None:
            rows_KB = (sample_B < rows_K.unsqueeze(1)).long()
        else:
            part_K = torch.from_numpy(self._part_K)
            rows_KB = self._lengths_PB.view(-1, num_samples).index_select(0, part_K.clamp(min=0))
            by_bag = (part_K == NO_PART).nonzero().squeeze(1)
            if by_bag.numel():
                rows_KB[by_bag] = (sample_B < rows_K[by_bag].unsqueeze(1)).to(rows_KB.dtype)
        # of each row its block and its sample, then of each chunk the row
        block_N = torch.arange(len(rows_K)).repeat_interleave(rows_K)
        sample_N = sample_B.repeat(len(rows_K)).repeat_interleave(
            rows_KB.flatten(), output_size=len(block_N)
        )
        chunks_N = gather.chunks_K[block_N]
        row = torch.arange(len(block_N)).repeat_interleave(chunks_N)
        within = torch.arange(len(row)) - (chunks_N.cumsum(0) - chunks_N)[row]
        spread = gather.output_chunks[gather.first_K[block_N][row] + within]
        spread += sample_N[row] * num_chunks
        collect = torch.sort(spread, stable=True).indices
        offsets = ops.complete_cumsum(torch.bincount(spread, minlength=num_samples * num_chunks))
        return collect, offsets, spread

    def collect(self, buffer: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the rectangle.

        Args:
            buffer: flat.
            counts: `[row-split slots, B]` ids per bag, if any slot is averaged.

        Returns:
            `[B, D]`.
        """
        gather, num_samples = self._gather, self._num_samples
        if not num_samples:
            return buffer.new_zeros(0, gather.width)
        if buffer.is_cuda:
            from recsys.kernels.ragged_triton import collect_ragged

            return collect_ragged(buffer, num_samples, *self._on_device, counts)
        index, offsets, _ = self._index
        rows = functional.embedding_bag(
            index, buffer.view(-1, gather.chunk), offsets, mode="sum", include_last_offset=True
        )
        output = rows.view(num_samples, gather.width)
        if gather.columns.mean_slots:
            gather.columns.divide(output, counts)
        return output

    def spread(self, grad_BD: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the gradient of the buffer, by the transpose of `collect`.

        Args:
            grad_BD: the rectangle's.
            counts: as for `collect`.
        """
        gather = self._gather
        if not self.num_values:
            return grad_BD.new_empty(0)
        if grad_BD.is_cuda:
            from recsys.kernels.ragged_triton import spread_ragged

            return spread_ragged(grad_BD, self.num_values, *self._on_device, counts)
        if gather.columns.mean_slots:
            grad_BD = grad_BD.clone()
            gather.columns.divide(grad_BD, counts)
        return grad_BD.reshape(-1, gather.chunk).index_select(0, self._index[2]).view(-1)

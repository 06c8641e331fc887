"""Lays out what arrived of batches whose features have batch sizes of their own, without padding.

A block of the buffer has the bags that a feature has in a batch, and nothing in place of those that
it has not. Laid out, they are the first rows of a rectangle, whose other rows are 0. An owner of
tables has the blocks of all ranks' batches, one batch below the other; a rank has those of its own
batch from all owners, and adds up the parts of row-split tables.

Shape names: `G` batches, `K` blocks of each, `T` rows of all, `D` columns, `E` chunks in the
blocks.
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
        filled = np.flatnonzero(chunks_K)
        before = (np.cumsum(chunks_K) - chunks_K)[filled]
        first_E = self.columns.host_entries_4E[0]
        self.block_E: np.ndarray = filled[np.searchsorted(before, first_E)]

    @cached_property
    def block_on_device_E(self) -> Tensor:
        """The block of each entry."""
        return ops.upload(self.block_E, self.columns.entries_4E.device)


@final
class RaggedBatches:
    """Batches as blocks in a buffer, and as a rectangle.

    Args:
        gather: whose blocks they have.
        bags_GK: `[G, K]` bags of each block.
        rows_G: `[G]` rows of each batch's rectangle, at least as many.

    Attributes:
        sizes_G: values of each batch in the buffer.
        num_rows: T.
    """

    def __init__(self, gather: RaggedGather, bags_GK: np.ndarray, rows_G: np.ndarray) -> None:
        self._gather, self._bags_GK, self._rows_G = gather, bags_GK, rows_G
        self.sizes_G: list[int] = (bags_GK @ gather.widths_K).tolist()
        self.num_rows = int(rows_G.sum())
        chunks_GK = bags_GK * (gather.widths_K // gather.chunk)
        self._before_GK = (np.cumsum(chunks_GK) - chunks_GK.ravel()).reshape(chunks_GK.shape)
        self._first_G = np.cumsum(rows_G) - rows_G

    @cached_property
    def _on_device(self) -> tuple[Columns, Tensor, Tensor, int]:
        """What kernels are told of the columns, of their blocks, and of the batches."""
        gather, parts = self._gather, (self._before_GK, self._bags_GK, self._first_G)
        batches = np.concatenate([part.ravel() for part in parts])
        columns = gather.columns.columns
        uploaded = ops.upload(batches, columns.entries_4E.device)
        return columns, gather.block_on_device_E, uploaded, len(self._first_G)

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gathers in PyTorch, on the host.

        For each chunk of the rectangle, the chunks of the buffer that add up to it, end to end;
        where each list begins; and for each chunk of the buffer, the chunk of the rectangle.
        """
        gather, num_chunks = self._gather, self._gather.columns.num_chunks
        batch_T = np.repeat(np.arange(len(self._rows_G)), self._rows_G)
        row_T1 = (np.arange(self.num_rows) - self._first_G[batch_T])[:, None]
        _, width_E, place_E, chunk_E = gather.columns.host_entries_4E
        exists_TE = row_T1 < self._bags_GK[:, gather.block_E][batch_T]
        at_TE = self._before_GK[:, gather.block_E][batch_T] + row_T1 * width_E + place_E
        collect = at_TE[exists_TE]
        target = (np.arange(self.num_rows)[:, None] * num_chunks + chunk_E)[exists_TE]
        numbers = np.bincount(target, minlength=self.num_rows * num_chunks)
        spread = np.empty_like(collect)
        spread[collect] = target
        offsets = np.concatenate([[0], np.cumsum(numbers)])
        return torch.from_numpy(collect), torch.from_numpy(offsets), torch.from_numpy(spread)

    def collect(self, buffer: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the rectangle.

        Args:
            buffer: flat.
            counts: `[row-split slots, T]` ids per bag, if any slot is averaged.

        Returns:
            `[T, D]`.
        """
        gather = self._gather
        if not self.num_rows or not gather.width:
            return buffer.new_zeros(self.num_rows, gather.width)
        if buffer.is_cuda:
            from recsys.kernels.ragged_triton import collect_ragged

            return collect_ragged(buffer, self.num_rows, *self._on_device, counts)
        index, offsets, _ = self._index
        rows = functional.embedding_bag(
            index, buffer.view(-1, gather.chunk), offsets, mode="sum", include_last_offset=True
        )
        output = rows.view(self.num_rows, gather.width)
        if gather.columns.mean_slots:
            gather.columns.divide(output, counts)
        return output

    def spread(self, grad_TD: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the gradient of the buffer, by the transpose of `collect`.

        Args:
            grad_TD: the rectangle's.
            counts: as for `collect`.
        """
        gather = self._gather
        if not sum(self.sizes_G):
            return grad_TD.new_empty(0)
        if grad_TD.is_cuda:
            from recsys.kernels.ragged_triton import spread_ragged

            return spread_ragged(grad_TD, sum(self.sizes_G), *self._on_device, counts)
        if gather.columns.mean_slots:
            grad_TD = grad_TD.clone()
            gather.columns.divide(grad_TD, counts)
        return grad_TD.reshape(-1, gather.chunk).index_select(0, self._index[2]).view(-1)

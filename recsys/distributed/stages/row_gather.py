"""Gather of received rows for sequences.

The receive buffer has, stream by stream, a row per id with the columns of the stream. The output
has a row per id with the columns of all its streams.

Shapes: `S` streams, `N` their ids, `R` rows of the output, `D` its columns.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from recsys.kernels import ops


@final
class RowGather:
    """Bijection between the values of a batch's receive buffer and of its `[R, D]` output.

    Args:
        dim: Embedding dimension, D.
        chunk: Columns that are moved together; divides `dim` and the columns of every stream.
        first_S: `[S]` first chunk of each stream's columns in the output.
        chunks_S: `[S]` chunks of a row of each stream.
        counts_S: `[S]` ids of each stream.
        shifts_S: `[S]` output row of an id minus its position in the batch.
        places_N: `[N]` int64 positions of the ids in the batch, stream by stream.
    """

    def __init__(
        self,
        dim: int,
        chunk: int,
        first_S: np.ndarray,
        chunks_S: np.ndarray,
        counts_S: np.ndarray,
        shifts_S: np.ndarray,
        places_N: Tensor,
    ) -> None:
        self._dim, self._chunk = dim, chunk
        self._on_device: tuple[Tensor, Tensor, int, int] | tuple[()] = ()
        self._target = places_N  # for each chunk of the buffer the chunk of the output
        # index_copy_ and index_select suffice for whole rows in the order of the batch
        # docs/decisions/output.md, "One kernel on a GPU"
        if dim == chunk and not shifts_S.any():
            return
        streams = np.stack([counts_S, chunks_S, shifts_S, first_S])
        if places_N.is_cuda and ops.HAS_TRITON and places_N.numel():
            self._on_device = self._streams(streams, places_N)
        else:
            self._target = self._chunk_of_each(streams, places_N)

    def _streams(self, streams_4S: np.ndarray, places_N: Tensor) -> tuple[Tensor, Tensor, int, int]:
        """Return the arguments of the Triton kernels."""
        counts_S, chunks_S, shifts_S, first_S = streams_4S
        before_S, sizes_S = np.cumsum(counts_S) - counts_S, counts_S * chunks_S
        starts_S = np.cumsum(sizes_S) - sizes_S - before_S * chunks_S
        streams_5S = np.stack([before_S, chunks_S, starts_S, shifts_S, first_S])
        uploaded = ops.upload(streams_5S, places_N.device)
        return places_N, uploaded, int(chunks_S.max()), self._chunk

    def _chunk_of_each(self, streams_4S: np.ndarray, target: Tensor) -> Tensor:
        """Return the output chunk of each chunk of the buffer."""
        counts_S, chunks_S, shifts_S, first_S = streams_4S
        per_row = self._dim // self._chunk
        num_ids, device = target.numel(), target.device

        def repeat(values_S: np.ndarray) -> Tensor:
            both = ops.upload(np.stack([values_S, counts_S]), device)
            return both[0].repeat_interleave(both[1], output_size=num_ids)

        if shifts_S.any():
            target = target + repeat(shifts_S)
        if per_row == 1:
            return target
        target = target * per_row
        if first_S.any():
            target += repeat(first_S)
        chunks, total = repeat(chunks_S), int(counts_S @ chunks_S)
        first = target - (chunks.cumsum(0) - chunks)
        within = torch.arange(total, device=device)
        return first.repeat_interleave(chunks, output_size=total) + within

    def gather(self, buffer: Tensor) -> Tensor:
        """Return the output, `[R, D]`.

        Args:
            buffer: The receive buffer, flat.
        """
        if self._on_device:
            from recsys.kernels.sequence_triton import gather_rows

            return gather_rows(buffer, self._dim, *self._on_device)
        output = torch.empty_like(buffer, memory_format=torch.contiguous_format)
        rows = buffer.view(-1, self._chunk)
        output.view(-1, self._chunk).index_copy_(0, self._target, rows)
        return output.view(-1, self._dim)

    def scatter_grad(self, grad_RD: Tensor) -> Tensor:
        """Return the gradient of the buffer: the transpose of `gather`.

        Args:
            grad_RD: Gradient of the output.
        """
        if self._on_device:
            from recsys.kernels.sequence_triton import scatter_grad_rows

            return scatter_grad_rows(grad_RD, *self._on_device)
        return grad_RD.reshape(-1, self._chunk).index_select(0, self._target).view(-1)

"""Kernels of an output stage where blocks have other rows than one per sample, by Triton.

Those of `output_triton`, but for where the rows of a bag begin: that depends on how many bags each
block has in the batch, or on how many ids each bag has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys.kernels.ops_triton import _current
from recsys.kernels.output_triton import _COLUMNS, _SAMPLES, Columns, _mean_factors, _own_tile


@triton.jit
def _rows_of_bags(
    batch_ptr, offsets_ptr, num_blocks, blocks, samples, num_samples, HAS_PARTS: tl.constexpr
):
    """Return the first row of samples' bags in blocks, and the row behind the last."""
    num_rows = tl.load(batch_ptr + num_blocks + blocks)
    begins = samples[:, None] + tl.zeros_like(blocks)[None, :]
    ends = begins + (begins < num_rows[None, :])
    if HAS_PARTS:
        parts = tl.load(batch_ptr + 2 * num_blocks + blocks)
        is_part = parts >= 0
        first = parts * num_samples
        before = tl.load(offsets_ptr + first, mask=is_part, other=0).to(tl.int64)
        bags = first[None, :] + samples[:, None]
        starts = tl.load(offsets_ptr + bags, mask=is_part[None, :], other=0).to(tl.int64)
        stops = tl.load(offsets_ptr + bags + 1, mask=is_part[None, :], other=0).to(tl.int64)
        begins = tl.where(is_part[None, :], starts - before[None, :], begins)
        ends = tl.where(is_part[None, :], stops - before[None, :], ends)
    return begins, ends


# `do_not_specialize`: as in `ops_triton`.
@triton.jit(do_not_specialize=["num_samples", "row_stride", "column_stride"])
def _move_ragged(
    matrix_ptr,
    row_stride,
    column_stride,
    buffer_ptr,
    entries_ptr,
    lists_ptr,
    means_ptr,
    counts_ptr,
    blocks_ptr,
    batch_ptr,
    offsets_ptr,
    num_samples,
    num_units,
    num_entries,
    num_blocks,
    COLLECTS: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_MEANS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    samples, units, is_real = _own_tile(num_samples, num_units, BLOCK_B, BLOCK_U)
    columns = (units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]).to(tl.int64)
    places = samples[:, None, None] * row_stride + columns[None, :, :] * column_stride
    chunks = units // (CHUNK // UNIT)
    in_chunk = (units % (CHUNK // UNIT) * UNIT)[None, :, None] + tl.arange(0, UNIT)[None, None, :]
    first = chunks.to(tl.int64)
    numbers = tl.full(chunks.shape, 1, tl.int64)
    if HAS_LISTS:
        first = tl.load(lists_ptr + chunks)
        numbers = tl.load(lists_ptr + chunks + 1) - first
    if COLLECTS:
        values = tl.zeros([BLOCK_B, BLOCK_U, UNIT], tl.float32)
    else:
        values = tl.load(matrix_ptr + places).to(tl.float32)
        if HAS_MEANS:
            values *= _mean_factors(means_ptr, counts_ptr, units, samples, num_samples)
    i, longest = 0, tl.max(numbers)
    while i < longest:
        entries = first + tl.minimum(i, numbers - 1)
        blocks = tl.load(blocks_ptr + entries)
        widths = tl.load(entries_ptr + num_entries + entries)[None, :]
        chunk_of_block = tl.load(batch_ptr + blocks)
        chunk_of_block += tl.load(entries_ptr + 2 * num_entries + entries)
        rows, ends = _rows_of_bags(
            batch_ptr, offsets_ptr, num_blocks, blocks, samples, num_samples, HAS_PARTS
        )
        ends = tl.where((i < numbers)[None, :], ends, rows)
        most = tl.max(tl.max(ends - rows, axis=1), axis=0)
        j = 0
        while j < most:
            at = (chunk_of_block[None, :] + rows * widths) * CHUNK
            exists = is_real & (rows < ends)[:, :, None]
            if COLLECTS:
                values += tl.load(buffer_ptr + at[:, :, None] + in_chunk, mask=exists, other=0.0)
            else:
                tl.store(buffer_ptr + at[:, :, None] + in_chunk, values, mask=exists)
            rows += 1
            j += 1
        i += 1
    if COLLECTS:
        if HAS_MEANS:
            values *= _mean_factors(means_ptr, counts_ptr, units, samples, num_samples)
        tl.store(matrix_ptr + places, values, mask=is_real)


def _move(
    matrix: Tensor,
    buffer: Tensor,
    columns: Columns,
    block_E: Tensor,
    batch: Tensor,
    offsets: Tensor | None,
    counts: Tensor | None,
    collects: bool,
) -> None:
    entries, lists, means, width, chunk, unit = columns
    num_samples, num_units = matrix.shape[0], width // unit
    block = min(_COLUMNS // unit, triton.next_power_of_2(num_units))
    grid = triton.cdiv(num_samples, _SAMPLES), triton.cdiv(num_units, block)
    with _current(entries.device):
        _move_ragged[grid](
            matrix,
            *matrix.stride(),
            buffer,
            entries,
            entries if lists is None else lists,
            entries if means is None else means,
            entries if counts is None else counts.contiguous(),
            block_E,
            batch,
            batch if offsets is None else offsets,
            num_samples,
            num_units,
            entries.shape[1],
            batch.numel() // 3,
            COLLECTS=collects,
            HAS_LISTS=lists is not None,
            HAS_MEANS=means is not None,
            HAS_PARTS=offsets is not None,
            CHUNK=chunk,
            UNIT=unit,
            BLOCK_B=_SAMPLES,
            BLOCK_U=block,
        )


def collect_ragged(
    buffer: Tensor,
    num_samples: int,
    columns: Columns,
    block_E: Tensor,
    batch: Tensor,
    offsets: Tensor | None,
    counts: Tensor | None,
) -> Tensor:
    """Lay a buffer of blocks out as a rectangle; its twin is `RaggedBatch.collect`.

    Args:
        buffer: flat, fp32.
        num_samples: B, at least 1.
        columns: of the rectangle, at least one.
        block_E: `[E]` int64 the block of each entry.
        batch: `[3 * K]` int64: for each block the chunks of the buffer before it; its rows; and the
            part that it is of, where it has a row per id, else -1.
        offsets: `[P * B + 1]` int32 or int64: of the ids of all parts, bag by bag; None: no block
            has a row per id.
        counts: `[slots, B]` int32 or int64 ids per bag, if anything is averaged.

    Returns:
        `[B, D]` fp32, 0 where no block has a row. What several rows hold is added up in the order
        of the blocks, from 0.
    """
    out = torch.empty(num_samples, columns.width, dtype=buffer.dtype, device=buffer.device)
    _move(out, buffer, columns, block_E, batch, offsets, counts, collects=True)
    return out


def spread_ragged(
    grad_BD: Tensor,
    num_values: int,
    columns: Columns,
    block_E: Tensor,
    batch: Tensor,
    offsets: Tensor | None,
    counts: Tensor | None,
) -> Tensor:
    """Return the gradient of the buffer; its twin is `RaggedBatch.spread`.

    Args:
        grad_BD: `[B, D]` fp32 of any strides.
        num_values: of the buffer, at least one.
        columns: as for `collect`, and so are the others.
        block_E: as there.
        batch: as there.
        offsets: as there.
        counts: as there.
    """
    out = torch.empty(num_values, dtype=grad_BD.dtype, device=grad_BD.device)
    _move(grad_BD, out, columns, block_E, batch, offsets, counts, collects=False)
    return out

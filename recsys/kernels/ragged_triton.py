"""Kernels of an output stage whose features have batch sizes of their own, by Triton.

Those of `output_triton`, but for where a row of a block begins: that depends on how many bags each
block has in each batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys.kernels.ops_triton import _current, _last_at_most
from recsys.kernels.output_triton import _COLUMNS, _SAMPLES, Columns, _mean_factors, _own_tile


@triton.jit
def _places(
    entries_ptr,
    blocks_ptr,
    batches_ptr,
    num_entries,
    num_blocks,
    num_batches,
    entries,
    units,
    batches,
    rows,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Return where units of rows are in the buffer, which these entries hold, and whether."""
    blocks = tl.load(blocks_ptr + entries)
    at = batches[:, None] * num_blocks + blocks[None, :]
    chunks = tl.load(batches_ptr + at)
    exists = rows[:, None] < tl.load(batches_ptr + num_batches * num_blocks + at)
    widths = tl.load(entries_ptr + num_entries + entries)
    chunks += tl.load(entries_ptr + 2 * num_entries + entries)[None, :]
    chunks += rows[:, None] * widths[None, :]
    starts = chunks * CHUNK + (units % (CHUNK // UNIT) * UNIT)[None, :]
    return starts[:, :, None] + tl.arange(0, UNIT)[None, None, :], exists[:, :, None]


# `do_not_specialize`: as in `ops_triton`.
@triton.jit(do_not_specialize=["num_rows", "row_stride", "column_stride"])
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
    batches_ptr,
    num_rows,
    num_units,
    num_entries,
    num_blocks,
    num_batches,
    COLLECTS: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_MEANS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    all_rows, units, is_real = _own_tile(num_rows, num_units, BLOCK_B, BLOCK_U)
    firsts_ptr = batches_ptr + 2 * num_batches * num_blocks
    low = tl.zeros_like(all_rows).to(tl.int32)
    batches = _last_at_most(firsts_ptr, 1, all_rows, low, low + num_batches, STEPS).to(tl.int64)
    rows = all_rows - tl.load(firsts_ptr + batches)
    columns = (units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]).to(tl.int64)
    places = all_rows[:, None, None] * row_stride + columns[None, :, :] * column_stride
    chunks = units // (CHUNK // UNIT)
    begins = chunks.to(tl.int64)
    numbers = tl.full(chunks.shape, 1, tl.int64)
    if HAS_LISTS:
        begins = tl.load(lists_ptr + chunks)
        numbers = tl.load(lists_ptr + chunks + 1) - begins
    if COLLECTS:
        values = tl.zeros([BLOCK_B, BLOCK_U, UNIT], tl.float32)
    else:
        values = tl.load(matrix_ptr + places).to(tl.float32)
        if HAS_MEANS:
            values *= _mean_factors(means_ptr, counts_ptr, units, all_rows, num_rows)
    i, longest = 0, tl.max(numbers)
    while i < longest:
        entries = begins + tl.minimum(i, numbers - 1)
        at, exists = _places(
            entries_ptr,
            blocks_ptr,
            batches_ptr,
            num_entries,
            num_blocks,
            num_batches,
            entries,
            units,
            batches,
            rows,
            CHUNK,
            UNIT,
        )
        exists &= is_real & (i < numbers)[None, :, None]
        if COLLECTS:
            values += tl.load(buffer_ptr + at, mask=exists, other=0.0)
        else:
            tl.store(buffer_ptr + at, values, mask=exists)
        i += 1
    if COLLECTS:
        if HAS_MEANS:
            values *= _mean_factors(means_ptr, counts_ptr, units, all_rows, num_rows)
        tl.store(matrix_ptr + places, values, mask=is_real)


def _move(
    matrix: Tensor,
    buffer: Tensor,
    columns: Columns,
    block_E: Tensor,
    batches: Tensor,
    num_batches: int,
    counts: Tensor | None,
    collects: bool,
) -> None:
    entries, lists, means, width, chunk, unit = columns
    num_rows, num_units = matrix.shape[0], width // unit
    block = min(_COLUMNS // unit, triton.next_power_of_2(num_units))
    grid = triton.cdiv(num_rows, _SAMPLES), triton.cdiv(num_units, block)
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
            batches,
            num_rows,
            num_units,
            entries.shape[1],
            (batches.numel() // num_batches - 1) // 2,
            num_batches,
            COLLECTS=collects,
            HAS_LISTS=lists is not None,
            HAS_MEANS=means is not None,
            CHUNK=chunk,
            UNIT=unit,
            STEPS=num_batches.bit_length(),
            BLOCK_B=_SAMPLES,
            BLOCK_U=block,
        )


def collect_ragged(
    buffer: Tensor,
    num_rows: int,
    columns: Columns,
    block_E: Tensor,
    batches: Tensor,
    num_batches: int,
    counts: Tensor | None,
) -> Tensor:
    """Lay a buffer of blocks out as a rectangle; its twin is `RaggedBatches.collect`.

    Args:
        buffer: flat, fp32.
        num_rows: T, at least 1.
        columns: of the rectangle, at least one.
        block_E: `[E]` int64 the block of each entry.
        batches: `[2 * G * K + G]` int64: for each batch and block the chunks of the buffer before
            it; its bags; and for each batch the rows of the rectangle before it.
        num_batches: G.
        counts: `[slots, T]` int32 or int64 ids per bag, if anything is averaged.

    Returns:
        `[T, D]` fp32, 0 in rows of bags that do not exist. What several blocks hold is added up in
        their order, from 0.
    """
    out = torch.empty(num_rows, columns.width, dtype=buffer.dtype, device=buffer.device)
    _move(out, buffer, columns, block_E, batches, num_batches, counts, collects=True)
    return out


def spread_ragged(
    grad_TD: Tensor,
    num_values: int,
    columns: Columns,
    block_E: Tensor,
    batches: Tensor,
    num_batches: int,
    counts: Tensor | None,
) -> Tensor:
    """Return the gradient of the buffer; its twin is `RaggedBatches.spread`.

    Args:
        grad_TD: `[T, D]` fp32 of any strides.
        num_values: of the buffer, at least one.
        columns: as for `collect`, and so are the others.
        block_E: as there.
        batches: as there.
        num_batches: as there.
        counts: as there.
    """
    out = torch.empty(num_values, dtype=grad_TD.dtype, device=grad_TD.device)
    _move(grad_TD, out, columns, block_E, batches, num_batches, counts, collects=False)
    return out

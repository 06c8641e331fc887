"""Kernels of the output stage on a GPU, by Triton: columns of what arrived to those of the output.

Each is one launch, whatever the plan, and reads descriptors of columns that hold for every batch;
`ColumnGather` makes them, and has the twins in PyTorch, whose bits these return.

A program has a tile of samples and of columns. Columns go by units, powers of two that lie in one
chunk and in one slot, so that their places are worked out once and read side by side.
"""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor

from recsys.kernels.ops_triton import _current
from recsys.kernels.optional_triton import tl, triton

_SAMPLES, _COLUMNS = 16, 128  # of a program


@final
class Columns(NamedTuple):
    """What is known of the columns of an output, on the device.

    Attributes:
        entries_4E: `[4, E]` int64, per chunk that a block of the buffer holds of each sample: the
            chunks of each sample before the block, chunks of the block, the place in the block, and
            the chunk of the output, ascending.
        lists_C1: `[C + 1]` int64 where the entries of each chunk of the output begin; None: each
            has one.
        means_U: `[D / unit]` int32 the row of the counts that each unit is divided by, -1: none;
            None if none is.
        width: D.
        chunk: columns of a chunk.
        unit: columns of a unit, a power of two that divides a chunk.
    """

    entries_4E: Tensor
    lists_C1: Tensor | None
    means_U: Tensor | None
    width: int
    chunk: int
    unit: int


@triton.jit
def _own_tile(num_samples, num_units, BLOCK_B: tl.constexpr, BLOCK_U: tl.constexpr):
    """Return a program's samples and units, and which of them are not past the end.

    Those past the end stand for the last one, so that what they read is there.
    """
    samples = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    units = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    is_real = (samples < num_samples)[:, None, None] & (units < num_units)[None, :, None]
    return tl.minimum(samples, num_samples - 1), tl.minimum(units, num_units - 1), is_real


@triton.jit
def _starts(
    entries_ptr,
    num_entries,
    entries,
    units,
    samples,
    num_samples,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Return where units begin in the buffer, which these entries hold."""
    first = tl.load(entries_ptr + entries) * num_samples
    widths = tl.load(entries_ptr + num_entries + entries)
    first += tl.load(entries_ptr + 2 * num_entries + entries)
    chunks = first[None, :] + samples[:, None] * widths[None, :]
    starts = chunks * CHUNK + (units % (CHUNK // UNIT) * UNIT)[None, :]
    return starts[:, :, None]


@triton.jit
def _read(
    buffer_ptr,
    arrived_ptr,
    num_arrived,
    starts,
    is_there,
    IS_NARROW: tl.constexpr,
    LOSS_SCALE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Return the values of units of the buffer, 0 for those that are not there."""
    places = starts + tl.arange(0, UNIT)[None, None, :]
    if IS_NARROW:
        has_arrived = starts < num_arrived
        values = tl.load(arrived_ptr + places, mask=is_there & has_arrived, other=0.0)
        values = values.to(tl.float32)
        if LOSS_SCALE != 1.0:
            values = tl.div_rn(values, tl.full(values.shape, LOSS_SCALE, tl.float32))
        is_there &= starts >= num_arrived
        rest = tl.load(buffer_ptr + places, mask=is_there, other=0.0)
        values = tl.where(has_arrived, values, rest)
    else:
        values = tl.load(buffer_ptr + places, mask=is_there, other=0.0)
    return values


@triton.jit
def _mean_factors(means_ptr, counts_ptr, units, samples, num_samples):
    """Return one over the lengths of bags, 1 where nothing is averaged."""
    slots = tl.load(means_ptr + units).to(tl.int64)
    places = slots[None, :] * num_samples + samples[:, None]
    counts = tl.load(counts_ptr + places, mask=slots[None, :] >= 0, other=1)
    counts = tl.maximum(counts, 1).to(tl.float32)
    return tl.div_rn(tl.full(counts.shape, 1.0, tl.float32), counts)[:, :, None]


# `do_not_specialize`: as in `ops_triton`.
@triton.jit(do_not_specialize=["num_narrow", "num_samples"])
def _collect(
    out_ptr,
    buffer_ptr,
    narrow_ptr,
    num_narrow,
    entries_ptr,
    lists_ptr,
    means_ptr,
    counts_ptr,
    num_samples,
    num_units,
    num_entries,
    HAS_LISTS: tl.constexpr,
    HAS_MEANS: tl.constexpr,
    IS_NARROW: tl.constexpr,
    LOSS_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    samples, units, is_real = _own_tile(num_samples, num_units, BLOCK_B, BLOCK_U)
    chunks = units // (CHUNK // UNIT)
    if HAS_LISTS:
        begins = tl.load(lists_ptr + chunks)
        numbers = tl.load(lists_ptr + chunks + 1) - begins
        values = tl.zeros([BLOCK_B, BLOCK_U, UNIT], tl.float32)
        i, longest = 0, tl.max(numbers)
        while i < longest:
            entries = begins + tl.minimum(i, numbers - 1)
            starts = _starts(
                entries_ptr, num_entries, entries, units, samples, num_samples, CHUNK, UNIT
            )
            is_there = is_real & (i < numbers)[None, :, None]
            values += _read(
                buffer_ptr, narrow_ptr, num_narrow, starts, is_there, IS_NARROW, LOSS_SCALE, UNIT
            )
            i += 1
    else:
        starts = _starts(entries_ptr, num_entries, chunks, units, samples, num_samples, CHUNK, UNIT)
        values = _read(
            buffer_ptr, narrow_ptr, num_narrow, starts, is_real, IS_NARROW, LOSS_SCALE, UNIT
        )
    if HAS_MEANS:
        values *= _mean_factors(means_ptr, counts_ptr, units, samples, num_samples)
    starts = (samples[:, None] * num_units + units[None, :]) * UNIT
    places = starts[:, :, None] + tl.arange(0, UNIT)[None, None, :]
    tl.store(out_ptr + places, values, mask=is_real)


@triton.jit(do_not_specialize=["num_sent", "num_samples"])
def _spread(
    buffer_ptr,
    grad_ptr,
    row_stride,
    column_stride,
    scale,
    sent_ptr,
    num_sent,
    entries_ptr,
    lists_ptr,
    means_ptr,
    counts_ptr,
    num_samples,
    num_units,
    num_entries,
    HAS_LISTS: tl.constexpr,
    HAS_MEANS: tl.constexpr,
    IS_NARROW: tl.constexpr,
    LOSS_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    samples, units, is_real = _own_tile(num_samples, num_units, BLOCK_B, BLOCK_U)
    chunks = units // (CHUNK // UNIT)
    columns = (units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]).to(tl.int64)
    places = samples[:, None, None] * row_stride + columns[None, :, :] * column_stride
    values = tl.load(grad_ptr + places).to(tl.float32)
    if HAS_MEANS:
        values *= _mean_factors(means_ptr, counts_ptr, units, samples, num_samples)
    begins, numbers = chunks, tl.full([BLOCK_U], 1, tl.int32)
    if HAS_LISTS:
        begins = tl.load(lists_ptr + chunks)
        numbers = tl.load(lists_ptr + chunks + 1) - begins
    i, longest = 0, tl.max(numbers)
    while i < longest:
        entries = begins + tl.minimum(i, numbers - 1)
        starts = _starts(
            entries_ptr, num_entries, entries, units, samples, num_samples, CHUNK, UNIT
        )
        places = starts + tl.arange(0, UNIT)[None, None, :]
        is_there = is_real & (i < numbers)[None, :, None]
        is_sent = starts < num_sent
        given = tl.where(is_sent, values * scale, values)
        if IS_NARROW:  # what is sent is not in the buffer
            narrow = (given * LOSS_SCALE).to(sent_ptr.dtype.element_ty)
            tl.store(sent_ptr + places, narrow, mask=is_there & is_sent)
            is_there &= starts >= num_sent
        tl.store(buffer_ptr + places, given, mask=is_there)
        i += 1


def _launch(
    kernel,
    given,
    batch_size: int,
    columns: Columns,
    counts: Tensor | None,
    is_narrow: bool,
    loss_scale: float | None,
) -> None:
    """Launch a kernel over tiles of samples and columns."""
    entries, lists, means, width, chunk, unit = columns
    num_units = width // unit
    block = min(_COLUMNS // unit, triton.next_power_of_2(num_units))
    grid = triton.cdiv(batch_size, _SAMPLES), triton.cdiv(num_units, block)
    with _current(entries.device):
        kernel[grid](
            *given,
            entries,
            entries if lists is None else lists,
            entries if means is None else means,
            entries if counts is None else counts.contiguous(),
            batch_size,
            num_units,
            entries.shape[1],
            HAS_LISTS=lists is not None,
            HAS_MEANS=means is not None,
            IS_NARROW=is_narrow,
            LOSS_SCALE=loss_scale or 1.0,
            CHUNK=chunk,
            UNIT=unit,
            BLOCK_B=_SAMPLES,
            BLOCK_U=block,
        )


def collect(
    buffer: Tensor,
    batch_size: int,
    columns: Columns,
    counts: Tensor | None,
    arrived: Tensor | None = None,
    loss_scale: float | None = None,
) -> Tensor:
    """Lay a buffer out as the output; its twin is `ColumnGather.collect`.

    Args:
        buffer: flat, of blocks `[B, columns of the block]`, fp32.
        batch_size: B, at least 1.
        columns: of the output, at least one.
        counts: `[slots, B]` int32 or int64 ids per bag, if anything is averaged.
        arrived: values of the first blocks as they travelled, read in place of the buffer's; of any
            floating dtype.
        loss_scale: they are divided by; None: 1.

    Returns:
        `[B, D]` fp32. What several blocks hold is added up in their order, from 0.
    """
    out = torch.empty(batch_size, columns.width, dtype=buffer.dtype, device=buffer.device)
    is_narrow = arrived is not None
    arrived = buffer[:0] if arrived is None else arrived
    given = out, buffer, arrived, arrived.numel()
    _launch(_collect, given, batch_size, columns, counts, is_narrow, loss_scale)
    return out


def spread(
    grad_BD: Tensor,
    columns: Columns,
    counts: Tensor | None,
    scale: float,
    num_sent: int,
    dtype: torch.dtype | None = None,
    loss_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the buffer; its twin is `ColumnGather.spread`.

    Args:
        grad_BD: `[B, D]` fp32 of any strides, at least one value.
        columns: as for `collect`.
        counts: as for `collect`.
        scale: multiplies what is sent, after the division.
        num_sent: values of the buffer's first blocks, which are sent.
        dtype: they travel in; None: fp32.
        loss_scale: multiplies them on their way, if it is not fp32; None: 1.

    Returns:
        Flat and fp32, the gradient of the buffer, not filled where values travel in another dtype;
        and what is sent.
    """
    batch_size = grad_BD.shape[0]
    total = columns.entries_4E.shape[1] * columns.chunk * batch_size
    out = torch.empty(total, dtype=grad_BD.dtype, device=grad_BD.device)
    sent = out[:num_sent]
    if dtype is not None:
        sent = torch.empty(num_sent, dtype=dtype, device=out.device)
    given = out, grad_BD, *grad_BD.stride(), scale, sent, num_sent
    _launch(_spread, given, batch_size, columns, counts, dtype is not None, loss_scale)
    return out, sent

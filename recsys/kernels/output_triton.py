"""Triton kernels of the output stage on a GPU: columns of the receive buffer to output columns.

Each function is one launch for any plan. The kernels read descriptors of the columns, which are
the same for every batch. `ColumnGather` builds the descriptors and has the twins in PyTorch;
results are equal bit for bit.

A program has a tile of samples and of columns. Columns are processed by unit: a power of two of
columns within one chunk and one slot, so that places are computed once and read side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from recsys.kernels.ops_triton import launch
from recsys.kernels.optional_triton import tl, triton
from recsys.kernels.self_check import self_checked

_SAMPLES, _COLUMNS = 16, 128  # per program


@final
class GatherColumns(NamedTuple):
    """Descriptors of the columns of an output, on the device.

    Attributes:
        entries_4E: `[4, E]` int64, an entry per chunk that a block of the buffer has of each
            sample: the chunks of each sample before the block, the chunks of the block, the place
            in the block, and the chunk of the output, ascending.
        lists_C1: `[C + 1]` int64 first entry of each chunk of the output; None: each has one entry.
        means_U: `[D / unit]` int32 the row of the counts by which each unit is divided, -1 for
            none; None if no unit is divided.
        width: D.
        chunk: Columns of a chunk.
        unit: Columns of a unit, a power of two that divides a chunk.
    """

    entries_4E: Tensor
    lists_C1: Tensor | None
    means_U: Tensor | None
    width: int
    chunk: int
    unit: int

    def grid(self, num_samples: int) -> tuple[tuple[int, int], dict[str, int]]:
        """Return the grid of a kernel over tiles, and its constants."""
        num_units = self.width // self.unit
        block = min(_COLUMNS // self.unit, triton.next_power_of_2(num_units))
        known = {"CHUNK": self.chunk, "UNIT": self.unit, "BLOCK_B": _SAMPLES, "BLOCK_U": block}
        return (triton.cdiv(num_samples, _SAMPLES), triton.cdiv(num_units, block)), known


class _Tensors(NamedTuple):
    """Tensors of a kernel; None for unused tensors."""

    matrix: Any
    """`[B, D]` the output, or its gradient."""
    buffer: Any
    narrow: Any
    """The first values of the buffer in the dtype in which they are sent."""
    entries: Any
    lists: Any
    means: Any
    counts: Any


@triton.jit
def own_tile(num_samples, num_units, BLOCK_B: tl.constexpr, BLOCK_U: tl.constexpr):
    """Return a program's samples and units, and a mask of those before the end.

    Samples and units past the end are replaced by the last one, so that every read is in bounds.
    """
    samples = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    units = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    is_real = (samples < num_samples)[:, None, None] & (units < num_units)[None, :, None]
    return tl.minimum(samples, num_samples - 1), tl.minimum(units, num_units - 1), is_real


@triton.jit
def mean_factors(means_ptr, counts_ptr, units, samples, num_samples):
    """Return 1 / length of the bags, 1 for units that are not averaged."""
    slots = tl.load(means_ptr + units).to(tl.int64)
    places = slots[None, :] * num_samples + samples[:, None]
    counts = tl.load(counts_ptr + places, mask=slots[None, :] >= 0, other=1)
    counts = tl.maximum(counts, 1).to(tl.float32)
    # rounded as in PyTorch: Triton's `/` is approximate, and results equal the twin bit for bit
    return tl.div_rn(tl.full(counts.shape, 1.0, tl.float32), counts)[:, :, None]


@triton.jit
def _places(
    t, num_entries, entries, units, samples, num_samples, CHUNK: tl.constexpr, UNIT: tl.constexpr
):
    """Return the starts of units in the buffer for some entries, and the places of columns."""
    first = tl.load(t.entries + entries) * num_samples
    widths = tl.load(t.entries + num_entries + entries)
    first += tl.load(t.entries + 2 * num_entries + entries)
    chunks = first[None, :] + samples[:, None] * widths[None, :]
    starts = chunks * CHUNK + (units % (CHUNK // UNIT) * UNIT)[None, :]
    starts = starts[:, :, None]
    return starts, starts + tl.arange(0, UNIT)[None, None, :]


@triton.jit
def _read(t, num_narrow, starts, places, is_there, LOSS_SCALE: tl.constexpr):
    """Return the values of units of the buffer, 0 for absent ones."""
    if t.narrow is not None:
        # a unit is within one block, so its start decides for all its columns
        # docs/decisions/output.md, "One kernel on a GPU"
        is_narrow = starts < num_narrow
        values = tl.load(t.narrow + places, mask=is_there & is_narrow, other=0.0)
        values = values.to(tl.float32)
        if LOSS_SCALE != 1.0:
            values = tl.div_rn(values, tl.full(values.shape, LOSS_SCALE, tl.float32))
        is_there &= starts >= num_narrow
        rest = tl.load(t.buffer + places, mask=is_there, other=0.0)
        values = tl.where(is_narrow, values, rest)
    else:
        values = tl.load(t.buffer + places, mask=is_there, other=0.0)
    return values


# `do_not_specialize`: see `ops_triton`.
@triton.jit(do_not_specialize=["num_narrow", "num_samples"])
def _gather(
    t,
    num_narrow,
    num_samples,
    num_units,
    num_entries,
    LOSS_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    samples, units, is_real = own_tile(num_samples, num_units, BLOCK_B, BLOCK_U)
    chunks = units // (CHUNK // UNIT)
    if t.lists is not None:
        begins = tl.load(t.lists + chunks)
        numbers = tl.load(t.lists + chunks + 1) - begins
        values = tl.zeros([BLOCK_B, BLOCK_U, UNIT], tl.float32)
        i, longest = 0, tl.max(numbers)
        while i < longest:
            # chunks with fewer entries read their last entry again, and mask it
            entries = begins + tl.minimum(i, numbers - 1)
            starts, places = _places(
                t, num_entries, entries, units, samples, num_samples, CHUNK, UNIT
            )
            is_there = is_real & (i < numbers)[None, :, None]
            values += _read(t, num_narrow, starts, places, is_there, LOSS_SCALE)
            i += 1
    else:
        starts, places = _places(t, num_entries, chunks, units, samples, num_samples, CHUNK, UNIT)
        values = _read(t, num_narrow, starts, places, is_real, LOSS_SCALE)
    if t.means is not None:
        values *= mean_factors(t.means, t.counts, units, samples, num_samples)
    starts = (samples[:, None] * num_units + units[None, :]) * UNIT
    places = starts[:, :, None] + tl.arange(0, UNIT)[None, None, :]
    tl.store(t.matrix + places, values, mask=is_real)


@triton.jit(do_not_specialize=["num_sent", "num_samples"])
def _scatter_grad(
    t,
    num_sent,
    num_samples,
    num_units,
    num_entries,
    row_stride,
    column_stride,
    scale,
    LOSS_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    samples, units, is_real = own_tile(num_samples, num_units, BLOCK_B, BLOCK_U)
    chunks = units // (CHUNK // UNIT)
    columns = (units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]).to(tl.int64)
    places = samples[:, None, None] * row_stride + columns[None, :, :] * column_stride
    # without a mask: `own_tile` has only places in bounds
    values = tl.load(t.matrix + places).to(tl.float32)
    if t.means is not None:
        values *= mean_factors(t.means, t.counts, units, samples, num_samples)
    begins, numbers = chunks, tl.full([BLOCK_U], 1, tl.int32)
    if t.lists is not None:
        begins = tl.load(t.lists + chunks)
        numbers = tl.load(t.lists + chunks + 1) - begins
    i, longest = 0, tl.max(numbers)
    while i < longest:
        entries = begins + tl.minimum(i, numbers - 1)
        starts, places = _places(t, num_entries, entries, units, samples, num_samples, CHUNK, UNIT)
        is_there = is_real & (i < numbers)[None, :, None]
        is_sent = starts < num_sent
        # gradients of replicas are not sent and not scaled
        # docs/decisions/output.md, "One kernel on a GPU"
        sent_values = tl.where(is_sent, values * scale, values)
        if t.narrow is not None:  # the buffer does not hold the values to send
            narrow = (sent_values * LOSS_SCALE).to(t.narrow.dtype.element_ty)
            tl.store(t.narrow + places, narrow, mask=is_there & is_sent)
            is_there &= starts >= num_sent
        tl.store(t.buffer + places, sent_values, mask=is_there)
        i += 1


def _launch(
    kernel: Any,
    matrix: Tensor,
    buffer: Tensor,
    narrow: Tensor | None,
    num_narrow: int,
    columns: GatherColumns,
    counts: Tensor | None,
    loss_scale: float | None,
    *numbers: float,
) -> None:
    """Launch a kernel over tiles of samples and columns."""
    entries, lists, means, width, _, unit = columns
    counts = None if counts is None or means is None else counts.contiguous()
    tensors = _Tensors(matrix, buffer, narrow, entries, lists, means, counts)
    grid, known = columns.grid(matrix.shape[0])
    sizes = num_narrow, matrix.shape[0], width // unit, entries.shape[1]
    launch(kernel, grid, tensors, *sizes, *numbers, LOSS_SCALE=loss_scale or 1.0, **known)


@self_checked
def gather(
    buffer: Tensor,
    batch_size: int,
    columns: GatherColumns,
    counts: Tensor | None,
    arrived: Tensor | None = None,
    loss_scale: float | None = None,
) -> Tensor:
    """Gather the output from the receive buffer; its twin is `ColumnGather.gather`.

    Args:
        buffer: Flat, blocks of `[B, columns of the block]`, fp32.
        batch_size: B, at least 1.
        columns: Descriptors of the output, which has at least one column.
        counts: `[slots, B]` int32 or int64 ids per bag, if any column is averaged.
        arrived: Received values of the first blocks, of any floating dtype, read instead of the
            buffer.
        loss_scale: Divisor of `arrived`; None: 1.

    Returns:
        `[B, D]` fp32. Values that several blocks have are added up in the order of the blocks,
        from 0.
    """
    out = torch.empty(batch_size, columns.width, dtype=buffer.dtype, device=buffer.device)
    num_arrived = 0 if arrived is None else arrived.numel()
    _launch(_gather, out, buffer, arrived, num_arrived, columns, counts, loss_scale)
    return out


@self_checked
def scatter_grad(
    grad_BD: Tensor,
    columns: GatherColumns,
    counts: Tensor | None,
    scale: float,
    num_sent: int,
    dtype: torch.dtype | None = None,
    loss_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the buffer; its twin is `ColumnGather.scatter_grad`.

    Args:
        grad_BD: `[B, D]` fp32 of any strides, at least one value.
        columns: As for `gather`.
        counts: As for `gather`.
        scale: Factor of the values to send, after the division by `counts`.
        num_sent: Number of values of the buffer's first blocks, which are sent.
        dtype: dtype in which they are sent; None: fp32.
        loss_scale: Another factor of the values to send if `dtype` is given; None: 1.

    Returns:
        The gradient of the buffer, flat and fp32, and the values to send. With a `dtype`, the first
        `num_sent` values of the gradient are not set.
    """
    batch_size = grad_BD.shape[0]
    total = columns.entries_4E.shape[1] * columns.chunk * batch_size
    out = torch.empty(total, dtype=grad_BD.dtype, device=grad_BD.device)
    narrow = None
    if dtype is not None:
        narrow = torch.empty(num_sent, dtype=dtype, device=out.device)
    numbers = *grad_BD.stride(), scale
    _launch(_scatter_grad, grad_BD, out, narrow, num_sent, columns, counts, loss_scale, *numbers)
    return out, out[:num_sent] if narrow is None else narrow

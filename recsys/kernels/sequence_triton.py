"""Triton kernels of sequences' output stage on a GPU: received rows to the places of their ids.

Each function is one launch for any plan. The kernels read a few numbers per stream and the place of
each id. `RowGather` has the twin in PyTorch; results are equal bit for bit.

A program has a tile of ids, in the order of the streams, and of columns. Columns are processed by
unit, as in `output_triton`.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from recsys.kernels.ops_triton import launch, own_places
from recsys.kernels.optional_triton import tl, triton
from recsys.kernels.self_check import self_checked

_IDS, _COLUMNS, _MAX_UNIT = 16, 128, 32  # per program


# `do_not_specialize`: see `ops_triton`.
@triton.jit(do_not_specialize=["num_streams", "num_ids"])
def _move_rows(
    tensors,
    row_stride,
    column_stride,
    num_streams,
    num_ids,
    GATHERS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    rows_ptr, buffer_ptr, places_ptr, streams_ptr = tensors
    ids, is_real, streams = own_places(streams_ptr, 1, num_streams, num_ids, STEPS, BLOCK_N)
    widths = tl.load(streams_ptr + num_streams + streams)
    sources = tl.load(streams_ptr + 2 * num_streams + streams) + ids * widths
    rows = tl.load(places_ptr + ids) + tl.load(streams_ptr + 3 * num_streams + streams)
    firsts = tl.load(streams_ptr + 4 * num_streams + streams)
    units = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    chunks = units // (CHUNK // UNIT)
    in_chunk = (units % (CHUNK // UNIT) * UNIT)[None, :, None] + tl.arange(0, UNIT)[None, None, :]
    is_there = (is_real[:, None] & (chunks[None, :] < widths[:, None]))[:, :, None]
    at = ((sources[:, None] + chunks[None, :]) * CHUNK)[:, :, None] + in_chunk
    columns = ((firsts[:, None] + chunks[None, :]) * CHUNK)[:, :, None] + in_chunk
    places = rows[:, None, None] * row_stride + columns * column_stride
    if GATHERS:
        tl.store(rows_ptr + places, tl.load(buffer_ptr + at, mask=is_there), mask=is_there)
    else:
        tl.store(buffer_ptr + at, tl.load(rows_ptr + places, mask=is_there), mask=is_there)


def _move(
    rows: Tensor,
    buffer: Tensor,
    places_N: Tensor,
    streams_5S: Tensor,
    widest: int,
    chunk: int,
    gathers: bool,
) -> None:
    num_streams, num_ids, unit = streams_5S.shape[1], places_N.numel(), gcd(chunk, _MAX_UNIT)
    num_units = widest * chunk // unit
    block = min(_COLUMNS // unit, triton.next_power_of_2(num_units))
    known = {"CHUNK": chunk, "UNIT": unit, "BLOCK_N": _IDS, "BLOCK_U": block}
    launch(
        _move_rows,
        (triton.cdiv(num_ids, _IDS), triton.cdiv(num_units, block)),
        (rows, buffer, places_N, streams_5S),
        *rows.stride(),
        num_streams,
        num_ids,
        GATHERS=gathers,
        STEPS=num_streams.bit_length(),
        **known,
    )


@self_checked
def gather_rows(
    buffer: Tensor, dim: int, places_N: Tensor, streams_5S: Tensor, widest: int, chunk: int
) -> Tensor:
    """Move the rows of a buffer to the places of their ids; its twin is `RowGather.gather`.

    Args:
        buffer: Flat, at least one value.
        dim: Columns of the result.
        places_N: `[N]` int32 or int64 place in the batch of each id of the concatenated streams.
        streams_5S: `[5, S]` int64, for each stream: the ids before it, ascending from 0; the chunks
            of a row; the chunks of the buffer before it minus the chunks that its own rows would
            have for the ids before it; the distance from an id's place to its row in the result;
            and the first chunk of the row.
        widest: The most chunks of a row of a stream.
        chunk: Columns of a chunk.

    Returns:
        `[rows, dim]` of the buffer's dtype.
    """
    out = torch.empty(buffer.numel() // dim, dim, dtype=buffer.dtype, device=buffer.device)
    _move(out, buffer, places_N, streams_5S, widest, chunk, gathers=True)
    return out


@self_checked
def scatter_grad_rows(
    grad_RD: Tensor, places_N: Tensor, streams_5S: Tensor, widest: int, chunk: int
) -> Tensor:
    """Return the gradient of the buffer, flat; its twin is `RowGather.scatter_grad`.

    Args:
        grad_RD: `[rows, dim]` of any strides, at least one value.
        places_N: As in `gather_rows`.
        streams_5S: As in `gather_rows`.
        widest: As in `gather_rows`.
        chunk: As in `gather_rows`.
    """
    out = torch.empty(grad_RD.numel(), dtype=grad_RD.dtype, device=grad_RD.device)
    _move(grad_RD, out, places_N, streams_5S, widest, chunk, gathers=False)
    return out

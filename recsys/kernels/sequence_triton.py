"""Kernels of the output stage of sequences on a GPU, by Triton: rows of what arrived to their ids.

Each is one launch, whatever the plan, and reads a few numbers for each stream and the place of each
id; `RowGather` has the twin in PyTorch, whose bits these return.

A program has a tile of ids, in the order of the streams, and of columns. Columns go by units, as in
`output_triton`.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from recsys.kernels.ops_triton import _current, _own_places
from recsys.kernels.optional_triton import tl, triton

_IDS, _COLUMNS, _MAX_UNIT = 16, 128, 32  # of a program


# `do_not_specialize`: as in `ops_triton`.
@triton.jit(do_not_specialize=["num_streams", "num_ids"])
def _move_rows(
    rows_ptr,
    row_stride,
    column_stride,
    buffer_ptr,
    places_ptr,
    streams_ptr,
    num_streams,
    num_ids,
    COLLECTS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    ids, is_real, streams = _own_places(streams_ptr, 1, num_streams, num_ids, STEPS, BLOCK_N)
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
    if COLLECTS:
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
    collects: bool,
) -> None:
    num_streams, num_ids, unit = streams_5S.shape[1], places_N.numel(), gcd(chunk, _MAX_UNIT)
    num_units = widest * chunk // unit
    block = min(_COLUMNS // unit, triton.next_power_of_2(num_units))
    with _current(rows.device):
        _move_rows[triton.cdiv(num_ids, _IDS), triton.cdiv(num_units, block)](
            rows,
            *rows.stride(),
            buffer,
            places_N,
            streams_5S,
            num_streams,
            num_ids,
            COLLECTS=collects,
            CHUNK=chunk,
            UNIT=unit,
            STEPS=num_streams.bit_length(),
            BLOCK_N=_IDS,
            BLOCK_U=block,
        )


def collect_rows(
    buffer: Tensor, dim: int, places_N: Tensor, streams_5S: Tensor, widest: int, chunk: int
) -> Tensor:
    """Put the rows of a buffer where their ids are; its twin is `RowGather.collect`.

    Args:
        buffer: flat, at least one value.
        dim: columns of the result.
        places_N: `[N]` int32 or int64 where the ids of the streams, end to end, are in the batch.
        streams_5S: `[5, S]` int64, for each stream the ids before it, ascending from 0; the chunks
            of a row; the chunks of the buffer before it, less those of as many rows of its own as
            there are ids before it; the rows of the result between an id's place and its row; and
            the chunk of the row at which it begins.
        widest: the most chunks of a row of a stream.
        chunk: columns of a chunk.

    Returns:
        `[rows, dim]` of the buffer's dtype.
    """
    out = torch.empty(buffer.numel() // dim, dim, dtype=buffer.dtype, device=buffer.device)
    _move(out, buffer, places_N, streams_5S, widest, chunk, collects=True)
    return out


def spread_rows(
    grad_RD: Tensor, places_N: Tensor, streams_5S: Tensor, widest: int, chunk: int
) -> Tensor:
    """Return the gradient of the buffer, flat; its twin is `RowGather.spread`.

    Args:
        grad_RD: `[rows, dim]` of any strides, at least one value.
        places_N: as for `collect_rows`, and so are the others.
        streams_5S: as there.
        widest: as there.
        chunk: as there.
    """
    out = torch.empty(grad_RD.numel(), dtype=grad_RD.dtype, device=grad_RD.device)
    _move(grad_RD, out, places_N, streams_5S, widest, chunk, collects=False)
    return out

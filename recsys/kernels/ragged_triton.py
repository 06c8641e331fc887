"""Triton kernels of an output stage whose blocks do not have one row per sample.

They differ from `output_triton` in how they find the rows of a bag. A block with a row per bag has
it at the bag's place. Where owners return a row per id, the offsets of the batch give the ids of a
bag. The place of an id among the ids of all buckets gives its bucket, by bisection of the buckets'
starts, and its row in that bucket. So nothing is read once per bucket; there are as many buckets as
ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from recsys.kernels.ops_triton import launch
from recsys.kernels.optional_triton import tl, triton
from recsys.kernels.output_triton import GatherColumns, mean_factors, own_tile
from recsys.kernels.self_check import self_checked


@final
class RaggedIds(NamedTuple):
    """Places of the ids of bags that were split into buckets, in one round or several.

    Attributes:
        places: `[rounds * N]` int32 or int64: for each round the place of each id among the round's
            ids, which are sorted by bucket, then by feature.
        offsets: `[features * B + 1]` int32 or int64, of the bags' ids: the same in each round.
        num_rounds: How often the batch was split.
        num_buckets: Number of buckets.
        num_features: Number of features of the batch.
    """

    places: Tensor
    offsets: Tensor
    num_rounds: int
    num_buckets: int
    num_features: int


@final
class Ragged(NamedTuple):
    """Descriptors of a batch, on the device.

    A group is the set of blocks of the buffer that have the same columns. Blocks of a group with a
    row per id are the blocks of the first buckets that a feature is split into, one per bucket.

    Attributes:
        columns: Descriptors of the output, which has at least one column.
        chunks_4C: `[4, C]` int64, for each chunk of the output: the group of the blocks that have
            it; chunks of a row of such a block; the place in it; and the number of blocks in
            earlier groups.
        batch: int64, concatenated: `[groups + 1]` start in this tensor of the list of each group's
            blocks with a row per bag; `[groups]` the first segment of each group with blocks that
            have a row per id, else -1; `[segments]` the ids before each segment; `[blocks]` by
            group, then by bucket, the chunks of the buffer before each block with a row per id,
            else -1; and the lists, of the chunks before a block and its rows. Segments and buckets
            are left out if there are no `ids`.
        num_groups: Number of groups.
        ids: Places of the ids if any block has a row per id. A segment is the ids of a feature in
            one bucket of one round.
    """

    columns: GatherColumns
    chunks_4C: Tensor
    batch: Tensor
    num_groups: int
    ids: RaggedIds | None


class _Tensors(NamedTuple):
    """Tensors of the kernel; None for unused tensors."""

    matrix: Any
    """`[B, D]` the output, or its gradient."""
    buffer: Any
    means: Any
    counts: Any
    chunks: Any
    batch: Any
    places: Any
    offsets: Any


@triton.jit
def _find_buckets(starts_ptr, segments, places, is_there, num_buckets, num_features, half):
    """Return the bucket of each id, the last that starts at or before it, and its row there.

    Args:
        starts_ptr: Ids before each segment.
        segments: Segments of the features in the first bucket.
        places: Places of the ids.
        is_there: Mask of the ids.
        num_buckets: Number of buckets.
        num_features: Distance of a feature's segments in two neighbouring buckets.
        half: A power of two, at least half the number of buckets.
    """
    buckets = tl.zeros_like(places)
    begins = tl.load(starts_ptr + segments + buckets, mask=is_there, other=0)
    step = half
    while step > 0:
        others = buckets + step
        exists = is_there & (others < num_buckets)
        starts = tl.load(starts_ptr + segments + others * num_features, mask=exists, other=0)
        fits = exists & (starts <= places)
        buckets = tl.where(fits, others, buckets)
        begins = tl.where(fits, starts, begins)
        step //= 2
    return buckets, places - begins


@triton.jit
def _moved(values, buffer_ptr, starts, in_chunk, exists, GATHERS: tl.constexpr):
    """Add values of the buffer, or write the values there."""
    places = starts[:, :, None] + in_chunk
    if GATHERS:
        values += tl.load(buffer_ptr + places, mask=exists, other=0.0)
    else:
        tl.store(buffer_ptr + places, values, mask=exists)
    return values


# `do_not_specialize`: see `ops_triton`.
@triton.jit(
    do_not_specialize=["num_samples", "row_stride", "column_stride", "ids_of_round", "half"]
)
def _move_ragged(
    t,
    row_stride,
    column_stride,
    num_samples,
    num_units,
    num_groups,
    ids_of_round,
    num_rounds,
    num_buckets,
    num_features,
    half,
    GATHERS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    samples, units, is_real = own_tile(num_samples, num_units, BLOCK_B, BLOCK_U)
    columns = (units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]).to(tl.int64)
    matrix_places = samples[:, None, None] * row_stride + columns[None, :, :] * column_stride
    num_chunks, chunks = num_units // (CHUNK // UNIT), units // (CHUNK // UNIT)
    in_chunk = (units % (CHUNK // UNIT) * UNIT)[None, :, None] + tl.arange(0, UNIT)[None, None, :]
    groups = tl.load(t.chunks + chunks)
    widths = tl.load(t.chunks + num_chunks + chunks)[None, :]
    in_row = tl.load(t.chunks + 2 * num_chunks + chunks)[None, :]
    if GATHERS:
        values = tl.zeros([BLOCK_B, BLOCK_U, UNIT], tl.float32)
    else:
        values = tl.load(t.matrix + matrix_places).to(tl.float32)
        if t.means is not None:
            values *= mean_factors(t.means, t.counts, units, samples, num_samples)
    # blocks with a row per bag; docs/decisions/ragged.md, "Missing bags are not returned"
    blocks = tl.load(t.batch + groups)
    ends = tl.load(t.batch + groups + 1)
    i, longest = 0, tl.max(ends - blocks)
    while i < longest:
        is_there = blocks < ends
        before = tl.load(t.batch + blocks, mask=is_there, other=0)[None, :]
        num_rows = tl.load(t.batch + blocks + 1, mask=is_there, other=0)[None, :]
        exists = is_real & (samples[:, None] < num_rows)[:, :, None]
        starts = (before + samples[:, None] * widths + in_row) * CHUNK
        values = _moved(values, t.buffer, starts, in_chunk, exists, GATHERS)
        # a list has two numbers per block
        blocks += 2
        i += 2
    # blocks with a row per id; docs/decisions/row_split.md, "Short bags: rows return by id"
    if t.places is not None:
        segments = tl.load(t.batch + num_groups + 1 + groups)[None, :]
        # in `Ragged.batch`, the starts of lists and the first segments come before
        starts_ptr = t.batch + 2 * num_groups + 1
        of_buckets_ptr = starts_ptr + num_rounds * num_buckets * num_features
        of_buckets_ptr += tl.load(t.chunks + 3 * num_chunks + chunks)[None, :]
        # segments are numbered by round, then bucket, then feature; masks leave out -1
        before_round = segments // (num_buckets * num_features) * ids_of_round
        bags = segments % num_features * num_samples + samples[:, None]
        ids = tl.load(t.offsets + bags, mask=segments >= 0, other=0).to(tl.int64)
        id_ends = tl.load(t.offsets + bags + 1, mask=segments >= 0, other=0).to(tl.int64)
        j, most = 0, tl.max(tl.max(id_ends - ids, axis=1), axis=0)
        while j < most:
            is_there = ids < id_ends
            places = tl.load(t.places + before_round + ids, mask=is_there, other=0)
            places = before_round + places.to(tl.int64)
            buckets, rows = _find_buckets(
                starts_ptr, segments, places, is_there, num_buckets, num_features, half
            )
            before = tl.load(of_buckets_ptr + buckets, mask=is_there, other=-1)
            exists = is_real & (before >= 0)[:, :, None]  # -1: the block has a row per bag
            starts = (before + rows * widths + in_row) * CHUNK
            values = _moved(values, t.buffer, starts, in_chunk, exists, GATHERS)
            ids += 1
            j += 1
    if GATHERS:
        if t.means is not None:
            values *= mean_factors(t.means, t.counts, units, samples, num_samples)
        tl.store(t.matrix + matrix_places, values, mask=is_real)


def _move(
    matrix: Tensor, buffer: Tensor, ragged: Ragged, counts: Tensor | None, gathers: bool
) -> None:
    columns, chunks, batch, num_groups, ids = ragged
    means, num_samples = columns.means_U, matrix.shape[0]
    places, offsets, *sizes = ids or (None, None, 1, 1, 1)
    ids_of_round = 0 if places is None else places.numel() // sizes[0]
    counts = None if counts is None or means is None else counts.contiguous()
    tensors = _Tensors(matrix, buffer, means, counts, chunks, batch, places, offsets)
    grid, known = columns.grid(num_samples)
    launch(
        _move_ragged,
        grid,
        tensors,
        *matrix.stride(),
        num_samples,
        columns.width // columns.unit,
        num_groups,
        ids_of_round,
        *sizes,
        triton.next_power_of_2(sizes[1]) // 2,
        GATHERS=gathers,
        **known,
    )


@self_checked
def gather_ragged(
    buffer: Tensor, num_samples: int, ragged: Ragged, counts: Tensor | None
) -> Tensor:
    """Gather the output from a buffer of blocks; its twin is `RaggedBatch.gather`.

    Args:
        buffer: Flat, fp32.
        num_samples: B, at least 1.
        ragged: Descriptors of the batch.
        counts: `[slots, B]` int32 or int64 ids per bag, if any column is averaged.

    Returns:
        `[B, D]` fp32, 0 where no block has a row. Several rows are added up from 0: first rows of
        bags in the order of the blocks, then rows of ids in the order of the bag.
    """
    width, device = ragged.columns.width, buffer.device
    out = torch.empty(num_samples, width, dtype=buffer.dtype, device=device)
    _move(out, buffer, ragged, counts, gathers=True)
    return out


@self_checked
def scatter_grad_ragged(
    grad_BD: Tensor, num_values: int, ragged: Ragged, counts: Tensor | None
) -> Tensor:
    """Return the gradient of the buffer; its twin is `RaggedBatch.scatter_grad`.

    Args:
        grad_BD: `[B, D]` fp32 of any strides.
        num_values: Number of values of the buffer, at least one.
        ragged: As for `gather_ragged`.
        counts: As for `gather_ragged`.
    """
    out = torch.empty(num_values, dtype=grad_BD.dtype, device=grad_BD.device)
    _move(grad_BD, out, ragged, counts, gathers=False)
    return out

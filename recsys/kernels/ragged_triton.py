"""Kernels of an output stage where blocks have other rows than one per sample, by Triton.

Those of `output_triton`, but for where the rows of a bag are. A block that has a row per bag has it
at the bag's place. Where rows return one for each id, offsets of the batch tell a bag's ids, and
the place of each among those of all buckets tells its bucket, by a search among the buckets'
starts, and its row among those of the bucket. So nothing is read bucket by bucket, of which there
are as many as ranks.
"""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor

from recsys.kernels.ops_triton import _current
from recsys.kernels.optional_triton import tl, triton
from recsys.kernels.output_triton import _COLUMNS, _SAMPLES, Columns, _mean_factors, _own_tile


@final
class Ids(NamedTuple):
    """Where the ids of bags went, which were split into buckets, in one round or several.

    Attributes:
        places: `[rounds * N]` int32 or int64: for each round the place of each id among the round's
            ids, which are bucket by bucket, and in these feature by feature.
        offsets: `[features * B + 1]` int32 or int64, of the bags' ids: the same in each round.
        num_rounds: how often the batch was split.
        num_buckets: into how many.
        num_features: of the batch.
    """

    places: Tensor
    offsets: Tensor
    num_rounds: int
    num_buckets: int
    num_features: int


@final
class Ragged(NamedTuple):
    """What is known of a batch, on the device.

    A group are the blocks of the buffer that hold the same columns. If some of them have a row per
    id, they are those of the first buckets that a feature is split into, each of one bucket.

    Attributes:
        columns: of the output, at least one.
        chunks_4C: `[4, C]` int64, of each chunk of the output: the group of the blocks that hold
            it; chunks of a row of such a block; the place in it; and how many blocks are in earlier
            groups.
        batch: int64, one behind the other: `[groups + 1]` where in this tensor the list of each
            group's blocks with a row per bag begins; `[groups]` the first segment of each group
            with blocks that have a row per id, else -1; `[segments]` the ids before each segment;
            `[blocks]` by groups, and by buckets, the chunks of the buffer before each block that
            has a row per id, else -1; and the lists, of the chunks before a block and its rows.
            Those of segments and buckets are left out if there are no `ids`.
        num_groups: how many.
        ids: where they went, if any block has a row per id. A segment are the ids of a feature that
            are in one bucket of one round.
    """

    columns: Columns
    chunks_4C: Tensor
    batch: Tensor
    num_groups: int
    ids: Ids | None


@triton.jit
def _find_buckets(starts_ptr, segments, places, is_there, num_buckets, num_features, half):
    """Return which bucket has ids, the last that begins before them, and their rows in it.

    Args:
        starts_ptr: ids before each segment.
        segments: the features' in the first bucket.
        places: of the ids.
        is_there: which ids are.
        num_buckets: how many.
        num_features: from a feature's segment in one bucket to that in the next.
        half: the power of two that is half as many as buckets, or more.
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
def _moved(values, buffer_ptr, starts, in_chunk, exists, COLLECTS: tl.constexpr):
    """Return values with those of the buffer, or write them there."""
    places = starts[:, :, None] + in_chunk
    if COLLECTS:
        values += tl.load(buffer_ptr + places, mask=exists, other=0.0)
    else:
        tl.store(buffer_ptr + places, values, mask=exists)
    return values


# `do_not_specialize`: as in `ops_triton`.
@triton.jit(
    do_not_specialize=["num_samples", "row_stride", "column_stride", "ids_of_round", "half"]
)
def _move_ragged(
    matrix_ptr,
    row_stride,
    column_stride,
    buffer_ptr,
    means_ptr,
    counts_ptr,
    chunks_ptr,
    batch_ptr,
    places_ptr,
    offsets_ptr,
    num_samples,
    num_units,
    num_groups,
    ids_of_round,
    num_rounds,
    num_buckets,
    num_features,
    half,
    COLLECTS: tl.constexpr,
    HAS_MEANS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    samples, units, is_real = _own_tile(num_samples, num_units, BLOCK_B, BLOCK_U)
    columns = (units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]).to(tl.int64)
    matrix_places = samples[:, None, None] * row_stride + columns[None, :, :] * column_stride
    num_chunks, chunks = num_units // (CHUNK // UNIT), units // (CHUNK // UNIT)
    in_chunk = (units % (CHUNK // UNIT) * UNIT)[None, :, None] + tl.arange(0, UNIT)[None, None, :]
    groups = tl.load(chunks_ptr + chunks)
    widths = tl.load(chunks_ptr + num_chunks + chunks)[None, :]
    in_row = tl.load(chunks_ptr + 2 * num_chunks + chunks)[None, :]
    if COLLECTS:
        values = tl.zeros([BLOCK_B, BLOCK_U, UNIT], tl.float32)
    else:
        values = tl.load(matrix_ptr + matrix_places).to(tl.float32)
        if HAS_MEANS:
            values *= _mean_factors(means_ptr, counts_ptr, units, samples, num_samples)
    # blocks with a row per bag
    blocks = tl.load(batch_ptr + groups)
    ends = tl.load(batch_ptr + groups + 1)
    i, longest = 0, tl.max(ends - blocks)
    while i < longest:
        is_there = blocks < ends
        before = tl.load(batch_ptr + blocks, mask=is_there, other=0)[None, :]
        num_rows = tl.load(batch_ptr + blocks + 1, mask=is_there, other=0)[None, :]
        exists = is_real & (samples[:, None] < num_rows)[:, :, None]
        starts = (before + samples[:, None] * widths + in_row) * CHUNK
        values = _moved(values, buffer_ptr, starts, in_chunk, exists, COLLECTS)
        blocks += 2
        i += 2
    # blocks with a row per id
    if HAS_IDS:
        segments = tl.load(batch_ptr + num_groups + 1 + groups)[None, :]
        starts_ptr = batch_ptr + 2 * num_groups + 1
        of_buckets_ptr = starts_ptr + num_rounds * num_buckets * num_features
        of_buckets_ptr += tl.load(chunks_ptr + 3 * num_chunks + chunks)[None, :]
        before_round = segments // (num_buckets * num_features) * ids_of_round
        bags = segments % num_features * num_samples + samples[:, None]
        ids = tl.load(offsets_ptr + bags, mask=segments >= 0, other=0).to(tl.int64)
        id_ends = tl.load(offsets_ptr + bags + 1, mask=segments >= 0, other=0).to(tl.int64)
        j, most = 0, tl.max(tl.max(id_ends - ids, axis=1), axis=0)
        while j < most:
            is_there = ids < id_ends
            places = tl.load(places_ptr + before_round + ids, mask=is_there, other=0)
            places = before_round + places.to(tl.int64)
            buckets, rows = _find_buckets(
                starts_ptr, segments, places, is_there, num_buckets, num_features, half
            )
            before = tl.load(of_buckets_ptr + buckets, mask=is_there, other=-1)
            exists = is_real & (before >= 0)[:, :, None]  # the others' blocks have a row per bag
            starts = (before + rows * widths + in_row) * CHUNK
            values = _moved(values, buffer_ptr, starts, in_chunk, exists, COLLECTS)
            ids += 1
            j += 1
    if COLLECTS:
        if HAS_MEANS:
            values *= _mean_factors(means_ptr, counts_ptr, units, samples, num_samples)
        tl.store(matrix_ptr + matrix_places, values, mask=is_real)


def _move(
    matrix: Tensor, buffer: Tensor, ragged: Ragged, counts: Tensor | None, collects: bool
) -> None:
    (_, _, means, width, chunk, unit), chunks, batch, num_groups, ids = ragged
    num_samples, num_units = matrix.shape[0], width // unit
    block = min(_COLUMNS // unit, triton.next_power_of_2(num_units))
    grid = triton.cdiv(num_samples, _SAMPLES), triton.cdiv(num_units, block)
    places, offsets, *sizes = ids or (batch, batch, 1, 1, 1)
    with _current(batch.device):
        _move_ragged[grid](
            matrix,
            *matrix.stride(),
            buffer,
            chunks if means is None else means,
            chunks if counts is None else counts.contiguous(),
            chunks,
            batch,
            places,
            offsets,
            num_samples,
            num_units,
            num_groups,
            places.numel() // sizes[0],
            *sizes,
            triton.next_power_of_2(sizes[1]) // 2,
            COLLECTS=collects,
            HAS_MEANS=means is not None,
            HAS_IDS=ids is not None,
            CHUNK=chunk,
            UNIT=unit,
            BLOCK_B=_SAMPLES,
            BLOCK_U=block,
        )


def collect_ragged(
    buffer: Tensor, num_samples: int, ragged: Ragged, counts: Tensor | None
) -> Tensor:
    """Lay a buffer of blocks out as a rectangle; its twin is `RaggedBatch.collect`.

    Args:
        buffer: flat, fp32.
        num_samples: B, at least 1.
        ragged: of the batch.
        counts: `[slots, B]` int32 or int64 ids per bag, if anything is averaged.

    Returns:
        `[B, D]` fp32, 0 where no block has a row. What several rows hold is added up from 0: those
        of bags in the order of the blocks, then those of ids in the order of the bag's.
    """
    width, device = ragged.columns.width, buffer.device
    out = torch.empty(num_samples, width, dtype=buffer.dtype, device=device)
    _move(out, buffer, ragged, counts, collects=True)
    return out


def spread_ragged(
    grad_BD: Tensor, num_values: int, ragged: Ragged, counts: Tensor | None
) -> Tensor:
    """Return the gradient of the buffer; its twin is `RaggedBatch.spread`.

    Args:
        grad_BD: `[B, D]` fp32 of any strides.
        num_values: of the buffer, at least one.
        ragged: as for `collect`.
        counts: as for `collect`.
    """
    out = torch.empty(num_values, dtype=grad_BD.dtype, device=grad_BD.device)
    _move(grad_BD, out, ragged, counts, collects=False)
    return out

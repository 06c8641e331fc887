"""Kernels of the input stage on a GPU, by Triton; each has a twin in PyTorch, which says so.

Threads share the ids evenly, however long the segments are: FBGEMM's permute gives each segment one
group of threads, which a few long segments leave waiting for one of them.

Triton's interpreter (`TRITON_INTERPRET=1`) runs them on a CPU, for tests.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from recsys.kernels.bounds import NO_LIMIT
from recsys.kernels.optional_triton import tl, triton

_BLOCK = 1024  # ids of a program
_SCANNED = 4096  # lengths of a program


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@triton.jit
def _last_at_most(sorted_ptr, stride, places, low, high, STEPS: tl.constexpr):
    """Return for each place the last index in [low, high) whose number is at most the place."""
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        goes_up = tl.load(sorted_ptr + middle * stride) <= places
        low = tl.where(goes_up, middle, low)
        high = tl.where(goes_up, high, middle)
    return low


@triton.jit
def _segments_of(sorted_ptr, stride, number, first, last, places, STEPS: tl.constexpr):
    """Return the segments of ascending places; every `stride`th number says where one begins."""
    low = _last_at_most(sorted_ptr, stride, first, 0, number, STEPS)
    high = _last_at_most(sorted_ptr, stride, last, low, number, STEPS) + 1
    nothing = tl.zeros_like(places).to(tl.int32)
    segments = nothing + low
    if high - low > 1:
        segments = _last_at_most(sorted_ptr, stride, places, segments, nothing + high, STEPS)
    return segments


@triton.jit
def _own_places(sorted_ptr, stride, number, total, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's places, which of them are not past the end, and their segments.

    Those past the end stand for the last one, so that what they read is there.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = first + tl.arange(0, BLOCK)
    is_real = places < total
    last = tl.minimum(first + BLOCK, total) - 1
    places = tl.minimum(places, last)
    return places, is_real, _segments_of(sorted_ptr, stride, number, first, last, places, STEPS)


# `do_not_specialize`: numbers that differ from batch to batch must not make Triton compile anew (it
# would for 1, and for multiples of 16).
@triton.jit(do_not_specialize=["total"])
def _sum_blocks(sums_ptr, values_ptr, total, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    places = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(values_ptr + places, mask=places < total, other=0)
    tl.store(sums_ptr + program, tl.sum(values))


@triton.jit(do_not_specialize=["total"])
def _add_up_blocks(out_ptr, sums_ptr, values_ptr, total, BLOCK: tl.constexpr):
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], dtype=out_ptr.dtype.element_ty)
    first = 0
    while first < program:
        before += tl.load(sums_ptr + first + lanes, mask=first + lanes < program, other=0)
        first += BLOCK
    places = program.to(tl.int64) * BLOCK + lanes
    values = tl.load(values_ptr + places, mask=places < total, other=0)
    tl.store(out_ptr + 1 + places, tl.cumsum(values) + tl.sum(before), mask=places < total)
    if program == 0:
        tl.store(out_ptr, 0)


def complete_cumsum(lengths_M: Tensor) -> Tensor:
    """Return the running sum with a leading zero; its twin is `ops.complete_cumsum`.

    One launch for up to 4,096 values, and two for more: each block of them is added up, and what
    stands before it is the sum of these sums.

    Args:
        lengths_M: `[M]` int32 or int64.

    Returns:
        `[M + 1]` of the same dtype.
    """
    lengths_M, total = lengths_M.contiguous(), lengths_M.numel()
    out = lengths_M.new_empty(total + 1)
    number = max(1, triton.cdiv(total, _SCANNED))
    sums = lengths_M.new_empty(number)
    with _current(out.device):
        if number > 1:
            _sum_blocks[number,](sums, lengths_M, total, BLOCK=_SCANNED)
        _add_up_blocks[number,](out, sums, lengths_M, total, BLOCK=_SCANNED)
    return out


@triton.jit(do_not_specialize=["num_segments", "total"])
def _move_segments(
    out_ptr,
    source_ptr,
    plan_ptr,
    num_segments,
    total,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places, is_real, segments = _own_places(plan_ptr, 1, num_segments, total, STEPS, BLOCK)
    from_places = places + tl.load(plan_ptr + num_segments + segments)
    tl.store(out_ptr + places, tl.load(source_ptr + from_places, mask=is_real), mask=is_real)


@triton.jit(do_not_specialize=["num_segments", "num_lengths", "num_ids", "total"])
def _pack(
    out_ptr,
    lengths_ptr,
    ids_ptr,
    weights_ptr,
    plan_ptr,
    num_segments,
    num_lengths,
    num_ids,
    total,
    IS_WEIGHTED: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places, is_real, segments = _own_places(plan_ptr, 1, num_segments, total, STEPS, BLOCK)
    from_places = places + tl.load(plan_ptr + num_segments + segments)
    is_length = from_places < num_lengths
    lengths = tl.load(lengths_ptr + from_places, mask=is_length, other=0)
    from_places -= num_lengths
    is_id = (from_places >= 0) & (from_places < num_ids)
    ids = tl.load(ids_ptr + from_places, mask=is_id, other=0)
    word = out_ptr.dtype.element_ty
    words = tl.where(is_length, lengths.to(word), ids.to(word))
    if IS_WEIGHTED:
        from_places -= num_ids
        weights = tl.load(weights_ptr + from_places, mask=from_places >= 0, other=0)
        if word == tl.int32:
            bits = weights.to(tl.float32).to(tl.int32, bitcast=True)
        else:
            bits = weights.to(tl.float64).to(tl.int64, bitcast=True)
        words = tl.where(from_places >= 0, bits, words)
    tl.store(out_ptr + places, words, mask=is_real)


def pack(
    lengths_M: Tensor,
    ids_N: Tensor,
    weights_N: Tensor | None,
    plan: Tensor,
    total: int,
    dtype: torch.dtype,
) -> Tensor:
    """Copy segments of lengths, ids and weights as words of one type; see `move_segments`.

    Args:
        lengths_M: `[M]` int32 or int64.
        ids_N: `[N]` int32 or int64.
        weights_N: `[N]` of a floating dtype, or None.
        plan: `[2P]` as for `move_segments`, whose source is these three end to end.
        total: words of the result.
        dtype: int32, or int64; of weights it takes the bits, as fp32 or fp64.

    Returns:
        `[total]`.
    """
    out = torch.empty(total, dtype=dtype, device=ids_N.device)
    if total:
        number, ids_N = plan.numel() // 2, ids_N.contiguous()
        weights = ids_N if weights_N is None else weights_N.contiguous()
        sizes = number, lengths_M.numel(), ids_N.numel(), total
        with _current(out.device):
            _pack[triton.cdiv(total, _BLOCK),](
                out,
                lengths_M.contiguous(),
                ids_N,
                weights,
                plan,
                *sizes,
                IS_WEIGHTED=weights_N is not None,
                STEPS=number.bit_length(),
                BLOCK=_BLOCK,
            )
    return out


def move_segments(source_N: Tensor, plan: Tensor, total: int) -> Tensor:
    """Copy segments of a tensor to where a plan says; its twin is `ops.permute_1d`.

    Args:
        source_N: `[N]`.
        plan: `[2P]` int64, for each segment where it begins in the result, ascending from 0; then
            by how much its values are farther along in the source.
        total: values of the result.

    Returns:
        `[total]`, of the source's dtype.
    """
    source_N = source_N.contiguous()
    out = torch.empty(total, dtype=source_N.dtype, device=source_N.device)
    if total:
        number = plan.numel() // 2
        steps, grid = number.bit_length(), (triton.cdiv(total, _BLOCK),)
        with _current(out.device):
            _move_segments[grid](out, source_N, plan, number, total, STEPS=steps, BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["num_bags", "num_ids", "bags_of_feature"])
def _find_bad_bags(
    found_ptr,
    lengths_ptr,
    offsets_ptr,
    told_ptr,
    num_bags,
    num_ids,
    bags_of_feature,
    IS_TOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    bags = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = bags < num_bags
    lengths = tl.load(lengths_ptr + bags, mask=is_real, other=0)
    starts = tl.load(offsets_ptr + bags, mask=is_real, other=0)
    ends = tl.load(offsets_ptr + bags + 1, mask=is_real, other=0)
    is_bad = (ends < starts) | (ends - starts != lengths)
    is_bad |= ((bags == 0) & (starts != 0)) | ((bags == num_bags - 1) & (ends != num_ids))
    if IS_TOLD:
        is_first = bags % bags_of_feature == 0
        told = tl.load(told_ptr + bags // bags_of_feature, mask=is_real & is_first, other=0)
        is_bad |= is_first & (starts != told)
    tl.atomic_max(found_ptr, tl.max((is_bad & is_real).to(tl.int32)))


@triton.jit(do_not_specialize=["num_bags", "num_ids", "num_features", "bags_of_feature"])
def _make_safe(
    found_ptr,
    lengths_ptr,
    offsets_ptr,
    ids_ptr,
    rows_ptr,
    told_ptr,
    safe_lengths_ptr,
    safe_offsets_ptr,
    safe_ids_ptr,
    counts_ptr,
    num_bags,
    num_ids,
    num_features,
    bags_of_feature,
    IS_TOLD: tl.constexpr,
    NO_LIMIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = first + tl.arange(0, BLOCK)
    is_bad = tl.load(found_ptr) != 0
    is_first, before, after = places == 0, 0, num_ids  # if bad, all ids are in the first bag, or
    if IS_TOLD:  # those of each feature in its first
        is_first, of_feature = places % bags_of_feature == 0, told_ptr + places // bags_of_feature
        before = tl.load(of_feature, mask=places <= num_bags, other=0)
        after = tl.load(of_feature + 1, mask=places < num_bags, other=0)
    lengths = tl.load(lengths_ptr + places, mask=places < num_bags, other=0)
    lengths = tl.where(is_bad, tl.where(is_first, after - before, 0), lengths)
    tl.store(safe_lengths_ptr + places, lengths, mask=places < num_bags)
    offsets = tl.load(offsets_ptr + places, mask=places <= num_bags, other=0)
    offsets = tl.where(is_bad, tl.where(is_first, before, after), offsets)
    tl.store(safe_offsets_ptr + places, offsets, mask=places <= num_bags)
    if first < num_features:
        is_feature = places < num_features
        bags = places * bags_of_feature
        begins = tl.load(offsets_ptr + bags, mask=is_feature, other=0)
        counts = tl.load(offsets_ptr + bags + bags_of_feature, mask=is_feature, other=0) - begins
        safe_counts = tl.where(places == 0, num_ids, 0)
        if IS_TOLD:
            safe_counts = tl.load(told_ptr + places + 1, mask=is_feature, other=0)
            safe_counts -= tl.load(told_ptr + places, mask=is_feature, other=0)
        counts = tl.where(is_bad, safe_counts, counts)
        tl.store(counts_ptr + places, counts, mask=is_feature)
    if first < num_ids:
        is_real = places < num_ids
        ids = tl.load(ids_ptr + places, mask=is_real, other=0)
        if is_bad:  # whose ids they are is not known
            tl.store(safe_ids_ptr + places, tl.zeros_like(ids), mask=is_real)
        else:
            last = tl.minimum(first + BLOCK, num_ids) - 1
            places = tl.minimum(places, last)
            features = _segments_of(
                offsets_ptr, bags_of_feature, num_features, first, last, places, STEPS
            )
            rows = tl.load(rows_ptr + features)
            is_outside = (ids < 0) | (ids.to(tl.int64) >= rows)
            tl.store(safe_ids_ptr + places, tl.where(is_outside, 0, ids), mask=is_real)
            is_outside &= is_real & (rows != NO_LIMIT)
            tl.atomic_max(found_ptr + 1, tl.max(is_outside.to(tl.int32)))


def make_safe(
    lengths: Tensor,
    offsets: Tensor,
    ids_N: Tensor,
    num_rows_F: Tensor,
    told_F1: Tensor | None = None,
    unpadded: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a batch that can be read whatever it holds; its twins are those of `bounds`.

    Args:
        lengths: `[F * B]` int32 or int64, at least one.
        offsets: `[F * B + 1]` of the same dtype.
        ids_N: `[N]` int32 or int64.
        num_rows_F: `[F]` int64 rows of the table that each feature reads; the largest number where
            none does: then any id is good, and becomes 0 if it is negative.
        told_F1: `[F + 1]` int64 where each feature's ids begin, and where the last one's end, if
            the host knows it: bags that say otherwise are bad.
        unpadded: lengths and offsets before features were padded to one batch size, which are
            checked then; the padded ones only for what was told.

    Returns:
        `[2]` int32: whether bags are bad, and whether ids are. Then lengths and offsets, all ids in
        the first bag if they were bad, or those of each feature, as told, in that feature's first;
        ids, 0 in place of bad ones, or of all if bags were; and `[F]` int64, the ids that each
        feature has now.
    """
    lengths, offsets, ids_N = lengths.contiguous(), offsets.contiguous(), ids_N.contiguous()
    found = torch.zeros(2, dtype=torch.int32, device=ids_N.device)
    safe = torch.empty_like(lengths), torch.empty_like(offsets), torch.empty_like(ids_N)
    counts_F = torch.empty_like(num_rows_F)
    num_bags, num_ids, num_features = lengths.numel(), ids_N.numel(), num_rows_F.numel()
    bag_grid = (triton.cdiv(num_bags, _BLOCK),)
    grid = (triton.cdiv(max(num_bags + 1, num_ids), _BLOCK),)
    told, is_told = num_rows_F if told_F1 is None else told_F1.contiguous(), told_F1 is not None
    sizes = num_bags, num_ids, num_bags // num_features
    with _current(found.device):
        if unpadded is not None:
            given, begins = (part.contiguous() for part in unpadded)
            _find_bad_bags[(triton.cdiv(given.numel(), _BLOCK),)](
                found, given, begins, told, given.numel(), num_ids, 1, IS_TOLD=False, BLOCK=_BLOCK
            )
        if unpadded is None or is_told:
            _find_bad_bags[bag_grid](
                found, lengths, offsets, told, *sizes, IS_TOLD=is_told, BLOCK=_BLOCK
            )
        _make_safe[grid](
            found,
            lengths,
            offsets,
            ids_N,
            num_rows_F,
            told,
            *safe,
            counts_F,
            num_bags,
            num_ids,
            num_features,
            num_bags // num_features,
            IS_TOLD=is_told,
            NO_LIMIT=NO_LIMIT,
            STEPS=num_features.bit_length(),
            BLOCK=_BLOCK,
        )
    return found, *safe, counts_F


@triton.jit(do_not_specialize=["num_ids", "num_features", "bags_of_feature"])
def _row_ids(
    out_ptr,
    ids_ptr,
    offsets_ptr,
    base_ptr,
    num_ids,
    num_features,
    bags_of_feature,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places, is_real, features = _own_places(
        offsets_ptr, bags_of_feature, num_features, num_ids, STEPS, BLOCK
    )
    rows = tl.load(base_ptr + features) + tl.load(ids_ptr + places)
    tl.store(out_ptr + places, rows, mask=is_real)


def row_ids(ids_N: Tensor, offsets: Tensor, row_base_F: Tensor) -> Tensor:
    """Return the rows that ids are in tables that lie end to end; its twin is `tbe_torch`'s.

    Args:
        ids_N: `[N]` int32 or int64, at least one.
        offsets: `[F * B + 1]` int32 or int64.
        row_base_F: `[F]` int64 the row at which the table of each feature begins.

    Returns:
        `[N]` int64.
    """
    out = torch.empty_like(ids_N, dtype=torch.int64)
    num_ids, num_features = ids_N.numel(), row_base_F.numel()
    with _current(out.device):
        _row_ids[triton.cdiv(num_ids, _BLOCK),](
            out,
            ids_N.contiguous(),
            offsets.contiguous(),
            row_base_F,
            num_ids,
            num_features,
            (offsets.numel() - 1) // num_features,
            STEPS=num_features.bit_length(),
            BLOCK=_BLOCK,
        )
    return out


@triton.jit(do_not_specialize=["num_ids", "num_bags", "num_features"])
def _places_of_bags(
    out_ptr, offsets_ptr, num_ids, num_bags, num_features, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    number = num_bags * num_features
    places, is_real, bags = _own_places(offsets_ptr, 1, number, num_ids, STEPS, BLOCK)
    bags = bags.to(tl.int64)
    tl.store(out_ptr + places, bags % num_bags * num_features + bags // num_bags, mask=is_real)


def places_of_bags(offsets: Tensor, num_ids: int, num_features: int) -> Tensor:
    """Return where the bag of each id stands in what was pooled; its twin is `tbe_torch`'s.

    Args:
        offsets: `[F * B + 1]` int32 or int64.
        num_ids: at least one.
        num_features: F.

    Returns:
        `[N]` int64: `b * F + f` for an id of bag b of feature f.
    """
    out = torch.empty(num_ids, dtype=torch.int64, device=offsets.device)
    number = offsets.numel() - 1
    with _current(out.device):
        _places_of_bags[triton.cdiv(num_ids, _BLOCK),](
            out,
            offsets.contiguous(),
            num_ids,
            number // num_features,
            num_features,
            STEPS=number.bit_length(),
            BLOCK=_BLOCK,
        )
    return out


@triton.jit(do_not_specialize=["flag", "batch_size", "if_bags", "if_ids", "total"])
def _build_header(
    out_ptr,
    places_ptr,
    counts_ptr,
    found_ptr,
    flag,
    batch_size,
    if_bags,
    if_ids,
    total,
    BLOCK: tl.constexpr,
):
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = words < total
    places = tl.load(places_ptr + words, mask=is_real, other=0)
    bad_bags, bad_ids = tl.load(found_ptr), tl.load(found_ptr + 1)
    flag |= tl.where(bad_bags != 0, if_bags, 0) | tl.where(bad_ids != 0, if_ids, 0)
    counts = tl.load(counts_ptr + places - 2, mask=is_real & (places >= 2), other=0)
    values = tl.where(places == 0, flag, tl.where(places == 1, batch_size, counts))
    tl.store(out_ptr + words, values, mask=is_real)


def build_header(
    places_H: Tensor,
    counts_G: Tensor,
    found: Tensor,
    flag: int,
    batch_size: int,
    if_bags: int,
    if_ids: int,
) -> Tensor:
    """Return the words that ranks are told of a batch; `InputDist.header_of` is its twin.

    Args:
        places_H: `[H]` int64 which of `[flag, batch size, counts]` each word is.
        counts_G: `[G]` int64.
        found: `[2]` int32, of `make_safe`.
        flag: what is said of the batch.
        batch_size: its samples.
        if_bags: bits that are added to the flag if bags are bad.
        if_ids: bits that are added if ids are.

    Returns:
        `[H]` int64.
    """
    out = torch.empty_like(places_H)
    total = places_H.numel()
    rest = flag, batch_size, if_bags, if_ids, total
    with _current(out.device):
        _build_header[triton.cdiv(total, _BLOCK),](
            out, places_H, counts_G, found, *rest, BLOCK=_BLOCK
        )
    return out

"""Triton kernels of the input stage on a GPU; the docstring of each names its PyTorch twin.

Threads share the ids evenly, however long the segments are. FBGEMM's permute gives each segment one
group of threads, so a few long segments leave most groups idle.

Triton's interpreter (`TRITON_INTERPRET=1`) runs the kernels on a CPU, for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys.kernels.bounds import NO_LIMIT
from recsys.kernels.optional_triton import tl, triton
from recsys.kernels.self_check import self_checked

_BLOCK = 1024  # ids per program
_SCANNED = 4096  # lengths per program


def launch(
    kernel: Any, grid: int | tuple[int, ...], tensors: tuple[Any, ...], *numbers: Any, **known: Any
) -> None:
    """Launch a kernel on the device of its first tensor.

    Args:
        kernel: The function under `triton.jit`.
        grid: The number of programs, per axis.
        tensors: Its first argument, a tuple or NamedTuple of tensors; the first is a tensor. None
            marks an absent tensor, which the kernel sees at compile time. Triton specializes
            integers in tuples, so numbers that differ from batch to batch do not belong there.
        numbers: Its other arguments.
        known: Its compile-time constants, and Triton's options such as `num_warps`.
    """
    device = tensors[0].device
    programs = grid if isinstance(grid, tuple) else (grid,)
    if device.type != "cuda":  # Triton's interpreter
        kernel[programs](tensors, *numbers, **known)
        return
    with torch.cuda.device(device):  # Triton launches on the current device
        kernel[programs](tensors, *numbers, **known)


@triton.jit
def last_at_most(sorted_ptr, stride, places, low, high, STEPS: tl.constexpr):
    """Return for each place the last index in [low, high) whose number is at most the place."""
    for _ in tl.static_range(STEPS):
        # Steps after the end keep `low`. So STEPS is a bit length, and each length compiles once.
        middle = (low + high) // 2
        goes_up = tl.load(sorted_ptr + middle * stride) <= places
        low = tl.where(goes_up, middle, low)
        high = tl.where(goes_up, high, middle)
    return low


@triton.jit
def _segments_of(sorted_ptr, stride, number, first, last, places, STEPS: tl.constexpr):
    """Return the segments of ascending places; every `stride`th number is the start of one."""
    low = last_at_most(sorted_ptr, stride, first, 0, number, STEPS)
    high = last_at_most(sorted_ptr, stride, last, low, number, STEPS) + 1
    nothing = tl.zeros_like(places).to(tl.int32)
    segments = nothing + low
    # a block within one segment, as most are if segments are long, needs no search per place
    if high - low > 1:
        segments = last_at_most(sorted_ptr, stride, places, segments, nothing + high, STEPS)
    return segments


@triton.jit
def own_places(sorted_ptr, stride, number, total, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's places, a mask of those before the end, and their segments.

    Places past the end are replaced by the last place, so that every read is in bounds.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = first + tl.arange(0, BLOCK)
    is_real = places < total
    last = tl.minimum(first + BLOCK, total) - 1
    places = tl.minimum(places, last)
    return places, is_real, _segments_of(sorted_ptr, stride, number, first, last, places, STEPS)


# `do_not_specialize`: Triton would compile a number again for 1 and for multiples of 16, so it must
# not specialize numbers that differ from batch to batch.
@triton.jit(do_not_specialize=["total"])
def _sum_blocks(tensors, total, BLOCK: tl.constexpr):
    sums_ptr, values_ptr = tensors
    program = tl.program_id(0)
    places = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(values_ptr + places, mask=places < total, other=0)
    tl.store(sums_ptr + program, tl.sum(values))


@triton.jit(do_not_specialize=["total"])
def _add_up_blocks(tensors, total, BLOCK: tl.constexpr):
    out_ptr, sums_ptr, values_ptr = tensors
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], dtype=out_ptr.dtype.element_ty)
    first = 0
    # each program adds up the blocks before it again, which saves a third launch
    # docs/decisions/triton.md, "Kernels of the input stage"
    while first < program:
        before += tl.load(sums_ptr + first + lanes, mask=first + lanes < program, other=0)
        first += BLOCK
    places = program.to(tl.int64) * BLOCK + lanes
    values = tl.load(values_ptr + places, mask=places < total, other=0)
    tl.store(out_ptr + 1 + places, tl.cumsum(values) + tl.sum(before), mask=places < total)
    if program == 0:
        tl.store(out_ptr, 0)


@self_checked
def complete_cumsum(lengths_M: Tensor) -> Tensor:
    """Return the running sum with a leading zero; its twin is `ops.complete_cumsum`.

    One launch for up to 4,096 values. Two launches for more: the first adds up each block of 4,096,
    the second starts each block from the sum of the blocks before it.

    Args:
        lengths_M: `[M]` int32 or int64.

    Returns:
        `[M + 1]` of the same dtype.
    """
    lengths_M, total = lengths_M.contiguous(), lengths_M.numel()
    out = lengths_M.new_empty(total + 1)
    # one program at least: it writes the leading zero
    number = max(1, triton.cdiv(total, _SCANNED))
    sums = lengths_M.new_empty(number)
    if number > 1:
        launch(_sum_blocks, number, (sums, lengths_M), total, BLOCK=_SCANNED)
    launch(_add_up_blocks, number, (out, sums, lengths_M), total, BLOCK=_SCANNED)
    return out


@triton.jit(do_not_specialize=["num_segments", "total"])
def _move_segments(tensors, num_segments, total, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    out_ptr, source_ptr, plan_ptr = tensors
    places, is_real, segments = own_places(plan_ptr, 1, num_segments, total, STEPS, BLOCK)
    from_places = places + tl.load(plan_ptr + num_segments + segments)
    tl.store(out_ptr + places, tl.load(source_ptr + from_places, mask=is_real), mask=is_real)


@triton.jit(do_not_specialize=["num_segments", "num_lengths", "num_ids", "total"])
def _pack(
    tensors, num_segments, num_lengths, num_ids, total, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    out_ptr, lengths_ptr, ids_ptr, weights_ptr, plan_ptr = tensors
    places, is_real, segments = own_places(plan_ptr, 1, num_segments, total, STEPS, BLOCK)
    from_places = places + tl.load(plan_ptr + num_segments + segments)
    is_length = from_places < num_lengths
    lengths = tl.load(lengths_ptr + from_places, mask=is_length, other=0)
    from_places -= num_lengths
    is_id = (from_places >= 0) & (from_places < num_ids)
    ids = tl.load(ids_ptr + from_places, mask=is_id, other=0)
    # words of 32 or 64 bits; docs/decisions/exchange.md, "One payload behind one header"
    word = out_ptr.dtype.element_ty
    words = tl.where(is_length, lengths.to(word), ids.to(word))
    if weights_ptr is not None:
        from_places -= num_ids
        weights = tl.load(weights_ptr + from_places, mask=from_places >= 0, other=0)
        if word == tl.int32:
            bits = weights.to(tl.float32).to(tl.int32, bitcast=True)
        else:
            bits = weights.to(tl.float64).to(tl.int64, bitcast=True)
        words = tl.where(from_places >= 0, bits, words)
    tl.store(out_ptr + places, words, mask=is_real)


@self_checked
def pack(
    lengths_M: Tensor,
    ids_N: Tensor,
    weights_N: Tensor | None,
    plan: Tensor,
    total: int,
    dtype: torch.dtype,
) -> Tensor:
    """Copy segments of lengths, ids and weights as words of one dtype; see `move_segments`.

    Args:
        lengths_M: `[M]` int32 or int64.
        ids_N: `[N]` int32 or int64.
        weights_N: `[N]` of a floating dtype, or None.
        plan: `[2P]` as for `move_segments`, with these three, end to end, as the source.
        total: Words of the result.
        dtype: int32 or int64. Weights are stored as the bits of an fp32 or fp64.

    Returns:
        `[total]`.
    """
    out = torch.empty(total, dtype=dtype, device=ids_N.device)
    if total:
        number, ids_N = plan.numel() // 2, ids_N.contiguous()
        weights = None if weights_N is None else weights_N.contiguous()
        sizes = number, lengths_M.numel(), ids_N.numel(), total
        tensors = out, lengths_M.contiguous(), ids_N, weights, plan
        grid, steps = triton.cdiv(total, _BLOCK), number.bit_length()
        launch(_pack, grid, tensors, *sizes, STEPS=steps, BLOCK=_BLOCK)
    return out


@self_checked
def move_segments(source_N: Tensor, plan: Tensor, total: int) -> Tensor:
    """Copy segments of a tensor as a plan describes; its twin is `ops.permute_1d`.

    Args:
        source_N: `[N]`.
        plan: `[2P]` int64: the start of each segment in the result, ascending from 0; then its
            start in the source minus its start in the result.
        total: Values of the result.

    Returns:
        `[total]`, of the source's dtype.
    """
    out = torch.empty(total, dtype=source_N.dtype, device=source_N.device)
    if total:
        number, tensors = plan.numel() // 2, (out, source_N.contiguous(), plan)
        grid, steps = triton.cdiv(total, _BLOCK), number.bit_length()
        launch(_move_segments, grid, tensors, number, total, STEPS=steps, BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["num_bags", "num_ids", "bags_of_feature"])
def _find_bad_bags(tensors, num_bags, num_ids, bags_of_feature, BLOCK: tl.constexpr):
    found_ptr, lengths_ptr, offsets_ptr, known_ptr = tensors
    bags = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = bags < num_bags
    lengths = tl.load(lengths_ptr + bags, mask=is_real, other=0)
    starts = tl.load(offsets_ptr + bags, mask=is_real, other=0)
    ends = tl.load(offsets_ptr + bags + 1, mask=is_real, other=0)
    is_bad = (ends < starts) | (ends - starts != lengths)
    is_bad |= ((bags == 0) & (starts != 0)) | ((bags == num_bags - 1) & (ends != num_ids))
    if known_ptr is not None:
        is_first = bags % bags_of_feature == 0
        known = tl.load(known_ptr + bags // bags_of_feature, mask=is_real & is_first, other=0)
        is_bad |= is_first & (starts != known)
    tl.atomic_max(found_ptr, tl.max((is_bad & is_real).to(tl.int32)))


@triton.jit(do_not_specialize=["num_bags", "num_ids", "num_features", "bags_of_feature"])
def _make_safe(
    tensors,
    safe,
    num_bags,
    num_ids,
    num_features,
    bags_of_feature,
    NO_LIMIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    found_ptr, lengths_ptr, offsets_ptr, ids_ptr, rows_ptr, known_ptr = tensors
    safe_lengths_ptr, safe_offsets_ptr, safe_ids_ptr, counts_ptr = safe
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = first + tl.arange(0, BLOCK)
    # by an earlier launch: within one launch a block could not know the flags of all blocks
    is_bad = tl.load(found_ptr) != 0
    is_first, before, after = places == 0, 0, num_ids  # bad: all ids in the first bag,
    if known_ptr is not None:  # or in the first bag of their feature
        is_first, of_feature = places % bags_of_feature == 0, known_ptr + places // bags_of_feature
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
        if known_ptr is not None:
            safe_counts = tl.load(known_ptr + places + 1, mask=is_feature, other=0)
            safe_counts -= tl.load(known_ptr + places, mask=is_feature, other=0)
        counts = tl.where(is_bad, safe_counts, counts)
        tl.store(counts_ptr + places, counts, mask=is_feature)
    if first < num_ids:
        is_real = places < num_ids
        ids = tl.load(ids_ptr + places, mask=is_real, other=0)
        if is_bad:  # the features of the ids are unknown
            tl.store(safe_ids_ptr + places, tl.zeros_like(ids), mask=is_real)
        else:
            last = tl.minimum(first + BLOCK, num_ids) - 1
            places = tl.minimum(places, last)
            features = _segments_of(
                offsets_ptr, bags_of_feature, num_features, first, last, places, STEPS
            )
            rows = tl.load(rows_ptr + features)
            is_outside = ((ids < 0) | (ids.to(tl.int64) >= rows)) & (rows != NO_LIMIT)
            tl.store(safe_ids_ptr + places, tl.where(is_outside, 0, ids), mask=is_real)
            is_outside &= is_real
            tl.atomic_max(found_ptr + 1, tl.max(is_outside.to(tl.int32)))


@self_checked
def make_safe(
    lengths: Tensor,
    offsets: Tensor,
    ids_N: Tensor,
    num_rows_F: Tensor,
    known_F1: Tensor | None = None,
    unpadded: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sanitize a batch: replace bad bags and ids so that lookups stay in bounds.

    Its twins are the functions of `bounds`.

    Args:
        lengths: `[F * B]` int32 or int64, at least one.
        offsets: `[F * B + 1]` of the same dtype.
        ids_N: `[N]` int32 or int64.
        num_rows_F: `[F]` int64 rows of the table that each feature reads. `NO_LIMIT` for a feature
            without a table: every id is good and stays, also a negative one.
        known_F1: `[F + 1]` int64 start of each feature's ids, and the end, if the host knows them.
            Bags that disagree are bad.
        unpadded: Lengths and offsets before features were padded to one batch size. These are
            checked then; the padded ones are compared with `known_F1` only.

    Returns:
        `[2]` int32 flags: bad bags, and bad ids. Then lengths and offsets; if bags are bad, all ids
        are in the first bag, or in the first bag of their feature if `known_F1` is given. Then ids,
        0 in place of a bad id, or all 0 if bags are bad. Then `[F]` int64 ids per feature.
    """
    lengths, offsets, ids_N = lengths.contiguous(), offsets.contiguous(), ids_N.contiguous()
    counts = torch.zeros(2, dtype=torch.int32, device=ids_N.device)
    safe = torch.empty_like(lengths), torch.empty_like(offsets), torch.empty_like(ids_N)
    counts_F = torch.empty_like(num_rows_F)
    num_bags, num_ids, num_features = lengths.numel(), ids_N.numel(), num_rows_F.numel()
    known = None if known_F1 is None else known_F1.contiguous()
    per_feature = num_bags // num_features
    if unpadded is not None:
        original = tuple(part.contiguous() for part in unpadded)
        grid = triton.cdiv(original[0].numel(), _BLOCK)
        sizes = original[0].numel(), num_ids, 1
        launch(_find_bad_bags, grid, (counts, *original, None), *sizes, BLOCK=_BLOCK)
    if unpadded is None or known is not None:
        grid, tensors = triton.cdiv(num_bags, _BLOCK), (counts, lengths, offsets, known)
        launch(_find_bad_bags, grid, tensors, num_bags, num_ids, per_feature, BLOCK=_BLOCK)
    launch(
        _make_safe,
        triton.cdiv(max(num_bags + 1, num_ids), _BLOCK),
        (counts, lengths, offsets, ids_N, num_rows_F, known),
        (*safe, counts_F),
        num_bags,
        num_ids,
        num_features,
        per_feature,
        NO_LIMIT=NO_LIMIT,
        STEPS=num_features.bit_length(),
        BLOCK=_BLOCK,
    )
    return counts, *safe, counts_F


@triton.jit(do_not_specialize=["num_ids", "num_features", "bags_of_feature"])
def _row_ids(
    tensors, num_ids, num_features, bags_of_feature, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    out_ptr, ids_ptr, offsets_ptr, base_ptr = tensors
    places, is_real, features = own_places(
        offsets_ptr, bags_of_feature, num_features, num_ids, STEPS, BLOCK
    )
    rows = tl.load(base_ptr + features) + tl.load(ids_ptr + places)
    tl.store(out_ptr + places, rows, mask=is_real)


@self_checked
def row_ids(ids_N: Tensor, offsets: Tensor, row_base_F: Tensor) -> Tensor:
    """Convert ids to rows of concatenated tables; its twin is `lookup_batch.row_ids_of`.

    Args:
        ids_N: `[N]` int32 or int64, at least one.
        offsets: `[F * B + 1]` int32 or int64.
        row_base_F: `[F]` int64 first row of the table of each feature.

    Returns:
        `[N]` int64.
    """
    out = torch.empty_like(ids_N, dtype=torch.int64)
    num_ids, num_features = ids_N.numel(), row_base_F.numel()
    tensors = out, ids_N.contiguous(), offsets.contiguous(), row_base_F
    sizes = num_ids, num_features, (offsets.numel() - 1) // num_features
    grid, steps = triton.cdiv(num_ids, _BLOCK), num_features.bit_length()
    launch(_row_ids, grid, tensors, *sizes, STEPS=steps, BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["num_ids", "num_bags", "num_features"])
def _places_of_bags(
    tensors, num_ids, num_bags, num_features, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    out_ptr, offsets_ptr = tensors
    number = num_bags * num_features
    places, is_real, bags = own_places(offsets_ptr, 1, number, num_ids, STEPS, BLOCK)
    bags = bags.to(tl.int64)
    tl.store(out_ptr + places, bags % num_bags * num_features + bags // num_bags, mask=is_real)


@self_checked
def places_of_bags(offsets: Tensor, num_ids: int, num_features: int) -> Tensor:
    """Return the row of each id's bag in the pooled output, `[B * F, D]`.

    Its twin is in `TorchKernel._gradient_of_ids`.

    Args:
        offsets: `[F * B + 1]` int32 or int64.
        num_ids: At least one.
        num_features: F.

    Returns:
        `[N]` int64: `b * F + f` for an id of bag b of feature f.
    """
    out = torch.empty(num_ids, dtype=torch.int64, device=offsets.device)
    number = offsets.numel() - 1
    sizes, steps = (num_ids, number // num_features, num_features), number.bit_length()
    tensors, grid = (out, offsets.contiguous()), triton.cdiv(num_ids, _BLOCK)
    launch(_places_of_bags, grid, tensors, *sizes, STEPS=steps, BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["flag", "batch_size", "if_bags", "if_ids", "total"])
def _build_header(tensors, flag, batch_size, if_bags, if_ids, total, BLOCK: tl.constexpr):
    out_ptr, places_ptr, counts_ptr, found_ptr = tensors
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = words < total
    places = tl.load(places_ptr + words, mask=is_real, other=0)
    bad_bags, bad_ids = tl.load(found_ptr), tl.load(found_ptr + 1)
    # the header reports bad batches to all ranks before any row is read
    # docs/decisions/exchange.md, "One payload behind one header"
    flag |= tl.where(bad_bags != 0, if_bags, 0) | tl.where(bad_ids != 0, if_ids, 0)
    counts = tl.load(counts_ptr + places - 2, mask=is_real & (places >= 2), other=0)
    values = tl.where(places == 0, flag, tl.where(places == 1, batch_size, counts))
    tl.store(out_ptr + words, values, mask=is_real)


@self_checked
def build_header(
    places_H: Tensor,
    counts_G: Tensor,
    found: Tensor,
    flag: int,
    batch_size: int,
    if_bags: int,
    if_ids: int,
) -> Tensor:
    """Return the words of a batch's header for other ranks; `InputDist.header_of` is its twin.

    Args:
        places_H: `[H]` int64 index in `[flag, batch size, *counts]` of each word.
        counts_G: `[G]` int64.
        found: `[2]` int32 flags of `make_safe`.
        flag: Flag bits of the batch.
        batch_size: Samples of the batch.
        if_bags: Bits that are added to the flag if bags are bad.
        if_ids: Bits that are added to the flag if ids are bad.

    Returns:
        `[H]` int64.
    """
    out, total = torch.empty_like(places_H), places_H.numel()
    numbers, grid = (flag, batch_size, if_bags, if_ids, total), triton.cdiv(total, _BLOCK)
    launch(_build_header, grid, (out, places_H, counts_G, found), *numbers, BLOCK=_BLOCK)
    return out

"""Gradients added up by row, and updates of rows, on a GPU, by Triton; PyTorch's are their twins.

The ids of a batch come sorted by row. A program adds up the entries of one block of them, row by
row; then, for each row that goes on into other blocks, one program adds up what the blocks have of
it. Of rows in very many blocks a launch in between adds up blocks, many at a time. Where an entry
stands says what it is added to, and in which order: there are no atomics, and results are the same
from run to run, to the bit. All is added up in fp32.

Triton's interpreter (`TRITON_INTERPRET=1`) runs them on a CPU, for tests.

Shape suffixes: N ids, M rows of gradients, R rows of the tables, K entries, T tables, D columns.
"""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor

from recsys.kernels.ops_triton import _current, _last_at_most
from recsys.kernels.optional_triton import tl, triton
from recsys.kernels.types import EmbOptimType, OptimizerSpec, WeightDecayMode

_TILE = 4096  # values of a block, about
_LEAST, _MOST = 8, 64  # entries of a block
_FEW_BLOCKS = 1024  # so many are added up without a launch in between


@final
class RowUpdate(NamedTuple):
    """Which rows an optimizer moves, and how."""

    spec: OptimizerSpec
    """SGD or row-wise Adagrad, without stochastic rounding."""
    weight_RD: Tensor
    """Of tables that lie end to end: fp32, fp16 or bf16; changed in place."""
    state_R: Tensor | None
    """Row-wise Adagrad's sum, fp32; changed in place."""
    rate: float | Tensor
    """The learning rate, or where tables differ [T] fp32."""
    row_starts: Tensor
    """[T + 1] int64: where each table begins, and the end."""


@triton.jit
def _add_segments(begins_a, sum_a, begins_b, sum_b):
    """Add up neighbours, unless the second one begins anew."""
    return begins_a | begins_b, tl.where(begins_b != 0, sum_b, sum_a + sum_b)


@triton.jit
def _move_rows(
    sums,
    rows,
    places,
    is_meant,
    weight_ptr,
    state_ptr,
    moments_ptr,
    rates_ptr,
    starts_ptr,
    num_tables,
    rate,
    eps,
    decay,
    IS_ADAGRAD: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
    STEPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Update rows, each by its gradient; `update_rules` has the formulas."""
    columns = tl.arange(0, WIDTH)
    at = rows.to(tl.int64)[:, None] * DIM + columns[None, :]
    mask = is_meant[:, None] & (columns < DIM)[None, :]
    old = tl.load(weight_ptr + at, mask=mask, other=0).to(tl.float32)
    if DECAY == "l2":
        sums += decay * old
    rates = tl.zeros_like(rows).to(tl.float32) + rate
    if STEPS > 0:
        nothing = tl.zeros_like(rows).to(tl.int32)
        tables = _last_at_most(starts_ptr, 1, rows, nothing, nothing + num_tables, STEPS)
        rates = tl.load(rates_ptr + tables)
    scale = rates
    if IS_ADAGRAD:
        if HAS_MOMENTS:
            moments = tl.load(moments_ptr + places, mask=is_meant, other=0)
        else:
            moments = tl.sum(sums * sums, 1) / DIM
        state = tl.load(state_ptr + rows, mask=is_meant, other=0) + moments
        scale = tl.div_rn(rates, tl.sqrt_rn(state) + eps)
    # Several threads may have read the same: all of them must have, before one writes.
    tl.debug_barrier()
    if IS_ADAGRAD:
        tl.store(state_ptr + rows, state, mask=is_meant)
    move = sums * scale[:, None]
    if DECAY == "decouple":
        move += (rates * decay)[:, None] * old
    tl.store(weight_ptr + at, (old - move).to(weight_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _leave(
    sums,
    rows,
    places,
    is_meant,
    out_ptr,
    squares_ptr,
    weight_ptr,
    state_ptr,
    rates_ptr,
    starts_ptr,
    num_tables,
    rate,
    eps,
    decay,
    FORM: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    IS_ADAGRAD: tl.constexpr,
    DECAY: tl.constexpr,
    STEPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Do with the gradients of rows what they were added up for."""
    columns = tl.arange(0, WIDTH)
    mask = is_meant[:, None] & (columns < DIM)[None, :]
    if FORM == "by entry":
        tl.store(out_ptr + places[:, None] * DIM + columns[None, :], sums, mask=mask)
        if HAS_SQUARES:
            tl.store(squares_ptr + places, tl.sum(sums * sums, 1), mask=is_meant)
    if FORM == "by row":
        at = rows.to(tl.int64)[:, None] * DIM + columns[None, :]
        tl.store(out_ptr + at, sums, mask=mask)
    if FORM == "update":
        _move_rows(
            sums,
            rows,
            places,
            is_meant,
            weight_ptr,
            state_ptr,
            weight_ptr,
            rates_ptr,
            starts_ptr,
            num_tables,
            rate,
            eps,
            decay,
            IS_ADAGRAD,
            DECAY,
            False,
            STEPS,
            DIM,
            WIDTH,
        )


# `do_not_specialize`: see `ops_triton`
@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _sum_blocks(
    rows_ptr,
    order_ptr,
    source_ptr,
    scale_ptr,
    gradients_ptr,
    heads_ptr,
    tails_ptr,
    num_ids,
    out_rows_ptr,
    out_ptr,
    squares_ptr,
    weight_ptr,
    state_ptr,
    rates_ptr,
    starts_ptr,
    num_tables,
    rate,
    eps,
    decay,
    HAS_SCALE: tl.constexpr,
    FORM: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    IS_ADAGRAD: tl.constexpr,
    DECAY: tl.constexpr,
    STEPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up a block by rows, and leave those that have no entries in others.

    What it has of the row that began before it goes to `heads`, of the one that it begins and does
    not end to `tails`.
    """
    block = tl.program_id(0).to(tl.int64)
    places = block * BLOCK + tl.arange(0, BLOCK)
    is_real = places < num_ids
    rows = tl.load(rows_ptr + places, mask=is_real, other=-1)
    before = tl.load(rows_ptr + places - 1, mask=is_real & (places > 0), other=-1)
    begins = is_real & (rows != before)
    next_places = places + 1
    is_last = rows != tl.load(rows_ptr + next_places, mask=next_places < num_ids, other=-1)

    columns = tl.arange(0, WIDTH)
    is_column = (columns < DIM)[None, :]
    ids = tl.load(order_ptr + places, mask=is_real, other=0)
    bags = tl.load(source_ptr + ids, mask=is_real, other=0)
    at = bags[:, None] * DIM + columns[None, :]
    sums = tl.load(gradients_ptr + at, mask=is_real[:, None] & is_column, other=0).to(tl.float32)
    if HAS_SCALE:
        sums *= tl.load(scale_ptr + ids, mask=is_real, other=0)[:, None]
    # from the end to the front, so that an entry has the sum of what comes behind it of its row
    ends = is_last.to(tl.int32)[:, None] + tl.zeros([BLOCK, WIDTH], tl.int32)
    _, sums = tl.associative_scan((ends, sums), 0, _add_segments, reverse=True)

    last = tl.minimum((block + 1) * BLOCK, num_ids) - 1
    last_row = tl.load(rows_ptr + last)
    goes_on = tl.load(rows_ptr + last + 1, mask=last + 1 < num_ids, other=-1) == last_row
    is_tail = begins & goes_on & (rows == last_row)
    is_head = (places == block * BLOCK) & (begins == 0)
    at = block * DIM + columns[None, :] + tl.zeros([BLOCK, WIDTH], tl.int64)
    tl.store(heads_ptr + at, sums, mask=is_head[:, None] & is_column)
    tl.store(tails_ptr + at, sums, mask=is_tail[:, None] & is_column)
    is_meant = begins & (is_tail == 0)
    if FORM == "by entry":
        tl.store(out_rows_ptr + places, rows.to(tl.int64), mask=is_real)
        sums = tl.where(is_meant[:, None], sums, 0.0)
        is_meant = is_real
    _leave(
        sums,
        rows,
        places,
        is_meant,
        out_ptr,
        squares_ptr,
        weight_ptr,
        state_ptr,
        rates_ptr,
        starts_ptr,
        num_tables,
        rate,
        eps,
        decay,
        FORM,
        HAS_SQUARES,
        IS_ADAGRAD,
        DECAY,
        STEPS,
        DIM,
        WIDTH,
    )


@triton.jit
def _sum_heads(
    rows_ptr, heads_ptr, supers_ptr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up `BLOCK` blocks, if all of them and the entry before them are of one row."""
    number = tl.program_id(0).to(tl.int64)
    first = number * BLOCK
    before = tl.load(rows_ptr + first * BLOCK - 1, mask=number > 0, other=-1)
    if tl.load(rows_ptr + (first + BLOCK) * BLOCK - 1) == before:
        columns = tl.arange(0, WIDTH)
        at = (first + tl.arange(0, BLOCK))[:, None] * DIM + columns[None, :]
        heads = tl.load(heads_ptr + at, mask=(columns < DIM)[None, :], other=0)
        tl.store(supers_ptr + number * DIM + columns, tl.sum(heads, 0), mask=columns < DIM)


@triton.jit
def _add_parts(
    sums, parts_ptr, begin, end, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Add parts `[begin, end)` to `BLOCK` sums in turn."""
    columns = tl.arange(0, WIDTH)
    while begin < end:
        parts = begin + tl.arange(0, BLOCK)
        mask = (parts < end)[:, None] & (columns < DIM)[None, :]
        sums += tl.load(parts_ptr + parts[:, None] * DIM + columns[None, :], mask=mask, other=0)
        begin += BLOCK
    return sums


@triton.jit(do_not_specialize=["num_ids", "num_blocks", "num_tables"])
def _sum_spans(
    rows_ptr,
    heads_ptr,
    tails_ptr,
    supers_ptr,
    num_ids,
    num_blocks,
    out_ptr,
    squares_ptr,
    weight_ptr,
    state_ptr,
    rates_ptr,
    starts_ptr,
    num_tables,
    rate,
    eps,
    decay,
    HAS_SUPERS: tl.constexpr,
    FORM: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    IS_ADAGRAD: tl.constexpr,
    DECAY: tl.constexpr,
    STEPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up what blocks have of the row that begins in this one and ends in another."""
    block = tl.program_id(0).to(tl.int64)
    last = tl.minimum((block + 1) * BLOCK, num_ids) - 1
    row = tl.load(rows_ptr + last)
    goes_on = tl.load(rows_ptr + last + 1, mask=last + 1 < num_ids, other=-1) == row
    begins_here = tl.load(rows_ptr + block * BLOCK - 1, mask=block > 0, other=-1) != row
    if goes_on & begins_here:
        low = block + 1  # the last block that begins with the row is in [low, high)
        high = num_blocks.to(tl.int64)
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(rows_ptr + middle * BLOCK) == row:
                low = middle
            else:
                high = middle
        sums = tl.zeros([BLOCK, WIDTH], tl.float32)
        begin = block + 1
        if HAS_SUPERS:
            first_super, end_super = (begin + BLOCK - 1) // BLOCK, low // BLOCK
            if first_super < end_super:
                sums = _add_parts(sums, heads_ptr, begin, first_super * BLOCK, DIM, WIDTH, BLOCK)
                sums = _add_parts(sums, supers_ptr, first_super, end_super, DIM, WIDTH, BLOCK)
                begin = end_super * BLOCK
        sums = _add_parts(sums, heads_ptr, begin, low + 1, DIM, WIDTH, BLOCK)
        columns = tl.arange(0, WIDTH)
        tail = tl.load(tails_ptr + block * DIM + columns, mask=columns < DIM, other=0)
        places = block * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(rows_ptr + places, mask=places <= last, other=-1) == row
        nothing = tl.zeros([1], tl.int64)
        _leave(
            (tl.sum(sums, 0) + tail)[None, :],
            nothing + row,
            nothing + last + 1 - tl.sum(own.to(tl.int32)),
            nothing == 0,
            out_ptr,
            squares_ptr,
            weight_ptr,
            state_ptr,
            rates_ptr,
            starts_ptr,
            num_tables,
            rate,
            eps,
            decay,
            FORM,
            HAS_SQUARES,
            IS_ADAGRAD,
            DECAY,
            STEPS,
            DIM,
            WIDTH,
        )


@triton.jit(do_not_specialize=["num_entries", "num_tables"])
def _update_entries(
    rows_ptr,
    gradients_ptr,
    moments_ptr,
    num_entries,
    weight_ptr,
    state_ptr,
    rates_ptr,
    starts_ptr,
    num_tables,
    rate,
    eps,
    decay,
    HAS_MOMENTS: tl.constexpr,
    IS_ADAGRAD: tl.constexpr,
    DECAY: tl.constexpr,
    STEPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = places < num_entries
    rows = tl.load(rows_ptr + places, mask=is_real, other=-1)
    before = tl.load(rows_ptr + places - 1, mask=is_real & (places > 0), other=-1)
    is_meant = is_real & (rows != before)
    columns = tl.arange(0, WIDTH)
    at = places[:, None] * DIM + columns[None, :]
    mask = is_meant[:, None] & (columns < DIM)[None, :]
    _move_rows(
        tl.load(gradients_ptr + at, mask=mask, other=0),
        rows,
        places,
        is_meant,
        weight_ptr,
        state_ptr,
        moments_ptr,
        rates_ptr,
        starts_ptr,
        num_tables,
        rate,
        eps,
        decay,
        IS_ADAGRAD,
        DECAY,
        HAS_MOMENTS,
        STEPS,
        DIM,
        WIDTH,
    )


def sum_by_row(
    rows_N: Tensor,
    order_N: Tensor,
    gradients_MD: Tensor,
    source_N: Tensor,
    scale_N: Tensor | None,
    with_squares: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row gradients with an entry per id; its twin is `tbe_torch`'s.

    Args:
        rows_N: `[N]` int32 or int64 the row of each id, ascending.
        order_N: `[N]` int64 which id that is.
        gradients_MD: `[M, D]` floats.
        source_N: `[N]` int64 by id, the row of `gradients_MD` that is its gradient.
        scale_N: `[N]` fp32 by id, its factor; None for 1.
        with_squares: Whether to return the last of the results; else it is empty.

    Returns:
        `[N]` int64 rows; `[N, D]` fp32, a row's gradient at its first entry, and 0 at the others;
        and `[N]` fp32, the sum of the squares of each entry.
    """
    num_ids, dim = rows_N.numel(), gradients_MD.shape[1]
    rows = torch.empty_like(rows_N, dtype=torch.int64)
    sums = gradients_MD.new_empty(num_ids, dim, dtype=torch.float32)
    squares = gradients_MD.new_empty(num_ids if with_squares else 0, dtype=torch.float32)
    given = rows_N, order_N, gradients_MD, source_N, scale_N
    _sum(given, "by entry", _no_update(gradients_MD), rows, sums, squares)
    return rows, sums, squares


def sum_into(
    out_RD: Tensor,
    rows_N: Tensor,
    order_N: Tensor,
    gradients_MD: Tensor,
    source_N: Tensor,
    scale_N: Tensor | None,
) -> None:
    """Write the gradients of rows to where these are in `[R, D]` fp32; see `sum_by_row`."""
    given = rows_N, order_N, gradients_MD, source_N, scale_N
    _sum(given, "by row", _no_update(gradients_MD), rows_N, out_RD, out_RD)


def sum_and_update(
    update: RowUpdate,
    rows_N: Tensor,
    order_N: Tensor,
    gradients_MD: Tensor,
    source_N: Tensor,
    scale_N: Tensor | None,
) -> None:
    """Update rows by their gradients, which are nowhere written; see `sum_by_row`.

    Its twin is `update_rows` of what `sum_by_row` returns.
    """
    given = rows_N, order_N, gradients_MD, source_N, scale_N
    _sum(given, "update", update, rows_N, gradients_MD, gradients_MD)


def update_entries(
    update: RowUpdate, rows_K: Tensor, gradients_KD: Tensor, moments_K: Tensor | None
) -> None:
    """Update rows by gradients that were added up; its twin is `row_update.update_rows`.

    Args:
        update: What is updated.
        rows_K: `[K]` ascending; of a row that repeats, the first entry counts.
        gradients_KD: `[K, D]` fp32.
        moments_K: `[K]` fp32 the mean of g*g over all columns, where the tables have only some;
            None: computed here.
    """
    num_entries, dim = gradients_KD.shape
    if not num_entries:
        return
    width, block, num_warps = _sizes(dim)
    numbers, known = _arguments(update)
    with _current(rows_K.device):
        _update_entries[triton.cdiv(num_entries, block),](
            rows_K,
            gradients_KD.contiguous(),
            moments_K.contiguous() if moments_K is not None else gradients_KD,
            num_entries,
            *numbers,
            HAS_MOMENTS=moments_K is not None,
            **known,
            DIM=dim,
            WIDTH=width,
            BLOCK=block,
            num_warps=num_warps,
        )


def _sum(
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    form: str,
    update: RowUpdate,
    out_rows: Tensor,
    out: Tensor,
    squares: Tensor,
) -> None:
    rows, order, gradients, source, scale = given
    num_ids, dim = rows.numel(), gradients.shape[1]
    if not num_ids:
        return
    width, block, num_warps = _sizes(dim)
    num_blocks = triton.cdiv(num_ids, block)
    num_supers = num_ids // (block * block) if num_blocks > _FEW_BLOCKS else 0
    parts = gradients.new_empty(2 * num_blocks + num_supers, dim, dtype=torch.float32)
    heads, tails, supers = parts.split([num_blocks, num_blocks, num_supers])
    numbers, known = _arguments(update)
    sizes = {"DIM": dim, "WIDTH": width, "BLOCK": block}
    known |= {"FORM": form, "HAS_SQUARES": form == "by entry" and squares.numel() > 0}
    with _current(rows.device):
        _sum_blocks[num_blocks,](
            rows,
            order,
            source,
            source if scale is None else scale.contiguous(),
            gradients.contiguous(),
            heads,
            tails,
            num_ids,
            out_rows,
            out,
            squares,
            *numbers,
            HAS_SCALE=scale is not None,
            **known,
            **sizes,
            num_warps=num_warps,
        )
        if num_supers:
            _sum_heads[num_supers,](rows, heads, supers, **sizes, num_warps=num_warps)
        if num_blocks > 1:
            _sum_spans[num_blocks,](
                rows,
                heads,
                tails,
                supers,
                num_ids,
                num_blocks,
                out,
                squares,
                *numbers,
                HAS_SUPERS=num_supers > 0,
                **known,
                **sizes,
                num_warps=num_warps,
            )


def _sizes(dim: int) -> tuple[int, int, int]:
    """Return the power of two that columns are rounded up to, entries of a block, and warps."""
    width = triton.next_power_of_2(dim)
    block = min(max(_TILE // width, _LEAST), _MOST)
    return width, block, min(max(block * width // 1024, 1), 8)


def _no_update(like: Tensor) -> RowUpdate:
    return RowUpdate(OptimizerSpec(algorithm=EmbOptimType.SGD), like, None, 0.0, like)


def _arguments(update: RowUpdate) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return what kernels are told of an update, from the weights on."""
    spec, weight, rate = update.spec, update.weight_RD, update.rate
    num_tables = rate.numel() if isinstance(rate, Tensor) else 0
    numbers = (
        weight,
        weight if update.state_R is None else update.state_R,
        rate if isinstance(rate, Tensor) else weight,
        update.row_starts,
        num_tables,
        0.0 if isinstance(rate, Tensor) else rate,
        spec.eps,
        spec.weight_decay,
    )
    return numbers, {
        "IS_ADAGRAD": update.state_R is not None,
        "DECAY": next((mode.value for mode in WeightDecayMode if spec.decay(mode)), "none"),
        "STEPS": num_tables.bit_length(),
    }

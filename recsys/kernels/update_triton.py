"""Triton kernels that sum gradients by row and update rows, on a GPU; the twins are in PyTorch.

The ids of a batch are sorted by row. Each program sums one block of ids, row by row. For each row
that continues in other blocks, one program then adds up the sums of the blocks. If there are very
many blocks, a launch in between adds up groups of blocks. The position of an entry alone
determines the order of additions. There are no atomics, so results are the same from run to
run, bit for bit. All sums are fp32.

Triton's interpreter (`TRITON_INTERPRET=1`) runs the kernels on a CPU, for tests.

Shapes: N ids, M rows of gradients, R rows of the tables, K entries, T tables, D columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from recsys.kernels.ops_triton import last_at_most, launch
from recsys.kernels.optional_triton import tl, triton
from recsys.kernels.self_check import self_checked
from recsys.kernels.types import OptimizerSpec, WeightDecayMode

_TILE = 4096  # approximate number of values of a block
_LEAST, _MOST = 8, 64  # entries of a block
_FEW_BLOCKS = 1024  # the most blocks that are added up without a launch in between


@final
class RowUpdate(NamedTuple):
    """The rows to update, and the optimizer."""

    spec: OptimizerSpec
    """SGD or row-wise Adagrad, without stochastic rounding."""
    weight_RD: Tensor
    """Concatenated tables: fp32, fp16 or bf16; changed in place."""
    state_R: Tensor | None
    """Sum of row-wise Adagrad, fp32; changed in place."""
    rate: float | Tensor
    """The learning rate; [T] fp32 if tables differ."""
    row_starts: Tensor
    """[T + 1] int64 first row of each table, and the end."""


class _Update(NamedTuple):
    """A `RowUpdate` as an argument of kernels."""

    weight: Any
    state: Any
    """None for SGD."""
    rates: Any
    """None if all tables have one rate."""
    starts: Any
    num_tables: Any
    rate: Any
    eps: Any
    l2: Any
    """Weight decay added to the gradient, or None."""
    decoupled: Any
    """Weight decay applied to the weight, or None."""


class _Target(NamedTuple):
    """Destination of the gradients of rows: `sums` or `update`."""

    sums: Any = None
    """fp32 sums, by entry if `rows` is set, else by row of the tables. None: rows are updated."""
    rows: Any = None
    """[N] int64 row of each entry."""
    squares: Any = None
    """[N] fp32 sum of the squares of each entry."""
    update: Any = None


@triton.jit
def _add_segments(begins_a, sum_a, begins_b, sum_b):
    """Add up neighbours, unless the second one begins a segment."""
    return begins_a | begins_b, tl.where(begins_b != 0, sum_b, sum_a + sum_b)


@triton.jit
def _move_rows(
    u,
    sums,
    rows,
    places,
    is_meant,
    moments_ptr,
    STEPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Update rows, each by its gradient; `update_rules` has the formulas."""
    columns = tl.arange(0, WIDTH)
    # `sort_rows` narrows rows to int32, which elements of a table can exceed
    at = rows.to(tl.int64)[:, None] * DIM + columns[None, :]
    mask = is_meant[:, None] & (columns < DIM)[None, :]
    old = tl.load(u.weight + at, mask=mask, other=0).to(tl.float32)
    if u.l2 is not None:
        sums += u.l2 * old
    if u.rates is not None:
        nothing = tl.zeros_like(rows).to(tl.int32)
        tables = last_at_most(u.starts, 1, rows, nothing, nothing + u.num_tables, STEPS)
        rates = tl.load(u.rates + tables)
    else:
        rates = tl.zeros_like(rows).to(tl.float32) + u.rate
    scale = rates
    if u.state is not None:
        if moments_ptr is not None:
            moments = tl.load(moments_ptr + places, mask=is_meant, other=0)
        else:
            moments = tl.sum(sums * sums, 1) / DIM
        state = tl.load(u.state + rows, mask=is_meant, other=0) + moments
        # rounded to the nearest, as in PyTorch; Triton's `/` and `sqrt` of fp32 are approximate
        scale = tl.div_rn(rates, tl.sqrt_rn(state) + u.eps)
    # Several threads may read the same values: all of them must have read before one writes
    # docs/decisions/triton.md, "Updates in two passes"
    tl.debug_barrier()
    if u.state is not None:
        tl.store(u.state + rows, state, mask=is_meant)
    move = sums * scale[:, None]
    if u.decoupled is not None:
        move += (rates * u.decoupled)[:, None] * old
    tl.store(u.weight + at, (old - move).to(u.weight.dtype.element_ty), mask=mask)


@triton.jit
def _write(
    target,
    sums,
    rows,
    places,
    is_meant,
    STEPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the gradients of rows to their destination, or update the rows."""
    columns = tl.arange(0, WIDTH)
    mask = is_meant[:, None] & (columns < DIM)[None, :]
    if target.sums is None:
        _move_rows(target.update, sums, rows, places, is_meant, None, STEPS, DIM, WIDTH)
    elif target.rows is not None:
        tl.store(target.sums + places[:, None] * DIM + columns[None, :], sums, mask=mask)
        if target.squares is not None:
            tl.store(target.squares + places, tl.sum(sums * sums, 1), mask=is_meant)
    else:
        at = rows.to(tl.int64)[:, None] * DIM + columns[None, :]
        tl.store(target.sums + at, sums, mask=mask)


# `do_not_specialize`: see `ops_triton`.
@triton.jit(do_not_specialize=["num_ids"])
def _sum_blocks(
    tensors,
    target,
    num_ids,
    STEPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a block by row, and write the sums of rows that have no entries in other blocks.

    The sum of the row that began before the block is stored in `heads`; the sum of the row that
    begins in the block and continues behind it in `tails`.
    """
    rows_ptr, order_ptr, gradients_ptr, source_ptr, scale_ptr, heads_ptr, tails_ptr = tensors
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
    if scale_ptr is not None:
        sums *= tl.load(scale_ptr + ids, mask=is_real, other=0)[:, None]
    # from the end to the front, so that an entry has the sum of its row from there on
    # the operands of a scan have equal shapes
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
    # The memory is uninitialized, so entries without a sum get 0. `_sum_spans` overwrites the first
    # entries of rows that continue in other blocks.
    if target.rows is not None:
        tl.store(target.rows + places, rows.to(tl.int64), mask=is_real)
        sums = tl.where(is_meant[:, None], sums, 0.0)
        is_meant = is_real
    _write(target, sums, rows, places, is_meant, STEPS, DIM, WIDTH)


@triton.jit
def _sum_heads(tensors, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Add up `BLOCK` blocks, if all of them and the entry before them are of one row."""
    supers_ptr, rows_ptr, heads_ptr = tensors
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


@triton.jit(do_not_specialize=["num_ids", "num_blocks"])
def _sum_spans(
    tensors,
    target,
    num_ids,
    num_blocks,
    STEPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the sums of the row that begins in this block and ends in another."""
    rows_ptr, heads_ptr, tails_ptr, supers_ptr = tensors
    block = tl.program_id(0).to(tl.int64)
    last = tl.minimum((block + 1) * BLOCK, num_ids) - 1
    row = tl.load(rows_ptr + last)
    goes_on = tl.load(rows_ptr + last + 1, mask=last + 1 < num_ids, other=-1) == row
    begins_here = tl.load(rows_ptr + block * BLOCK - 1, mask=block > 0, other=-1) != row
    if goes_on & begins_here:
        # rows are sorted, so blocks that begin with the row are neighbours
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
        if supers_ptr is not None:
            first_super, end_super = (begin + BLOCK - 1) // BLOCK, low // BLOCK
            if first_super < end_super:
                sums = _add_parts(sums, heads_ptr, begin, first_super * BLOCK, DIM, WIDTH, BLOCK)
                sums = _add_parts(sums, supers_ptr, first_super, end_super, DIM, WIDTH, BLOCK)
                begin = end_super * BLOCK
        sums = _add_parts(sums, heads_ptr, begin, low + 1, DIM, WIDTH, BLOCK)
        columns = tl.arange(0, WIDTH)
        tail = tl.load(tails_ptr + block * DIM + columns, mask=columns < DIM, other=0)
        places = block * BLOCK + tl.arange(0, BLOCK)
        is_row = tl.load(rows_ptr + places, mask=places <= last, other=-1) == row
        nothing = tl.zeros([1], tl.int64)
        sums = (tl.sum(sums, 0) + tail)[None, :]
        # the row's entries are the last of the block, so their number gives the first one
        place = nothing + last + 1 - tl.sum(is_row.to(tl.int32))
        _write(target, sums, nothing + row, place, nothing == 0, STEPS, DIM, WIDTH)


@triton.jit(do_not_specialize=["num_entries"])
def _update_entries(
    tensors,
    update,
    num_entries,
    STEPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows_ptr, gradients_ptr, moments_ptr = tensors
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = places < num_entries
    rows = tl.load(rows_ptr + places, mask=is_real, other=-1)
    before = tl.load(rows_ptr + places - 1, mask=is_real & (places > 0), other=-1)
    is_meant = is_real & (rows != before)
    columns = tl.arange(0, WIDTH)
    mask = is_meant[:, None] & (columns < DIM)[None, :]
    sums = tl.load(gradients_ptr + places[:, None] * DIM + columns[None, :], mask=mask, other=0)
    _move_rows(update, sums, rows, places, is_meant, moments_ptr, STEPS, DIM, WIDTH)


@self_checked
def sum_by_row(
    rows_N: Tensor,
    order_N: Tensor,
    gradients_MD: Tensor,
    source_N: Tensor,
    scale_N: Tensor | None,
    with_squares: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row gradients with an entry per id; its twin is `row_gradients.sum_by_row`.

    Args:
        rows_N: `[N]` int32 or int64 the row of each id, ascending.
        order_N: `[N]` int64 the number of that id.
        gradients_MD: `[M, D]` floats.
        source_N: `[N]` int64 by id, the row of `gradients_MD` that is its gradient.
        scale_N: `[N]` fp32 by id, its factor; None for 1.
        with_squares: Whether to return the squares; else they are empty.

    Returns:
        `[N]` int64 rows; `[N, D]` fp32, a row's gradient at its first entry, and 0 at the others;
        and `[N]` fp32, the sum of the squares of each entry.
    """
    num_ids, dim = rows_N.numel(), gradients_MD.shape[1]
    rows = torch.empty_like(rows_N, dtype=torch.int64)
    sums = gradients_MD.new_empty(num_ids, dim, dtype=torch.float32)
    squares = gradients_MD.new_empty(num_ids if with_squares else 0, dtype=torch.float32)
    target = _Target(sums, rows, squares if with_squares else None)
    _sum(target, rows_N, order_N, gradients_MD, source_N, scale_N)
    return rows, sums, squares


@self_checked
def sum_into(
    out_RD: Tensor,
    rows_N: Tensor,
    order_N: Tensor,
    gradients_MD: Tensor,
    source_N: Tensor,
    scale_N: Tensor | None,
) -> None:
    """Write the gradients of rows to those rows of `[R, D]` fp32; see `sum_by_row`."""
    _sum(_Target(out_RD), rows_N, order_N, gradients_MD, source_N, scale_N)


@self_checked
def sum_and_update(
    update: RowUpdate,
    rows_N: Tensor,
    order_N: Tensor,
    gradients_MD: Tensor,
    source_N: Tensor,
    scale_N: Tensor | None,
) -> None:
    """Update rows by their gradients, which are not stored; see `sum_by_row`.

    Its twin is `update_rows` of the result of `sum_by_row`.
    """
    argument, steps = _as_argument(update)
    target = _Target(update=argument)
    _sum(target, rows_N, order_N, gradients_MD, source_N, scale_N, steps)


@self_checked
def update_entries(
    update: RowUpdate, rows_K: Tensor, gradients_KD: Tensor, moments_K: Tensor | None = None
) -> None:
    """Update rows by summed gradients; its twin is `row_update.update_rows`.

    Args:
        update: The rows to update, and the optimizer.
        rows_K: `[K]` ascending; the first entry of a row counts.
        gradients_KD: `[K, D]` fp32.
        moments_K: `[K]` fp32 the mean of g*g over all columns, if the tables have only some of
            them; None: computed here.
    """
    num_entries, dim = gradients_KD.shape
    if not num_entries:
        return
    known = _sizes(dim)
    moments = None if moments_K is None else moments_K.contiguous()
    tensors = rows_K, gradients_KD.contiguous(), moments
    grid = triton.cdiv(num_entries, known["BLOCK"])
    argument, steps = _as_argument(update)
    launch(_update_entries, grid, tensors, argument, num_entries, STEPS=steps, **known)


def _sum(
    target: _Target,
    rows: Tensor,
    order: Tensor,
    gradients: Tensor,
    source: Tensor,
    scale: Tensor | None,
    steps: int = 0,
) -> None:
    num_ids, dim = rows.numel(), gradients.shape[1]
    if not num_ids:
        return
    known = _sizes(dim)
    block = known["BLOCK"]
    num_blocks = triton.cdiv(num_ids, block)
    # full groups only, which `_sum_heads` reads without masks
    # docs/decisions/triton.md, "Updates in two passes"
    num_supers = num_ids // (block * block) if num_blocks > _FEW_BLOCKS else 0
    parts = gradients.new_empty(2 * num_blocks + num_supers, dim, dtype=torch.float32)
    heads, tails, supers = parts.split([num_blocks, num_blocks, num_supers])
    scale = None if scale is None else scale.contiguous()
    tensors = rows, order, gradients.contiguous(), source, scale, heads, tails
    launch(_sum_blocks, num_blocks, tensors, target, num_ids, STEPS=steps, **known)
    if num_supers:
        launch(_sum_heads, num_supers, (supers, rows, heads), **known)
    if num_blocks > 1:
        spans = rows, heads, tails, supers if num_supers else None
        launch(_sum_spans, num_blocks, spans, target, num_ids, num_blocks, STEPS=steps, **known)


def _sizes(dim: int) -> dict[str, int]:
    """Return the constants for rows of some columns, and the number of warps."""
    # Triton's blocks have powers of two; columns from `dim` on are masked
    width = triton.next_power_of_2(dim)
    block = min(max(_TILE // width, _LEAST), _MOST)
    num_warps = min(max(block * width // 1024, 1), 8)
    return {"DIM": dim, "WIDTH": width, "BLOCK": block, "num_warps": num_warps}


def _as_argument(update: RowUpdate) -> tuple[_Update, int]:
    """Return the argument of kernels, and the steps of their search for the table of a row."""
    spec, weight, state, rate, starts = update
    # None instead of 0: Triton compiles the kernel without the term
    l2 = spec.decay(WeightDecayMode.L2) or None
    decoupled = spec.decay(WeightDecayMode.DECOUPLE) or None
    if isinstance(rate, Tensor):
        tables = starts, rate.numel(), 0.0
        return _Update(weight, state, rate, *tables, spec.eps, l2, decoupled), tables[
            1
        ].bit_length()
    return _Update(weight, state, None, None, 0, rate, spec.eps, l2, decoupled), 0

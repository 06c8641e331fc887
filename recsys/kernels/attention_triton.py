"""Triton kernels of attention inside bags, on a GPU; the twin is `attention_blocks`.

A program has a block of queries of one bag and head, and reads the keys of the bag block by block:
scores exist only in registers, as in Dao et al., "FlashAttention", NeurIPS 2022. Sums are fp32.
`attention_grad_triton` has the backward pass.

Programs find their bags on the device, so the host waits for nothing. Program
`offsets[m] // BLOCK + m + b` has block `b` of bag `m`. These numbers ascend from bag to bag and
leave enough programs for each, with at most one program per bag that has no block.

Triton's interpreter (`TRITON_INTERPRET=1`) runs the kernels on a CPU, for tests.

Shapes: as in `attention_blocks`; `P` entries of `Bias.position` of a
head, `T` entries of `Bias.time`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from recsys.kernels.attention_rules import AttentionRules, Bias
from recsys.kernels.ops_triton import launch
from recsys.kernels.optional_triton import tl, triton
from recsys.kernels.self_check import self_checked

_BLOCK, _SMALL_BLOCK = 64, 32
"""Queries and keys of a block; of fp32 or more than 64 columns, which need more registers."""


@final
class _Tensors(NamedTuple):
    """Tensors of all kernels, contiguous."""

    query: Any
    """[N, H, D]."""
    key: Any
    """[N, H, D]."""
    value: Any
    """[N, H, V]."""
    offsets: Any
    """[M + 1]."""
    position: Any
    """[H, P] or None."""
    time: Any
    """[H, T] or None."""
    query_times: Any
    """[N] or None."""
    key_times: Any
    """[N] or None."""
    num_targets: Any
    """[M] or None."""


# -- launches --------------------------------------------------------------------------------------


def tensors_of(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, bias: Bias) -> _Tensors:
    """Return the tensors of all kernels, contiguous."""
    tensors = query, key, value, offsets, *bias
    return _Tensors(*(None if part is None else part.contiguous() for part in tensors))


def _block(tensors: _Tensors) -> int:
    is_wide = max(tensors.query.shape[2], tensors.value.shape[2]) > 64
    return _SMALL_BLOCK if is_wide or tensors.query.dtype == torch.float32 else _BLOCK


def num_programs(tensors: _Tensors) -> int:
    """Return the number of programs of a head; see the module."""
    return int(tensors.query.shape[0] // _block(tensors) + tensors.offsets.shape[0] - 1)


def launch_attention(
    kernel: Any, tensors: _Tensors, results: tuple[Any, ...], rules: AttentionRules, **known: int
) -> None:
    """Launch a kernel for all blocks and heads; `known` are further compile-time constants."""
    num_values, heads, columns = tensors.query.shape
    num_bags = tensors.offsets.shape[0] - 1
    if not num_values:
        return
    is_softmax = rules.kind == "softmax"
    launch(
        kernel,
        (num_programs(tensors), heads),
        tensors,
        results,
        num_bags,
        num_values,
        float(rules.scale),
        1.0 if is_softmax else 1.0 / rules.divisor,
        HEADS=heads,
        COLUMNS=columns,
        WIDTH=tensors.value.shape[2],
        POSITIONS=1 if tensors.position is None else tensors.position.shape[1],
        TIMES=1 if tensors.time is None else tensors.time.shape[1],
        IS_SOFTMAX=is_softmax,
        IS_CAUSAL=rules.causal,
        # each new constant compiles the kernel again, and a bit length is seldom new
        STEPS=num_bags.bit_length(),
        BLOCK=_block(tensors),
        # fp32 needs more registers; docs/decisions/triton.md, "Attention inside bags"
        num_warps=8 if tensors.query.dtype == torch.float32 else 4,
        **known,
    )


# -- blocks ----------------------------------------------------------------------------------------


@triton.jit
def block_of(t, num_bags, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's bag: its start, length and first target; and the block's first position.

    A program without a block has a position past the end of the bag.
    """
    program = tl.program_id(0)
    low, high = 0, num_bags
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        goes_up = tl.load(t.offsets + middle) // BLOCK + middle <= program
        low = tl.where(goes_up, middle, low)
        high = tl.where(goes_up, high, middle)
    start = tl.load(t.offsets + low).to(tl.int64)
    length = (tl.load(t.offsets + low + 1) - start).to(tl.int32)
    target = length
    if t.num_targets is not None:
        target -= tl.load(t.num_targets + low).to(tl.int32)
        # the host checks no values, which would wait: reads stay in the bag for any number
        target = tl.minimum(tl.maximum(target, 0), length)
    first = (program - start // BLOCK - low) * BLOCK
    return start, length, target, first.to(tl.int32)


@triton.jit
def _places(row, head, number, HEADS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the places of a block [BLOCK, COLUMNS] from a row on, and a mask of `number` rows."""
    lines, columns = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    places = lines[:, None] * (HEADS * COLUMNS) + columns[None, :]
    is_there = (lines < number)[:, None] & (columns < COLUMNS)[None, :]
    return (row * HEADS + head) * COLUMNS + places, is_there


@triton.jit
def load_block(
    pointer, row, head, number, HEADS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a block [BLOCK, COLUMNS] from a row on, with 0 from row `number` on."""
    places, is_there = _places(row, head, number, HEADS, COLUMNS, BLOCK)
    return tl.load(pointer + places, mask=is_there, other=0.0)


@triton.jit
def store_block(
    pointer,
    rows,
    row,
    head,
    number,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the first `number` rows of a block [BLOCK, COLUMNS] from a row on."""
    places, is_there = _places(row, head, number, HEADS, COLUMNS, BLOCK)
    tl.store(pointer + places, rows.to(pointer.dtype.element_ty), mask=is_there)


@triton.jit
def num_key_blocks(first, length, target, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers of key blocks of a block of queries: before the targets, and of all.

    Targets are read by their own queries alone, so they need one block of keys.
    """
    end = tl.minimum(first + BLOCK, length)
    history = target
    if IS_CAUSAL:
        history = tl.minimum(end, target)
    history = tl.cdiv(history, BLOCK)
    return history, history + (end > target).to(tl.int32)


@triton.jit
def keys_of_step(step, num_history, first, length, target, BLOCK: tl.constexpr):
    """Return the first position of a block of keys, and the end of its positions."""
    at = tl.where(step < num_history, step * BLOCK, tl.maximum(first, target))
    return at, tl.where(step < num_history, target, length)


# -- scores ----------------------------------------------------------------------------------------


@triton.jit
def position_entry(distances, POSITIONS: tl.constexpr):
    """Return the entries of `Bias.position` of distances."""
    most: tl.constexpr = POSITIONS // 2
    return tl.minimum(tl.maximum(distances, -most), most) + most


@triton.jit
def time_entries(t, i, j, start, length, TIMES: tl.constexpr):
    """Return `time_buckets` of the distances in time [Q, K], at most TIMES - 1."""
    query_times = tl.load(t.query_times + start + i, mask=i < length, other=0).to(tl.int64)
    key_times = tl.load(t.key_times + start + j, mask=j < length, other=0).to(tl.int64)
    distances = tl.abs(query_times[:, None] - key_times[None, :]).to(tl.float64)
    bits = distances.to(tl.int64, bitcast=True)
    # `frexp` from the bits of an fp64: its exponent is biased by 1022; the exponent of 0 is below 0
    exponents = ((bits >> 52) & 2047).to(tl.int32) - 1022
    return tl.minimum(tl.maximum(exponents, 0), TIMES - 1)


@triton.jit
def scores_of(
    t,
    queries,
    keys,
    i,
    j,
    start,
    length,
    target,
    head,
    scale,
    POSITIONS: tl.constexpr,
    TIMES: tl.constexpr,
):
    """Return the scores [Q, K] of positions `i` and `j` of a bag, with bias, in fp32."""
    # Triton's default for fp32 is TF32, with 10 bits of mantissa
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if t.position is not None:
        distances = tl.minimum(i, target)[:, None] - tl.minimum(j, target)[None, :]
        entries = position_entry(distances, POSITIONS)
        scores += tl.load(t.position + head * POSITIONS + entries).to(tl.float32)
    if t.time is not None:
        entries = time_entries(t, i, j, start, length, TIMES)
        scores += tl.load(t.time + head * TIMES + entries).to(tl.float32)
    return scores


@triton.jit
def read_mask(i, j, length, end, target, IS_CAUSAL: tl.constexpr):
    """Return whether queries read keys, [Q, K]; keys from `end` on are not of the block."""
    is_read = (i < length)[:, None] & (j < end)[None, :]
    is_read &= (j < target)[None, :] | (i[:, None] == j[None, :])
    if IS_CAUSAL:
        is_read &= j[None, :] <= i[:, None]
    return is_read


# -- forward ---------------------------------------------------------------------------------------


# `do_not_specialize`: see `ops_triton`.
@triton.jit(do_not_specialize=["num_bags", "num_values"])
def _attend(
    t,
    results,
    num_bags,
    num_values,
    scale,
    factor,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr,
    TIMES: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    out_ptr, log_sums_ptr = results
    start, length, target, first = block_of(t, num_bags, STEPS, BLOCK)
    if first >= length:
        return
    # int64: `head * num_values` can exceed int32
    head, lines = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    i = first + lines
    queries = load_block(t.query, start + first, head, length - first, HEADS, COLUMNS, BLOCK)
    out = tl.zeros([BLOCK, WIDTH], dtype=tl.float32)
    largest = tl.zeros([BLOCK], dtype=tl.float32) - 1e30  # finite, for lines without keys
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    num_history, num_steps = num_key_blocks(first, length, target, IS_CAUSAL, BLOCK)
    for step in range(num_steps):
        at, end = keys_of_step(step, num_history, first, length, target, BLOCK)
        j = at + lines
        keys = load_block(t.key, start + at, head, end - at, HEADS, COLUMNS, BLOCK)
        values = load_block(t.value, start + at, head, end - at, HEADS, WIDTH, BLOCK)
        scores = scores_of(
            t, queries, keys, i, j, start, length, target, head, scale, POSITIONS, TIMES
        )
        is_read = read_mask(i, j, length, end, target, IS_CAUSAL)
        if IS_SOFTMAX:
            scores = tl.where(is_read, scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            shares = tl.exp(scores - larger[:, None])
            shrink = tl.exp(largest - larger)
            sums = sums * shrink + tl.sum(shares, 1)
            out *= shrink[:, None]
            largest = larger
        else:
            shares = tl.where(is_read, scores * tl.sigmoid(scores), 0.0)
        out = tl.dot(shares.to(values.dtype), values, out, input_precision="ieee")
    if IS_SOFTMAX:
        is_real = i < length
        # lines past the bag read no key: 1 avoids 0 / 0 and log(0)
        sums = tl.where(is_real, sums, 1.0)
        out /= sums[:, None]
        places = head * num_values + start + i
        tl.store(log_sums_ptr + places, largest + tl.log(sums), mask=is_real)
    else:
        out *= factor
    store_block(out_ptr, out, start + first, head, length - first, HEADS, WIDTH, BLOCK)


@self_checked
def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, rules: AttentionRules, bias: Bias
) -> tuple[Tensor | None, Tensor]:
    """Return attention inside each bag, in one launch; its twin is `blocks_forward`.

    Args:
        query: `[N, H, D]` fp32, fp16 or bf16; D is 16, 32, 64 or 128.
        key: `[N, H, D]` of the same dtype.
        value: `[N, H, V]` of the same dtype; V is 16, 32, 64 or 128.
        offsets: `[M + 1]` int32 or int64; the last is N.
        rules: The rules. `max_length` is not read.
        bias: Terms of the scores.

    Returns:
        `[H, N]` fp32 logarithm of each query's sum of exponentials, None for SiLU; `[N, H, V]`.
    """
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    log_sums = None
    if rules.kind == "softmax":
        shape = query.shape[1], query.shape[0]
        log_sums = torch.empty(shape, dtype=torch.float32, device=query.device)
    tensors = tensors_of(query, key, value, offsets, bias)
    launch_attention(_attend, tensors, (out, log_sums), rules)
    return log_sums, out

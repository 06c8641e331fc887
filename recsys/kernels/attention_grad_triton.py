"""Triton kernels of the backward pass of attention, on a GPU; the twin is `attention_blocks`.

Scores are computed again, once per block of queries, for the gradients of queries and of the bias,
and once per block of keys, for the gradients of keys and values.

Atomics sum the gradient of `Bias.position`, one per distance of two blocks. All other gradients are
the same from run to run, bit for bit.

Shapes: as in `attention_triton`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.kernels.attention_rules import AttentionRules, Bias
from recsys.kernels.attention_triton import (
    block_of,
    keys_of_step,
    launch_attention,
    load_block,
    num_key_blocks,
    num_programs,
    position_entry,
    read_mask,
    scores_of,
    store_block,
    tensors_of,
    time_entries,
)
from recsys.kernels.optional_triton import tl, triton
from recsys.kernels.self_check import self_checked


@triton.jit
def _shares_and_slopes(scores, is_read, log_sums, deltas, of_shares, IS_SOFTMAX: tl.constexpr):
    """Return the shares [Q, K] and the gradients of scores, both without the divisor of SiLU."""
    if IS_SOFTMAX:
        shares = tl.exp(tl.where(is_read, scores - log_sums[:, None], float("-inf")))
        of_scores = shares * (of_shares - deltas[:, None])
    else:
        sigmoid = tl.sigmoid(scores)
        shares = tl.where(is_read, scores * sigmoid, 0.0)
        of_scores = tl.where(is_read, of_shares * sigmoid * (1 + scores * (1 - sigmoid)), 0.0)
    return shares, of_scores


@triton.jit
def _add_to_positions(
    table, of_scores, first, at, target, factor, POSITIONS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add gradients of scores [Q, K] to the gradients of a head's row of `Bias.position`."""
    lines = tl.arange(0, BLOCK)
    # the least and the greatest distance: if they agree, all pairs share one entry
    low = tl.minimum(first, target) - tl.minimum(at + BLOCK - 1, target)
    high = tl.minimum(first + BLOCK - 1, target) - tl.minimum(at, target)
    low, high = position_entry(low, POSITIONS), position_entry(high, POSITIONS)
    # `relaxed` in all branches: no program of this launch reads the sums
    if low == high:  # both blocks far apart, or targets
        tl.atomic_add(table + low, tl.sum(of_scores) * factor, sem="relaxed")
    else:
        if first + BLOCK > target:  # targets have the distances of the first one
            is_target = (first + lines >= target)[:, None]
            sums = tl.sum(tl.where(is_target, of_scores, 0.0), 0) * factor
            entries = position_entry(target - tl.minimum(at + lines, target), POSITIONS)
            tl.atomic_add(table + entries, sums, sem="relaxed")
            of_scores = tl.where(is_target, 0.0, of_scores)
        # Rotate line `r` by `r`: equal distances are in one column, `c - r` is k or k - BLOCK.
        sources = lines[:, None] + lines[None, :]
        rotated = tl.gather(of_scores, sources % BLOCK, 1)
        sums = tl.sum(tl.where(sources < BLOCK, rotated, 0.0), 0) * factor
        entries = position_entry(first - at - lines, POSITIONS)
        tl.atomic_add(table + entries, sums, sem="relaxed")
        sums = tl.sum(tl.where(sources < BLOCK, 0.0, rotated), 0) * factor
        entries = position_entry(first - at - lines + BLOCK, POSITIONS)
        tl.atomic_add(table + entries, sums, sem="relaxed")


@triton.jit
def _sum_by_time(of_scores, is_read, entries, places, TIMES: tl.constexpr):
    """Return sums of the gradients of scores [Q, K] by entry of `Bias.time`, at `places`.

    Two blocks have few entries between them, as distances with equal numbers of bits share one.
    """
    sums = tl.zeros_like(places).to(tl.float32)
    low = tl.min(tl.where(is_read, entries, TIMES))
    high = tl.max(tl.where(is_read, entries, -1))
    for entry in range(low, high + 1):
        total = tl.sum(tl.where(entries == entry, of_scores, 0.0))
        sums += tl.where(places == entry, total, 0.0)
    return sums


@triton.jit(do_not_specialize=["num_bags", "num_values"])
def _queries_backward(
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
    TIME_PLACES: tl.constexpr,
):
    """Gradients of queries and of the bias; and the sum over `out` of each query, `deltas`."""
    of_query_ptr, gradient_ptr, out_ptr, log_sums_ptr, deltas_ptr, positions_ptr, times_ptr = (
        results
    )
    start, length, target, first = block_of(t, num_bags, STEPS, BLOCK)
    if first >= length:
        return
    head, lines = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    i, number = first + lines, length - first
    queries = load_block(t.query, start + first, head, number, HEADS, COLUMNS, BLOCK)
    gradient = load_block(gradient_ptr, start + first, head, number, HEADS, WIDTH, BLOCK)
    log_sums = tl.zeros([BLOCK], dtype=tl.float32)
    deltas = tl.zeros([BLOCK], dtype=tl.float32)
    if IS_SOFTMAX:
        out = load_block(out_ptr, start + first, head, number, HEADS, WIDTH, BLOCK)
        deltas = tl.sum(gradient.to(tl.float32) * out.to(tl.float32), 1)
        places = head * num_values + start + i
        log_sums = tl.load(log_sums_ptr + places, mask=i < length, other=0.0)
        tl.store(deltas_ptr + places, deltas, mask=i < length)
    of_queries = tl.zeros([BLOCK, COLUMNS], dtype=tl.float32)
    time_places = tl.arange(0, TIME_PLACES)
    of_times = tl.zeros([TIME_PLACES], dtype=tl.float32)
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
        of_shares = tl.dot(gradient, tl.trans(values), input_precision="ieee")
        _, of_scores = _shares_and_slopes(scores, is_read, log_sums, deltas, of_shares, IS_SOFTMAX)
        if positions_ptr is not None:
            table = positions_ptr + head * POSITIONS
            _add_to_positions(table, of_scores, first, at, target, factor, POSITIONS, BLOCK)
        if times_ptr is not None:
            entries = time_entries(t, i, j, start, length, TIMES)
            of_times += _sum_by_time(of_scores, is_read, entries, time_places, TIMES)
        of_queries = tl.dot(of_scores.to(keys.dtype), keys, of_queries, input_precision="ieee")
    of_queries *= scale * factor
    store_block(of_query_ptr, of_queries, start + first, head, number, HEADS, COLUMNS, BLOCK)
    if times_ptr is not None:
        row = (tl.program_id(0).to(tl.int64) * HEADS + head) * TIMES
        tl.store(times_ptr + row + time_places, of_times * factor, mask=time_places < TIMES)


@triton.jit(do_not_specialize=["num_bags", "num_values"])
def _keys_backward(
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
    """Gradients of keys and values."""
    of_key_ptr, of_value_ptr, gradient_ptr, log_sums_ptr, deltas_ptr = results
    start, length, target, first = block_of(t, num_bags, STEPS, BLOCK)
    if first >= length:
        return
    head, lines = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    j, number = first + lines, length - first
    keys = load_block(t.key, start + first, head, number, HEADS, COLUMNS, BLOCK)
    values = load_block(t.value, start + first, head, number, HEADS, WIDTH, BLOCK)
    log_sums = tl.zeros([BLOCK], dtype=tl.float32)
    deltas = tl.zeros([BLOCK], dtype=tl.float32)
    of_keys = tl.zeros([BLOCK, COLUMNS], dtype=tl.float32)
    of_values = tl.zeros([BLOCK, WIDTH], dtype=tl.float32)
    are_targets = first >= target  # read by their own queries alone
    begin = tl.where(are_targets, first, 0)
    if IS_CAUSAL:
        begin = first
    end = tl.where(are_targets, tl.minimum(first + BLOCK, length), length)
    for at in range(begin, end, BLOCK):
        i = at + lines
        queries = load_block(t.query, start + at, head, length - at, HEADS, COLUMNS, BLOCK)
        gradient = load_block(gradient_ptr, start + at, head, length - at, HEADS, WIDTH, BLOCK)
        if IS_SOFTMAX:
            places = head * num_values + start + i
            log_sums = tl.load(log_sums_ptr + places, mask=i < length, other=0.0)
            deltas = tl.load(deltas_ptr + places, mask=i < length, other=0.0)
        scores = scores_of(
            t, queries, keys, i, j, start, length, target, head, scale, POSITIONS, TIMES
        )
        is_read = read_mask(i, j, length, length, target, IS_CAUSAL)
        of_shares = tl.dot(gradient, tl.trans(values), input_precision="ieee")
        shares, of_scores = _shares_and_slopes(
            scores, is_read, log_sums, deltas, of_shares, IS_SOFTMAX
        )
        shares, of_scores = shares.to(gradient.dtype), of_scores.to(queries.dtype)
        of_values = tl.dot(tl.trans(shares), gradient, of_values, input_precision="ieee")
        of_keys = tl.dot(tl.trans(of_scores), queries, of_keys, input_precision="ieee")
    of_keys *= scale * factor
    of_values *= factor
    store_block(of_key_ptr, of_keys, start + first, head, number, HEADS, COLUMNS, BLOCK)
    store_block(of_value_ptr, of_values, start + first, head, number, HEADS, WIDTH, BLOCK)


@self_checked
def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    log_sums: Tensor | None,
    out: Tensor | None,
    rules: AttentionRules,
    bias: Bias,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor]:
    """Return the gradients, in two launches; its twin is `attention_blocks.blocks_backward`.

    Args:
        gradient: `[N, H, V]`, the gradient of the result.
        query: As for `attention_forward`.
        key: As for `attention_forward`.
        value: As for `attention_forward`.
        offsets: As for `attention_forward`.
        log_sums: The first result of `attention_forward`.
        out: The second result of `attention_forward`; None for SiLU.
        rules: The rules.
        bias: Terms of the scores.

    Returns:
        Gradients of `bias.position` and `bias.time`, of `query`, `key` and `value`.
    """
    tensors = tensors_of(query, key, value, offsets, bias)
    gradient, device = gradient.contiguous(), query.device
    gradients = [torch.empty(part.shape, dtype=part.dtype, device=device) for part in tensors[:3]]
    deltas = None if log_sums is None else torch.empty_like(log_sums)
    positions = times = None
    if bias.position is not None:
        positions = torch.zeros(bias.position.shape, dtype=torch.float32, device=device)
    if bias.time is not None:
        shape = num_programs(tensors), *bias.time.shape
        # A row per program: sums have a fixed order. Programs without a block write
        # no row, hence zeros. See docs/decisions/triton.md, "Attention inside bags".
        times = torch.zeros(shape, dtype=torch.float32, device=device)
    results = gradients[0], gradient, out, log_sums, deltas, positions, times
    num_times = 1 if bias.time is None else bias.time.shape[1]
    num_places = triton.next_power_of_2(num_times)
    # in this order: the first launch writes `deltas`, the second one reads them
    launch_attention(_queries_backward, tensors, results, rules, TIME_PLACES=num_places)
    launch_attention(_keys_backward, tensors, (*gradients[1:], gradient, log_sums, deltas), rules)
    of_position = of_time = None
    if bias.position is not None and positions is not None:
        of_position = positions.to(bias.position.dtype)
    if bias.time is not None and times is not None:
        of_time = times.sum(0).to(bias.time.dtype)
    return of_position, of_time, gradients[0], gradients[1], gradients[2]

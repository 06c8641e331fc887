"""Attention inside each bag of a jagged tensor, in operations of PyTorch.

Bags are grouped by length, so that hardly anything is padded, and scores exist only for a block of
queries at a time: memory grows with the number of values. The backward pass computes the scores
again, as in Dao et al., "FlashAttention", NeurIPS 2022.

Shapes: `M` bags, `N` values of all bags, `H` heads, `D` columns of queries and keys, `V` columns of
values; `G` bags of a group, `L` positions of its longest bag, `Q` queries of a block, `K` keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recsys.kernels.attention_rules import AttentionRules, Bias, time_buckets

__all__ = ["blocks_backward", "blocks_forward", "padded_forward"]

_MOST_PADDED: Final = 1.3
"""Most work of a group, relative to the work of its bags."""
_BLOCK_SCORES: Final = 1 << 20
"""Most scores of a block, unless one row of queries has more."""
_BLOCK_QUERIES: Final = 64
"""Fewest queries of a causal block; shorter blocks compute fewer scores that are masked."""


# -- groups of bags --------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Bags of similar lengths."""

    rows: Tensor
    """int64 [G, L]: positions of the values; of padding, of the last value of the bag."""
    lengths: Tensor
    """int64 [G]."""
    bags: Tensor
    """int64 [G]."""
    is_even: bool
    """True if all bags are equally long."""


def _groups(offsets: Tensor, heads: int, max_length: int) -> Iterator[_Group]:
    """Yield all bags with values, in groups, the longest first."""
    # the host waits for lengths here, unlike for Triton's kernels
    # docs/decisions/triton.md, "Attention inside bags"
    starts = offsets.detach().cpu().long()
    lengths = starts.diff()
    order = lengths.argsort(descending=True, stable=True)
    ordered = lengths[order].tolist()
    if ordered and ordered[0] > max_length:
        raise ValueError(
            f"Bags must have at most max_length={max_length} values; received {ordered[0]}. "
            "Truncate them with recsys.sparse.ops.truncate."
        )
    device, first = offsets.device, 0
    # lengths descend, so the first empty bag ends the groups
    while first < len(ordered) and ordered[first]:
        longest, work, last = ordered[first], 0, first
        # limits the bags: a block of `_BLOCK_QUERIES` queries has at most `_BLOCK_SCORES` scores
        most = max(1, _BLOCK_SCORES // (heads * longest * min(longest, _BLOCK_QUERIES)))
        while last < len(ordered) and ordered[last] and last - first < most:
            # a bag has a score for each pair of its values
            more = work + ordered[last] ** 2
            if (last + 1 - first) * longest**2 > _MOST_PADDED * more:
                break
            work, last = more, last + 1
        bags = order[first:last]
        group_lengths = lengths[bags]
        places = torch.arange(longest).minimum(group_lengths.unsqueeze(1) - 1)
        rows = (starts[bags].unsqueeze(1) + places).to(device)
        is_even = ordered[last - 1] == longest
        yield _Group(rows, group_lengths.to(device), bags.to(device), is_even)
        first = last


def _gather(values: Tensor, group: _Group) -> Tensor:
    """Return [G, H, L, columns] of a group."""
    gathered = values.index_select(0, group.rows.flatten())
    return gathered.view(*group.rows.shape, *values.shape[1:]).transpose(1, 2)


def _gather_by_head(values: Tensor, group: _Group) -> Tensor:
    """Return [G, H, L, columns] of a group; `transpose` would ask a compiler for empty groups."""
    heads = torch.arange(values.shape[1], device=values.device).unsqueeze(1)
    rows = group.rows.unsqueeze(1) * values.shape[1] + heads
    gathered = values.flatten(0, 1).index_select(0, rows.flatten())
    return gathered.view(*rows.shape, values.shape[2])


def _is_real(group: _Group) -> Tensor:
    """Return whether a position of a group is a value of a bag, bool [G, L]."""
    places = torch.arange(group.rows.shape[1], device=group.rows.device)
    return places < group.lengths.unsqueeze(1)


def _scatter(result: Tensor, group: _Group, found: Tensor) -> None:
    """Write [G, H, L, columns] of a group to the rows [N, H, columns] of its values."""
    found = found.transpose(1, 2)
    if group.is_even:
        result[group.rows.flatten()] = found.flatten(0, 1).to(result.dtype)
    else:
        is_real = _is_real(group)
        # padding has the row of the bag's last value, whose result it must not overwrite
        result[group.rows[is_real]] = found[is_real].to(result.dtype)


# -- one padded group ------------------------------------------------------------------------------


def padded_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    rules: AttentionRules,
    bias: Bias,
) -> Tensor:
    """Return attention of all bags as one group, for compilers: no shape depends on lengths."""
    starts, lengths = offsets[:-1].long(), offsets.diff().long()
    # a longer bag would read values of the next bag; the host does not wait for this check
    fits = (lengths <= rules.max_length).all()
    torch._assert_async(fits, f"Bags must have at most max_length={rules.max_length} values.")
    places = torch.arange(rules.max_length, device=offsets.device)
    places = places.minimum(lengths.unsqueeze(1) - 1).clamp(min=0)
    rows = starts.unsqueeze(1) + places
    bags = torch.arange(lengths.shape[0], device=offsets.device)
    group = _Group(rows, lengths, bags, False)
    num_values = query.shape[0]
    # bags without values read some row, even of a batch without values
    query, key, value = (functional.pad(part, (0, 0, 0, 0, 0, 1)) for part in (query, key, value))
    query_times, key_times = (
        None if times is None else functional.pad(times, (0, 1))
        for times in (bias.query_times, bias.key_times)
    )
    bias = bias._replace(query_times=query_times, key_times=key_times)
    parts = _parts(query, key, value, bias, group)
    queries = range(rules.max_length)
    block = _block(parts, group, rules, bias, queries, rules.max_length)
    shares = _shares(block, rules)[0].flatten(0, 1)
    output = torch.bmm(shares, parts.value.flatten(0, 1)).flatten(0, 1)
    # `output_size`: a compiler needs a shape that does not depend on the lengths
    of_values = bags.repeat_interleave(lengths, output_size=num_values)
    place = torch.arange(num_values, device=bags.device) - starts.index_select(0, of_values)
    num_heads = value.shape[1]
    heads = torch.arange(num_heads, device=bags.device)
    places = (of_values.unsqueeze(1) * num_heads + heads) * rules.max_length + place.unsqueeze(1)
    output = output.index_select(0, places.flatten()).view(num_values, num_heads, value.shape[2])
    return output.to(value.dtype)


# -- blocks ----------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """Tensors of a group, in the dtype of the computation."""

    query: Tensor
    """[G, H, L, D]."""
    key: Tensor
    """[G, H, L, D]."""
    value: Tensor
    """[G, H, L, V]."""
    query_times: Tensor | None
    """int64 [G, L]."""
    key_times: Tensor | None
    """int64 [G, L]."""
    num_targets: Tensor | None
    """int64 [G]."""


class _Block(NamedTuple):
    """Scores of some queries of a group."""

    scores: Tensor
    """[G, H, Q, K], with bias."""
    masked: Tensor | None
    """bool [1 or G, 1, Q, K]: keys that a query does not read."""
    distances: Tensor | None
    """int64 [1 or G, Q, K]: entries of `Bias.position`."""
    buckets: Tensor | None
    """int64 [G, Q, K]: entries of `Bias.time`."""


def blocks_forward(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, rules: AttentionRules, bias: Bias
) -> Tensor:
    """Return `attend` in operations of PyTorch; see there."""
    result = value.new_empty(query.shape[0], *value.shape[1:])
    for group in _groups(offsets, query.shape[1], rules.max_length):
        parts = _parts(query, key, value, bias, group)
        blocks = [
            _shares(block, rules)[0] @ parts.value[:, :, : block.scores.shape[3]]
            for _, block in _blocks(parts, group, rules, bias)
        ]
        _scatter(result, group, torch.cat(blocks, 2))
    return result


def blocks_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    rules: AttentionRules,
    bias: Bias,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor]:
    """Return the gradients of `bias.position` and `bias.time`, of `query`, `key` and `value`.

    Args:
        gradient: [N, H, V], the gradient of the result.
        query: As for `attend`.
        key: As for `attend`.
        value: As for `attend`.
        offsets: As for `attend`.
        rules: The rules.
        bias: Terms of the scores.
    """
    gradients = [torch.empty_like(part) for part in (query, key, value)]
    of_bias = [
        # fp64: an entry adds up gradients of very many scores, block after block
        None if part is None else torch.zeros_like(part, dtype=torch.float64)
        for part in (bias.position, bias.time)
    ]
    for group in _groups(offsets, query.shape[1], rules.max_length):
        parts = _parts(query, key, value, bias, group)
        out = _gather(gradient, group).to(parts.value.dtype)
        if not group.is_even:
            # queries of padding repeat the last value, whose gradient must count once
            out = out * _is_real(group)[:, None, :, None]
        of_query = list[Tensor]()
        of_key, of_value = torch.zeros_like(parts.key), torch.zeros_like(parts.value)
        for first, block in _blocks(parts, group, rules, bias):
            keys = block.scores.shape[3]
            of_block = out[:, :, first : first + block.scores.shape[2]]
            shares, slopes = _shares(block, rules)
            of_value[:, :, :keys] += shares.transpose(2, 3) @ of_block
            of_shares = of_block @ parts.value[:, :, :keys].transpose(2, 3)
            if slopes is None:
                of_shares -= (of_shares * shares).sum(3, keepdim=True)
                of_scores = of_shares.mul_(shares)
            else:
                of_scores = of_shares.mul_(slopes)
            _add_to_bias(of_bias, of_scores, block)
            of_scores *= rules.scale
            of_query.append(of_scores @ parts.key[:, :, :keys])
            queries = parts.query[:, :, first : first + block.scores.shape[2]]
            of_key[:, :, :keys] += of_scores.transpose(2, 3) @ queries
        of_parts = torch.cat(of_query, 2), of_key, of_value
        for result, of_part in zip(gradients, of_parts, strict=True):
            _scatter(result, group, of_part)
    of_position, of_time = (
        None if total is None else total.to(part)
        for total, part in zip(of_bias, (bias.position, bias.time), strict=True)
    )
    return of_position, of_time, gradients[0], gradients[1], gradients[2]


def _parts(query: Tensor, key: Tensor, value: Tensor, bias: Bias, group: _Group) -> _Parts:
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    kind = torch.float32 if is_half else query.dtype

    def of_group(part: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _gather_by_head(part, group).to(kind)
        # otherwise each product of a block copies the transposed view again
        return _gather(part, group).to(kind).contiguous()

    def times_of(times: Tensor | None) -> Tensor | None:
        return None if times is None else times[group.rows]

    return _Parts(
        of_group(query),
        of_group(key),
        of_group(value),
        times_of(bias.query_times),
        times_of(bias.key_times),
        None if bias.num_targets is None else bias.num_targets[group.bags],
    )


def _blocks(
    parts: _Parts, group: _Group, rules: AttentionRules, bias: Bias
) -> Iterator[tuple[int, _Block]]:
    """Yield the first query of each block of a group, and its scores."""
    bags, heads, longest, _ = parts.query.shape
    queries = max(1, _BLOCK_SCORES // (bags * heads * longest))
    if rules.causal and queries > _BLOCK_QUERIES:
        queries = _BLOCK_QUERIES
    for first in range(0, longest, queries):
        last = min(longest, first + queries)
        keys = last if rules.causal else longest
        yield first, _block(parts, group, rules, bias, range(first, last), keys)


def _block(
    parts: _Parts, group: _Group, rules: AttentionRules, bias: Bias, queries: range, keys: int
) -> _Block:
    chosen = slice(queries.start, queries.stop)
    queries_of_heads = (parts.query[:, :, chosen] * rules.scale).flatten(0, 1)
    keys_of_heads = parts.key[:, :, :keys].flatten(0, 1)
    # `matmul` of four dims would ask a compiler whether there are bags
    scores = torch.bmm(queries_of_heads, keys_of_heads.transpose(1, 2))
    scores = scores.unflatten(0, parts.query.shape[:2])
    i = torch.arange(queries.start, queries.stop, device=scores.device).unsqueeze(1)
    j = torch.arange(keys, device=scores.device)
    distances = buckets = masked = None
    targets = None
    if parts.num_targets is not None:
        targets = (group.lengths - parts.num_targets).view(-1, 1, 1)
    if bias.position is not None:
        most = bias.position.shape[1] // 2
        distances = i - j if targets is None else i.minimum(targets) - j.minimum(targets)
        distances = (distances.clamp(-most, most) + most).view(-1, len(queries), keys)
        scores += bias.position[:, distances].transpose(0, 1).to(scores.dtype)
    if bias.time is not None:
        assert parts.query_times is not None
        assert parts.key_times is not None
        apart = parts.query_times[:, chosen].unsqueeze(2) - parts.key_times[:, None, :keys]
        buckets = time_buckets(apart).clamp(max=bias.time.shape[1] - 1)
        scores += bias.time[:, buckets].transpose(0, 1).to(scores.dtype)
    if rules.causal:
        # padding is behind all values of its bag, so this mask covers it, too
        masked = (j > i)[None, None]
    elif not group.is_even:
        masked = (j >= group.lengths.view(-1, 1, 1, 1)) & (i != j)  # a query reads some key
    if targets is not None:
        is_target = (j >= targets.unsqueeze(1)) & (i != j)
        masked = is_target if masked is None else masked | is_target
    return _Block(scores, masked, distances, buckets)


def _shares(block: _Block, rules: AttentionRules) -> tuple[Tensor, Tensor | None]:
    """Return the shares [G, H, Q, K] of keys; for SiLU also the slopes by the scores."""
    scores, masked = block.scores, block.masked
    if rules.kind == "softmax":
        if masked is not None:
            scores = scores.masked_fill_(masked, float("-inf"))
        return scores.softmax(3), None
    sigmoid = scores.sigmoid()
    shares = scores * sigmoid
    slopes = sigmoid + shares * (1 - sigmoid)
    if masked is not None:
        shares.masked_fill_(masked, 0.0)
        slopes.masked_fill_(masked, 0.0)
    return shares.div_(rules.divisor), slopes.div_(rules.divisor)


def _add_to_bias(of_bias: list[Tensor | None], of_scores: Tensor, block: _Block) -> None:
    """Add the gradients of a block's scores to the gradients of the tables."""
    for of_table, entries in zip(of_bias, (block.distances, block.buckets), strict=True):
        if of_table is None or entries is None:
            continue
        of_entries = of_scores
        if entries.shape[0] < of_scores.shape[0]:
            of_entries = of_scores.sum(0, keepdim=True)
        flat = entries.flatten()
        for head, of_row in enumerate(of_table):
            weights = of_entries[:, head].flatten()
            if flat.is_cuda:  # there `bincount` waits for the device, in an order of its own
                of_row.index_add_(0, flat, weights.double())
            else:
                of_row += flat.bincount(weights, minlength=of_row.numel())

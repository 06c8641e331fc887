"""Inputs of each Triton kernel with the results of PyTorch, for `self_check`.

Values are small integers if the order of a sum could matter, so that results are equal bit for
bit. Inputs exceed one block of a kernel.

Shapes: as in the modules of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recsys.kernels import (
    attention_grad_triton,
    attention_triton,
    ops,
    ops_triton,
    output_triton,
    ragged_triton,
    sequence_triton,
    update_triton,
)
from recsys.kernels.attention_blocks import blocks_backward, blocks_forward
from recsys.kernels.attention_rules import AttentionRules, Bias
from recsys.kernels.bounds import are_bags_bad, find_bad_ids, safe_lengths
from recsys.kernels.row_update import update_rows
from recsys.kernels.types import EmbOptimType, OptimizerSpec

Results: TypeAlias = Iterator[tuple[Tensor, Tensor]]
"""Pairs of a kernel's result and PyTorch's."""

_FEATURES, _BAGS = 3, 700


def _integers(seed: int, high: int, *size: int) -> Tensor:
    # on the CPU, so that inputs are the same for all devices
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, size, generator=generator)


class _Batch(NamedTuple):
    """A jagged batch of some features."""

    lengths: Tensor
    offsets: Tensor
    ids: Tensor
    bag_of_id: Tensor

    @staticmethod
    def on(device: torch.device) -> _Batch:
        lengths = _integers(0, 5, _FEATURES * _BAGS)
        offsets = functional.pad(lengths.cumsum(0), (1, 0))
        ids = _integers(1, 90, int(offsets[-1]))
        bags = torch.arange(lengths.numel()).repeat_interleave(lengths)
        return _Batch(*(part.to(device) for part in (lengths, offsets, ids, bags)))


def _complete_cumsum(device: torch.device) -> Results:
    for number in (3, 10_000):
        values = _integers(0, 9, number).to(device)
        yield ops_triton.complete_cumsum(values), functional.pad(values.cumsum(0), (1, 0))


def _segments(device: torch.device, sizes: Tensor) -> tuple[Tensor, int, Tensor]:
    """Return a plan that reorders segments, its total, and the source of each value."""
    order = np.random.default_rng(0).permutation(sizes.numel()).astype(np.int32)
    plan, total = ops.plan_of_moves(order, sizes.numpy())
    sources = torch.arange(int(sizes.sum())).split(sizes.tolist())
    moved = torch.cat([sources[i] for i in order])
    return torch.from_numpy(plan).to(device), total, moved.to(device)


def _move_segments(device: torch.device) -> Results:
    plan, total, source = _segments(device, _integers(0, 300, 40))
    for dtype in (torch.int64, torch.float32):
        values = torch.arange(total, device=device).to(dtype)
        yield ops_triton.move_segments(values, plan, total), values[source]


def _pack(device: torch.device) -> Results:
    batch = _Batch.on(device)
    num_ids = batch.ids.numel()
    weights = torch.arange(num_ids, device=device) / 8
    counts = batch.lengths.view(_FEATURES, _BAGS).sum(1).cpu()
    sizes = torch.cat([torch.full((_FEATURES,), _BAGS), counts, counts])
    plan, total, source = _segments(device, sizes)
    words = torch.cat([batch.lengths.int(), batch.ids.int(), weights.view(torch.int32)])
    yield (
        ops_triton.pack(batch.lengths, batch.ids, weights, plan, total, torch.int32),
        words[source],
    )
    plan, total, source = _segments(device, sizes[: 2 * _FEATURES])
    words = torch.cat([batch.lengths, batch.ids])
    yield ops_triton.pack(batch.lengths, batch.ids, None, plan, total, torch.int64), words[source]


def _make_safe(device: torch.device) -> Results:
    batch, rows_F = _Batch.on(device), torch.tensor([80, 90, 100], device=device)
    num_ids = batch.ids.numel()
    known = batch.offsets[::_BAGS].contiguous()
    sizes = torch.arange(_FEATURES, device=device) * _BAGS, known.diff()
    for is_bad in (False, True):
        lengths = batch.lengths.clone()
        lengths[5] -= int(is_bad)
        flag = are_bags_bad(lengths, batch.offsets, num_ids)
        safe = safe_lengths(lengths, flag, num_ids, sizes)
        bad_ids = find_bad_ids(batch.ids, batch.offsets, rows_F)
        safe_ids = batch.ids.masked_fill(bad_ids | flag, 0)
        # ids are not checked if bags are bad, since their features are unknown
        flags = torch.stack([flag, bad_ids.any() & ~flag]).int()
        safe_offsets = functional.pad(safe.cumsum(0), (1, 0))
        expected = flags, safe, safe_offsets, safe_ids, sizes[1]
        results = ops_triton.make_safe(lengths, batch.offsets, batch.ids, rows_F, known)
        yield from zip(results, expected, strict=True)


def _row_ids(device: torch.device) -> Results:
    # rows of the last feature exceed int32
    batch, base_F = _Batch.on(device), torch.tensor([0, 100, 2**33], device=device)
    expected = batch.ids + base_F[batch.bag_of_id // _BAGS]
    yield ops_triton.row_ids(batch.ids.int(), batch.offsets, base_F), expected


def _places_of_bags(device: torch.device) -> Results:
    batch = _Batch.on(device)
    bags = batch.bag_of_id
    expected = bags % _BAGS * _FEATURES + bags // _BAGS
    yield ops_triton.places_of_bags(batch.offsets, batch.ids.numel(), _FEATURES), expected


def _build_header(device: torch.device) -> Results:
    counts, places = _integers(0, 2**40, 3000).to(device), _integers(1, 3002, 3000).to(device)
    for bad_counts, flag in (([0, 0], 4), ([1, 1], 7)):
        words = torch.cat([torch.tensor([flag, 17], device=device), counts])
        flags = torch.tensor(bad_counts, dtype=torch.int32, device=device)
        yield ops_triton.build_header(places, counts, flags, 4, 17, 1, 2), words[places]


_CHUNK, _SAMPLES = 64, 50
_PLACED = ((0, 0, 0), (0, 1, 1), (1, 2, 1), (0, 2, 2), (1, 0, 2), (1, 1, 3))
"""Block of three chunks, chunk in the block, chunk of the output."""


def _columns(device: torch.device, is_split: bool) -> tuple[Any, Tensor | None, Tensor, Any]:
    """Return descriptors, counts, the divisors of the chunks, and the chunks of the blocks."""
    placed = _PLACED if is_split else tuple((b, p, 3 * b + p) for b in (0, 1) for p in range(3))
    entries = torch.tensor([(3 * b, 3, p, c) for b, p, c in placed]).t().contiguous().to(device)
    width = _CHUNK * (1 + placed[-1][2])
    divisors = torch.ones(_SAMPLES, width, device=device)
    if not is_split:
        return (
            output_triton.GatherColumns(entries, None, None, width, _CHUNK, 32),
            None,
            divisors,
            placed,
        )
    means = torch.tensor([0, 0, -1, -1, 1, 1, -1, -1], dtype=torch.int32, device=device)
    # powers of two: products with their inverses are exact, as quotients are
    counts = torch.tensor([1, 2, 4, 0])[_integers(2, 4, 2, _SAMPLES)].to(device)
    for slot, chunk in ((0, 0), (1, 2)):
        divided = counts[slot].clamp(min=1).unsqueeze(1)
        divisors[:, chunk * _CHUNK : (chunk + 1) * _CHUNK] = divided
    lists = torch.tensor([0, 1, 3, 5, 6], device=device)
    return (
        output_triton.GatherColumns(entries, lists, means, width, _CHUNK, 32),
        counts,
        divisors,
        placed,
    )


def _gather(device: torch.device) -> Results:
    buffer = _integers(3, 99, 6 * _SAMPLES * _CHUNK).float().to(device)
    blocks = buffer.view(2, _SAMPLES, 3, _CHUNK)
    for is_split in (False, True):
        columns, counts, divisors, placed = _columns(device, is_split)
        expected = torch.zeros_like(divisors).view(_SAMPLES, -1, _CHUNK)
        for block, place, chunk in placed:
            expected[:, chunk] += blocks[block, :, place]
        # fp16 has all whole numbers up to 2,048
        sent = buffer[: buffer.numel() // 2].half() * 2
        expected = expected.view(_SAMPLES, -1) / divisors
        yield output_triton.gather(buffer, _SAMPLES, columns, counts), expected
        yield output_triton.gather(buffer, _SAMPLES, columns, counts, sent, 2.0), expected


def _scatter_grad(device: torch.device) -> Results:
    for is_split in (False, True):
        columns, counts, divisors, placed = _columns(device, is_split)
        grad = _integers(4, 99, *divisors.shape).float().to(device)
        divided = (grad / divisors).view(_SAMPLES, -1, _CHUNK)
        blocks = torch.empty(2, _SAMPLES, 3, _CHUNK, device=device)
        for block, place, chunk in placed:
            blocks[block, :, place] = divided[:, chunk]
        blocks[0] *= 0.5
        flat, num_sent = blocks.view(-1), blocks[0].numel()
        scattered, sent = output_triton.scatter_grad(grad, columns, counts, 0.5, num_sent)
        yield scattered, flat
        yield sent, flat[:num_sent]
        scattered, sent = output_triton.scatter_grad(
            grad, columns, counts, 0.5, num_sent, torch.float16, 2.0
        )
        # in another dtype, values to send are not in the buffer
        yield scattered[num_sent:], flat[num_sent:]
        yield sent, (flat[:num_sent] * 2).half()


def _ragged(device: torch.device) -> tuple[Any, Tensor, Tensor, int]:
    """Return descriptors, the bag and the row of each id, and the number of rows of bags."""
    lengths = _integers(5, 4, _SAMPLES)
    num_ids, num_rows = int(lengths.sum()), _SAMPLES // 2
    offsets = functional.pad(lengths.cumsum(0), (1, 0))
    rows = torch.randperm(num_ids, generator=torch.Generator().manual_seed(0))
    first = num_ids // 3  # ids of the first of two buckets
    batch = torch.tensor([7, 9, 0, 0, first, 0, 2 * first, 2 * num_ids, num_rows], device=device)
    chunks = torch.tensor([[0, 0], [2, 2], [0, 1], [0, 0]], device=device)
    entries = torch.zeros(4, 2, dtype=torch.int64, device=device)
    columns = output_triton.GatherColumns(entries, None, None, 2 * _CHUNK, _CHUNK, 32)
    ids = ragged_triton.RaggedIds(rows.to(device), offsets.to(device), 1, 2, 1)
    bag_of_id = torch.arange(_SAMPLES).repeat_interleave(lengths).to(device)
    return (
        ragged_triton.Ragged(columns, chunks, batch, 1, ids),
        bag_of_id,
        rows.to(device),
        num_rows,
    )


def _gather_ragged(device: torch.device) -> Results:
    ragged, bag_of_id, rows, num_rows = _ragged(device)
    buffer = _integers(6, 99, rows.numel() + num_rows, 2 * _CHUNK).float().to(device)
    expected = torch.zeros(_SAMPLES, 2 * _CHUNK, device=device)
    expected[:num_rows] = buffer[rows.numel() :]
    expected.index_add_(0, bag_of_id, buffer[rows])
    yield ragged_triton.gather_ragged(buffer.view(-1), _SAMPLES, ragged, None), expected


def _scatter_grad_ragged(device: torch.device) -> Results:
    ragged, bag_of_id, rows, num_rows = _ragged(device)
    grad = _integers(7, 99, _SAMPLES, 2 * _CHUNK).float().to(device)
    expected = torch.empty(rows.numel() + num_rows, 2 * _CHUNK, device=device)
    expected[rows], expected[rows.numel() :] = grad[bag_of_id], grad[:num_rows]
    yield ragged_triton.scatter_grad_ragged(grad, expected.numel(), ragged, None), expected.view(-1)


def _rows(device: torch.device, buffer: Tensor) -> tuple[tuple[Any, ...], Tensor]:
    """Return arguments of the kernels of sequences, and the output.

    The rows of the first stream are whole; the next two streams have one chunk each of the others.
    """
    whole, split = 70, 30
    places = torch.randperm(whole + split, generator=torch.Generator().manual_seed(0)).to(device)
    starts = [0, 2 * whole - whole, 2 * whole + split - (whole + split)]
    streams = [[0, whole, whole + split], [2, 1, 1], starts, [0, 0, 0], [0, 0, 1]]
    out = torch.empty(whole + split, 2, _CHUNK, device=device)
    parts = buffer.split([2 * whole * _CHUNK, split * _CHUNK, split * _CHUNK])
    out[places[:whole]] = parts[0].view(whole, 2, _CHUNK)
    for chunk in (0, 1):
        out[places[whole:], chunk] = parts[1 + chunk].view(split, _CHUNK)
    ids = torch.cat([places, places[whole:]])
    known = ids, torch.tensor(streams, device=device), 2, _CHUNK
    return known, out.view(-1, 2 * _CHUNK)


def _gather_rows(device: torch.device) -> Results:
    buffer = torch.arange(200.0 * _CHUNK, device=device)
    known, out = _rows(device, buffer)
    yield sequence_triton.gather_rows(buffer, 2 * _CHUNK, *known), out


def _scatter_grad_rows(device: torch.device) -> Results:
    buffer = torch.arange(200.0 * _CHUNK, device=device)
    known, out = _rows(device, buffer)
    yield sequence_triton.scatter_grad_rows(out, *known), buffer


_TABLE_ROWS = 50


class _Gradients(NamedTuple):
    """Gradients of ids, and their sums by row."""

    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
    sums_RD: Tensor
    first_K: Tensor
    """The first entry of each row."""

    @staticmethod
    def of(device: torch.device, dim: int, num_ids: int, is_scaled: bool) -> _Gradients:
        rows, order = torch.sort(_integers(8, _TABLE_ROWS, num_ids).to(device), stable=True)
        gradients = (_integers(9, 9, 300, dim) - 4).float().to(device)
        source = _integers(10, 300, num_ids).to(device)
        scale = _integers(11, 3, num_ids).float().to(device) if is_scaled else None
        of_ids = gradients[source] if scale is None else gradients[source] * scale.unsqueeze(1)
        sums = torch.zeros(_TABLE_ROWS, dim, device=device).index_add_(0, rows, of_ids[order])
        first = torch.searchsorted(rows, torch.unique_consecutive(rows))
        return _Gradients((rows, order, gradients, source, scale), sums, first)


_SHAPES = ((20, 700, True), (128, 300, False))
_VERY_MANY = 1, 70_000, False  # so many ids that a launch adds up groups of blocks


def _sum_by_row(device: torch.device) -> Results:
    for shape in _SHAPES:
        gradients, sums, first = _Gradients.of(device, *shape)
        rows = gradients[0]
        expected = torch.zeros(rows.numel(), shape[0], device=device)
        expected[first] = sums[rows[first]]
        result = update_triton.sum_by_row(*gradients, True)
        yield from zip(result, (rows, expected, (expected**2).sum(1)), strict=True)


def _sum_into(device: torch.device) -> Results:
    for shape in (*_SHAPES, _VERY_MANY):
        gradients, sums, _ = _Gradients.of(device, *shape)
        result = torch.zeros_like(sums)
        update_triton.sum_into(result, *gradients)
        yield result, sums


def _updated(
    device: torch.device,
    kernel: Callable[..., None],
    given: tuple[Tensor | None, ...],
    rows: Tensor,
    grads: Tensor,
    moments: tuple[Tensor | None, ...] = (),
) -> Results:
    """Yield tables and states after `kernel(update, *given)`, and after PyTorch's update.

    `moments` are further arguments of the kernel, for row-wise Adagrad.
    """
    starts = torch.tensor([0, 20, _TABLE_ROWS], device=device)
    rates = torch.tensor([0.5, 0.25], device=device)
    rate_of_rows = rates[(rows >= 20).long()].unsqueeze(1)
    for algorithm in (EmbOptimType.SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
        is_sgd = algorithm is EmbOptimType.SGD
        spec = OptimizerSpec(algorithm=algorithm, weight_decay=0.25)
        weight = _integers(12, 9, _TABLE_ROWS, grads.shape[1]).float().to(device)
        state = torch.ones(_TABLE_ROWS, device=device)
        weight_after, states_after = weight.clone(), {"sum": state.clone()}
        states = () if is_sgd else moments
        kernel(
            update_triton.RowUpdate(spec, weight, None if is_sgd else state, rates, starts),
            *given,
            *states,
        )
        update_rows(spec, weight_after, states_after, rows, grads, rate_of_rows, None, *states)
        yield weight, weight_after
        yield state, states_after["sum"]


def _sum_and_update(device: torch.device) -> Results:
    for shape in _SHAPES:
        gradients, sums, first = _Gradients.of(device, *shape)
        rows = gradients[0][first]
        yield from _updated(device, update_triton.sum_and_update, gradients, rows, sums[rows])


def _update_entries(device: torch.device) -> Results:
    rows = torch.arange(_TABLE_ROWS, device=device)
    grads = _integers(13, 9, _TABLE_ROWS, 20).float().to(device)
    for moments in ((), (torch.arange(50.0, device=device),)):
        yield from _updated(
            device, update_triton.update_entries, (rows, grads), rows, grads, moments
        )


class _Attention(NamedTuple):
    """Arguments of attention: bags longer than a block, with all terms of the scores."""

    parts: tuple[Tensor, Tensor, Tensor, Tensor]
    """Query, key, value and offsets."""
    gradient: Tensor
    rules: AttentionRules
    bias: Bias

    @staticmethod
    def on(device: torch.device) -> Iterator[_Attention]:
        # one bag is empty, and one has several blocks
        lengths = torch.tensor([3, 0, 150, 40])
        offsets, num = functional.pad(lengths.cumsum(0), (1, 0)), int(lengths.sum())
        query, key, value, gradient = (
            ((_integers(seed, 9, num, 2, 16) - 4) / 16).to(device) for seed in range(14, 18)
        )
        position = (_integers(18, 9, 2, 99) / 8).to(device)
        time = (_integers(19, 9, 2, 20) / 8).to(device)
        times = _integers(20, 10**6, num).to(device)
        targets = torch.tensor([0, 0, 70, 3], device=device)
        parts = query, key, value, offsets.to(device)
        bias = Bias(position, time, times + 3, times, targets)
        softmax = AttentionRules(
            kind="softmax", causal=True, scale=0.5, divisor=1.0, max_length=150
        )
        for rules in (softmax, replace(softmax, kind="silu", causal=False, divisor=8.0)):
            yield _Attention(parts, gradient, rules, bias)
            half = query.half(), key.half(), value.half(), parts[3]
            yield _Attention(half, gradient.half(), rules, bias)


def _near(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether results are close, relative to the largest value; and True, as expected."""
    largest = expected.float().abs().max().clamp(min=1.0)
    difference = (found.float() - expected.float()).abs().max() / largest
    most = 1e-2 if expected.dtype == torch.float16 else 1e-4
    return difference < most, torch.ones_like(difference, dtype=torch.bool)


def _attention_forward(device: torch.device) -> Results:
    for case in _Attention.on(device):
        output = attention_triton.attention_forward(*case.parts, case.rules, case.bias)[1]
        yield _near(output, blocks_forward(*case.parts, case.rules, case.bias))


def _attention_backward(device: torch.device) -> Results:
    for case in _Attention.on(device):
        known = case.rules, case.bias
        log_sums, out = attention_triton.attention_forward(*case.parts, *known)
        gradients = attention_grad_triton.attention_backward(
            case.gradient, *case.parts, log_sums, out, *known
        )
        expected = blocks_backward(case.gradient, *case.parts, *known)
        for gradient, other in zip(gradients, expected, strict=True):
            assert gradient is not None
            assert other is not None
            yield _near(gradient, other)


CASES: Mapping[str, Callable[[torch.device], Results]] = {
    case.__name__[1:]: case
    for case in (
        _attention_backward,
        _attention_forward,
        _build_header,
        _gather,
        _gather_ragged,
        _gather_rows,
        _complete_cumsum,
        _make_safe,
        _move_segments,
        _pack,
        _places_of_bags,
        _row_ids,
        _scatter_grad,
        _scatter_grad_ragged,
        _scatter_grad_rows,
        _sum_and_update,
        _sum_by_row,
        _sum_into,
        _update_entries,
    )
}
"""Case of each kernel."""

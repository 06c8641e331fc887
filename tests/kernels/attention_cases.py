"""Random cases of attention, and its formula bag by bag in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recsys.kernels.attention import AttentionRules, Bias

NO_BIAS = Bias(None, None, None, None, None)


def formula(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, rules: AttentionRules, bias: Bias
) -> Tensor:
    """Return attention of dense bags, with Python's own numbers of bits."""
    found = [torch.zeros(0, *value.shape[1:], dtype=value.dtype)]
    for bag, (first, last) in enumerate(zip(offsets.tolist(), offsets[1:].tolist(), strict=False)):
        length = last - first
        q, k, v = (part[first:last].transpose(0, 1) for part in (query, key, value))
        scores = q @ k.transpose(1, 2) * rules.scale
        i, j = torch.arange(length)[:, None], torch.arange(length)
        if bias.position is not None:
            most = (bias.position.shape[1] + 1) // 2 - 1
            first_target = length if bias.num_targets is None else length - bias.num_targets[bag]
            apart = i.clamp(max=first_target) - j.clamp(max=first_target)
            scores = scores + bias.position[:, apart.clamp(-most, most) + most]
        if bias.time is not None:
            apart = bias.query_times[first:last, None] - bias.key_times[None, first:last]
            bits = [abs(one).bit_length() for one in apart.flatten().tolist()]
            bits = torch.tensor(bits, dtype=torch.int64).view(length, length)
            scores = scores + bias.time[:, bits.clamp(max=bias.time.shape[1] - 1)]
        is_read = torch.ones(length, length, dtype=torch.bool)
        if rules.causal:
            is_read &= j <= i
        if bias.num_targets is not None:
            is_read &= (j < length - int(bias.num_targets[bag])) | (i == j)
        if rules.kind == "softmax":
            shares = scores.masked_fill(~is_read, float("-inf")).softmax(2)
        else:
            shares = (scores * scores.sigmoid()).masked_fill(~is_read, 0.0) / rules.divisor
        found.append((shares @ v).transpose(0, 1))
    return torch.cat(found)


def random_case(
    seed: int,
    most: int = 300,
    columns: Sequence[int] = (1, 4, 8),
    widths: Sequence[int] = (1, 5, 8),
):
    """Return query, key, value, offsets, rules and bias; tensors are float64, without gradients."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    bound = min(most + 1, draw.choice([1, 3, 20, 70, most + 1]))
    lengths = torch.randint(0, bound, (draw.randint(1, 6),), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    offsets = offsets.to(draw.choice([torch.int32, torch.int64]))
    num, heads = int(offsets[-1]), draw.choice([1, 2, 3])
    num_columns, width = draw.choice(columns), draw.choice(widths)
    times = torch.randint(0, 10 ** draw.choice([1, 9, 18]), (num,), generator=generator)
    has_time = draw.random() < 0.5
    bias = Bias(
        normal(heads, 2 * draw.choice([1, 5, most]) - 1) if draw.random() < 0.5 else None,
        normal(heads, draw.choice([1, 3, 64])) if has_time else None,
        times + draw.choice([0, 5]) if has_time else None,
        times if has_time else None,
        (torch.rand(len(lengths), generator=generator) * (lengths + 1)).long()
        if draw.random() < 0.4
        else None,
    )
    rules = AttentionRules(
        kind=draw.choice(["softmax", "silu"]),
        causal=draw.random() < 0.6,
        scale=draw.choice([0.3, num_columns**-0.5]),
        divisor=draw.choice([1.0, float(most)]),
        max_length=most,
    )
    return (
        normal(num, heads, num_columns),
        normal(num, heads, num_columns),
        normal(num, heads, width),
        offsets,
        rules,
        bias,
    )


def with_gradients(function, case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return the output and the gradients of query, key, value and bias, in float64."""
    *parts, offsets, rules, bias = case
    leaves = [part.to(dtype).requires_grad_() for part in parts]
    tables = {
        name: getattr(bias, name).to(dtype).requires_grad_()
        for name in ("position", "time")
        if getattr(bias, name) is not None
    }
    out = function(*leaves, offsets, rules, bias._replace(**tables))
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    leaves += tables.values()
    if not out.requires_grad:
        return [out.double(), *map(torch.zeros_like, leaves)]
    grads = torch.autograd.grad((out * factors).sum(), leaves, materialize_grads=True)
    return [out.double(), *(grad.double() for grad in grads)]


def with_max_length(rules: AttentionRules, max_length: int) -> AttentionRules:
    """Return rules with another limit."""
    return replace(rules, max_length=max_length)

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from recsys.kernels.attention import AttentionRules, attend, time_buckets
from tests.kernels.attention_cases import (
    NO_BIAS,
    formula,
    random_case,
    with_gradients,
    with_max_length,
)

CAUSAL = AttentionRules(kind="softmax", causal=True, scale=1.0, divisor=1.0, max_length=4096)


def check(seed: int) -> None:
    case = random_case(seed)
    expected = with_gradients(formula, case)
    for one, other in zip(with_gradients(attend, case), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    for dtype, tolerance in ((torch.float32, 2e-4), (torch.bfloat16, 0.1)):
        *parts, offsets, rules, bias = case
        rounded = [part.to(dtype).double() for part in parts]
        bias = bias._replace(
            position=None if bias.position is None else bias.position.to(dtype).double(),
            time=None if bias.time is None else bias.time.to(dtype).double(),
        )
        case_of_dtype = *rounded, offsets, rules, bias
        found = with_gradients(attend, case_of_dtype, dtype)
        expected = with_gradients(formula, case_of_dtype)
        for one, other in zip(found, expected, strict=True):
            largest = other.detach().abs().max().item() if other.numel() else 0.0
            torch.testing.assert_close(one, other, atol=tolerance * (1 + largest), rtol=tolerance)


@pytest.mark.parametrize("seed", range(40))
def test_against_the_formula(seed):
    check(seed)


@pytest.mark.parametrize("first", range(40, 500, 20))
def test_against_the_formula_in_500_cases(first):
    for seed in range(first, first + 20):
        check(seed)


@pytest.mark.parametrize("seed", range(30))
def test_compiled_programs_compute_the_same(seed, monkeypatch):
    *parts, offsets, rules, bias = random_case(seed, most=30)
    if not offsets[-1]:
        parts = [torch.zeros(1, *part.shape[1:], dtype=part.dtype) for part in parts]
        offsets = torch.tensor([0, 1])
        bias = NO_BIAS
    case = *parts, offsets, with_max_length(rules, 30), bias
    expected = with_gradients(formula, case)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for one, other in zip(with_gradients(attend, case), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_long_bags_are_named():
    x = torch.zeros(5, 1, 1)
    with pytest.raises(ValueError, match="at most max_length=4 values; received 5"):
        attend(x, x, x, torch.tensor([0, 5]), with_max_length(CAUSAL, 4), NO_BIAS)


def test_compiled_programs_refuse_long_bags(monkeypatch):
    x = torch.zeros(6, 1, 1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match="at most max_length=4 values"):
        attend(x, x, x, torch.tensor([0, 5, 6]), with_max_length(CAUSAL, 4), NO_BIAS)


def test_time_buckets_are_numbers_of_bits():
    numbers = [0, 1, 2, 3, 4, 2**31, 2**40 - 1, 2**52 - 1, 2**52, 2**62, 2**63 - 1]
    found = time_buckets(torch.tensor(numbers))
    assert found.tolist() == [number.bit_length() for number in numbers]
    assert torch.equal(time_buckets(-torch.tensor(numbers)), found)


MEASURE = """
import resource, torch
from recsys.kernels.attention import AttentionRules, Bias, attend
torch.set_num_threads(1)
for length in (512, 8192):
    for kind in ("softmax", "silu"):
        rules = AttentionRules(kind=kind, causal=True, scale=1.0, divisor=1.0, max_length=8192)
        parts = [torch.randn(length, 2, 8, requires_grad=True) for _ in range(3)]
        bias = Bias(torch.zeros(2, 511, requires_grad=True), None, None, None, None)
        attend(*parts, torch.tensor([0, length]), rules, bias).sum().backward()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_grows_with_the_number_of_values():
    """All scores of 8,192 values and two heads have 512 MiB, and backward needs four such tensors.

    The scores of a block have 4 MiB.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True
    )
    _, before, of_softmax, of_silu = map(int, done.stdout.split())
    assert of_softmax - before < 300
    assert of_silu - before < 300

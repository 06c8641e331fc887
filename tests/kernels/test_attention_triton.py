"""Triton's kernels of attention compute the formula, in the same cases as PyTorch's operations."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.kernels.compiled import num_compiled
from tests.needs_triton import HAS_TRITON, NEEDS_TRITON

if not HAS_TRITON:
    pytest.skip(NEEDS_TRITON, allow_module_level=True)

from recsys.kernels import attention, attention_triton
from recsys.kernels.attention import AttentionRules, Bias
from tests.kernels.attention_cases import (
    NO_BIAS,
    formula,
    random_case,
    with_gradients,
    with_max_length,
)
from tests.pretended_cuda import CUDA, PretendedCuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = AttentionRules(kind="softmax", causal=True, scale=0.5, divisor=1.0, max_length=9)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short bags have several blocks."""
    monkeypatch.setattr(attention_triton, "_BLOCK", 16)
    monkeypatch.setattr(attention_triton, "_SMALL_BLOCK", 16)


def on_triton(query, key, value, offsets, rules, bias):
    """Return `attend` by the kernels, on a GPU if there is one, else in the interpreter."""
    empty = torch.empty

    def filled(*size, **known):
        """Return a tensor of NaN, which shows values that kernels do not write."""
        return empty(*size, **known).fill_(torch.nan)

    parts = [part.to(DEVICE) for part in (query, key, value, offsets)]
    bias = Bias(*(None if part is None else part.to(DEVICE) for part in bias))
    with (
        mock.patch.object(attention, "why_not_triton", return_value=""),
        mock.patch.object(torch, "empty", filled),
    ):
        return attention.attend(*parts, rules, bias).cpu()


def check(case, dtype: torch.dtype, tolerance: float) -> None:
    """Compare output and gradients with the formula, relative to the largest value."""
    *parts, offsets, rules, bias = case
    rounded = [part.to(dtype).double() for part in parts]
    tables = [None if part is None else part.to(dtype).double() for part in bias[:2]]
    case = *rounded, offsets, rules, Bias(*tables, *bias[2:])
    found = with_gradients(on_triton, case, dtype)
    for one, other in zip(found, with_gradients(formula, case), strict=True):
        largest = other.detach().abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(one, other, atol=tolerance * (1 + largest), rtol=tolerance)


def case_of(seed: int, most: int):
    """Return a case whose heads have a number of columns that the kernels serve."""
    sizes = {"columns": (16, 32, 64), "widths": (16, 32, 128)}
    return random_case(seed, most=most, **sizes)


@pytest.mark.parametrize("seed", range(12))
def test_against_the_formula(seed):
    dtype, tolerance = [
        (torch.float32, 1e-4),
        (torch.float32, 1e-4),
        (torch.float16, 1e-2),
        # the interpreter multiplies the bits of bfloat16
        (torch.bfloat16, 0.1) if DEVICE.type == "cuda" else (torch.float16, 1e-2),
    ][seed % 4]
    check(case_of(seed, most=40), dtype, tolerance)


@pytest.mark.parametrize("first", range(12, 36, 8))
def test_against_the_formula_in_36_cases(first):
    for seed in range(first, first + 8):
        check(case_of(seed, most=70), torch.float32, 1e-4)


@pytest.mark.parametrize("kind", ["softmax", "silu"])
def test_history_targets_and_positions_in_several_blocks(kind):
    """Targets begin in a block of history, end in another one, and bags begin anywhere."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 56, 61, 93])
    q, k, v = (torch.randn(93, 1, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    times = torch.randint(0, 10**6, (93,), generator=generator)
    targets = torch.tensor([0, 0, 20, 5, 40])  # of the last bag more than it has
    position = torch.randn(1, 2 * 21 - 1, generator=generator, dtype=torch.float64)
    time = torch.randn(1, 18, generator=generator, dtype=torch.float64)
    for causal in (True, False):
        rules = AttentionRules(kind=kind, causal=causal, scale=0.3, divisor=7.0, max_length=60)
        bias = Bias(position, time, times + 3, times, targets.clamp(max=offsets.diff()))
        expected = with_gradients(formula, (q, k, v, offsets, rules, bias))
        bias = bias._replace(num_targets=targets)
        found = with_gradients(on_triton, (q, k, v, offsets, rules, bias), torch.float32)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_views_are_read_by_their_strides():
    both = torch.randn(20, 2, 3, 16, dtype=torch.float64)
    parts = both.unbind(2)
    case = *parts, torch.tensor([0, 13, 20]), with_max_length(RULES, 20), NO_BIAS
    found = with_gradients(on_triton, case, torch.float32)
    for one, other in zip(found, with_gradients(formula, case), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is pretended")
@pytest.mark.parametrize("kind", ["softmax", "silu"])
def test_a_step_has_three_launches_and_the_host_does_not_wait(kind, monkeypatch):
    launched = list[str]()
    launch = attention_triton.launch

    def note(kernel, *given, **known):
        launched.append(kernel.fn.__name__ if hasattr(kernel, "fn") else kernel.__name__)
        launch(kernel, *given, **known)

    monkeypatch.setattr(attention_triton, "launch", note)
    rules = AttentionRules(kind=kind, causal=True, scale=0.5, divisor=2.0, max_length=9)
    with PretendedCuda(triton=True) as cuda:
        parts = [torch.randn(9, 2, 16).to(CUDA).requires_grad_() for _ in range(3)]
        position, time = (torch.zeros(2, 5).to(CUDA).requires_grad_() for _ in range(2))
        times, offsets = torch.arange(9).to(CUDA), torch.tensor([0, 4, 9]).to(CUDA)
        targets = torch.tensor([1, 0]).to(CUDA)
        bias = Bias(position, time, times, times, targets)
        cuda.forget()
        attention.attend(*parts, offsets, rules, bias).sum().backward()
        assert cuda.notes == []
        assert cuda.launched == {"attention_forward", "attention_backward"}
        assert launched == ["_attend", "_queries_backward", "_keys_backward"]
        assert all(part.grad is not None for part in (*parts, position, time))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is pretended")
def test_pytorch_serves_what_the_kernels_do_not(monkeypatch):
    with PretendedCuda(triton=True) as cuda:
        for columns, dtype, reason in (
            (8, torch.float32, "columns of a head"),
            (24, torch.float32, "columns of a head"),
            (256, torch.float32, "columns of a head"),
            (16, torch.float64, "no common dtype"),
        ):
            x = torch.randn(4, 1, columns, dtype=dtype).to(CUDA)
            assert reason in attention.why_not_triton(x, x, x, NO_BIAS)
            attention.attend(x, x, x, torch.tensor([0, 4]).to(CUDA), RULES, NO_BIAS)
        x = torch.randn(4, 1, 16).to(CUDA)
        assert attention.why_not_triton(x, x, x, NO_BIAS) == ""
        assert "dtype" in attention.why_not_triton(x, x, x.half(), NO_BIAS)
        table = NO_BIAS._replace(position=torch.zeros(1, 3).to(CUDA).requires_grad_())
        assert attention.why_not_triton(x, x, x, table) == ""
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert "atomics" in attention.why_not_triton(x, x, x, table)
        assert attention.why_not_triton(x, x, x, NO_BIAS) == ""
        assert not cuda.launched
    with PretendedCuda(triton=False):
        assert "RECSYS_KERNELS=torch" in attention.why_not_triton(x, x, x, NO_BIAS)


COMPILES = """
from recsys.kernels.attention_rules import AttentionRules, Bias

for kind, columns, width, dtype in CASES:
    causal = kind == "softmax"
    rules = AttentionRules(kind=kind, causal=causal, scale=0.5, divisor=3.0, max_length=9)
    query, value = empty((70, 2, columns), dtype), empty((70, 2, width), dtype)
    tables = empty((2, 9), torch.float32), empty((2, 50), torch.float32)
    bias = Bias(*tables, empty(70), empty(70), empty(3))
    if width == 16:
        bias = Bias(None, None, None, None, None)
    given = query, query, value, empty(4)
    log_sums, out = attention_triton.attention_forward(*given, rules, bias)
    attention_grad_triton.attention_backward(out, *given, log_sums, out, rules, bias)
assert max(kernel.metadata.shared for kernel in built) <= 163 * 1024  # of an A100
"""
"""Forward and backward. The largest blocks must fit the memory that programs share."""


@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_a_gpu_without_one(capability: int, tmp_path: Path) -> None:
    cases = '("softmax", 16, 16, torch.float16), ("silu", 64, 64, torch.bfloat16)'
    assert num_compiled(f"CASES = [{cases}]\n" + COMPILES, tmp_path, capability) == 6


def test_large_blocks_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    cases = '("softmax", 64, 64, torch.float32), ("silu", 128, 128, torch.float32)'
    assert num_compiled(f"CASES = [{cases}]\n" + COMPILES, tmp_path, 80) == 6

"""Questions while torch traces, compiles or exports."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recsys.compat.tracing import (
    assert_fx_safe,
    is_non_strict_exporting,
    is_pt2_compiling,
    is_torchdynamo_compiling,
)


class Says(nn.Module):
    """Adds a number for each kind of trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_torchdynamo_compiling():
            x = x + 1
        if is_non_strict_exporting():
            x = x + 10
        if is_pt2_compiling():
            x = x + 100
        return x


def test_a_plain_call_is_neither() -> None:
    assert Says()(torch.zeros(1)).item() == 0


def test_a_compiled_call_says_so() -> None:
    compiled = torch.compile(Says(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 101


@pytest.mark.parametrize(("strict", "value"), [(False, 110), (True, 101)])
def test_an_exported_call_says_which(strict: bool, value: int) -> None:
    program = torch.export.export(Says(), (torch.zeros(1),), strict=strict)
    assert program.module()(torch.zeros(1)).item() == value


def test_fx_traces_past_a_checked_condition() -> None:
    class Checked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert_fx_safe(x.shape[0] > 3, "too few rows")
            return x + 1

    traced = torch.fx.symbolic_trace(Checked())
    assert traced(torch.zeros(5)).tolist() == [1.0] * 5
    assert Checked()(torch.zeros(4)).tolist() == [1.0] * 4
    with pytest.raises(AssertionError, match="too few rows"):
        Checked()(torch.zeros(3))

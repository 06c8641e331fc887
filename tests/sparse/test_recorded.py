"""Functions that are one node of a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from recsys.sparse import KeyedTensor
from recsys.sparse.recorded import recorded


@recorded
def total(tensors: list[Tensor], by: dict[str, Tensor] | None = None) -> Tensor:
    """Add up tensors."""
    found = torch.zeros(1)
    for tensor in tensors:
        found = found + tensor.sum()
    if by is not None:
        for factor in by.values():
            found = found * factor
    return found


class Totals(nn.Module):
    def forward(self, one: Tensor, more: list[Tensor]) -> Tensor:
        return total([one]) + total(more, {"twice": one[:1]}) + total([torch.ones(2)])


def test_a_call_with_a_proxy_is_one_node() -> None:
    graph = fx.symbolic_trace(Totals())
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(total) == 2  # the third has no proxy: its result is a constant
    inputs = torch.tensor([2.0, 3.0]), [torch.ones(2), torch.ones(1)]
    assert graph(*inputs).tolist() == Totals()(*inputs).tolist() == [13.0]


def test_torchscript_compiles_the_function() -> None:
    inputs = torch.tensor([2.0]), [torch.ones(2)]
    assert torch.jit.script(Totals())(*inputs).tolist() == Totals()(*inputs).tolist()


def test_errors_are_those_of_the_function() -> None:
    with pytest.raises(ValueError, match="at least one KeyedTensor"):
        KeyedTensor.regroup([], [["a"]])

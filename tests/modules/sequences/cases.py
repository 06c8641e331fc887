"""Encoders on plain tensors, and numpy pieces of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recsys.sparse import JaggedTensor, KeyedJaggedTensor

LENGTHS = (3, 0, 1, 4)
NUM = sum(LENGTHS)
DIM = 4


class OnRows(nn.Module):
    """An encoder of rows `[N, D]` in bags of fixed lengths."""

    def __init__(self, encoder: nn.Module, lengths: tuple[int, ...] = LENGTHS) -> None:
        super().__init__()
        self.encoder = encoder
        self.lengths = torch.tensor(lengths)

    def forward(self, rows: Tensor, *fixed: object) -> Tensor:
        return self.encoder(JaggedTensor(rows, lengths=self.lengths), *fixed).values()


class Exportable(nn.Module):
    """The same, with lengths as an input."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        return self.encoder(JaggedTensor(rows, lengths=lengths)).values()


def assert_exports(encoder: nn.Module, dim: int = DIM) -> None:
    """Check that a program of `torch.export` computes the same for batches of other sizes."""
    module = Exportable(encoder.eval())
    values, bags = torch.export.Dim("values", min=2), torch.export.Dim("bags", min=3)
    given = torch.randn(6, dim), torch.tensor([3, 1, 2])
    shapes = {"rows": {0: values}, "lengths": {0: bags}}
    with torch.no_grad():
        program = torch.export.export(module, given, dynamic_shapes=shapes).module()
        other = torch.randn(9, dim), torch.tensor([1, 4, 0, 2, 2])
        torch.testing.assert_close(program(*other), module(*other))


def assert_names_other_inputs(encoder: nn.Module) -> None:
    """Check that the error for inputs of other classes names the argument."""
    name = type(encoder).__name__
    ids = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
    for given in (ids, torch.ones(2, DIM), None, {"a": 1}):
        with pytest.raises(TypeError, match=rf"^{name}\.x must be a JaggedTensor; received "):
            encoder(given)


def assert_causal(encoder: nn.Module, dim: int = DIM) -> None:
    """Check that later values and other bags change nothing."""
    encoder.eval()
    rows = torch.randn(NUM, dim)
    found = OnRows(encoder)(rows)
    changed = rows.clone()
    changed[2] += 1.0  # last of the first bag
    again = OnRows(encoder)(changed)
    is_same = (again == found).all(1)
    assert is_same.tolist() == [True, True, False] + [True] * (NUM - 3)
    alone = OnRows(encoder, (4,))(rows[4:])
    torch.testing.assert_close(found[4:], alone)


def layer_norm(state, name, x):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def linear(state, name, x):
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def softmax_attention(q, k, v, heads, causal):
    """Return attention of one bag, `[L, D]`."""
    out = []
    for q_h, k_h, v_h in zip(*(np.split(part, heads, 1) for part in (q, k, v)), strict=True):
        scores = q_h @ k_h.T / np.sqrt(q_h.shape[1])
        if causal:
            scores = np.where(np.tri(len(q)) > 0, scores, -np.inf)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        out.append(shares / shares.sum(1, keepdims=True) @ v_h)
    return np.concatenate(out, 1)


def by_bag(function):
    """Return the formula of rows `[N, D]` of a formula of one bag."""

    def formula(state, rows, *fixed):
        bags = np.split(rows, np.cumsum(LENGTHS)[:-1])
        return np.concatenate([function(state, bag, *fixed) for bag in bags if len(bag)])

    return formula

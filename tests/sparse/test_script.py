"""TorchScript compiles the containers, with the methods that models call."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recsys.sparse.script import add_forms

KEYS = ["film", "user", "other"]


class Jagged(nn.Module):
    def forward(self, bags: JaggedTensor) -> JaggedTensor:
        return JaggedTensor(bags.values() * 2, lengths=bags.lengths())


class OfBatch(nn.Module):
    """Each method that scripted containers have."""

    def forward(self, kjt: KeyedJaggedTensor) -> KeyedTensor:
        bags = kjt.to_dict()
        first = bags["film"].values().sum() + kjt["user"].offsets().sum()
        second = kjt.offsets().sum() + kjt.stride() + kjt.length_per_key()[1]
        parts = KeyedTensor(["a", "b"], [1, 1], torch.stack([first, second]).view(1, 2))
        third = parts["b"] + parts.to_dict()["a"] + kjt.weights().sum()
        return KeyedTensor(["a"], [1], third.float())


def test_scripted_containers_have_the_methods_of_the_real_ones() -> None:
    lengths = torch.tensor([2, 0, 1, 1, 3, 0])
    batch = KeyedJaggedTensor(KEYS, torch.arange(7), torch.rand(7), lengths)
    add_forms()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        of_batch, jagged = torch.jit.script(OfBatch()), torch.jit.script(Jagged())
    expected = OfBatch()(batch)
    assert torch.equal(of_batch(batch)["a"], expected["a"])
    by_offsets = KeyedJaggedTensor(
        KEYS, batch.values(), batch.weights(), offsets=batch.offsets().clone()
    )
    assert torch.equal(of_batch(by_offsets)["a"], expected["a"])
    bags = JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2]))
    found = jagged(bags)
    assert type(found) is JaggedTensor
    assert [bag.tolist() for bag in found.to_dense()] == [[2.0], [2.0, 2.0]]

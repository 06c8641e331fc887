"""Feature processors: their results for a batch, and their names in the state dict."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from recsys.modules.feature_processor import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.sparse import JaggedTensor, KeyedJaggedTensor


def _bags(**lengths: list[int]) -> KeyedJaggedTensor:
    flat = [n for own in lengths.values() for n in own]
    return KeyedJaggedTensor(
        list(lengths), torch.arange(sum(flat)), torch.full((sum(flat),), 9.0), torch.tensor(flat)
    )


def _collection() -> PositionWeightedModuleCollection:
    collection = PositionWeightedModuleCollection({"b": 2, "a": 3})  # not in alphabetical order
    with torch.no_grad():
        collection.position_weights["a"].copy_(torch.tensor([0.25, 0.5, 0.75]))
        collection.position_weights["b"].copy_(torch.tensor([2.0, 3.0]))
    return collection


def test_one_feature() -> None:
    module = PositionWeightedModule(3)
    assert {name: value.tolist() for name, value in module.state_dict().items()} == {
        "position_weight": [1.0, 1.0, 1.0]
    }
    with torch.no_grad():
        module.position_weight.copy_(torch.tensor([0.25, 0.5, 0.75]))
    bags = JaggedTensor(torch.tensor([7, 8, 9, 7]), offsets=torch.tensor([0, 3, 3, 4]))
    weighed = module(bags)
    assert weighed.weights().tolist() == [0.25, 0.5, 0.75, 0.25]
    assert weighed.values() is bags.values()
    assert weighed.lengths().tolist() == [3, 0, 1]
    weighed.weights().sum().backward()
    assert module.position_weight.grad is not None
    assert module.position_weight.grad.tolist() == [2.0, 1.0, 1.0]
    module.reset_parameters()
    assert module.position_weight.tolist() == [1.0, 1.0, 1.0]


def test_one_feature_refuses_bags_that_are_too_long() -> None:
    with pytest.raises(ValueError, match=r"2; received 3.*bag 1 \(1 such"):
        PositionWeightedModule(2)(JaggedTensor(torch.arange(4), lengths=torch.tensor([1, 3])))
    with pytest.raises(ValueError, match=r"max_feature_length must be .*1; received 0"):
        PositionWeightedModule(0)


def test_many_features() -> None:
    collection = _collection()
    assert list(collection.state_dict()) == ["position_weights.b", "position_weights.a"]
    weighed = collection(_bags(b=[2, 1], a=[0, 3], x=[1, 0]))
    assert weighed.keys() == ["b", "a", "x"]
    assert weighed.weights().tolist() == [2.0, 3.0, 2.0, 0.25, 0.5, 0.75, 1.0]
    assert collection(_bags(b=[1, 0])).weights().tolist() == [2.0]
    collection.reset_parameters()
    assert collection(_bags(a=[3, 1])).weights().tolist() == [1.0] * 4


def test_features_may_be_named_as_what_a_dict_has_itself() -> None:
    names = ["values", "items", "keys", "forward"]
    collection = PositionWeightedModuleCollection(dict.fromkeys(names, 1))
    assert list(collection.state_dict()) == [f"position_weights.{name}" for name in names]
    state = {f"position_weights.{name}": torch.tensor([float(i)]) for i, name in enumerate(names)}
    for assign in (False, True):
        collection.reset_parameters()
        collection.load_state_dict(state, assign=assign)
        copied = copy.deepcopy(collection)
        assert [copied.position_weights[name].item() for name in names] == [0, 1, 2, 3]
        assert collection(_bags(keys=[1], values=[1])).weights().tolist() == [2.0, 0.0]
        assert [name for name, _ in copied.position_weights.items()] == names


def test_no_features() -> None:
    empty = PositionWeightedModuleCollection({})
    assert empty(_bags(a=[2, 1])).weights().tolist() == [1.0, 1.0, 1.0]


def test_half_weights_stay_half() -> None:
    assert _collection().half()(_bags(a=[2, 1], x=[1, 1])).weights().dtype == torch.float16


def test_meta_weights_are_materialised_by_their_own_reset() -> None:
    collection = PositionWeightedModuleCollection({"a": 2}, torch.device("meta"))
    owners = [m for m in collection.modules() if list(m.parameters(recurse=False))]
    assert all(callable(getattr(m, "reset_parameters", None)) for m in owners)


def test_a_fitted_weight_finds_the_position_that_matters() -> None:
    """Labels are the third id's; gradient descent must find that out."""
    torch.manual_seed(0)
    module = PositionWeightedModule(3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    for _ in range(100):
        ids = torch.randint(0, 2, (16, 3))
        bags = JaggedTensor(ids.flatten(), lengths=torch.full((16,), 3))
        sums = (module(bags).weights() * ids.flatten()).view(16, 3).sum(1)
        loss = nn.functional.mse_loss(sums, ids[:, 2].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(module.position_weight.detach(), expected, atol=1e-2, rtol=0)


def test_position_weights_by_feature() -> None:
    weights = PositionWeightedModuleCollection({"a": 2, "items": 3})
    assert list(weights.position_weights_dict) == ["a", "items"]
    for name, parameter in weights.position_weights_dict.items():
        assert parameter is weights.position_weights[name]

"""Towers compiled by TorchScript score as in Python."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.compat.towers import EmbeddingTower, EmbeddingTowerCollection
from recsys.inference import quantize_embeddings
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor, KeyedTensor


def _script(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def _bags(name: str, is_weighted: bool) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(10, 4, name, feature_names=["f"])
    return EmbeddingBagCollection([table], is_weighted)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, pooled: KeyedTensor) -> Tensor:
        output: Tensor = self.linear(pooled.values())
        return output


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.weighted = _bags("c", False), _bags("d", True)

    def forward(self, features: KeyedJaggedTensor, weighted_features: KeyedJaggedTensor) -> Tensor:
        found: Tensor = self.plain(features).values() * self.weighted(weighted_features).values()
        return found


def _towers() -> EmbeddingTowerCollection:
    torch.manual_seed(0)
    return EmbeddingTowerCollection(
        [
            EmbeddingTower(_bags("a", False), Pooled()),
            EmbeddingTower(_bags("b", True), Pooled()),
            EmbeddingTower(Both(), nn.Linear(4, 1)),
        ]
    )


def _batch(size: int) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 3, (size,))
    count = int(lengths.sum())
    return KeyedJaggedTensor(["f"], torch.randint(0, 10, (count,)), torch.rand(count), lengths)


@pytest.mark.parametrize("size", [0, 1, 4])
def test_towers_read_their_features(size: int) -> None:
    model = _towers()
    plain, weighted = _batch(size), _batch(size)
    assert torch.equal(_script(model)(plain, weighted), model(plain, weighted))
    for place, inputs in enumerate([(plain,), (weighted,), (plain, weighted)]):
        tower = model.towers[place]
        assert torch.equal(_script(tower)(*inputs), tower(*inputs))


def test_quantized_towers_are_compiled() -> None:
    model = quantize_embeddings(EmbeddingTower(_bags("a", False), Pooled()))
    batch = _batch(4)
    assert torch.equal(_script(model)(batch), model(batch))


def test_missing_features_are_named() -> None:
    program = _script(_towers())
    with pytest.raises(torch.jit.Error, match="A tower reads weighted_features; received None"):
        program(_batch(2))
    with pytest.raises(torch.jit.Error, match="A tower reads features; received None"):
        program(None, _batch(2))


def test_embedding_modules_of_other_arguments_are_named() -> None:
    class Other(nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return a + b + c

    with pytest.raises(TypeError, match=r"received Other, which takes \['a', 'b', 'c'\]"):
        _script(EmbeddingTower(Other(), nn.Identity()))

"""Features of jagged inputs: their rows, tables and modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from recsys.inference import quantize_embeddings
from recsys.inference.input_features import InputFeature, features_of_inputs
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.sparse import JaggedTensor, KeyedJaggedTensor


def _bags(**rows_of_feature: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(rows, 4, f"t_{feature}", feature_names=[feature])
            for feature, rows in rows_of_feature.items()
        ]
    )


def _batch(keys: list[str], dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    ones = torch.ones(2 * len(keys), dtype=torch.int64)
    return KeyedJaggedTensor(keys, ones.to(dtype), lengths=ones)


class Changed(nn.Module):
    """Changes ids before it looks them up."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bags, self.change = _bags(a=10), change

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.bags(features.with_values(self.change(features.values()))).values()


class Two(nn.Module):
    """Two inputs have a feature of one name, and two tables read another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _bags(a=10, b=7), _bags(a=5)
        self.rows = EmbeddingCollection(tables=[EmbeddingConfig(6, 4, "t", feature_names=["b"])])
        self.plain = nn.Embedding(3, 4)

    def forward(
        self, x: Tensor, left: KeyedJaggedTensor, more: dict[str, object]
    ) -> tuple[Tensor, ...]:
        right, single = more["right"], more["single"]
        assert isinstance(right, KeyedJaggedTensor)
        assert isinstance(single, JaggedTensor)
        rows = self.rows(features=left)["b"].values()
        plain = self.plain(right["c"].values())
        return self.first(left).values(), self.second(right).values(), rows, plain, single.values()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_features_belong_to_their_input(dtype: torch.dtype) -> None:
    model = quantize_embeddings(Two())
    empty = KeyedJaggedTensor(
        ["b", "a", "unused"], torch.zeros(0, dtype=dtype), lengths=torch.zeros(6, dtype=torch.long)
    )
    single = JaggedTensor(torch.tensor([1, 2], dtype=dtype), lengths=torch.tensor([2]))
    more = {"right": _batch(["a", "c"], dtype), "single": single}
    assert features_of_inputs(model, [torch.ones(2), empty, more]) == {
        "left": (
            InputFeature("b", 6, "t", "rows"),
            InputFeature("a", 10, "t_a", "first"),
            InputFeature("unused", None, None, None),
        ),
        "more_right": (
            InputFeature("a", 5, "t_a", "second"),
            InputFeature("c", 3, "plain", "plain"),
        ),
        "more_single": (InputFeature("more_single", None, None, None),),
    }


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda ids: ids, 10),
        (lambda ids: ids[:], 10),
        (lambda ids: ids % 10, None),
        (lambda ids: ids.clamp(max=9), None),
        (lambda ids: ids.clamp(min=0), None),
        (lambda ids: (ids + 1) % 10, None),
        (lambda ids: ids - ids, None),
    ],
)
def test_changed_ids_have_no_rows(change: Callable[[Tensor], Tensor], rows: int | None) -> None:
    found = features_of_inputs(quantize_embeddings(Changed(change)), [_batch(["a"])])
    assert [feature.rows for feature in found["features"]] == [rows]


class Reads(nn.Module):
    """Reads the ids of one feature as positions of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = _bags(a=10, b=7)
        self.register_buffer("names", torch.zeros(3))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        names = self.names[features["c"].values()]
        return self.bags(features).values() + names.sum()


def test_models_that_fail_on_marks_are_tried_by_feature() -> None:
    model = quantize_embeddings(Reads())
    found = features_of_inputs(model, [_batch(["a", "c", "b"])])["features"]
    assert [feature.rows for feature in found] == [10, None, 7]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_examples_without_samples_have_no_rows() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    batch = KeyedJaggedTensor(["a"], empty, lengths=empty)
    found = features_of_inputs(quantize_embeddings(Changed(lambda ids: ids)), [batch])
    assert found["features"] == (InputFeature("a", None, None, None),)

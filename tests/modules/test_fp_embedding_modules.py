"""Weighed and pooled bags, against plain matrix products."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.feature_processor import (
    FeatureProcessor,
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessorDictWrapper,
)
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import JaggedTensor, KeyedJaggedTensor

LENGTHS = {"c": 5, "a": 4, "b": 2}  # not in alphabetical order


def _tables(is_weighted: bool = True) -> EmbeddingBagCollection:
    mean = {"pooling": PoolingType.MEAN}
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(10, 4, "t0", feature_names=["a", "c"]),
            EmbeddingBagConfig(7, 8, "t1", feature_names=["b"], **mean),
            EmbeddingBagConfig(10, 4, "t2", feature_names=["a"]),
        ],
        is_weighted=is_weighted,
    )


class Halving(FeatureProcessor):
    """Weighs by 1/2, 1/4, ... along the whole feature."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        ids = features.values()
        weights = 0.5 ** torch.arange(1, ids.numel() + 1)
        return JaggedTensor(ids, weights, features.lengths())


def _processors(kind: str) -> dict[str, FeatureProcessor] | FeatureProcessorsCollection:
    if kind == "collection":
        return PositionWeightedModuleCollection(LENGTHS)
    processors = {name: PositionWeightedModule(length) for name, length in LENGTHS.items()}
    return processors | {"c": Halving()} if kind == "mixed" else processors


def _model(kind: str) -> FeatureProcessedEmbeddingBagCollection:
    torch.manual_seed(0)
    model = FeatureProcessedEmbeddingBagCollection(_tables(), _processors(kind))
    for parameter in model.split()[0].parameters():
        nn.init.normal_(parameter)
    return model


def _batch(seed: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(0, n + 1, (3,), generator=generator) for n in (2, 5, 4)]
    total = int(torch.cat(lengths).sum())
    return KeyedJaggedTensor(
        ["b", "c", "a"],
        torch.randint(0, 7, (total,), generator=generator),
        lengths=torch.cat(lengths),
    )


def _dense_reference(
    tables: dict[str, Tensor], weights: dict[str, Tensor], batch: KeyedJaggedTensor
) -> Tensor:
    columns = []
    for table, feature in [("t0", "a"), ("t0", "c"), ("t1", "b"), ("t2", "a")]:
        rows = []
        done = 0
        for ids in batch[feature].to_dense():
            own = weights[feature][: len(ids)]
            if feature not in LENGTHS:
                own = weights[feature][done : done + len(ids)]
            done += len(ids)
            row = own @ tables[table][ids]
            rows.append(row / max(len(ids), 1) if table == "t1" else row)
        columns.append(torch.stack(rows))
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", ["collection", "dict"])
@pytest.mark.parametrize("seed", range(3))
def test_trains_as_a_dense_model(kind: str, in_backward: bool, seed: int) -> None:
    model = _model(kind)
    tables = {
        n: m.weight.detach().clone().requires_grad_()
        for n, m in model.split()[1].embedding_bags.items()
    }
    weights = {
        f: p.detach().clone().requires_grad_()
        for f, p in zip(LENGTHS, model.split()[0].parameters(), strict=True)
    }
    reference = torch.optim.SGD([*tables.values(), *weights.values()], lr=0.1)
    if in_backward:
        apply_optimizer_in_backward(torch.optim.SGD, model.split()[1].parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = _batch(10 * seed + step)
        pooled = model(batch).values()
        expected = _dense_reference(tables, weights, batch)
        torch.testing.assert_close(pooled, expected)
        optimizer.zero_grad()
        reference.zero_grad()
        pooled.sin().sum().backward()
        expected.sin().sum().backward()
        if in_backward:
            torch.optim.SGD(model.split()[0].parameters(), lr=0.1).step()
        else:
            optimizer.step()
        reference.step()
    for name, module in model.split()[1].embedding_bags.items():
        torch.testing.assert_close(module.weight, tables[name])
    for parameter, expected in zip(model.split()[0].parameters(), weights.values(), strict=True):
        torch.testing.assert_close(parameter, expected)


def test_names_are_those_that_users_know() -> None:
    tables = [f"_embedding_bag_collection.embedding_bags.t{i}.weight" for i in range(3)]
    assert list(_model("collection").state_dict()) == [
        *tables,
        *(f"_feature_processors.position_weights.{f}" for f in LENGTHS),
    ]
    assert list(_model("dict").state_dict()) == [
        *tables,
        *(f"_feature_processors.{f}.position_weight" for f in LENGTHS),
    ]


def test_a_dict_equals_a_collection() -> None:
    one, other = _model("dict"), _model("collection")
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(one(_batch(0)).values(), other(_batch(0)).values())
    assert one(_batch(0)).keys() == ["a@t0", "c", "b", "a@t2"]
    assert copy.deepcopy(one).is_weighted()


def test_processors_of_ones_own() -> None:
    model = _model("mixed")
    batch = _batch(1)
    position, tables = model.split()
    weighed = position(batch)
    ids = batch["c"].values().numel()
    torch.testing.assert_close(weighed["c"].weights(), 0.5 ** torch.arange(1, ids + 1))
    only_positions = PositionWeightedModuleCollection({"a": 4, "b": 2})
    with torch.no_grad():
        for feature in ("a", "b"):
            weight = position.get_parameter(f"{feature}.position_weight")
            only_positions.position_weights[feature].copy_(weight)
    assert torch.equal(weighed["a"].weights(), only_positions(batch)["a"].weights())
    assert torch.equal(model(batch).values(), tables(weighed).values())


def test_features_without_a_processor_weigh_one() -> None:
    weighed = FeatureProcessorDictWrapper({"c": Halving()})(_batch(1))
    assert weighed["a"].weights().eq(1).all()


def test_bad_processors_are_refused() -> None:
    class Silent(FeatureProcessor):
        def forward(self, features: JaggedTensor) -> JaggedTensor:
            return features

    with pytest.raises(ValueError, match=r"needs .* with is_weighted=True"):
        FeatureProcessedEmbeddingBagCollection(_tables(is_weighted=False), _processors("dict"))
    some = {"a": PositionWeightedModule(4), "z": PositionWeightedModule(1)}
    with pytest.raises(ValueError, match=r"missing: \['b', 'c'\], unknown: \['z'\]"):
        FeatureProcessedEmbeddingBagCollection(_tables(), some)
    with pytest.raises(TypeError, match="must be a FeatureProcessor; received Identity"):
        FeatureProcessorDictWrapper({"a": nn.Identity()})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"'c' \(Silent\) must return one weight"):
        FeatureProcessorDictWrapper({"c": Silent()})(_batch(1))


@pytest.mark.parametrize("kind", ["collection", "dict"])
def test_a_bag_that_is_too_long_is_named(kind: str) -> None:
    lengths = torch.tensor([3, 0, 0])
    batch = KeyedJaggedTensor(["b", "c", "a"], torch.zeros(3).long(), lengths=lengths)
    with pytest.raises(ValueError, match=r"received 3 ids.*bag 0.*'b'"):
        _model(kind)(batch)

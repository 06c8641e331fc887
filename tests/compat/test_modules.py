"""Feature processors, configs and fused collections under TorchRec's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recsys.compat.modules import (
    EmbeddingTableConfig,
    PositionWeightedProcessor,
    fuse_embedding_optimizer,
    pooling_type_to_pooling_mode,
    pooling_type_to_str,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from recsys.sparse import KeyedJaggedTensor

CPU = torch.device("cpu")


def configs(kind: type[Any]) -> list[Any]:
    return [
        kind(num_embeddings=10 + i, embedding_dim=4, name=f"t{i}", feature_names=[f"f{i}"])
        for i in range(2)
    ]


def test_the_processor_leaves_out_features_that_it_does_not_know() -> None:
    processor = PositionWeightedProcessor({"b": 2, "a": 3})
    with torch.no_grad():
        processor.position_weights["a"].copy_(torch.tensor([0.25, 0.5, 0.75]))
        processor.position_weights["b"].copy_(torch.tensor([2.0, 3.0]))
    lengths = torch.tensor([2, 1, 1, 0, 0, 3])
    weighed = processor(KeyedJaggedTensor(["b", "x", "a"], torch.arange(7), lengths=lengths))
    assert weighed.keys() == ["b", "a"]
    assert weighed.values().tolist() == [0, 1, 2, 4, 5, 6]
    assert weighed.weights().tolist() == [2.0, 3.0, 2.0, 0.25, 0.5, 0.75]


def test_configs_can_be_adapted_in_place() -> None:
    config = EmbeddingTableConfig(num_embeddings=10, embedding_dim=4, is_weighted=True)
    config.feature_names = ["f"]
    assert config.num_features() == 1


def test_every_pooling_has_a_mode() -> None:
    modes = [pooling_type_to_pooling_mode(p).name for p in PoolingType]
    assert modes == ["SUM", "MEAN", "NONE"]
    mode = pooling_type_to_pooling_mode(pooling_type=PoolingType.MEAN, sharding_type="row_wise")
    assert mode.name == "MEAN"


def test_poolings_as_text() -> None:
    assert [pooling_type_to_str(kind) for kind in (PoolingType.SUM, PoolingType.MEAN)] == [
        "sum",
        "mean",
    ]
    with pytest.raises(ValueError, match=r"must be PoolingType\.SUM or MEAN; received"):
        pooling_type_to_str(PoolingType.NONE)


def test_fuses_every_collection_of_a_model_with_its_weights() -> None:
    ebc = EmbeddingBagCollection(configs(EmbeddingBagConfig), is_weighted=True)
    ec = EmbeddingCollection(configs(EmbeddingConfig), need_indices=True)
    model = nn.ModuleDict({"ebc": ebc, "again": ebc, "rest": nn.ModuleList([ec, nn.Linear(2, 2)])})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fused: Any = fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, CPU)
    assert fused is model
    assert type(fused["ebc"]) is FusedEmbeddingBagCollection
    assert fused["again"] is fused["ebc"]
    assert fused["ebc"].is_weighted()
    assert type(fused["rest"][0]) is FusedEmbeddingCollection
    assert fused["rest"][0].need_indices()
    assert list(fused.state_dict()) == list(state)
    for name, value in state.items():
        assert torch.equal(fused.state_dict()[name], value)
    lone = fuse_embedding_optimizer(ec, torch.optim.SGD, {"lr": 0.1}, CPU)
    assert type(lone) is FusedEmbeddingCollection


def test_tables_on_meta_are_made_on_the_device() -> None:
    model = EmbeddingBagCollection(configs(EmbeddingBagConfig), device=torch.device("meta"))
    fused = fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, CPU)
    assert fused.device == CPU
    ids = KeyedJaggedTensor(["f0", "f1"], torch.arange(2), lengths=torch.ones(2, dtype=torch.int64))
    assert fused(ids).values().abs().sum() > 0

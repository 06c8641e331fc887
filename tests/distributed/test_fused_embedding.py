"""Fused collections shard with their optimizer, and train as they do unsharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.shard import shard
from recsys.distributed.sharding_plan import row_wise
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, assert_same, whole, whole_state
from tests.ranks import RankPool


def collection(pooled: bool) -> nn.Module:
    torch.manual_seed(0)
    if pooled:
        bags = [EmbeddingBagConfig(10, 4, "t", feature_names=["f"])]
        return FusedEmbeddingBagCollection(bags, torch.optim.Adagrad, {"lr": 0.1})
    tables = [EmbeddingConfig(10, 4, "t", feature_names=["f"])]
    return FusedEmbeddingCollection(tables, torch.optim.Adagrad, {"lr": 0.1})


def values(found: object) -> Tensor:
    keyed = found.values() if hasattr(found, "key_dim") else found["f"].values()  # type: ignore[index]
    assert isinstance(keyed, Tensor)
    return keyed


def _train(pooled: bool) -> None:
    rank = dist.get_rank()
    ids = torch.tensor([[1, 5, 5], [2, 5, 9]])
    lengths = torch.tensor([2, 1])
    reference = collection(pooled)
    planned = DistributedModelParallel(collection(pooled), device=CPU)
    rows = shard(collection(pooled), row_wise(), device=CPU)
    for _ in range(3):
        joined = reference(KeyedJaggedTensor(["f"], ids.flatten(), lengths=lengths.repeat(2)))
        (values(joined).square().sum() / 2).backward()
        for sharded in (planned, rows):
            own = sharded(KeyedJaggedTensor(["f"], ids[rank], lengths=lengths))
            values(own.wait()).square().sum().backward()
    for sharded in (planned, rows):
        assert_same(whole_state(sharded), reference.state_dict())
        (name,) = reference.state_dict()
        assert list(sharded.fused_optimizer.params) == [name]
        expected = reference.fused_optimizer().state_dict()["state"][name]["sum"]
        state = sharded.fused_optimizer.state_dict()["state"][name]["sum"]
        torch.testing.assert_close(whole(state), expected)


@pytest.mark.parametrize("pooled", [True, False])
def test_trains_as_unsharded(ranks: RankPool, pooled: bool) -> None:
    ranks(2, _train, pooled)

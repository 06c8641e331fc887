from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recsys.compat.state_dict_transform import (
    state_dict_all_gather_keys,
    state_dict_gather,
    state_dict_to_device,
)
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from tests.distributed.cases import CPU, assert_same
from tests.ranks import RankPool

KINDS = list(ShardingType)


def unsharded(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    tables = [EmbeddingBagConfig(12, 8, kind.value, feature_names=["f"]) for kind in KINDS]
    return nn.ModuleDict({"ebc": EmbeddingBagCollection(tables), "over": nn.Linear(8, 1)})


def sharded(seed: int) -> DistributedModelParallel:
    plan = EmbeddingModuleShardingPlan(
        {
            kind.value: parameter_sharding(
                kind, 12, 8, [1] if kind is ShardingType.TABLE_WISE else [0, 1]
            )
            for kind in KINDS
        }
    )
    return DistributedModelParallel(unsharded(seed), device=CPU, plan=ShardingPlan({"ebc": plan}))


def _gathers_into_an_unsharded_model() -> None:
    rank = dist.get_rank()
    expected, model, served = unsharded(0).state_dict(), sharded(0), unsharded(1)
    state_dict_gather(model.state_dict(), served.state_dict())
    assert_same(served.state_dict(), expected, rtol=0, atol=0)
    some = {"ebc.embedding_bags.row_wise.weight": torch.zeros(12, 8)}
    state_dict_gather(model.state_dict(), some)
    assert torch.equal(some["ebc.embedding_bags.row_wise.weight"], expected[next(iter(some))])
    with pytest.raises(KeyError, match="src must have all values of dst; it lacks"):
        state_dict_gather(model.state_dict(), {"other": torch.zeros(1)})
    with pytest.raises(ValueError, match="values of the same shapes; received"):
        state_dict_gather(model.state_dict(), {"over.bias": torch.zeros(2)})
    names = [f"ebc.embedding_bags.{kind}.weight" for kind in ("row_wise", "table_wise")]
    with pytest.raises(ValueError, match="Every rank must gather the same tables"):
        state_dict_gather(model.state_dict(), {names[rank]: torch.zeros(12, 8)})


def test_gathers_into_an_unsharded_model(ranks: RankPool) -> None:
    ranks(2, _gathers_into_an_unsharded_model)


def _moves_and_names() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    model = sharded(0)
    state = model.state_dict()
    moved = state_dict_to_device(state, group, CPU)
    assert list(moved) == list(state)
    assert not any(value.requires_grad for value in moved.values())
    table = moved["ebc.embedding_bags.row_wise.weight"]
    assert isinstance(table, ShardedTable)
    expected = unsharded(0).state_dict()["ebc.embedding_bags.row_wise.weight"]
    assert torch.equal(table.full_tensor(), expected)
    on_meta = state_dict_to_device(state, group, torch.device("meta"))
    assert {value.device.type for value in on_meta.values()} == {"meta"}
    assert group is not None
    assert state_dict_all_gather_keys({f"of {rank}": 1, "both": 2}, group) == [
        "both",
        "of 0",
        "of 1",
    ]


def test_moves_and_names(ranks: RankPool) -> None:
    ranks(2, _moves_and_names)

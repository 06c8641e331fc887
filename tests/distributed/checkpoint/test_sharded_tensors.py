"""Tables of a state dict as torch's own sharded tensors, for torchsnapshot."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.utils import _pytree as pytree

from recsys.distributed.checkpoint.sharded_tensors import WithShardedTensors, to_sharded_tensor
from recsys.distributed.shard import shard
from recsys.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import Adam, RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU
from tests.ranks import RankPool

NAMES = ["a", "b", "c"]
PLAN: dict[str, Any] = {"a": row_wise(), "b": table_wise(rank=1), "c": data_parallel()}
OTHER: dict[str, Any] = {"a": table_wise(rank=0), "b": row_wise(), "c": data_parallel()}


def _trained(seed: int, plan: dict[str, Any], optimizer: Any = Adam) -> Any:
    torch.manual_seed(seed)
    configs = [EmbeddingBagConfig(7, 8, name, feature_names=[name]) for name in NAMES]
    tables = EmbeddingBagCollection(tables=configs)
    apply_optimizer_in_backward(optimizer, tables.parameters(), {"lr": 0.1})
    sharded = shard(tables, plan=plan, device=CPU)
    values, lengths = torch.randint(0, 7, (6,)), torch.ones(6, dtype=torch.int64)
    sharded(KeyedJaggedTensor(NAMES, values, lengths=lengths)).values().sum().backward()
    return sharded


def _everything(model: Any) -> list[Any]:
    state = [model.state_dict(), model.fused_optimizer.state_dict()["state"]]
    leaves = pytree.tree_leaves(state)
    return [v.full_tensor() if isinstance(v, ShardedTable) else torch.as_tensor(v) for v in leaves]


def _shares_and_loads() -> None:
    saved, other = _trained(0, PLAN), _trained(1, PLAN)
    for part in (saved, saved.fused_optimizer):
        state = WithShardedTensors(part).state_dict()
        tables = [v for v in pytree.tree_leaves(state) if type(v) is ShardedTensor]
        assert len(tables) == (2 if part is saved else 4)
        assert not [v for v in pytree.tree_leaves(state) if isinstance(v, ShardedTable)]
    state, own = WithShardedTensors(saved).state_dict(), saved.state_dict()
    for name in ("embedding_bags.a.weight", "embedding_bags.b.weight"):
        views, parts = state[name].local_shards(), own[name].local_shards()
        assert state[name].metadata().size == own[name].shape == (7, 8)
        assert [v.tensor.data_ptr() for v in views] == [p.tensor.data_ptr() for p in parts]
    for target, source in ((other, saved), (other.fused_optimizer, saved.fused_optimizer)):
        WithShardedTensors(target).load_state_dict(WithShardedTensors(source).state_dict())
    for found, one in zip(_everything(other), _everything(saved), strict=True):
        assert torch.equal(found, one)


def test_they_share_the_parts_and_load(ranks: RankPool) -> None:
    ranks(2, _shares_and_loads)


def _refuses_repeated_parts() -> None:
    columns: dict[str, Any] = {**PLAN, "a": column_wise(ranks=[0, 1])}
    model = _trained(0, columns, RowWiseAdagrad)
    assert type(WithShardedTensors(model).state_dict()["embedding_bags.a.weight"]) is ShardedTensor
    state = model.fused_optimizer.state_dict()["state"]["embedding_bags.a.weight"]
    with pytest.raises(ValueError, match=r"no parts that repeat.*torch\.distributed\.checkpoint"):
        to_sharded_tensor(state["sum"])


def test_row_wise_states_of_column_wise_tables_are_refused(ranks: RankPool) -> None:
    ranks(2, _refuses_repeated_parts)


def _snapshot(folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchsnapshot import Snapshot

        saved = _trained(0, PLAN)
        parts = {"model": saved, "optimizer": saved.fused_optimizer}
        for name, part in parts.items():
            Snapshot.take(f"{folder}/{name}", {name: WithShardedTensors(part)})
        for plan in (PLAN, OTHER):
            other = _trained(1, plan)
            parts = {"model": other, "optimizer": other.fused_optimizer}
            for name, part in parts.items():
                Snapshot(f"{folder}/{name}").restore({name: WithShardedTensors(part)})
            for found, one in zip(_everything(other), _everything(saved), strict=True):
                assert torch.equal(found, one)
    dist.barrier()


@pytest.mark.skipif(not find_spec("torchsnapshot"), reason="needs torchsnapshot")
def test_torchsnapshot_restores_under_another_plan(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, _snapshot, str(tmp_path))

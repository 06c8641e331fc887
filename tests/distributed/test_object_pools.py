"""A sharded pool equals the unsharded one after the updates of all ranks in turn."""

from __future__ import annotations

import copy
import os
import pickle
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.object_pools import (
    KeyedJaggedTensorPoolSharder,
    ShardedKeyedJaggedTensorPool,
    ShardedTensorPool,
    TensorPoolSharder,
)
from recsys.distributed.types import (
    ObjectPoolShardingPlan,
    ObjectPoolShardingType,
    ShardingEnv,
)
from recsys.modules.object_pools import KeyedJaggedTensorPool, TensorPool
from recsys.sparse import KeyedJaggedTensor
from tests.modules.test_object_pools import MAXIMA, jagged_of, random_row
from tests.ranks import RankPool

CPU = torch.device("cpu")
ROW_WISE, REPLICATED = ObjectPoolShardingType


def _shard(pool: Any, kind: ObjectPoolShardingType = ROW_WISE) -> Any:
    plan, env = ObjectPoolShardingPlan(kind), ShardingEnv.default()
    if isinstance(pool, TensorPool):
        return TensorPoolSharder().shard(pool, plan, env, CPU)
    return KeyedJaggedTensorPoolSharder().shard(pool, plan, env, CPU)


def _pool(is_jagged: bool, pool_size: int, device: torch.device = CPU) -> Any:
    if is_jagged:
        return KeyedJaggedTensorPool(pool_size, MAXIMA, is_weighted=True, device=device)
    return TensorPool(pool_size, 3, torch.float16, device=device)


def _objects(is_jagged: bool, rng: random.Random, count: int) -> Any:
    if is_jagged:
        rows = [random_row(rng) for _ in range(count)]
        return jagged_of(rows, rng.sample(list(MAXIMA), 3), is_weighted=True)
    return torch.tensor([[rng.random()] * 3 for _ in range(count)]).half().view(count, 3)


def _parts(found: Any) -> list[Any]:
    if not isinstance(found, KeyedJaggedTensor):
        return [found]
    return [torch.tensor(found.stride()), found.lengths(), found.values(), found.weights()]


def _assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(_parts(found), _parts(expected), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def _holds_what_the_unsharded_holds(
    seed: int, is_jagged: bool, kind: ObjectPoolShardingType, node_size: int
) -> None:
    """Every rank plays the updates of all of them on an unsharded pool."""
    rng, rank, num_ranks = random.Random(seed), dist.get_rank(), dist.get_world_size()
    pool_size = rng.choice([1, 5, 12])
    pool = _pool(is_jagged, pool_size)
    pool.update(torch.arange(pool_size), _objects(is_jagged, rng, pool_size))  # is kept
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(node_size)):
        sharded = _shard(pool, kind)
    for _ in range(3):
        for other in range(num_ranks):
            ids = torch.tensor([rng.randrange(pool_size) for _ in range(rng.choice([0, 1, 9]))])
            ids, objects = ids.long(), _objects(is_jagged, rng, len(ids))
            pool.update(ids, objects)
            if other == rank:
                own_update = ids.to(torch.int32 if rank else torch.int64), objects
        sharded.update(*own_update)
        own = random.Random(rank)
        asked = torch.tensor([own.randrange(pool_size) for _ in range(own.choice([0, 4]))]).long()
        first, second = sharded(asked), sharded.lookup(torch.arange(pool_size))
        _assert_same(second.wait(), pool.lookup(torch.arange(pool_size)))
        _assert_same(first.wait(), pool.lookup(asked))
    for name, value in sharded.state_dict().items():
        assert torch.equal(value.full_tensor(), pool.state_dict()[name])


@pytest.mark.parametrize("is_jagged", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "node_size", "kind"),
    [
        (1, 1, ROW_WISE),
        (2, 2, ROW_WISE),
        (2, 1, REPLICATED),
        (3, 3, REPLICATED),
        (4, 2, REPLICATED),
    ],
)
def test_holds_what_the_unsharded_holds(
    ranks: RankPool, is_jagged: bool, num_ranks: int, node_size: int, kind: ObjectPoolShardingType
) -> None:
    for seed in range(4):
        ranks(num_ranks, _holds_what_the_unsharded_holds, seed, is_jagged, kind, node_size)


def _errors_are_raised_on_all_ranks() -> None:
    rank = dist.get_rank()
    sharded = _shard(_pool(True, 5))
    good, one = _objects(True, random.Random(0), 1), torch.tensor([2])
    sharded.update(one, good)
    expected = sharded.lookup(one).wait()
    too_long = jagged_of([{"a": [1] * 9, "b": [], "c": []}], list(MAXIMA), is_weighted=True)
    with pytest.raises(IndexError, match=r"On rank 1: .*\[0, 5\); .*5"):
        sharded.lookup(torch.tensor([5 if rank == 1 else 1]))
    with pytest.raises(ValueError, match=r"On rank 0: .*received 9"):
        sharded.update(one, good if rank else too_long)
    with pytest.raises(TypeError, match=r"On rank 0: .*ids must be"):
        sharded.update(one if rank else [2], good)
    _assert_same(sharded.lookup(one).wait(), expected)


def test_errors_are_raised_on_all_ranks(ranks: RankPool) -> None:
    ranks(2, _errors_are_raised_on_all_ranks)


def _states_are_saved_and_loaded(folder: str, is_jagged: bool) -> None:
    pool = _pool(is_jagged, 5)
    pool.update(torch.arange(5), _objects(is_jagged, random.Random(0), 5))
    sharded = _shard(pool)
    dcp.save(sharded.state_dict(), checkpoint_id=folder)
    loaded = _pool(is_jagged, 5)
    dcp.load(loaded.state_dict(), checkpoint_id=folder)  # in place
    _assert_same(loaded.lookup(torch.arange(5)), pool.lookup(torch.arange(5)))
    other = _shard(_pool(is_jagged, 5, torch.device("meta")))
    assert other.lookup(torch.tensor([1])).wait() is not None
    other.load_state_dict(pool.state_dict())
    _assert_same(other.lookup(torch.arange(5)).wait(), pool.lookup(torch.arange(5)))
    again = _shard(_pool(is_jagged, 5))
    again.load_state_dict(sharded.state_dict())
    _assert_same(again.lookup(torch.arange(5)).wait(), pool.lookup(torch.arange(5)))
    copied = copy.deepcopy(again)
    copied.update(torch.arange(5), _objects(is_jagged, random.Random(1), 5))
    _assert_same(again.lookup(torch.arange(5)).wait(), pool.lookup(torch.arange(5)))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        again.load_state_dict({"other": torch.ones(1)})
    with pytest.raises(RuntimeError, match="received one of shape"):
        again.load_state_dict(_pool(is_jagged, 6).state_dict())
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(again)
    with pytest.raises(ValueError, match="stays on its device"):
        again.double()


@pytest.mark.parametrize("is_jagged", [False, True])
def test_states_are_saved_and_loaded(ranks: RankPool, tmp_path: Path, is_jagged: bool) -> None:
    ranks(2, _states_are_saved_and_loaded, str(tmp_path), is_jagged)


class _Model(nn.Module):
    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool = pool
        self.dense = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dense(self.pool(ids).wait().float())
        return found


def _trains_beside_dense_layers() -> list[float]:
    torch.manual_seed(0)
    pool = TensorPool(5, 3, torch.float32, device=CPU, loaded_values=torch.rand(5, 3))
    model = DistributedModelParallel(_Model(_shard(pool)), device=CPU)
    before = pool(torch.arange(5))
    ids = torch.tensor([4, dist.get_rank()])
    model(ids).sum().backward()
    gradient = next(p.grad for p in model.parameters() if p.dim() == 2)
    assert gradient is not None
    assert set(model.state_dict()) == {"pool._pool", "dense.weight", "dense.bias"}
    assert torch.equal(model.module.pool.lookup(torch.arange(5)).wait(), before)
    assert torch.allclose(gradient, (before[4] + (before[0] + before[1]) / 2)[None])
    return gradient.flatten().tolist()


def test_trains_beside_dense_layers(ranks: RankPool) -> None:
    first, second = ranks(2, _trains_beside_dense_layers)
    assert first == second


def test_settings_are_those_of_the_pool() -> None:
    plan = ObjectPoolShardingPlan(ROW_WISE)
    env = ShardingEnv.from_local()
    pool = TensorPoolSharder().shard(TensorPool(4, 2, torch.bfloat16), plan, env)
    assert isinstance(pool, ShardedTensorPool)
    assert (pool.pool_size, pool.dim, pool.dtype, pool.device) == (4, 2, torch.bfloat16, CPU)
    assert TensorPoolSharder().module_type is pool.unsharded_module_type is TensorPool
    assert not TensorPoolSharder().shardable_parameters(TensorPool(4, 2, torch.float32))
    jagged = KeyedJaggedTensorPoolSharder().shard(_pool(True, 3), plan, env)
    assert isinstance(jagged, ShardedKeyedJaggedTensorPool)
    assert (jagged.feature_max_lengths, jagged.values_dtype) == (MAXIMA, torch.int64)
    assert jagged.is_weighted
    made = ShardedTensorPool(env, 4, 2, torch.bfloat16, plan)
    _assert_same(made.lookup(torch.arange(4)).wait(), pool.lookup(torch.arange(4)).wait())
    with pytest.raises(TypeError, match="must be a TensorPool"):
        TensorPoolSharder().shard(nn.Linear(1, 1), plan, env)


def test_bad_plans() -> None:
    assert ObjectPoolShardingPlan("row_wise").sharding_type is ROW_WISE  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be one of row_wise, replicated_row_wise"):
        ObjectPoolShardingPlan("table_wise")  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="served unsharded"):
        ObjectPoolShardingPlan(ROW_WISE, inference=True)

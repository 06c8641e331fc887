"""Pools of vectors and of jagged features, unsharded and sharded on one rank."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.compat.answers import raises

CPU = torch.device("cpu")
MAXIMA = {"f": 3, "g": 1, "h": 2}


def _vectors(size: int = 8, dim: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    from torchrec.modules.tensor_pool import TensorPool

    return TensorPool(size, dim, dtype, device=CPU)


def _jagged_pool(is_weighted: bool = False, **kwargs: Any) -> Any:
    from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool

    return KeyedJaggedTensorPool(8, MAXIMA, is_weighted=is_weighted, device=CPU, **kwargs)


def _features(num_rows: int, dtype: torch.dtype = torch.int64, is_weighted: bool = False) -> Any:
    from torchrec import KeyedJaggedTensor

    lengths = torch.cat([torch.randint(0, most + 1, (num_rows,)) for most in MAXIMA.values()])
    values = torch.randint(0, 100, (int(lengths.sum()),)).to(dtype)
    weights = torch.rand(len(values)) if is_weighted else None
    return KeyedJaggedTensor(list(MAXIMA), values, weights, lengths=lengths)


def _seen(features: Any) -> Any:
    return {
        "keys": features.keys(),
        "values": features.values(),
        "lengths": features.lengths(),
        "weights": features.weights_or_none(),
        "stride": features.stride(),
        "by key": {key: features[key].values() for key in features.keys()},  # noqa: SIM118
    }


@contextlib.contextmanager
def _env() -> Iterator[Any]:
    from torchrec.distributed.types import ShardingEnv

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            group = dist.group.WORLD
            assert group is not None
            yield ShardingEnv.from_process_group(group)
        finally:
            dist.destroy_process_group()


def vectors_are_written_and_read() -> Any:
    pool = _vectors()
    ids = torch.randperm(8)[:5]
    pool.update(ids, torch.rand(5, 3))
    asked = torch.randint(0, 8, (6,))
    return pool.lookup(asked), pool(asked.int()), pool(asked.view(2, 3)), pool.pool


def vectors_of_other_dtypes() -> Any:
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool):
        pool = _vectors(dtype=dtype)
        pool.update(torch.tensor([1, 4]), torch.randint(0, 2, (2, 3)).to(dtype))
        found.append((pool.dtype, pool(torch.tensor([4, 0, 1]))))
    return found


def of_vectors_for_one_id_the_last_stays() -> Any:
    pool = _vectors()
    pool.update(torch.tensor([2, 5, 2, 2, 5]), torch.rand(5, 3))
    return pool.pool


def vectors_that_were_loaded() -> Any:
    from torchrec.modules.tensor_pool import TensorPool

    values = torch.rand(4, 2)
    pool = TensorPool(4, 2, torch.float32, device=CPU, loaded_values=values)
    before = pool(torch.arange(4))
    pool.update(torch.tensor([3]), torch.zeros(1, 2))
    return before, values, pool.state_dict()


def settings_of_a_tensor_pool() -> Any:
    from torchrec.modules.object_pool import ObjectPool

    pool = _vectors(5, 2, torch.float16)
    return (
        [pool.pool_size, pool.dim, pool.dtype, pool.device, isinstance(pool, ObjectPool)],
        {name: value for name, value in pool.state_dict().items()},
        [name for name, _ in pool.named_parameters()],
        [name for name, _ in pool.named_buffers()],
    )


def a_pool_without_a_device_is_on_meta() -> Any:
    from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
    from torchrec.modules.tensor_pool import TensorPool

    vectors = TensorPool(4, 2, torch.float32)
    jagged = KeyedJaggedTensorPool(4, {"f": 2})
    return (
        [vectors.device, raises(lambda: vectors(torch.tensor([1])))],
        {name: [value.device, value.shape] for name, value in jagged.state_dict().items()},
    )


def vectors_that_do_not_fit() -> Any:
    pool, one = _vectors(), torch.tensor([1])
    return [
        raises(lambda: pool(torch.tensor([8]))),
        raises(lambda: pool.update(torch.tensor([8]), torch.ones(1, 3))),
        raises(lambda: pool.update(one, torch.ones(1, 2))),
        raises(lambda: pool.update(one, torch.ones(3))),
        raises(lambda: pool.update(one, torch.ones(1, 3, dtype=torch.float64))),
        raises(lambda: pool.update(torch.tensor([1, 2]), torch.ones(1, 3))),
        pool.pool,
    ]


def no_ids() -> Any:
    pool, jagged, none = _vectors(), _jagged_pool(), torch.empty(0, dtype=torch.int64)
    pool.update(none, torch.empty(0, 3))
    return pool(none), pool.pool, _seen(jagged.lookup(none))


def a_state_dict_is_loaded() -> Any:
    pool, other, jagged, another = _vectors(), _vectors(), _jagged_pool(), _jagged_pool()
    pool.update(torch.tensor([1, 2]), torch.rand(2, 3))
    jagged.update(torch.tensor([6, 2, 0]), _features(3))
    other.load_state_dict(pool.state_dict())
    another.load_state_dict(jagged.state_dict())
    return other.pool, _seen(another.lookup(torch.arange(8)))


def features_are_written_and_read() -> Any:
    pool = _jagged_pool()
    pool.update(torch.randperm(8)[:5], _features(5))
    first = _seen(pool.lookup(torch.arange(8)))
    pool.update(torch.randperm(8)[:3], _features(3))
    return first, _seen(pool.lookup(torch.randint(0, 8, (6,)).int())), pool.state_dict()


def of_features_for_one_id_the_last_stays() -> Any:
    pool = _jagged_pool()
    pool.update(torch.tensor([2, 5, 2, 2, 5]), _features(5))
    return _seen(pool.lookup(torch.arange(8)))


def features_of_other_dtypes() -> Any:
    found = []
    for dtype in (torch.int32, torch.float32, torch.float16):
        pool = _jagged_pool(values_dtype=dtype)
        pool.update(torch.tensor([1, 4]), _features(2, dtype))
        found.append((pool.values_dtype, _seen(pool.lookup(torch.tensor([4, 0, 1])))))
    return found


def state_of_weighted_features() -> Any:
    pool = _jagged_pool(is_weighted=True)
    pool.update(torch.tensor([1, 4, 7]), _features(3, is_weighted=True))
    return list(pool.state_dict()), pool.state_dict()


def weights_that_a_pool_does_not_keep() -> Any:
    pool = _jagged_pool()
    pool.update(torch.tensor([1, 4]), _features(2, is_weighted=True))
    return _seen(pool.lookup(torch.tensor([4, 0, 1])))


def settings_of_a_jagged_pool() -> Any:
    pool = _jagged_pool(is_weighted=True, values_dtype=torch.int32)
    return [
        pool.pool_size,
        pool.feature_max_lengths,
        pool.values_dtype,
        pool.is_weighted,
        {name: [value.dtype, value.shape] for name, value in pool.state_dict().items()},
        [name for name, _ in pool.named_parameters()],
    ]


def features_that_do_not_fit() -> Any:
    from torchrec import KeyedJaggedTensor

    pool, one = _jagged_pool(), torch.tensor([1])
    long = KeyedJaggedTensor(list(MAXIMA), torch.arange(4), lengths=torch.tensor([4, 0, 0]))
    few = KeyedJaggedTensor(["f"], torch.arange(1), lengths=torch.tensor([1]))
    weighted = _jagged_pool(is_weighted=True)
    return [
        raises(lambda: pool.lookup(torch.tensor([8]))),
        raises(lambda: pool.update(torch.tensor([8]), _features(1))),
        raises(lambda: pool.update(one, long)),
        raises(lambda: pool.update(one, few)),
        raises(lambda: pool.update(one, _features(1, torch.float32))),
        raises(lambda: weighted.update(one, _features(1))),
        pool.state_dict(),
    ]


def lookups_that_are_traced() -> Any:
    vectors, jagged = _vectors(), _jagged_pool()
    vectors.update(torch.tensor([1, 2]), torch.rand(2, 3))
    jagged.update(torch.tensor([1, 2]), _features(2))

    class Reader(torch.nn.Module):
        def __init__(self, pool: Any) -> None:
            super().__init__()
            self.pool = pool

        def forward(self, ids: torch.Tensor) -> Any:
            return self.pool.lookup(ids)

    ids = torch.tensor([2, 0, 1, 2])
    graph = torch.fx.symbolic_trace(Reader(vectors))
    return [
        graph(ids),
        raises(lambda: graph(torch.tensor([8]))),
        torch.jit.script(vectors)(ids),
        _seen(torch.fx.symbolic_trace(Reader(jagged))(ids)),
    ]


def a_sharded_tensor_pool() -> Any:
    from torchrec.distributed.tensor_pool import ShardedTensorPool, TensorPoolSharder
    from torchrec.distributed.types import ObjectPoolShardingPlan, ObjectPoolShardingType
    from torchrec.modules.tensor_pool import TensorPool

    with _env() as env:
        plan = ObjectPoolShardingPlan(sharding_type=ObjectPoolShardingType.ROW_WISE)
        sharder = TensorPoolSharder()
        pool = sharder.shard(_vectors(), plan, env, CPU)
        pool.update(torch.tensor([2, 5, 2, 7]), torch.rand(4, 3))
        asked = torch.randint(0, 8, (6,))
        return [
            sharder.module_type is TensorPool,
            isinstance(pool, ShardedTensorPool),
            [pool.pool_size, pool.dim, pool.dtype, pool.device],
            pool.lookup(torch.arange(8)).wait(),
            pool(asked).wait(),
            pool(asked.int()) + 1,
            pool(torch.empty(0, dtype=torch.int64)).wait(),
            {
                name: [list(value.size()), [shard.tensor for shard in value.local_shards()]]
                for name, value in pool.state_dict().items()
            },
            raises(lambda: pool.update(torch.tensor([1]), torch.ones(1, 2))),
        ]


def a_sharded_jagged_pool() -> Any:
    from torchrec.distributed.keyed_jagged_tensor_pool import (
        KeyedJaggedTensorPoolSharder,
        ShardedKeyedJaggedTensorPool,
    )
    from torchrec.distributed.types import ObjectPoolShardingPlan, ObjectPoolShardingType

    found: list[Any] = []
    with _env() as env:
        plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)
        for is_weighted in (False, True):
            given = _jagged_pool(is_weighted)
            pool = KeyedJaggedTensorPoolSharder().shard(given, plan, env, CPU)
            pool.update(torch.tensor([2, 5, 2, 7]), _features(4, is_weighted=is_weighted))
            found += [
                isinstance(pool, ShardedKeyedJaggedTensorPool),
                [pool.pool_size, pool.feature_max_lengths, pool.values_dtype, pool.is_weighted],
                pool.device,
                _seen(pool.lookup(torch.arange(8)).wait()),
                _seen(pool(torch.randint(0, 8, (6,))).wait()),
                {
                    name: [list(value.size()), [shard.tensor for shard in value.local_shards()]]
                    for name, value in pool.state_dict().items()
                },
            ]
    return found


def sharding_plans_of_pools() -> Any:
    from torchrec.distributed.types import ObjectPoolShardingPlan, ObjectPoolShardingType

    plan = ObjectPoolShardingPlan(ObjectPoolShardingType.REPLICATED_ROW_WISE)
    return [(kind.name, kind.value) for kind in ObjectPoolShardingType], plan

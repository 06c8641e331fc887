"""Object pools sharded over ranks by blocks of rows.

Ids are sent to the ranks that hold their rows. Rows of a lookup are sent back; rows of an update
are sent with the ids.

Shapes: `R` ranks, `P` rows of a pool, `N` ids of this rank's call, `M` received ids.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from recsys.base.arguments import instance
from recsys.base.checked import checked
from recsys.distributed.placement.layout import Rect
from recsys.distributed.placement.plan import ObjectPoolShardingPlan, ObjectPoolShardingType
from recsys.distributed.ranks.comm import LazyAwaitable
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.sharded.devices import canonical_device, default_device
from recsys.distributed.sharded.sharder import ModuleSharder, OwnShardsModule
from recsys.distributed.stages.pool_rows import send_ids, start_rows
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.modules.object_pools import KeyedJaggedTensorPool, TensorPool
from recsys.modules.row_pool import META, ObjectPool, RowPool, check_ids
from recsys.optim.keyed import CombinedOptimizer
from recsys.sparse import KeyedJaggedTensor

__all__ = [
    "KeyedJaggedTensorPoolSharder",
    "ShardedKeyedJaggedTensorPool",
    "ShardedObjectPool",
    "ShardedTensorPool",
    "TensorPoolSharder",
]

T = TypeVar("T")
R = TypeVar("R")
P = TypeVar("P", bound=RowPool[Any])
S = TypeVar("S", bound="ShardedObjectPool[Any]")


def _attempt(work: Callable[[], R]) -> tuple[R | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # the other ranks wait for this one
        return None, error


class ShardedObjectPool(ObjectPool[T], OwnShardsModule, Generic[T]):
    """Pool with a block of rows on each rank.

    `lookup` and `update` are collective calls, each rank with its own ids. An error on one rank is
    raised on all. If several ranks update an id, the value of the last rank is stored. The state
    dict has the names of the unsharded pool; each entry is a `ShardedTable`.

    Args:
        env: The ranks.
        sharding_plan: The plan.
        pool: Unsharded pool with the same settings. Its rows are kept unless it is on the meta
            device; each rank keeps its own copy of its rows.
        device: Device of this rank's rows; None for a GPU under NCCL, else the CPU.
    """

    unsharded_module_type: ClassVar[type[RowPool[Any]]]
    """Type of the unsharded pool."""
    _part: RowPool[T]
    """Unsharded pool with this rank's rows."""

    def __init__(
        self,
        env: ShardingEnv,
        sharding_plan: ObjectPoolShardingPlan,
        pool: RowPool[T],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        env.check_can_exchange()
        self._env = self._holders = env
        self._pool_size = pool.pool_size
        is_replicated = sharding_plan.sharding_type is ObjectPoolShardingType.REPLICATED_ROW_WISE
        if is_replicated and env.node_size < env.world_size:
            self._holders = env.of_node(env.node_size)
        first, end = self._blocks()[self._holders.rank]
        part = pool.resized(end - first, canonical_device(device or default_device(env)))
        for name, buffer in pool.named_buffers():
            if not buffer.is_meta:
                part.get_buffer(name).copy_(buffer[first:end])
        self._hold(part)

    def _hold(self, part: RowPool[T]) -> None:
        self.__dict__["_part"] = part  # not a submodule, so that buffers keep their names
        for name, buffer in part.named_buffers():
            self.register_buffer(name, buffer)

    def _blocks(self) -> list[tuple[int, int]]:
        """Return the first row and the end of each holder's block."""
        edges = [
            min(self._block_size * rank, self._pool_size)
            for rank in range(self._holders.world_size + 1)
        ]
        return list(itertools.pairwise(edges))

    @property
    def _block_size(self) -> int:
        return max(-(-self._pool_size // self._holders.world_size), 1)

    @property
    def pool_size(self) -> int:
        """The number of objects on all ranks."""
        return self._pool_size

    @property
    def env(self) -> ShardingEnv:
        """The ranks."""
        return self._env

    @property
    def device(self) -> torch.device:
        """Device of ids and objects."""
        return self._part.device

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Empty optimizer; a pool is not trained."""
        return CombinedOptimizer([])

    def lookup(self, ids: Tensor) -> LazyAwaitable[T]:  # type: ignore[override]
        """Look up objects; a collective call.

        Args:
            ids: int32 or int64 `[N]`; N may differ between ranks.

        Returns:
            The pending objects of the ids, in their order.

        Raises:
            IndexError: On all ranks, if an id of a rank is not in `0..pool_size - 1`.
            TypeError: On all ranks, if ids are not an int32 or int64 tensor.
            ValueError: On all ranks, if ids are on another device than the pool.
        """
        part = self._part
        _, error = _attempt(lambda: self._check_ids(ids))
        exchanged = send_ids(self._holders, ids, self._block_size, 1, self.device, error)
        finish = start_rows(
            self._holders, part.read_rows(exchanged.rows), exchanged.received, exchanged.sent
        )
        back = exchanged.order.argsort()
        return LazyAwaitable(lambda: part.from_rows([rows[back] for rows in finish()]))

    def update(self, ids: Tensor, values: T) -> None:
        """Overwrite objects; a collective call.

        If an id repeats, its last value is stored, the value of the last rank if several ranks
        write it.

        Args:
            ids: int32 or int64 `[N]`; N may differ between ranks.
            values: N objects.

        Raises:
            IndexError: On all ranks, if an id of a rank is not in `0..pool_size - 1`.
            TypeError: On all ranks, if an argument has another type.
            ValueError: On all ranks, if values of a rank do not fit the ids or the pool.
        """

        def check() -> list[Tensor]:
            self._check_ids(ids)
            return self._part.checked_rows(ids, values)

        rows, error = _attempt(check)
        copies = self._env.world_size // self._holders.world_size
        exchanged = send_ids(self._env, ids, self._block_size, copies, self.device, error)
        sent = [row[exchanged.order] for row in cast(list[Tensor], rows)]
        arrived = start_rows(self._env, sent, exchanged.sent, exchanged.received)()
        self._part.write_rows(exchanged.rows, arrived)

    def _check_ids(self, ids: Tensor) -> None:
        check_ids(type(self).__name__, ids, self._pool_size, self.device)

    def _whole(self, name: str) -> ShardedTable:
        """Return the state-dict entry of a buffer, which shares its memory."""
        buffer, holders = self.get_buffer(name), self._holders
        blocks, columns = self._blocks(), buffer.shape[1]
        rects = [
            Rect(row_start=first, row_end=end, col_start=0, col_end=columns, rank=rank)
            for rank, (first, end) in enumerate(blocks)
            if first < end
        ]
        first = blocks[holders.rank][0]
        return ShardedTable(
            (self._pool_size, columns),
            [((first, 0), buffer)] if len(buffer) else [],
            dtype=buffer.dtype,
            device=buffer.device,
            group=holders.process_group,
            rects=rects,
            node_size=holders.node_size,
        )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, _ in self.named_buffers():
            destination[prefix + name] = self._whole(name)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        names = [name for name, _ in self.named_buffers()]
        unexpected_keys += [prefix + name for name in state if strict and name not in names]
        missing_keys += [prefix + name for name in names if name not in state]
        for name in state.keys() & names:
            try:
                with torch.no_grad():
                    self._whole(name).copy_(state[name])
            except (ValueError, RuntimeError) as error:
                error_msgs.append(f"{prefix}{name}: {error}")

    def copy(self, device: torch.device) -> Self:
        """Return a copy on another device."""
        other = type(self).__new__(type(self))
        nn.Module.__init__(other)
        other._env, other._holders, other._pool_size = self._env, self._holders, self._pool_size
        other._hold(copy.deepcopy(self._part).to(canonical_device(device)))
        return other.train(self.training)


class ShardedTensorPool(ShardedObjectPool[Tensor]):
    """`TensorPool` with a block of rows on each rank.

    `lookup` and `update` are collective calls; see `ShardedObjectPool`. Vectors are initially zero.

    Args:
        env: The ranks.
        pool_size: P, the number of vectors on all ranks.
        dim: Size of a vector.
        dtype: dtype of the vectors.
        sharding_plan: The plan.
        device: Device of this rank's rows; None for a GPU under NCCL, else the CPU.
        enable_uvm: As in `TensorPool`.

    Example:
        >>> env = ShardingEnv.from_local()
        >>> plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)
        >>> pool = ShardedTensorPool(env, 4, 2, torch.float32, plan, torch.device("cpu"))
        >>> pool.update(torch.tensor([3]), torch.ones(1, 2))
        >>> pool.lookup(torch.tensor([0, 3])).wait()
        tensor([[0., 0.],
                [1., 1.]])
    """

    unsharded_module_type = TensorPool
    _part: TensorPool

    @checked
    def __init__(
        self,
        env: ShardingEnv,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        sharding_plan: ObjectPoolShardingPlan,
        device: torch.device | None = None,
        enable_uvm: bool = False,
    ) -> None:
        pool = TensorPool(pool_size, dim, dtype, META, enable_uvm=enable_uvm)
        super().__init__(env, sharding_plan, pool, device)

    dim = property(lambda self: self._part.dim, doc="Size of a vector.")
    dtype = property(lambda self: self._part.dtype, doc="dtype of the vectors.")


class ShardedKeyedJaggedTensorPool(ShardedObjectPool[KeyedJaggedTensor]):
    """`KeyedJaggedTensorPool` with a block of rows on each rank.

    `lookup` and `update` are collective calls; see `ShardedObjectPool`. Rows are initially empty.

    Args:
        pool_size: P, the number of rows on all ranks.
        feature_max_lengths: Largest number of ids in a row, by feature.
        values_dtype: dtype of the ids.
        is_weighted: Whether ids have weights.
        sharding_env: The ranks.
        sharding_plan: The plan.
        device: Device of this rank's rows; None for a GPU under NCCL, else the CPU.
        enable_uvm: As in `KeyedJaggedTensorPool`.

    Example:
        >>> env = ShardingEnv.from_local()
        >>> plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)
        >>> pool = ShardedKeyedJaggedTensorPool(4, {"film": 2}, torch.int64, False, env, plan)
        >>> film = KeyedJaggedTensor(["film"], torch.tensor([70, 71]), lengths=torch.tensor([2]))
        >>> pool.update(torch.tensor([3]), film)
        >>> pool.lookup(torch.tensor([0, 3])).wait()["film"].lengths()
        tensor([0, 2], dtype=torch.int32)
    """

    unsharded_module_type = KeyedJaggedTensorPool
    _part: KeyedJaggedTensorPool

    @checked
    def __init__(
        self,
        pool_size: int,
        feature_max_lengths: dict[str, int],
        values_dtype: torch.dtype,
        is_weighted: bool,
        sharding_env: ShardingEnv,
        sharding_plan: ObjectPoolShardingPlan,
        device: torch.device | None = None,
        enable_uvm: bool = False,
    ) -> None:
        pool = KeyedJaggedTensorPool(
            pool_size, feature_max_lengths, values_dtype, is_weighted, META, enable_uvm
        )
        super().__init__(sharding_env, sharding_plan, pool, device)

    feature_max_lengths = property(
        lambda self: self._part.feature_max_lengths,
        doc="Largest number of ids in a row, by feature.",
    )
    values_dtype = property(lambda self: self._part.values_dtype, doc="dtype of the ids.")
    is_weighted = property(lambda self: self._part.is_weighted, doc="Whether ids have weights.")


class _PoolSharder(ModuleSharder[P], Generic[P, S]):
    """Base of sharders of pools."""

    replaces: ClassVar[type[Any]]
    """Module type."""
    makes: ClassVar[type[Any]]
    """Type of the sharded pool."""

    @property
    def module_type(self) -> type[P]:
        """The module type this sharder replaces."""
        return self.replaces

    def shardable_parameters(self, module: P) -> dict[str, nn.Parameter]:
        """Return an empty dict: a pool has no parameters for a planner."""
        return {}

    @checked
    def shard(  # type: ignore[override]  # a plan of a pool
        self,
        module: Any,
        plan: ObjectPoolShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> S:
        """Return the sharded pool; a collective call.

        Each rank keeps its own copy of its rows of the pool. A pool on the meta device has no rows.

        Args:
            module: The pool.
            plan: Its plan.
            env: The ranks.
            device: Device of this rank's rows; None for a GPU under NCCL, else the CPU.
            module_fqn: Ignored; accepted for TorchRec scripts.
        """
        instance(f"{type(self).__name__}.shard.module", module, self.replaces)
        sharded: S = object.__new__(self.makes)
        ShardedObjectPool.__init__(sharded, env, plan, module, device)
        return sharded


class TensorPoolSharder(_PoolSharder[TensorPool, ShardedTensorPool]):
    """Sharder of `TensorPool`.

    Example:
        >>> pool = TensorPool(4, 2, torch.float32)
        >>> plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)
        >>> sharded = TensorPoolSharder().shard(pool, plan, ShardingEnv.from_local())
        >>> sharded.lookup(torch.tensor([3])).wait()
        tensor([[0., 0.]])
    """

    replaces = TensorPool
    makes = ShardedTensorPool


class KeyedJaggedTensorPoolSharder(
    _PoolSharder[KeyedJaggedTensorPool, ShardedKeyedJaggedTensorPool]
):
    """Sharder of `KeyedJaggedTensorPool`.

    Example:
        >>> pool = KeyedJaggedTensorPool(4, {"film": 2})
        >>> plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)
        >>> sharded = KeyedJaggedTensorPoolSharder().shard(pool, plan, ShardingEnv.from_local())
        >>> sharded.lookup(torch.tensor([3])).wait().lengths()
        tensor([0], dtype=torch.int32)
    """

    replaces = KeyedJaggedTensorPool
    makes = ShardedKeyedJaggedTensorPool

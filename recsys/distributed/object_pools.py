"""Pools of objects whose rows are divided among ranks: each rank holds one block of rows.

Ids travel to the ranks that hold their rows; rows of a lookup travel back, and rows of an update
travel with the ids.

Legend: `R` ranks, `P` rows of a pool, `N` ids of this rank's call, `M` ids that arrive.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from recsys.distributed.placement.layout import Rect
from recsys.distributed.placement.plan import ObjectPoolShardingPlan, ObjectPoolShardingType
from recsys.distributed.ranks.agreement import run_on_all_ranks
from recsys.distributed.ranks.comm import LazyAwaitable
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.sharded.devices import canonical_device, default_device
from recsys.distributed.sharded.sharder import ModuleSharder, ShardedModule, refuse_to_pickle
from recsys.distributed.stages.pool_rows import send_ids, start_rows
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.kernels.arguments import instance
from recsys.kernels.checked import checked
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
    except Exception as error:  # whatever it is: the other ranks wait for this one
        return None, error


class ShardedObjectPool(ObjectPool[T], ShardedModule, Generic[T]):
    """A pool of which this rank holds a block of rows.

    Every rank must call `lookup` and `update`, in one order, each with ids of its own. An error on
    one rank is raised on all. If ranks update the same id, the value of the last rank stays.

    The state dict has the names of the unsharded pool; each entry is a `ShardedTable`.

    Args:
        env: the ranks.
        sharding_plan: how rows are divided.
        pool: an unsharded pool with the same settings. Its rows are kept unless it is on the meta
            device, each rank's own copy of them.
        device: where this rank's rows are; None: a GPU under NCCL, else the CPU.
    """

    unsharded_module_type: ClassVar[type[RowPool[Any]]]
    """What it takes the place of."""
    _part: RowPool[T]
    """An unsharded pool of this rank's rows."""

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
        self.__dict__["_part"] = part  # no submodule: buffers are named as in the unsharded pool
        for name, buffer in part.named_buffers():
            self.register_buffer(name, buffer)

    def _blocks(self) -> list[tuple[int, int]]:
        """Return the first row of each holder's block, and the end of the block."""
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
        """How many objects there are on all ranks."""
        return self._pool_size

    @property
    def device(self) -> torch.device:
        """Where ids and objects are."""
        return self._part.device

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """An optimizer of nothing: a pool is not trained."""
        return CombinedOptimizer([])

    def lookup(self, ids: Tensor) -> LazyAwaitable[T]:  # type: ignore[override]
        """Look up objects of this rank; every rank must call it.

        Args:
            ids: int32 or int64 `[N]`, N of this rank's own.

        Returns:
            The objects of the ids, in their order, pending.

        Raises:
            IndexError: on all ranks, if an id of one rank is not in `0..pool_size - 1`.
            TypeError: on all ranks, if they are no int32 or int64 tensor.
            ValueError: on all ranks, if they are on another device than the pool.
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
        """Overwrite objects; every rank must call it.

        Of an id that repeats, the last value stays. If several ranks write it, that of the last
        rank stays.

        Args:
            ids: int32 or int64 `[N]`, N of this rank's own.
            values: N objects.

        Raises:
            IndexError: on all ranks, if an id of one rank is not in `0..pool_size - 1`.
            TypeError: on all ranks, if an argument is of another type.
            ValueError: on all ranks, if values of one rank do not fit the ids or the pool.
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
        """Return a buffer as it appears in the state dict; live."""
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
        given = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        names = [name for name, _ in self.named_buffers()]
        unexpected_keys += [prefix + name for name in given if strict and name not in names]
        missing_keys += [prefix + name for name in names if name not in given]
        for name in given.keys() & names:
            try:
                with torch.no_grad():
                    self._whole(name).copy_(given[name])
            except (ValueError, RuntimeError) as error:
                error_msgs.append(f"{prefix}{name}: {error}")

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As of any module; every rank must call it, and an error on one is raised on all."""
        load = partial(super().load_state_dict, state_dict, *args, **kwargs)
        return run_on_all_ranks(self._env, "load a state dict", load)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        probe = fn(torch.empty(0, device=self.device))
        if probe.device != self.device or probe.dtype != torch.float32:
            raise ValueError(
                f"A sharded pool stays on its device and keeps its dtype ({self.device}); received "
                f"a move to {probe.device}, {probe.dtype}. Shard it with device=..., or call copy."
            )
        return self

    def copy(self, device: torch.device) -> Self:
        """Return a copy on another device."""
        other = type(self).__new__(type(self))
        nn.Module.__init__(other)
        other._env, other._holders, other._pool_size = self._env, self._holders, self._pool_size
        other._hold(copy.deepcopy(self._part).to(canonical_device(device)))
        return other.train(self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy(self.device)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_pickle(self)


class ShardedTensorPool(ShardedObjectPool[Tensor]):
    """A `TensorPool` of which this rank holds a block of rows.

    Every rank must call `lookup` and `update`; see `ShardedObjectPool`. Vectors are zeros at first.

    Args:
        env: the ranks.
        pool_size: P, the number of vectors on all ranks.
        dim: values of a vector.
        dtype: of the values.
        sharding_plan: how rows are divided.
        device: where this rank's rows are; None: a GPU under NCCL, else the CPU.
        enable_uvm: as for `TensorPool`.

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

    dim = property(lambda self: self._part.dim, doc="Values of a vector.")
    dtype = property(lambda self: self._part.dtype, doc="Of the values.")


class ShardedKeyedJaggedTensorPool(ShardedObjectPool[KeyedJaggedTensor]):
    """A `KeyedJaggedTensorPool` of which this rank holds a block of rows.

    Every rank must call `lookup` and `update`; see `ShardedObjectPool`. Rows are empty at first.

    Args:
        pool_size: P, the number of rows on all ranks.
        feature_max_lengths: feature to the most ids that a row may have of it.
        values_dtype: of the ids of features.
        is_weighted: whether each id of a feature has a weight.
        sharding_env: the ranks.
        sharding_plan: how rows are divided.
        device: where this rank's rows are; None: a GPU under NCCL, else the CPU.
        enable_uvm: as for `KeyedJaggedTensorPool`.

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
        doc="Feature to the most ids that a row may have of it.",
    )
    values_dtype = property(lambda self: self._part.values_dtype, doc="Of the ids of features.")
    is_weighted = property(
        lambda self: self._part.is_weighted, doc="Whether each id of a feature has a weight."
    )


class _PoolSharder(ModuleSharder[P], Generic[P, S]):
    """Makes the sharded counterpart of one kind of pool."""

    replaces: ClassVar[type[Any]]
    """The module type."""
    makes: ClassVar[type[Any]]
    """The sharded pool's type."""

    @property
    def module_type(self) -> type[P]:
        """The module type this sharder replaces."""
        return self.replaces

    def shardable_parameters(self, module: P) -> dict[str, nn.Parameter]:
        """Return nothing: a pool has no parameters, and a planner has nothing to place."""
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
        """Return the sharded pool; every rank must call it.

        Objects of the given pool are kept, each rank's own copy of its rows. A pool on the meta
        device has none.

        Args:
            module: the pool.
            plan: how its rows are divided.
            env: the ranks.
            device: where this rank's rows go; None: a GPU under NCCL, else the CPU.
            module_fqn: Ignored; accepted for TorchRec scripts.
        """
        instance(f"{type(self).__name__}.shard.module", module, self.replaces)
        sharded: S = object.__new__(self.makes)
        ShardedObjectPool.__init__(sharded, env, plan, module, device)
        return sharded


class TensorPoolSharder(_PoolSharder[TensorPool, ShardedTensorPool]):
    """Makes a `ShardedTensorPool` of a `TensorPool`.

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
    """Makes a `ShardedKeyedJaggedTensorPool` of a `KeyedJaggedTensorPool`.

    Example:
        >>> pool = KeyedJaggedTensorPool(4, {"film": 2})
        >>> plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)
        >>> sharded = KeyedJaggedTensorPoolSharder().shard(pool, plan, ShardingEnv.from_local())
        >>> sharded.lookup(torch.tensor([3])).wait().lengths()
        tensor([0], dtype=torch.int32)
    """

    replaces = KeyedJaggedTensorPool
    makes = ShardedKeyedJaggedTensorPool

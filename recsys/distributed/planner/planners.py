"""A greedy planner: the largest table first, each where it makes the slowest rank least slow.

Costs are bytes moved divided by bandwidths: rows read in forward, read and written in backward,
ids and embeddings exchanged, dense gradients of replicas reduced. Memory, of device and host each,
counts weights, the state of the optimizer that a table has when it is planned or else its
gradient, the sum of a replica's gradients, and the buffers of one batch. The estimates order
placements; they do not predict milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.fused_optimizer import optimizer_of_table
from recsys.distributed.layout import Rect
from recsys.distributed.module_tree import outermost
from recsys.distributed.planner.tables import UVM_KERNELS, Bytes, PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import (
    HeuristicalStorageReservation,
    ParameterConstraints,
    PlannerError,
    StorageReservation,
)
from recsys.distributed.strategies import STRATEGIES, parameter_sharding
from recsys.distributed.types import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
    ShardingType,
    format_table,
)
from recsys.modules.embedding_tables import TableCollection

_DEFAULT_BATCH = 512
_MIN_PARTITION = 32
_ID_BYTES, _VALUE_BYTES = 4, 4
_ORDER = (  # the simplest first: it wins ties
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.ROW_WISE,
    ShardingType.DATA_PARALLEL,
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    sharding_type: ShardingType
    kernel: EmbeddingComputeKernel
    ranks: tuple[int, ...]
    cost_by_rank: Mapping[int, float]
    bytes_by_rank: Mapping[int, Bytes]


class EmbeddingShardingPlanner:
    """Plans where the tables of a model go.

    Args:
        topology: the machine; as many CPU ranks or GPUs as the process group has, if None.
        batch_size: samples per rank and batch (default 512).
        storage_reservation: memory to keep free of tables; 15 % and room for the dense parts, if
            None.
        constraints: demands by table name.

    Example:
        >>> from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=64, num_embeddings=1000, feature_names=["f"]
        ... )
        >>> model = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        >>> planner = EmbeddingShardingPlanner(topology=Topology(1, "cpu"))
        >>> plan = planner.plan(model, [EmbeddingBagCollectionSharder()])
        >>> plan.plan[""]["t"].sharding_type
        'table_wise'
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        *,
        storage_reservation: StorageReservation | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> None:
        self._topology = topology or _default_topology()
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"EmbeddingShardingPlanner.batch_size must be at least 1; received {batch_size}."
            )
        self._batch_size = batch_size or _DEFAULT_BATCH
        self._reservation = storage_reservation or HeuristicalStorageReservation()
        self._constraints = dict(constraints or {})

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plans on rank 0 and gives every rank the same plan, or the same error.

        Raises:
            PlannerError: if the tables do not fit.
        """
        if pg is None and dist.is_available() and dist.is_initialized():
            pg = dist.group.WORLD
        if pg is None or dist.get_world_size(pg) == 1:
            return self.plan(module, sharders)
        result: list[ShardingPlan | Exception | None] = [None]
        if dist.get_rank(pg) == 0:
            try:
                result = [self.plan(module, sharders)]
            except Exception as error:  # raised below, on every rank
                result = [error]
        dist.broadcast_object_list(result, group=pg, group_src=0)
        if isinstance(result[0], Exception):
            raise result[0]
        assert result[0] is not None
        return result[0]

    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> ShardingPlan:
        """Plans the tables of every module that a sharder can shard.

        Args:
            module: the model; may be on the ``meta`` device.
            sharders: one per module type to shard.

        Returns:
            The plan, the same for the same inputs.

        Raises:
            PlannerError: if the tables do not fit, or a constraint leaves no choice.
        """
        by_type = {sharder.module_type: sharder for sharder in sharders}
        tables = list(self._tables(module, by_type))
        unknown = sorted(self._constraints.keys() - {table.name for table in tables})
        if unknown:
            raise PlannerError(
                f"Constraints are given for the tables {unknown}, which the model does not have; "
                f"its tables are "
                f"{sorted(table.name for table in tables)}."
            )
        own = sum(p.numel() * p.element_size() for p in module.parameters())
        dense_bytes = own - sum(t.rows * t.dim * t.element_bytes for t in tables)
        room = Bytes(
            self._reservation.usable(self._topology.memory_cap, dense_bytes),
            self._reservation.usable(self._topology.host_cap, 0),
        )
        costs = [0.0] * self._topology.world_size
        free = [room] * self._topology.world_size
        chosen: dict[tuple[str, str], _Option] = {}
        for table in sorted(tables, key=lambda t: (-sum(t.whole), t.path, t.name)):
            option = self._choose(table, costs, free)
            for rank, cost in option.cost_by_rank.items():
                costs[rank] += cost
                free[rank] = free[rank].minus(option.bytes_by_rank[rank])
            chosen[table.path, table.name] = option
        plan = ShardingPlan()
        for table in tables:
            option = chosen[table.path, table.name]
            plan.plan.setdefault(table.path, EmbeddingModuleShardingPlan())[table.name] = (
                parameter_sharding(
                    option.sharding_type,
                    table.rows,
                    table.dim,
                    option.ranks,
                    device_type=self._topology.compute_device,
                    compute_kernel=option.kernel,
                    local_size=self._topology.local_size,
                )
            )
        return plan

    def _tables(
        self, module: nn.Module, sharders: Mapping[type[nn.Module], ModuleSharder[Any]]
    ) -> Iterator[PlannedTable]:
        for path, child in outermost(module, lambda found: type(found) in sharders):
            sharder = sharders[type(child)]
            features = {
                config.name: config.feature_names
                for part in child.modules()
                if isinstance(part, TableCollection)
                for config in part.configs()
            }
            for name, weight in sharder.shardable_parameters(child).items():
                constraints = self._constraints.get(name, ParameterConstraints())
                num_features = len(features.get(name, [name]))
                owned = optimizer_of_table(weight, sharder.fused_params)
                pooling = constraints.pooling_factors or [1.0] * num_features
                if len(pooling) != num_features:
                    raise PlannerError(
                        f"ParameterConstraints.pooling_factors of table {name!r} must have one "
                        f"number for each of "
                        f"its features {features.get(name, [name])}; received {pooling}."
                    )
                yield PlannedTable(
                    path=path,
                    name=name,
                    rows=weight.shape[0],
                    dim=weight.shape[1],
                    element_bytes=weight.element_size(),
                    optimizer=owned,
                    trains=weight.requires_grad,
                    ids_per_sample=sum(pooling),
                    num_features=num_features,
                    constraints=constraints,
                    kernels=self._kernels(sharder, constraints),
                )

    def _kernels(
        self, sharder: ModuleSharder[Any], constraints: ParameterConstraints
    ) -> dict[ShardingType, EmbeddingComputeKernel]:
        """Returns the sharding types that are allowed and executable, each with its kernel."""
        device, allowed = self._topology.compute_device, constraints.compute_kernels
        kernels = {}
        for name in sharder.sharding_types(device):
            executable = sharder.compute_kernels(name, device)
            usable = [k for k in allowed or executable if k in executable]
            if usable and name in (constraints.sharding_types or [name]):
                kernels[ShardingType(name)] = EmbeddingComputeKernel(usable[0])
        return kernels

    def _choose(
        self, table: PlannedTable, costs: Sequence[float], free: Sequence[Bytes]
    ) -> _Option:
        """Returns the option that fits and makes the slowest rank least slow."""
        options = list(self._options(table, costs, free))
        fitting = [
            option
            for option in options
            if all(size.fits(free[rank]) for rank, size in option.bytes_by_rank.items())
        ]
        if not fitting:
            raise PlannerError(self._explain_misfit(table, options, free))

        def slowest(option: _Option) -> tuple[float, float]:
            after = [cost + option.cost_by_rank.get(r, 0.0) for r, cost in enumerate(costs)]
            return max(after), sum(after)

        return min(fitting, key=slowest)

    def _options(
        self, table: PlannedTable, costs: Sequence[float], free: Sequence[Bytes]
    ) -> Iterator[_Option]:
        world_size = self._topology.world_size
        asked = table.constraints.sharding_types is not None
        wanted = [t for t in _ORDER if t in table.kernels and table.allows(t)]
        if not wanted:
            demands = table.constraints
            raise PlannerError(
                f"Table {table.name!r} may only be sharded "
                f"{', '.join(demands.sharding_types or [t.value for t in _ORDER])} with compute "
                f"kernel {', '.join(demands.compute_kernels or ['fused'])}, which is not supported "
                f"on {self._topology.compute_device} with its optimizer; sharding types are "
                f"{', '.join(t.value for t in _ORDER)}."
            )
        by_room = sorted(range(world_size), key=lambda rank: (costs[rank], -sum(free[rank]), rank))
        for sharding_type in wanted:
            if sharding_type is ShardingType.DATA_PARALLEL:
                yield self._replicate(table)
                continue
            if sharding_type is ShardingType.TABLE_WISE:
                size = table.whole
                roomy = [rank for rank in by_room if size.fits(free[rank])] or by_room
                yield self._split(table, sharding_type, roomy[:1])
            elif sharding_type is ShardingType.ROW_WISE:
                if world_size > 1 or asked:
                    yield self._split(table, sharding_type, range(world_size))
            else:
                least = table.constraints.min_partition or _MIN_PARTITION
                most = min(world_size, table.dim // least)
                for parts in range(2, most + 1):
                    yield self._split(table, sharding_type, by_room[:parts])
                if most < 2 and asked:
                    yield self._split(table, sharding_type, by_room[:1])

    def _split(
        self, table: PlannedTable, sharding_type: ShardingType, ranks: Sequence[int]
    ) -> _Option:
        rects = STRATEGIES[sharding_type](table.rows, table.dim, ranks, self._topology.local_size)
        kernel = table.kernels[sharding_type]
        costs: dict[int, float] = {}
        sizes: dict[int, Bytes] = {}
        for rect in rects:
            size = self._bytes(table, rect, kernel)
            costs[rect.rank] = costs.get(rect.rank, 0.0) + self._cost(table, rect, kernel)
            sizes[rect.rank] = sizes.get(rect.rank, Bytes(0)).plus(size)
        return _Option(
            sharding_type=sharding_type,
            kernel=kernel,
            ranks=tuple(ranks),
            cost_by_rank=costs,
            bytes_by_rank=sizes,
        )

    def _cost(self, table: PlannedTable, rect: Rect, kernel: EmbeddingComputeKernel) -> float:
        """Milliseconds of one rectangle on its owner, by bytes over bandwidth."""
        topology = self._topology
        samples = self._batch_size * topology.world_size
        ids = samples * table.ids_per_sample * rect.num_rows / max(table.rows, 1)
        row_bytes = rect.num_cols * table.element_bytes
        moved = 3 * ids * row_bytes  # read forward, read and write backward
        exchanged = 0.0
        if topology.world_size > 1:
            embeddings = samples * table.num_features * rect.num_cols * _VALUE_BYTES
            exchanged = ids * _ID_BYTES + 2 * embeddings
        bandwidth = topology.ddr_mem_bw if kernel in UVM_KERNELS else topology.memory_bw
        return moved / bandwidth + exchanged / topology.exchange_bw

    def _bytes(self, table: PlannedTable, rect: Rect, kernel: EmbeddingComputeKernel) -> Bytes:
        samples = self._batch_size * self._topology.world_size
        buffers = 2 * samples * table.num_features * rect.num_cols * _VALUE_BYTES
        buffers += int(samples * table.ids_per_sample) * _ID_BYTES
        return table.bytes_of(rect.num_rows, rect.num_cols, kernel).plus(Bytes(buffers))

    def _replicate(self, table: PlannedTable) -> _Option:
        topology = self._topology
        ids = self._batch_size * table.ids_per_sample
        kernel = table.kernels[ShardingType.DATA_PARALLEL]
        # of each element the sum of gradients, of each row whether it was touched
        dense = table.rows * (table.dim + 1) * 4 if table.trains else 0
        cost = 3 * ids * table.dim * table.element_bytes / topology.memory_bw
        if topology.world_size > 1:
            cost += 2 * dense / topology.exchange_bw + 3 * dense / topology.memory_bw
        size = table.bytes_of(table.rows, table.dim, kernel).plus(Bytes(dense))
        ranks = range(topology.world_size)
        return _Option(
            sharding_type=ShardingType.DATA_PARALLEL,
            kernel=kernel,
            ranks=tuple(ranks),
            cost_by_rank=dict.fromkeys(ranks, cost),
            bytes_by_rank=dict.fromkeys(ranks, size),
        )

    def _explain_misfit(
        self, table: PlannedTable, options: Sequence[_Option], free: Sequence[Bytes]
    ) -> str:
        topology = self._topology
        caps = {topology.compute_device: topology.memory_cap, "host": topology.host_cap}
        rows, scarce = [], {}
        for option in options:
            for pool, memory in enumerate(caps):
                needed = {rank: size[pool] for rank, size in option.bytes_by_rank.items()}
                over = max(size - free[rank][pool] for rank, size in needed.items())
                if over > 0:
                    kind, ranks = option.sharding_type.value, str(len(option.ranks))
                    rows.append((kind, ranks, _mib(max(needed.values())), _mib(over), memory))
                    scarce[memory] = [room[pool] for room in free]
        tried = format_table(
            ("sharding type", "ranks", "bytes per rank", "over by", "memory"), rows
        )
        rooms = ", and ".join(
            f"{_mib(caps[memory])}{' of host memory' if memory == 'host' else ''} each, of which "
            f"{_mib(min(rooms))} to {_mib(max(rooms))} are free for it"
            for memory, rooms in scarce.items()
        )
        state = "its gradient" if table.has_gradient else "optimizer state"
        return (
            f"Table {table.name!r} of module {table.path!r} ({table.rows} x {table.dim}, "
            f"{_mib(sum(table.whole))} with {state}) does not fit on the "
            f"{topology.world_size} {topology.compute_device} ranks of {rooms}. Tried:\n{tried}\n"
            "Allow more sharding types, use more ranks, a smaller data_type, or a smaller "
            "storage reservation."
        )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _default_topology() -> Topology:
    world_size = 1
    if dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Topology(world_size=world_size, compute_device=device)

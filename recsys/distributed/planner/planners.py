"""The planner: lists the ways to place each table, and searches for the best of all together.

Best is the plan whose slowest rank is done soonest. Memory, of device and host each, counts
weights, the state of the optimizer that a table has when it is planned or else its gradient, the
sum of a replica's gradients, and the buffers of one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.fused_optimizer import optimizer_of_table
from recsys.distributed.module_tree import outermost
from recsys.distributed.planner.options import OptionLister, TableOption
from recsys.distributed.planner.placement import InfeasibleError, Problem, Ranks
from recsys.distributed.planner.search import search
from recsys.distributed.planner.tables import Bytes, PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import (
    HeuristicalStorageReservation,
    ParameterConstraints,
    PlannerError,
    StorageReservation,
)
from recsys.distributed.strategies import parameter_sharding
from recsys.distributed.types import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
    ShardingType,
    format_table,
)
from recsys.distributed.wire import POOLED_OPS, SEQUENCE_OPS, codecs_for
from recsys.kernels.types import PoolingMode
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.embedding_tables import TableCollection

_DEFAULT_BATCH = 512


class EmbeddingShardingPlanner:
    """Plans where the tables of a model go.

    Args:
        topology: the machine; as many CPU ranks or GPUs as the process group has, if None.
        batch_size: samples per rank and batch (default 512).
        storage_reservation: memory to keep free of tables; 15 % and room for the dense parts, if
            None.
        constraints: demands by table name.
        timeout_seconds: how long the search may take; the best plan found until then is returned.

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
        timeout_seconds: float | None = None,
    ) -> None:
        self._topology = topology or _default_topology()
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"EmbeddingShardingPlanner.batch_size must be at least 1; received {batch_size}."
            )
        self._batch_size = batch_size or _DEFAULT_BATCH
        self._reservation = storage_reservation or HeuristicalStorageReservation()
        self._constraints = dict(constraints or {})
        self._timeout_seconds = timeout_seconds
        self._lister = OptionLister(self._topology, self._batch_size)

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
        rooms = [
            Bytes(
                self._reservation.usable(rank.memory_cap, dense_bytes),
                self._reservation.usable(rank.ddr_cap, 0),
            )
            for rank in self._topology.hardware
        ]
        options = [self._options(table) for table in tables]
        ranks = Ranks(
            memory_caps=[(max(room.device, 0), max(room.host, 0)) for room in rooms],
            kinds=self._topology.kinds,
            node_size=self._topology.local_size,
        )
        problem = Problem(
            ranks=ranks,
            tables=[[option.for_search() for option in of_table] for of_table in options],
        )
        try:
            placement = search(problem, time_limit=self._timeout_seconds)
        except InfeasibleError as error:
            most = max(rooms, key=sum)
            raise PlannerError(self._explain_misfit(error, tables, options, most)) from None
        plan = ShardingPlan()
        for table, of_table, choice in zip(tables, options, placement.choices, strict=True):
            option = of_table[choice.option]
            plan.plan.setdefault(table.path, EmbeddingModuleShardingPlan())[table.name] = (
                parameter_sharding(
                    option.sharding_type,
                    table.rows,
                    table.dim,
                    choice.ranks,
                    device_type=self._topology.compute_device,
                    compute_kernel=option.compute_kernel,
                    local_size=self._topology.local_size,
                )
            )
        return plan

    def _tables(
        self, module: nn.Module, sharders: Mapping[type[nn.Module], ModuleSharder[Any]]
    ) -> Iterator[PlannedTable]:
        for path, child in outermost(module, lambda found: type(found) in sharders):
            sharder = sharders[type(child)]
            features: dict[str, list[str]] = {}
            pooled, weighted = True, False
            for part in child.modules():
                if isinstance(part, TableCollection):
                    features |= {config.name: config.feature_names for config in part.configs()}
                    pooled = PoolingMode.NONE not in part.poolings()
                    weighted = isinstance(part, EmbeddingBagCollection) and part.is_weighted()
            wire_bytes = _wire_bytes(sharder, pooled=pooled)
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
                    is_pooled=pooled,
                    is_weighted=weighted,
                    wire_bytes=wire_bytes,
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

    def _options(self, table: PlannedTable) -> list[TableOption]:
        options = self._lister.options_of(table)
        if not options:
            demands = table.constraints
            types = [kind.value for kind in ShardingType]
            raise PlannerError(
                f"Table {table.name!r} may only be sharded "
                f"{', '.join(demands.sharding_types or types)} with compute "
                f"kernel {', '.join(demands.compute_kernels or ['fused'])}, which is not supported "
                f"on {self._topology.compute_device} with its optimizer and {table.rows} x "
                f"{table.dim} values; sharding types are {', '.join(types)}."
            )
        return options

    def _explain_misfit(
        self,
        error: InfeasibleError,
        tables: Sequence[PlannedTable],
        options: Sequence[Sequence[TableOption]],
        room: Bytes,
    ) -> str:
        topology = self._topology
        where = f"the {topology.world_size} {topology.compute_device} ranks"
        advice = (
            "Allow more sharding types, use more ranks, a smaller data_type, or a smaller "
            "storage reservation."
        )
        if error.too_big:
            number = error.too_big[0].table
            return (
                f"{self._describe(tables[number])} does not fit on {where} of "
                f"{self._tried(options[number], room)}\n{advice}"
            )
        over = ", and ".join(
            f"{_mib(size)} more of {name} memory than there is"
            for size, name in zip(error.bytes_over, (topology.compute_device, "host"), strict=True)
            if size
        )
        largest = sorted(tables, key=lambda t: -sum(t.whole))[:3]
        enough = (
            f" {error.ranks_needed} ranks like these could hold them."
            if error.ranks_needed is not None
            else ""
        )
        verdict = "do not fit" if error.proven else "were not found to fit"
        return (
            f"The {len(tables)} tables {verdict} on {where} of {self._caps(room)}: they need at "
            f"least {over or 'room that no rank has left'}. The largest: "
            f"{'; '.join(self._describe(table) for table in largest)}.{enough} {advice}"
        )

    def _describe(self, table: PlannedTable) -> str:
        state = "its gradient" if table.has_gradient else "optimizer state"
        return (
            f"Table {table.name!r} of module {table.path!r} ({table.rows} x {table.dim}, "
            f"{_mib(sum(table.whole))} with {state})"
        )

    def _caps(self, room: Bytes) -> str:
        topology = self._topology
        return f"{_mib(topology.memory_cap)} each, of which {_mib(room.device)} are free for tables"

    def _tried(self, options: Sequence[TableOption], room: Bytes) -> str:
        """Returns the memory there is, and a table of what each option would need of it."""
        topology = self._topology
        caps = {topology.compute_device: topology.memory_cap, "host": topology.host_cap}
        rows, scarce = [], {}
        for option in options:
            for pool, memory in enumerate(caps):
                needed = max(part.size[pool] for part in option.parts)
                if needed > room[pool]:
                    kind, ranks = option.sharding_type.value, str(option.num_ranks)
                    over = _mib(needed - room[pool])
                    rows.append((kind, ranks, _mib(needed), over, memory))
                    scarce[memory] = room[pool]
        rooms = ", and ".join(
            f"{_mib(caps[memory])}{' of host memory' if memory == 'host' else ''} each, of which "
            f"{_mib(free)} are free for it"
            for memory, free in scarce.items()
        )
        tried = format_table(
            ("sharding type", "ranks", "bytes per rank", "over by", "memory"), rows
        )
        return f"{rooms}. Tried:\n{tried}"


def _wire_bytes(sharder: ModuleSharder[Any], *, pooled: bool) -> tuple[float, float]:
    """Returns the bytes of a value on its way there, and of its gradient on its way back."""
    names = POOLED_OPS if pooled else SEQUENCE_OPS
    there, back = codecs_for(getattr(sharder, "qcomm_codecs_registry", None), *names)
    return there.bytes_per_value, back.bytes_per_value


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _default_topology() -> Topology:
    world_size = 1
    if dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Topology(world_size=world_size, compute_device=device)

"""The planner: lists the ways to place each table, and searches for the best of all together.

Best is the plan whose slowest rank is done soonest. Memory, of device and host each, counts
weights, the state of the optimizer that a table has when it is planned or else its gradient, the
sum of a replica's gradients, and the buffers of batches (see ``storage``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.options import OptionLister, TableOption
from recsys.distributed.planner.placement import InfeasibleError, Placement, Problem, Ranks
from recsys.distributed.planner.pooling_stats import PoolingStats
from recsys.distributed.planner.rating import RatedPlan, RatedTable, Rating
from recsys.distributed.planner.search import search
from recsys.distributed.planner.tables import Bytes, PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import (
    DEFAULT_BATCH_SIZE,
    HeuristicalStorageReservation,
    ParameterConstraints,
    PlannerError,
    StorageReservation,
)
from recsys.distributed.strategies import check_plan_covers, parameter_sharding
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
    ShardingType,
    format_table,
)


class EmbeddingShardingPlanner:
    """Plans where the tables of a model go.

    Args:
        topology: the machine; as many CPU ranks or GPUs as the process group has, if None.
        batch_size: samples per rank and batch (default 512).
        storage_reservation: memory to keep free of tables; 15 % and room for the dense parts, if
            None.
        constraints: demands by table name.
        timeout_seconds: how long the search may take; the best plan found until then is returned.
        pooling_stats: what a sample of batches says of ids; constraints say it better.
        batches_in_flight: batches whose ids a rank holds at a time: 1 without a train pipeline, 2
            or 3 with one.

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
        pooling_stats: PoolingStats | None = None,
        batches_in_flight: int = 1,
    ) -> None:
        self._topology = topology or _default_topology()
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"EmbeddingShardingPlanner.batch_size must be at least 1; received {batch_size}."
            )
        if batches_in_flight < 1:
            raise ValueError(
                "EmbeddingShardingPlanner.batches_in_flight must be at least 1; received "
                f"{batches_in_flight}."
            )
        self._batch_size = batch_size or DEFAULT_BATCH_SIZE
        self._reservation = storage_reservation or HeuristicalStorageReservation()
        self._constraints = dict(constraints or {})
        self._timeout_seconds = timeout_seconds
        self._pooling_stats = pooling_stats
        self._lister = OptionLister(self._topology, self._batch_size, batches_in_flight)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        pg: dist.ProcessGroup | None = None,
    ) -> RatedPlan:
        """Plans on rank 0 and gives every rank the same plan, or the same error.

        Raises:
            PlannerError: if the tables do not fit.
        """
        if pg is None and dist.is_available() and dist.is_initialized():
            pg = dist.group.WORLD
        if pg is None or dist.get_world_size(pg) == 1:
            return self.plan(module, sharders)
        result: list[RatedPlan | Exception | None] = [None]
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

    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> RatedPlan:
        """Plans the tables of every module that a sharder can shard.

        Args:
            module: the model; may be on the ``meta`` device.
            sharders: one per module type to shard.

        Returns:
            The plan, the same for the same inputs.

        Raises:
            PlannerError: if the tables do not fit, or a constraint leaves no choice.
        """
        tables = self._tables_of(module, sharders)
        rooms = self._rooms(module, tables)
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
        plan = RatedPlan()
        rated = []
        for table, of_table, choice in zip(tables, options, placement.choices, strict=True):
            option = of_table[choice.option]
            plan.plan.setdefault(table.path, EmbeddingModuleShardingPlan())[table.name] = (
                table.constraints.apply_to(
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
            )
            rated.append(
                RatedTable(
                    table=table,
                    option=option,
                    ranks=tuple(choice.ranks),
                    options=tuple(of_table),
                )
            )
        plan.rating = self._rating(rated, rooms, placement)
        return plan

    def rate(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], plan: ShardingPlan
    ) -> RatedPlan:
        """Returns a plan with what it costs on this planner's machine.

        Args:
            module: the model; may be on the ``meta`` device.
            sharders: one per module type to shard.
            plan: made by hand, loaded or edited.

        Raises:
            ValueError: if a module's plan does not name each of its tables once, or a rank that it
                names does not exist.
        """
        tables = self._tables_of(module, sharders)
        of_modules: dict[str, list[PlannedTable]] = {}
        for table in tables:
            of_modules.setdefault(table.path, []).append(table)
        rated = []
        for path, of_module in of_modules.items():
            entries = plan.plan.get(path, EmbeddingModuleShardingPlan())
            check_plan_covers(path, entries, [table.name for table in of_module])
            for table in of_module:
                option, ranks = self._lister.option_of(table, entries[table.name])
                rated.append(RatedTable(table=table, option=option, ranks=ranks))
        return RatedPlan(plan.plan, rating=self._rating(rated, self._rooms(module, tables)))

    def _tables_of(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
    ) -> list[PlannedTable]:
        return tables_of(
            module,
            sharders,
            self._constraints,
            self._topology.compute_device,
            batch_size=self._batch_size,
            pooling_stats=self._pooling_stats,
        )

    def _rating(
        self,
        rated: Sequence[RatedTable],
        rooms: Sequence[Bytes],
        placement: Placement | None = None,
    ) -> Rating:
        return Rating(
            topology=self._topology,
            batch_size=self._batch_size,
            tables=tuple(rated),
            rooms=tuple(rooms),
            placement=placement,
            batch=self._lister.storage.of_batch([table.table for table in rated]),
        )

    def _rooms(self, module: nn.Module, tables: Sequence[PlannedTable]) -> list[Bytes]:
        """Returns the memory of each rank that is free for tables."""
        batch = self._lister.storage.of_batch(tables).total.device
        own = sum(p.numel() * p.element_size() for p in module.parameters())
        dense_bytes = own - sum(t.rows * t.dim * t.element_bytes for t in tables)
        return [
            Bytes(
                self._reservation.usable(rank.memory_cap, dense_bytes) - batch,
                self._reservation.usable(rank.ddr_cap, None),
            )
            for rank in self._topology.hardware
        ]

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


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _default_topology() -> Topology:
    world_size = 1
    if dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Topology(world_size=world_size, compute_device=device)

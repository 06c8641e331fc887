"""The planner: lists the ways to place each table, and searches for the best of all together.

Best is the plan whose slowest rank is done soonest. Memory, of device and host each, counts
weights, the state of the optimizer that a table has when it is planned or else its gradient, the
sum of a replica's gradients, and the buffers of one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.planner.enumerators import (
    DEFAULT_BATCH_SIZE,
    EmbeddingEnumerator,
    Enumerator,
)
from recsys.distributed.planner.options import OptionLister, TableOption
from recsys.distributed.planner.partitioners import Partitioner, partitioned
from recsys.distributed.planner.placement import InfeasibleError, Placement, Problem, Ranks
from recsys.distributed.planner.rating import RatedPlan, RatedTable, Rating
from recsys.distributed.planner.search import search
from recsys.distributed.planner.shard_estimators import ShardEstimator, estimated
from recsys.distributed.planner.tables import Bytes, PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import (
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

_INSTEAD = {
    "proposer": "All options of all tables are weighed together, so that nothing has to be "
    "proposed. Give an enumerator to choose among options, or a partitioner to search on your own",
    "performance_model": "A plan is as good as its slowest rank. Give an estimator for other costs",
    "stats": "The plan that is returned says what it costs, in `plan.rating`",
}
"""Arguments of TorchRec's planner that mean nothing here, and what to do in their place."""


class EmbeddingShardingPlanner:
    """Plans where the tables of a model go.

    Args:
        topology: the machine; as many CPU ranks or GPUs as the process group has, if None.
        batch_size: samples per rank and batch (default 512).
        enumerator: what lists the options of each table; all that its constraints allow, if None.
        storage_reservation: memory to keep free of tables; 15 % and room for the dense parts, if
            None.
        proposer: must be None, as there are no proposals: all options are weighed together.
        partitioner: what chooses options and ranks, in place of the planner's own search.
        performance_model: must be None: a plan is as good as its slowest rank.
        stats: must be None: the plan says what it costs.
        constraints: demands by table name. An enumerator has its own, which must be the same.
        timeout_seconds: how long the search may take; the best plan found until then is returned.
        estimator: what changes the planner's costs and storage of parts of tables.

    Raises:
        ValueError: if an argument is out of range, or what must be None is not.

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
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: None = None,
        partitioner: Partitioner | None = None,
        performance_model: None = None,
        stats: None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        timeout_seconds: float | None = None,
        estimator: ShardEstimator | None = None,
    ) -> None:
        unused = {"proposer": proposer, "performance_model": performance_model, "stats": stats}
        for name, value in unused.items():
            if value is not None:
                raise ValueError(
                    f"EmbeddingShardingPlanner.{name} must be None; received a "
                    f"{type(value).__name__}. {_INSTEAD[name]}."
                )
        self._topology = topology or _default_topology()
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"EmbeddingShardingPlanner.batch_size must be at least 1; received {batch_size}."
            )
        self._batch_size = batch_size or DEFAULT_BATCH_SIZE
        self._reservation = storage_reservation or HeuristicalStorageReservation()
        if enumerator is None:
            enumerator = EmbeddingEnumerator(self._topology, self._batch_size, constraints)
        elif constraints is not None and getattr(enumerator, "constraints", None) != constraints:
            raise ValueError(
                "EmbeddingShardingPlanner.constraints must be those of its enumerator; received "
                f"others beside {type(enumerator).__name__}. Give them to the enumerator alone: "
                "EmbeddingEnumerator(topology, batch_size, constraints)."
            )
        self._enumerator = enumerator
        self._estimator = estimator
        self._partitioner = partitioner
        self._timeout_seconds = timeout_seconds

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
        listed = list(self._enumerator.enumerate(module, sharders))
        tables = [table for table, _ in listed]
        rooms = self._rooms(module, tables)
        options = [self._options(table, of_table) for table, of_table in listed]
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
            if self._partitioner is None:
                placement = search(problem, time_limit=self._timeout_seconds)
            else:
                placement = partitioned(self._partitioner, problem)
        except InfeasibleError as error:
            most = max(rooms, key=sum)
            raise PlannerError(self._explain_misfit(error, tables, options, most)) from None
        plan = RatedPlan()
        rated = []
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
        tables = [table for table, _ in self._enumerator.enumerate(module, sharders)]
        lister = OptionLister(self._topology, self._batch_size)
        of_modules: dict[str, list[PlannedTable]] = {}
        for table in tables:
            of_modules.setdefault(table.path, []).append(table)
        rated = []
        for path, of_module in of_modules.items():
            entries = plan.plan.get(path, EmbeddingModuleShardingPlan())
            check_plan_covers(path, entries, [table.name for table in of_module])
            for table in of_module:
                option, ranks = lister.option_of(table, entries[table.name])
                if self._estimator is not None:
                    (option,) = estimated(self._estimator, table, [option])
                rated.append(RatedTable(table=table, option=option, ranks=ranks))
        return RatedPlan(plan.plan, rating=self._rating(rated, self._rooms(module, tables)))

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
        )

    def _rooms(self, module: nn.Module, tables: Sequence[PlannedTable]) -> list[Bytes]:
        """Returns the memory of each rank that is free for tables."""
        own = sum(p.numel() * p.element_size() for p in module.parameters())
        dense_bytes = own - sum(t.rows * t.dim * t.element_bytes for t in tables)
        return [
            Bytes(
                self._reservation.usable(rank.memory_cap, dense_bytes),
                self._reservation.usable(rank.ddr_cap, 0),
            )
            for rank in self._topology.hardware
        ]

    def _options(self, table: PlannedTable, listed: Sequence[TableOption]) -> Sequence[TableOption]:
        """Returns a table's options with the costs that are asked for."""
        options = listed
        if self._estimator is not None:
            options = estimated(self._estimator, table, listed)
        if not options and type(self._enumerator) is not EmbeddingEnumerator:
            raise PlannerError(
                f"{type(self._enumerator).__name__}.enumerate must list at least one option of "
                f"every table; received none of table {table.name!r}."
            )
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

"""The planner: lists the ways to place each table, and searches for the best of all together.

Best is the plan whose slowest rank is done soonest. Memory, of device and host each, counts
weights, the state of the optimizer that a table has when it is planned or else its gradient, the
sum of a replica's gradients, and the buffers of batches (see ``storage``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.planner.agreement import Facts, check_agreement, facts_of
from recsys.distributed.planner.misfit import Misfit, check_fits
from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.options import OptionLister, TableOption
from recsys.distributed.planner.placement import InfeasibleError, Placement
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
from recsys.distributed.planner.what_if import problem_of
from recsys.distributed.strategies import (
    check_plan_covers,
    check_plan_paths,
    parameter_sharding,
)
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    PlanRanks,
    ShardingPlan,
    ShardingType,
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
        self._batches_in_flight = batches_in_flight
        self._lister = self._lister_on(self._topology)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        pg: dist.ProcessGroup | None = None,
    ) -> RatedPlan:
        """Plans on rank 0 and gives every rank the same plan, or the same error.

        Args:
            module: the model; may be on the ``meta`` device.
            sharders: one per module type to shard.
            pg: the ranks; all if None.

        Raises:
            PlannerError: if the tables do not fit, or a rank was asked for another plan than rank
                0: other tables, constraints, machine or batch size.
        """
        if pg is None and dist.is_available() and dist.is_initialized():
            pg = dist.group.WORLD
        if pg is None or dist.get_world_size(pg) == 1:
            return self.plan(module, sharders)
        tables: list[PlannedTable] = []
        facts: Facts | Exception
        try:
            tables = self._tables(module, sharders)
            facts = facts_of(
                self._topology,
                tables,
                {"batch_size": self._batch_size, "storage_reservation": self._reservation},
            )
        except Exception as error:  # raised by check_agreement, on every rank
            facts = error
        check_agreement(pg, facts, self._topology)
        answer: list[_Answer | Exception | None] = [None]
        plan = None
        if dist.get_rank(pg) == 0:
            try:
                plan = self.plan(module, sharders)
                answer = [_answer_of(plan)]
            except Exception as error:  # raised below, on every rank
                answer = [error]
        dist.broadcast_object_list(answer, group=pg, group_src=0)
        if isinstance(answer[0], Exception):
            raise answer[0]
        assert answer[0] is not None
        if plan is not None:
            return plan
        options, rooms, placement = answer[0]
        rated = [
            RatedTable(table=table, option=option, ranks=tuple(choice.ranks))
            for table, option, choice in zip(tables, options, placement.choices, strict=True)
        ]
        undemanded = self._undemanded(module, sharders)
        return self._rated_plan(self._rating(rated, rooms, placement, undemanded))

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
        tables = self._tables(module, sharders)
        rooms = self._rooms(module, tables)
        options = [self._options(table) for table in tables]
        problem = problem_of(self._topology, rooms, options)
        try:
            placement = search(problem, time_limit=self._timeout_seconds)
        except InfeasibleError as error:
            raise Misfit(
                topology=self._topology,
                lister_on=self._lister_on,
                tables=tuple(tables),
                options=options,
                rooms=tuple(rooms),
                demands=self._constraints,
                tables_under=functools.partial(self._tables, module, sharders),
            ).error(error) from None
        rated = [
            RatedTable(
                table=table,
                option=of_table[choice.option],
                ranks=tuple(choice.ranks),
                options=tuple(of_table),
            )
            for table, of_table, choice in zip(tables, options, placement.choices, strict=True)
        ]
        undemanded = self._undemanded(module, sharders)
        return self._rated_plan(self._rating(rated, rooms, placement, undemanded))

    def _rated_plan(self, rating: Rating) -> RatedPlan:
        plan = RatedPlan(rating=rating, made_for=self._made_for)
        for rated in rating.tables:
            table = rated.table
            plan.plan.setdefault(table.path, EmbeddingModuleShardingPlan())[table.name] = (
                table.constraints.apply_to(
                    parameter_sharding(
                        rated.option.sharding_type,
                        table.rows,
                        table.dim,
                        rated.ranks,
                        device_type=self._topology.compute_device,
                        compute_kernel=rated.option.compute_kernel,
                        local_size=self._topology.local_size,
                    )
                )
            )
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
            ValueError: if the plan does not name each shardable module, and each of its tables,
                once, or if a table's ranks or shards do not fit it.
            PlannerError: if a rank has not the memory for what the plan gives it.
        """
        tables = self._tables(module, sharders)
        of_modules: dict[str, list[PlannedTable]] = {}
        for table in tables:
            of_modules.setdefault(table.path, []).append(table)
        check_plan_paths(plan, of_modules)
        rated = []
        for path, of_module in of_modules.items():
            entries = plan.plan[path]
            check_plan_covers(path, entries, [table.name for table in of_module])
            for table in of_module:
                option, ranks = self._lister.option_of(table, entries[table.name])
                rated.append(RatedTable(table=table, option=option, ranks=ranks))
        undemanded = self._undemanded(module, sharders)
        rating = self._rating(rated, self._rooms(module, tables), undemanded=undemanded)
        check_fits(rating)
        return RatedPlan(plan.plan, rating=rating, made_for=plan.made_for or self._made_for)

    @property
    def _made_for(self) -> PlanRanks:
        topology = self._topology
        return PlanRanks(
            world_size=topology.world_size,
            local_world_size=topology.local_size,
            compute_device=topology.compute_device,
        )

    def _lister_on(self, topology: Topology) -> OptionLister:
        return OptionLister(topology, self._batch_size, self._batches_in_flight)

    def _tables(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> list[PlannedTable]:
        demands = self._constraints if constraints is None else constraints
        return tables_of(
            module,
            sharders,
            demands,
            self._topology.compute_device,
            batch_size=self._batch_size,
            pooling_stats=self._pooling_stats,
        )

    def _undemanded(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
    ) -> tuple[PlannedTable, ...]:
        """Returns the tables whose placement the user restricts, as if it were free."""
        lifted = {
            name: replace(demand, sharding_types=None, compute_kernels=None, cache_params=None)
            for name, demand in self._constraints.items()
            if demand.sharding_types is not None or demand.compute_kernels is not None
        }
        if not lifted:
            return ()
        tables = self._tables(module, sharders, {**self._constraints, **lifted})
        return tuple(table for table in tables if table.name in lifted)

    def _rating(
        self,
        rated: Sequence[RatedTable],
        rooms: Sequence[Bytes],
        placement: Placement | None = None,
        undemanded: tuple[PlannedTable, ...] = (),
    ) -> Rating:
        return Rating(
            topology=self._topology,
            batch_size=self._batch_size,
            tables=tuple(rated),
            rooms=tuple(rooms),
            lister=self._lister,
            placement=placement,
            batch=self._lister.storage.of_batch([table.table for table in rated]),
            undemanded=undemanded,
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


_Answer = tuple[list[TableOption], tuple[Bytes, ...], Placement]
"""What rank 0 tells the others, who know the tables: the option of each, memory, and the search."""


def _answer_of(plan: RatedPlan) -> _Answer:
    rating = plan.rating
    assert rating is not None
    assert rating.placement is not None
    return [rated.option for rated in rating.tables], rating.rooms, rating.placement


def _default_topology() -> Topology:
    world_size = 1
    if dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Topology(world_size=world_size, compute_device=device)

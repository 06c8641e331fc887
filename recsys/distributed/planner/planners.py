"""The planner: lists the options for placing each table, and searches for the best combination.

The objective is the time of the slowest rank. Memory, of device and host each, includes weights,
optimizer state or else gradients, the summed gradients of replicas, and the buffers of batches (see
`storage`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from recsys.base.arguments import finite, whole
from recsys.base.checked import checked, checked_but
from recsys.distributed.default_sharders import get_default_sharders
from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan, ShardingType
from recsys.distributed.placement.plan_json import PlanRanks, ShardingPlan
from recsys.distributed.placement.strategies import (
    check_plan_covers,
    check_plan_paths,
    parameter_sharding,
)
from recsys.distributed.planner.advice import (
    Constraints,
    InfeasibilityReport,
    check_fits,
    problem_of,
    unconstrained,
)
from recsys.distributed.planner.agreement import (
    check_agreement,
    facts_of,
    made_by_rank_0,
    planning_ranks,
)
from recsys.distributed.planner.constants import BATCH_SIZE
from recsys.distributed.planner.model_tables import check_kernels, tables_of
from recsys.distributed.planner.option_lister import OptionLister, ShardEstimator
from recsys.distributed.planner.options import TableOption
from recsys.distributed.planner.placement import InfeasibleError, SearchResult
from recsys.distributed.planner.plan_cost import PlanCost, TableCost
from recsys.distributed.planner.pooling_stats import PoolingStats
from recsys.distributed.planner.rating import RatedPlan
from recsys.distributed.planner.search import search
from recsys.distributed.planner.tables import Bytes, PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import (
    HeuristicalStorageReservation,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    StorageReservation,
)
from recsys.distributed.ranks.agreement import Facts
from recsys.distributed.ranks.build_transaction import no_collection
from recsys.distributed.sharded.sharder import ModuleSharder

Sharders: TypeAlias = Sequence[ModuleSharder[Any]]
_Listed: TypeAlias = list[tuple[PlannedTable, list[TableOption]]]
"""Every table with its options."""


class EmbeddingShardingPlanner:
    """Finds where to place the tables of a model.

    All options of all tables that the constraints allow are compared together. `plan.rating` and
    `plan.report()` contain the costs of a plan.

    Args:
        topology: Machine; if None, as many CPU ranks or GPUs as the process group has.
        batch_size: Samples per rank and step (default 512).
        storage_reservation: Memory to keep free of tables; if None, 15% and memory for the dense
            parameters.
        constraints: Constraints by table name.
        timeout_seconds: Time limit of the search, which then returns the best plan found so far.
        pooling_stats: Statistics of sample batches. Constraints take precedence.
        batches_in_flight: Batches whose ids a rank holds at a time: 1 without a train pipeline, 2
            or 3 with one.
        estimator: Replaces the planner's costs and storage of shards.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument has another type.

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

    @checked
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
        estimator: ShardEstimator | None = None,
    ) -> None:
        owner = "EmbeddingShardingPlanner"
        whole(f"{owner}.batches_in_flight", batches_in_flight)
        if timeout_seconds is not None:
            finite(f"{owner}.timeout_seconds", timeout_seconds, least=0)
        if topology is None:
            is_job = dist.is_available() and dist.is_initialized()
            device = "cuda" if torch.cuda.is_available() else "cpu"
            topology = Topology(dist.get_world_size() if is_job else 1, device)
        self._topology = topology
        self._batch_size = whole(
            f"{owner}.batch_size", BATCH_SIZE if batch_size is None else batch_size
        )
        self._made_for = PlanRanks(
            world_size=topology.world_size,
            local_world_size=topology.local_world_size,
            compute_device=topology.compute_device,
        )
        self._reservation = storage_reservation or HeuristicalStorageReservation()
        self._constraints = dict(constraints or {})
        self._timeout_seconds = timeout_seconds
        self._pooling_stats = pooling_stats
        self._lister = OptionLister(topology, self._batch_size, batches_in_flight, estimator)

    @checked
    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sharders | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> RatedPlan:
        """Plan on rank 0, and return the same plan or raise the same error on every rank.

        Args:
            module: Model; may be on the `meta` device.
            sharders: One for each module type to shard; the default sharders if None.
            pg: Process group of the ranks; all ranks if None.

        Raises:
            PlannerError: The tables do not fit, or a rank received other inputs than rank 0:
                tables, constraints, machine or batch size.
        """
        if sharders is None:
            sharders = get_default_sharders()
        return self._plan(module, sharders, planning_ranks(pg))

    @checked
    def plan(self, module: nn.Module, sharders: Sharders) -> RatedPlan:
        """Plan the tables of every module that a sharder can shard.

        Args:
            module: Model; may be on the `meta` device.
            sharders: One for each module type to shard.

        Returns:
            The plan; equal inputs give equal plans.

        Raises:
            PlannerError: The tables do not fit, or constraints leave no option for a table.
        """
        return self._plan(module, sharders, None)

    def _plan(
        self, module: nn.Module, sharders: Sharders, pg: dist.ProcessGroup | None
    ) -> RatedPlan:
        """Return the plan of a group of ranks; None is this process alone."""
        # equal inputs give equal lists on all ranks, so rank 0 sends options as indices
        listed = self._agreed(pg, lambda: self._listed(module, sharders))
        searched = made_by_rank_0(pg, lambda: self._search(module, sharders, listed))
        return self._planned(module, sharders, listed, *searched)

    def _agreed(self, pg: dist.ProcessGroup | None, make: Callable[[], _Listed]) -> _Listed:
        """Return the listed tables once all ranks have agreed on the inputs."""
        if pg is None:
            return make()
        listed: _Listed = []
        facts: Facts | Exception
        try:
            listed = make()
            facts = facts_of(self._lister, [table for table, _ in listed], self._reservation)
        except Exception as error:  # check_agreement raises it on every rank
            facts = error
        check_agreement(pg, facts, self._topology)
        return listed

    def _search(
        self, module: nn.Module, sharders: Sharders, listed: _Listed
    ) -> tuple[list[Bytes], SearchResult]:
        """Return the memory that is free for tables, and an option and ranks for each table."""
        with no_collection():
            budgets = self._budgets(module, [table for table, _ in listed])
            problem = problem_of(self._topology, budgets, [options for _, options in listed])
        try:
            return budgets, search(problem, time_limit=self._timeout_seconds)
        except InfeasibleError as error:
            raise InfeasibilityReport(
                lister=self._lister,
                listed=listed,
                budgets=budgets,
                constraints=self._constraints,
                tables_under=functools.partial(self._tables, module, sharders),
            ).error(error) from None

    @no_collection()
    def _planned(
        self,
        module: nn.Module,
        sharders: Sharders,
        listed: _Listed,
        budgets: Sequence[Bytes],
        placement: SearchResult,
    ) -> RatedPlan:
        """Return the plan of a placement."""
        kinds = self._topology.kinds
        placed = [
            TableCost(
                table=table,
                option=options[choice.option],
                ranks=tuple(choice.ranks),
                kinds=kinds,
                options=tuple(options),
            )
            for (table, options), choice in zip(listed, placement.choices, strict=True)
        ]
        rating = self._rating(module, sharders, placed, budgets, placement)
        plan = RatedPlan(rating=rating, made_for=self._made_for)
        for rated in placed:
            table, option = rated.table, rated.option
            entry = parameter_sharding(
                option.sharding_type,
                table.rows,
                table.dim,
                rated.ranks,
                device_type=self._topology.compute_device,
                compute_kernel=option.compute_kernel,
                local_size=self._topology.local_world_size,
            )
            of_module = plan.plan.setdefault(table.path, EmbeddingModuleShardingPlan())
            of_module[table.name] = table.constraints.apply_to(entry)
        return plan

    @checked_but("plan")
    def rate(self, module: nn.Module, sharders: Sharders, plan: ShardingPlan) -> RatedPlan:
        """Return a plan with its costs on this planner's machine.

        Args:
            module: Model; may be on the `meta` device.
            sharders: One for each module type to shard.
            plan: Plan that was written by hand, loaded or edited.

        Raises:
            ValueError: The plan does not contain each shardable module and each of its tables
                exactly once, the ranks or shards of a table do not fit it, or the sharder does not
                support a compute kernel.
            PlannerError: The plan exceeds the memory of a rank.
        """
        if not isinstance(plan, ShardingPlan):
            raise TypeError(
                "EmbeddingShardingPlanner.rate.plan must be a ShardingPlan; received a "
                f"{type(plan).__name__}. Read a file by ShardingPlan.from_json(path)."
            )
        rating = self._rating_of(module, sharders, plan)
        check_fits(rating)
        return RatedPlan(plan.plan, rating=rating, made_for=plan.made_for or self._made_for)

    def _rating_of(self, module: nn.Module, sharders: Sharders, plan: ShardingPlan) -> PlanCost:
        tables = self._tables(module, sharders)
        paths = dict.fromkeys(table.path for table in tables)
        check_plan_paths(plan, paths)
        for path in paths:
            check_plan_covers(path, plan.plan[path], [t.name for t in tables if t.path == path])
        rated = []
        for table in tables:
            option, ranks = self._lister.option_of(table, plan.plan[table.path][table.name])
            rated.append(
                TableCost(table=table, option=option, ranks=ranks, kinds=self._topology.kinds)
            )
        check_kernels(module, sharders, plan, self._topology.compute_device)
        return self._rating(module, sharders, rated, self._budgets(module, tables))

    def _tables(
        self, module: nn.Module, sharders: Sharders, constraints: Constraints | None = None
    ) -> list[PlannedTable]:
        return tables_of(
            module,
            sharders,
            self._constraints if constraints is None else constraints,
            self._topology.compute_device,
            batch_size=self._batch_size,
            pooling_stats=self._pooling_stats,
        )

    def _rating(
        self,
        module: nn.Module,
        sharders: Sharders,
        rated: Sequence[TableCost],
        budgets: Sequence[Bytes],
        placement: SearchResult | None = None,
    ) -> PlanCost:
        lifted = unconstrained(self._constraints)
        under = {**self._constraints, **lifted}
        free = (
            [t for t in self._tables(module, sharders, under) if t.name in lifted] if lifted else ()
        )
        return PlanCost(
            lister=self._lister,
            tables=tuple(rated),
            budgets=tuple(budgets),
            placement=placement,
            batch=self._lister.storage.batch_storage([table.table for table in rated]),
            unconstrained=tuple(free),
        )

    def _budgets(self, module: nn.Module, tables: Sequence[PlannedTable]) -> list[Bytes]:
        """Return the memory of each rank that is free for tables."""
        batch = self._lister.storage.batch_storage(tables).total.device
        model_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        # quantized rows are buffers, so `module.parameters()` lacks them
        dense_bytes = model_bytes - sum(
            t.rows * t.dim * t.element_bytes for t in tables if not t.is_quantized
        )
        return [
            Bytes(
                self._reservation.usable(rank.memory_cap, dense_bytes) - batch,
                # dense parameters are in the memory of the compute device
                self._reservation.usable(rank.ddr_cap, None),
            )
            for rank in self._topology.hardware
        ]

    @no_collection()
    def _listed(self, module: nn.Module, sharders: Sharders) -> _Listed:
        tables = self._tables(module, sharders)
        listed = [(table, self._lister.options_of(table)) for table in tables]
        for table, options in listed:
            if not options:
                raise PlannerError(self._no_option(table), PlannerErrorType.STRICT_CONSTRAINTS)
        return listed

    def _no_option(self, table: PlannedTable) -> str:
        asked, types = table.constraints, [kind.value for kind in ShardingType]
        kernels = asked.compute_kernels or (["fused"] if table.trains else [])
        which = f" with compute kernel {', '.join(kernels)}" if kernels else ""
        needs = ["its optimizer"] if table.optimizer else []
        needs += [f"hashed ids in {table.num_regions} regions"] if table.num_regions else []
        needs.append(f"{table.rows} x {table.dim} values")
        return (
            f"Table {table.name!r} may only be sharded {', '.join(asked.sharding_types or types)}"
            f"{which}, which is not supported on {self._topology.compute_device} with "
            f"{' and '.join(needs)}. Allow other sharding types of {', '.join(types)}."
        )

"""The planner: lists the ways to place each table, and searches for the best of all together.

Best is the plan whose slowest rank is done soonest. Memory, of device and host each, counts
weights, the state of the optimizer that a table has when it is planned or else its gradient, the
sum of a replica's gradients, and the buffers of batches (see ``storage``).
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.default_sharders import get_default_sharders
from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan, ShardingType
from recsys.distributed.placement.plan_json import PlanRanks, ShardingPlan
from recsys.distributed.placement.strategies import (
    check_plan_covers,
    check_plan_paths,
    parameter_sharding,
)
from recsys.distributed.planner.advice import Misfit, check_fits, problem_of, unconstrained
from recsys.distributed.planner.agreement import (
    check_agreement,
    facts_of,
    made_by_rank_0,
    planning_ranks,
)
from recsys.distributed.planner.constants import BATCH_SIZE
from recsys.distributed.planner.enumerators import EmbeddingEnumerator, Enumerator
from recsys.distributed.planner.model_tables import check_kernels, tables_of
from recsys.distributed.planner.option_lister import OptionLister
from recsys.distributed.planner.options import TableOption
from recsys.distributed.planner.partitioners import Partitioner, partitioned
from recsys.distributed.planner.placement import InfeasibleError, Placement
from recsys.distributed.planner.plan_cost import RatedTable, Rating
from recsys.distributed.planner.pooling_stats import PoolingStats
from recsys.distributed.planner.rating import RatedPlan
from recsys.distributed.planner.search import search
from recsys.distributed.planner.shard_estimators import ShardEstimator
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
from recsys.distributed.ranks.construction import no_collection
from recsys.distributed.sharder import ModuleSharder

_Answer: TypeAlias = tuple[list[TableOption], tuple[Bytes, ...], Placement | None]
"""What rank 0 tells the others, who know the tables: the option of each, memory, and the search."""

_INSTEAD = {
    "proposer": "All options of all tables are weighed together, so that nothing has to be "
    "proposed. Give an enumerator to choose among options, or a partitioner to search on your own",
    "performance_model": "A plan is as good as its slowest rank. Give an estimator for other costs",
    "stats": "The plan that is returned says what it costs, in `plan.rating`",
}
"""Arguments of TorchRec's planner that mean nothing here, and what to do in their place."""

_T = TypeVar("_T")


class EmbeddingShardingPlanner:
    """Plans where the tables of a model go.

    Args:
        topology: the machine; as many CPU ranks or GPUs as the process group has, if None.
        batch_size: samples per rank and batch (default 512).
        enumerator: what lists the options of each table; all that its constraints allow, if None.
            Its topology, batch_size, constraints and pooling_stats, if it has them, are the
            planner's.
        storage_reservation: memory to keep free of tables; 15 % and room for the dense parts, if
            None.
        proposer: must be None, as there are no proposals: all options are weighed together.
        partitioner: what chooses options and ranks, in place of the planner's own search.
        performance_model: must be None: a plan is as good as its slowest rank.
        stats: must be None: the plan says what it costs.
        constraints: by table name.
        timeout_seconds: how long the search may take; the best plan found until then is returned.
        pooling_stats: what a sample of batches says of ids; constraints say it better.
        batches_in_flight: batches whose ids a rank holds at a time: 1 without a train pipeline, 2
            or 3 with one.
        estimator: what changes the planner's costs and storage of shards of tables.

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
        pooling_stats: PoolingStats | None = None,
        batches_in_flight: int = 1,
        estimator: ShardEstimator | None = None,
    ) -> None:
        _check_arguments(locals())
        topology = _agreed(enumerator, "topology", topology)
        batch_size = _agreed(enumerator, "batch_size", batch_size)
        _check_arguments({"batch_size": batch_size})
        self._topology = topology or _default_topology()
        self._batch_size = batch_size or BATCH_SIZE
        self._reservation = storage_reservation or HeuristicalStorageReservation()
        self._enumerator = enumerator
        self._constraints = dict(_agreed(enumerator, "constraints", constraints) or {})
        self._partitioner = partitioner
        self._timeout_seconds = timeout_seconds
        self._pooling_stats = _agreed(enumerator, "pooling_stats", pooling_stats)
        self._batches_in_flight = batches_in_flight
        self._estimator = estimator
        self._lister = self._lister_on(self._topology)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> RatedPlan:
        """Plans on rank 0 and gives every rank the same plan, or the same error.

        Args:
            module: the model; may be on the ``meta`` device.
            sharders: one per module type to shard; all that there are if None.
            pg: the ranks; all if None.

        Raises:
            PlannerError: if the tables do not fit, or a rank was asked for another plan than rank
                0: other tables, constraints, machine or batch size.
        """
        if sharders is None:
            sharders = get_default_sharders()
        pg = planning_ranks(pg)
        if pg is None:
            return self.plan(module, sharders)
        tables = self._agreed_tables(module, sharders, pg)
        own: list[Rating] = []  # of rank 0

        def answer() -> _Answer:
            rating = self._rated(module, sharders, tables)
            own.append(rating)
            return [of.option for of in rating.tables], rating.budgets, rating.placement

        options, budgets, placement = made_by_rank_0(pg, answer)
        if own:
            return self._plan_of(own[0])
        assert placement is not None
        rated = _rated_tables(tables, options, placement)
        return self._plan_of(self._rating(module, sharders, rated, budgets, placement))

    def _agreed_tables(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], pg: dist.ProcessGroup
    ) -> list[PlannedTable]:
        """Returns the model's tables, once all ranks were asked for the same plan of them."""
        tables: list[PlannedTable] = []
        facts: Facts | Exception
        try:
            tables = self._tables(module, sharders)
            facts = facts_of(
                self._topology,
                tables,
                {
                    "batch_size": self._batch_size,
                    "batches_in_flight": self._batches_in_flight,
                    "storage_reservation": self._reservation,
                },
            )
        except Exception as error:  # raised by check_agreement, on every rank
            facts = error
        check_agreement(pg, facts, self._topology)
        return tables

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
        return self._plan_of(self._rated(module, sharders))

    def _rated(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        tables: Sequence[PlannedTable] | None = None,
    ) -> Rating:
        """Chooses an option and ranks for each table; ``tables`` are the model's, if known."""
        with no_collection():
            listed = self._listed(module, sharders, tables)
            tables = [table for table, _ in listed]
            budgets = self._budgets(module, tables)
            options = [of_table for _, of_table in listed]
            problem = problem_of(self._topology, budgets, options)
        try:
            if self._partitioner is None:
                placement = search(problem, time_limit=self._timeout_seconds)
            else:
                placement = partitioned(self._partitioner, problem)
        except InfeasibleError as error:
            raise Misfit(
                topology=self._topology,
                lister_on=self._lister_on,
                tables=tables,
                options=options,
                budgets=budgets,
                constraints=self._constraints,
                tables_under=functools.partial(self._tables, module, sharders),
                is_custom=self._is_custom,
            ).error(error) from None
        chosen = [of[choice.option] for of, choice in zip(options, placement.choices, strict=True)]
        rated = _rated_tables(tables, chosen, placement, options)
        return self._rating(module, sharders, rated, budgets, placement)

    def _plan_of(self, rating: Rating) -> RatedPlan:
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
                once, if a table's ranks or shards do not fit it, or its compute kernel is not one
                of the sharder's.
            PlannerError: if a rank has not the memory for what the plan gives it.
        """
        if not isinstance(plan, ShardingPlan):
            raise TypeError(
                "EmbeddingShardingPlanner.rate takes a ShardingPlan; received a "
                f"{type(plan).__name__}. ShardingPlan.from_json(path) reads a file."
            )
        rating = self._rating_of(module, sharders, plan)
        check_fits(rating)
        return RatedPlan(plan.plan, rating=rating, made_for=plan.made_for or self._made_for)

    def _rating_of(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], plan: ShardingPlan
    ) -> Rating:
        tables = self._tables(module, sharders)
        paths = dict.fromkeys(table.path for table in tables)
        check_plan_paths(plan, paths)
        for path in paths:
            check_plan_covers(path, plan.plan[path], [t.name for t in tables if t.path == path])
        rated = []
        for table in tables:
            option, ranks = self._lister.option_of(table, plan.plan[table.path][table.name])
            rated.append(RatedTable(table=table, option=option, ranks=ranks))
        check_kernels(module, sharders, plan, self._topology.compute_device)
        return self._rating(module, sharders, rated, self._budgets(module, tables))

    @property
    def _made_for(self) -> PlanRanks:
        topology = self._topology
        return PlanRanks(
            world_size=topology.world_size,
            local_world_size=topology.local_size,
            compute_device=topology.compute_device,
        )

    @property
    def _is_custom(self) -> bool:
        return self._has_own_enumerator or self._partitioner is not None

    @property
    def _has_own_enumerator(self) -> bool:
        """Whether the user's own code lists options, be it in a class made from ours."""
        return type(self._enumerator) not in (EmbeddingEnumerator, type(None))

    def _lister_on(self, topology: Topology) -> OptionLister:
        return OptionLister(topology, self._batch_size, self._batches_in_flight, self._estimator)

    def _tables(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> list[PlannedTable]:
        if self._enumerator is not None and constraints is None:
            return [table for table, _ in self._enumerator.enumerate(module, sharders)]
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
        sharders: Sequence[ModuleSharder[Any]],
        rated: Sequence[RatedTable],
        budgets: Sequence[Bytes],
        placement: Placement | None = None,
    ) -> Rating:
        return Rating(
            topology=self._topology,
            batch_size=self._batch_size,
            tables=tuple(rated),
            budgets=tuple(budgets),
            lister=self._lister,
            placement=placement,
            batch=self._lister.storage.of_batch([table.table for table in rated]),
            is_custom=self._is_custom,
            unconstrained=self._unconstrained(module, sharders),
        )

    def _unconstrained(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
    ) -> tuple[PlannedTable, ...]:
        """Returns the tables whose placement the user restricts, as if it were free."""
        lifted = unconstrained(
            {
                name: of_table
                for name, of_table in self._constraints.items()
                if (of_table.sharding_types, of_table.compute_kernels) != (None, None)
            }
        )
        if not lifted:
            return ()
        tables = self._tables(module, sharders, {**self._constraints, **lifted})
        return tuple(table for table in tables if table.name in lifted)

    def _budgets(self, module: nn.Module, tables: Sequence[PlannedTable]) -> list[Bytes]:
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

    def _listed(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        tables: Sequence[PlannedTable] | None,
    ) -> list[tuple[PlannedTable, list[TableOption]]]:
        """Returns every table with the options to choose from."""
        if self._enumerator is None:
            tables = self._tables(module, sharders) if tables is None else tables
            listed = [(table, self._lister.options_of(table)) for table in tables]
        else:
            found = self._enumerator.enumerate(module, sharders)
            listed = [(table, self._lister.estimated(table, options)) for table, options in found]
            if self._has_own_enumerator:
                self._check_listed(module, sharders, [table for table, _ in listed])
        for table, options in listed:
            if not options:
                raise PlannerError(self._no_option(table), PlannerErrorType.STRICT_CONSTRAINTS)
        return listed

    def _check_listed(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        listed: Sequence[PlannedTable],
    ) -> None:
        """Raises unless the user's enumerator lists all tables, under the planner's constraints."""
        name = type(self._enumerator).__name__
        found = {(table.path, table.name): table.constraints for table in listed}
        for table in self._tables(module, sharders, self._constraints):
            constraints = found.get((table.path, table.name))
            if constraints is None:
                raise PlannerError(
                    f"{name}.enumerate must list every table; received none of table "
                    f"{table.name!r} of module {table.path!r}."
                )
            if self._constraints and constraints != table.constraints:
                raise PlannerError(
                    f"{name}.enumerate must list table {table.name!r} under the planner's "
                    f"constraints; received it under others. Give {name} the constraints, and "
                    "EmbeddingEnumerator in it."
                )

    def _no_option(self, table: PlannedTable) -> str:
        if self._has_own_enumerator:
            return (
                f"{type(self._enumerator).__name__}.enumerate must list at least one option of "
                f"every table; received none of table {table.name!r}."
            )
        asked, types = table.constraints, [kind.value for kind in ShardingType]
        return (
            f"Table {table.name!r} may only be sharded "
            f"{', '.join(asked.sharding_types or types)} with compute "
            f"kernel {', '.join(asked.compute_kernels or ['fused'])}, which is not supported "
            f"on {self._topology.compute_device} with its optimizer and {table.rows} x "
            f"{table.dim} values; sharding types are {', '.join(types)}."
        )


def _rated_tables(
    tables: Sequence[PlannedTable],
    chosen: Sequence[TableOption],
    placement: Placement,
    options: Sequence[Sequence[TableOption]] | None = None,
) -> list[RatedTable]:
    """Returns where a placement puts the tables; ``options`` are those of each, if known."""
    of_tables = zip(tables, chosen, placement.choices, options or [()] * len(tables), strict=True)
    return [
        RatedTable(table=table, option=option, ranks=tuple(choice.ranks), options=tuple(others))
        for table, option, choice, others in of_tables
    ]


_TYPES: Mapping[str, tuple[type, str]] = {
    "topology": (Topology, "a Topology"),
    "batch_size": (numbers.Integral, "a whole number"),
    "constraints": (Mapping, "ParameterConstraints by table name"),
    "timeout_seconds": (numbers.Real, "a number"),
    "pooling_stats": (PoolingStats, "PoolingStats"),
    "batches_in_flight": (numbers.Integral, "a whole number"),
}
_METHODS = {
    "enumerator": "enumerate",
    "storage_reservation": "usable",
    "partitioner": "partition",
    "estimator": "estimate",
}


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError if an argument that is given is not what it must be."""
    given = {name: value for name, value in arguments.items() if value is not None}
    owner = "EmbeddingShardingPlanner"
    for name, instead in _INSTEAD.items():
        if name in given:
            raise ValueError(
                f"{owner}.{name} must be None; received a {type(given[name]).__name__}. "
                f"{instead}, or import the planner from recsys.compat.planner, which runs what was "
                "written for TorchRec."
            )
    for name, method in _METHODS.items():
        if name in given and not callable(getattr(given[name], method, None)):
            raise _wrong_type(f"{owner}.{name}", f"have a method {method}", given[name])
    for name, (kind, words) in _TYPES.items():
        if name in given and not isinstance(given[name], kind):
            raise _wrong_type(f"{owner}.{name}", f"be {words}", given[name])
    for table, constraints in given.get("constraints", {}).items():
        if not isinstance(constraints, ParameterConstraints):
            subject = f"{owner}.constraints[{table!r}]"
            raise _wrong_type(subject, "be ParameterConstraints", constraints)
    for name in ("batch_size", "batches_in_flight"):
        if given.get(name, 1) < 1:
            raise ValueError(f"{owner}.{name} must be at least 1; received {given[name]}.")


def _wrong_type(subject: str, rule: str, value: object) -> TypeError:
    return TypeError(f"{subject} must {rule}; received a {type(value).__name__}.")


def _agreed(enumerator: Enumerator | None, name: str, given: _T | None) -> _T | None:
    """Returns what a planner and its enumerator both count with: the enumerator's, if it has any.

    Raises:
        ValueError: if the planner was given another.
    """
    if enumerator is None or not hasattr(enumerator, name):
        return given
    own: _T | None = getattr(enumerator, name)
    if given is not None and given != own:
        raise ValueError(
            f"EmbeddingShardingPlanner.{name} must be that of its enumerator; received another "
            f"beside {type(enumerator).__name__}. Give it to the enumerator alone."
        )
    return own


def _default_topology() -> Topology:
    world_size = 1
    if dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Topology(world_size=world_size, compute_device=device)

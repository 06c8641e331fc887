"""Planner that accepts components written for TorchRec's planner."""

from __future__ import annotations

import copy
import functools
import math
import operator
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from recsys.base.arguments import instance
from recsys.compat.planner.enumerators import EmbeddingEnumerator, get_partition_by_type
from recsys.compat.planner.partitioners import GreedyPerfPartitioner
from recsys.compat.planner.perf_models import NoopPerfModel
from recsys.compat.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from recsys.compat.planner.storage_reservations import (
    HeuristicalStorageReservation,
    PlannersReservation,
)
from recsys.compat.planner.topology import Storage, Topology
from recsys.compat.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    Proposer,
    Shard,
    ShardingOption,
    Stats,
    StorageReservation,
    groups_of,
)
from recsys.distributed.placement.strategies import placement
from recsys.distributed.planner import planners, types
from recsys.distributed.planner import topology as topologies
from recsys.distributed.planner.agreement import made_by_rank_0
from recsys.distributed.planner.option_lister import ShardEstimator
from recsys.distributed.planner.plan_cost import PlanCost
from recsys.distributed.planner.planners import Sharders
from recsys.distributed.planner.pooling_stats import PoolingStats
from recsys.distributed.planner.rating import RatedPlan
from recsys.distributed.planner.tables import Bytes, PlannedTable
from recsys.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
)
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

_Callback = Callable[[list[ShardingOption]], list[ShardingOption]]
_T = TypeVar("_T")


class EmbeddingShardingPlanner(planners.EmbeddingShardingPlanner):
    """Planner that accepts components written for TorchRec.

    Without such components it is `recsys.distributed.planner.EmbeddingShardingPlanner`. An
    enumerator of another class or with an estimator, proposers, a partitioner, a performance model
    or callbacks make it try proposals instead. The reservation reduces the memory of the ranks. The
    partitioner places every proposal of every proposer, the performance model rates it, and the
    proposer receives the result. The feasible plan with the lowest rating is returned. Repeated
    proposals are not tried again.

    Args:
        topology: As in the base class.
        batch_size: As in the base class.
        enumerator: Lists the options; `EmbeddingEnumerator` if None.
        storage_reservation: As in the base class, or an object with `reserve`.
        proposer: One or several; if None a grid search, two greedy ones and a uniform one.
        partitioner: Places proposals; `GreedyPerfPartitioner` if None.
        performance_model: Rates plans; `NoopPerfModel`, the time of the slowest rank, if None.
        stats: One or several that log every plan, on rank 0 of ranks that plan together.
        constraints: As in the base class.
        debug: Passed to `stats`.
        callbacks: Functions that may change the options of the best plan before it is used.
        timeout_seconds: Time limit, after which no proposal is tried.
        pooling_stats: As in the base class; not for proposals.
        batches_in_flight: As in the base class; not for proposals.
        estimator: As in the base class; not for proposals, whose enumerator has its own.

    Raises:
        ValueError: An argument is out of range or not for proposals.
        TypeError: An argument has another type.

    Example:
        >>> import torch
        >>> from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=64, num_embeddings=1000, feature_names=["f"]
        ... )
        >>> model = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        >>> class OnlyRows(EmbeddingEnumerator):
        ...     def enumerate(self, module, sharders):
        ...         options = super().enumerate(module, sharders)
        ...         return [o for o in options if o.sharding_type == "row_wise"]
        >>> topology = Topology(2, "cpu", local_world_size=2)
        >>> planner = EmbeddingShardingPlanner(topology, enumerator=OnlyRows(topology))
        >>> planner.plan(model, [EmbeddingBagCollectionSharder()]).plan[""]["t"].ranks
        [0, 1]
    """

    def __init__(
        self,
        topology: topologies.Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | types.StorageReservation | None = None,
        proposer: Proposer | Sequence[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | Sequence[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: Sequence[_Callback] | None = None,
        timeout_seconds: float | None = None,
        *,
        pooling_stats: PoolingStats | None = None,
        batches_in_flight: int = 1,
        estimator: ShardEstimator | None = None,
    ) -> None:
        for kind, part in ((Enumerator, enumerator), (Partitioner, partitioner)):
            if part is not None:
                name = kind.__name__
                instance(
                    f"EmbeddingShardingPlanner.{name.lower()}", part, kind, f"a TorchRec {name}"
                )
        topology = topology or getattr(enumerator, "_topology", None)
        batch_size = batch_size or getattr(enumerator, "_batch_size", None)
        if constraints is None:
            constraints = getattr(enumerator, "_constraints", None)
        lists_all = type(enumerator) is EmbeddingEnumerator and enumerator._estimator is None
        extensions = (None if lists_all else enumerator, partitioner, proposer, performance_model)
        self._tries_proposals = any(part is not None for part in extensions) or bool(callbacks)
        if self._tries_proposals:
            _check_unused(
                pooling_stats=pooling_stats,
                batches_in_flight=None if batches_in_flight == 1 else batches_in_flight,
                estimator=estimator,
            )
        reservation = storage_reservation or HeuristicalStorageReservation()
        has_rule = hasattr(reservation, "usable") or not isinstance(reservation, StorageReservation)
        rule = cast(types.StorageReservation, reservation) if has_rule else None
        super().__init__(
            topology,
            batch_size,
            storage_reservation=rule,
            constraints=constraints,
            timeout_seconds=timeout_seconds,
            pooling_stats=pooling_stats,
            batches_in_flight=batches_in_flight,
            estimator=estimator,
        )
        self._machine = Topology.of(self._topology)
        self._has_rule = has_rule
        self._reserves = (
            reservation
            if isinstance(reservation, StorageReservation)
            else PlannersReservation(reservation)
        )
        self._reserved: Topology | None = None
        demands = self._constraints or None
        self._lists = enumerator or EmbeddingEnumerator(self._machine, self._batch_size, demands)
        self._places = partitioner or GreedyPerfPartitioner()
        self._rates = performance_model or NoopPerfModel(self._machine)
        self._proposers = _several(proposer) or [
            GridSearchProposer(),
            GreedyProposer(),
            GreedyProposer(use_depth=False),
            UniformProposer(),
        ]
        self._stats = _several(stats)
        self._debug = debug
        self._callbacks = list(callbacks or ())

    def _plan(
        self,
        module: nn.Module,
        sharders: Sharders,
        pg: dist.ProcessGroup | None,
    ) -> RatedPlan:
        tried = _Tried(time.monotonic())
        if self._tries_proposals:
            plan = self._best_plan(module, sharders, pg, tried)
        else:
            self._reserve_memory(module, sharders)
            plan = super()._plan(module, sharders, pg)
        if pg is None or dist.get_rank(pg) == 0:
            self._log_stats(module, sharders, plan, tried)
        return plan

    def _best_plan(
        self,
        module: nn.Module,
        sharders: Sharders,
        pg: dist.ProcessGroup | None,
        tried: _Tried,
    ) -> RatedPlan:
        """Return the feasible plan with the lowest rating, which rank 0 of a group finds."""

        def choose() -> ShardingPlan:
            self._reserve_memory(module, sharders)
            tried.best = self._best_of_proposals(module, list(sharders), tried)
            return to_sharding_plan(tried.best, self._machine)

        if pg is not None:
            self._agreed(pg, lambda: [(table, []) for table in self._tables(module, sharders)])
        chosen = made_by_rank_0(pg, choose)
        if pg is not None:
            self._reserve_memory(module, sharders)  # on the other ranks, too
        rating = self._rating_of(module, sharders, chosen)
        return RatedPlan(chosen.plan, rating=rating, made_for=self._made_for)

    def rate(self, module: nn.Module, sharders: Sharders, plan: ShardingPlan) -> RatedPlan:
        """Return a plan with its costs on this planner's machine.

        Args:
            module: Model; may be on the `meta` device.
            sharders: One for each module type to shard.
            plan: Plan that was written by hand, loaded or edited.

        Raises:
            ValueError: The plan does not fit the model.
            PlannerError: The plan exceeds the memory of a rank.
        """
        self._reserve_memory(module, sharders)
        return super().rate(module, sharders, plan)

    def _reserve_memory(self, module: nn.Module, sharders: Sharders) -> None:
        """Call the reservation, unless the base class can apply its rule."""
        self._reserved = None
        if self._tries_proposals or not self._has_rule:
            self._reserved = self._reserves.reserve(
                topology=self._machine,
                batch_size=self._batch_size,
                module=module,
                sharders=list(sharders),
                constraints=self._constraints or None,
            )

    def _budgets(self, module: nn.Module, tables: Sequence[PlannedTable]) -> list[Bytes]:
        """Return the memory of each rank that is free for tables."""
        if self._reserved is None:
            return super()._budgets(module, tables)
        on_cpu = self._topology.compute_device == "cpu"
        free = [device.storage for device in self._reserved.devices]
        return [Bytes(left.ddr if on_cpu else left.hbm, left.ddr) for left in free]

    def _best_of_proposals(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]], tried: _Tried
    ) -> list[ShardingOption]:
        """Return the options of the feasible plan with the lowest rating, with ranks."""
        space = self._lists.enumerate(module=module, sharders=sharders)
        if not space:
            return []
        for proposer in self._proposers:
            proposer.load(search_space=space, enumerator=self._lists)
        best: list[ShardingOption] = []
        best_rating = math.inf
        ratings: dict[Hashable, float | None] = {}
        refused: PlannerError | None = None
        for proposer in self._proposers:
            while (proposal := proposer.propose()) and not self._is_late(tried):
                plan, key = proposal, tuple(map(hash, proposal))
                if key not in ratings:
                    try:
                        plan, ratings[key] = self._placed(proposal)
                    except PlannerError as error:
                        refused, ratings[key] = error, None
                rating = ratings[key]
                if rating is not None and (rating < best_rating or not best):
                    best, best_rating = copy.deepcopy(plan), rating
                proposer.feedback(
                    partitionable=rating is not None,
                    plan=plan,
                    perf_rating=rating,
                    storage_constraint=self._reserved,
                )
        tried.num_proposals = len(ratings)
        tried.num_plans = sum(rating is not None for rating in ratings.values())
        if not best:
            raise self._no_plan(space, len(ratings), refused)
        for callback in self._callbacks:
            best = callback(best)
        return best

    def _placed(self, proposal: list[ShardingOption]) -> tuple[list[ShardingOption], float]:
        assert self._reserved is not None
        plan = self._places.partition(
            proposal=copy.deepcopy(proposal), storage_constraint=self._reserved
        )
        return plan, self._rates.rate(plan=plan)

    def _is_late(self, tried: _Tried) -> bool:
        limit = self._timeout_seconds
        return limit is not None and time.monotonic() - tried.started > limit

    def _no_plan(
        self, space: list[ShardingOption], num_proposals: int, refused: PlannerError | None
    ) -> PlannerError:
        """Return the error that no proposal became a plan."""
        assert self._reserved is not None
        least = [
            min((option.total_storage for option in group), key=lambda size: size.hbm + size.ddr)
            for group in groups_of(space).values()
        ]
        nothing = Storage(0, 0)
        needed = functools.reduce(operator.add, least)
        free = functools.reduce(operator.add, (d.storage for d in self._reserved.devices), nothing)
        fits = needed.hbm <= free.hbm and needed.ddr <= free.ddr
        return PlannerError(
            f"A proposal must fit on the ranks; received {num_proposals} of {len(least)} tables, "
            f"which take at least {needed} and have {free}. "
            f"{'Propose others' if fits else 'Use more ranks, or a smaller model'}. Last error: "
            f"{refused}",
            PlannerErrorType.STRICT_CONSTRAINTS if fits else PlannerErrorType.INSUFFICIENT_STORAGE,
        )

    def _rating_of(self, module: nn.Module, sharders: Sharders, plan: ShardingPlan) -> PlanCost:
        rating = super()._rating_of(module, sharders, plan)
        return replace(rating, is_custom=self._tries_proposals)

    def _log_stats(
        self,
        module: nn.Module,
        sharders: Sharders,
        plan: RatedPlan,
        tried: _Tried,
    ) -> None:
        if not self._stats:
            return
        run_time = time.monotonic() - tried.started
        if not self._tries_proposals:
            tried.best = self._options_of(module, sharders, plan)
        for stats in self._stats:
            stats.log(
                sharding_plan=plan,
                topology=self._machine,
                batch_size=self._batch_size,
                storage_reservation=self._reserves,
                num_proposals=tried.num_proposals,
                num_plans=tried.num_plans,
                run_time=run_time,
                best_plan=tried.best,
                constraints=self._constraints or None,
                sharders=list(sharders),
                enumerator=self._lists,
                debug=self._debug,
                debug_stats=None,
            )

    def _options_of(
        self, module: nn.Module, sharders: Sharders, plan: RatedPlan
    ) -> list[ShardingOption]:
        """Return the plan of the base class's search as options."""
        groups = groups_of(self._lists.enumerate(module=module, sharders=list(sharders)))
        options = []
        for path, entries in plan.plan.items():
            for name, entry in entries.items():
                option = copy.deepcopy(groups[f"{path}.{name}"][0])
                option.sharding_type = entry.sharding_type
                option.partition_by = get_partition_by_type(entry.sharding_type)
                option.compute_kernel = entry.compute_kernel
                option.shards = _shards_of(option, entry)
                options.append(option)
        self._lists.populate_estimates(options)
        return options


def to_sharding_plan(sharding_options: list[ShardingOption], topology: Topology) -> ShardingPlan:
    """Return the plan of options whose shards have ranks.

    Args:
        sharding_options: One for each table.
        topology: Machine.

    Raises:
        PlannerError: A shard has no rank, or one that does not exist.
    """
    plan = ShardingPlan({})
    device, world_size = topology.compute_device, topology.world_size
    for option in sharding_options:
        ranks = [rank for rank in option.get_shards_assignment() if rank is not None]
        if len(ranks) < option.num_shards or not all(0 <= rank < world_size for rank in ranks):
            raise PlannerError(
                f"Every shard must be on a rank of 0 to {world_size - 1}; received ranks "
                f"{option.get_shards_assignment()} for table {option.name!r}. The partitioner sets "
                "shard.rank."
            )
        shards = [
            ShardMetadata(
                shard_offsets=list(shard.offset),
                shard_sizes=list(shard.size),
                placement=placement(device, rank, topology.local_world_size),
            )
            for shard, rank in zip(option.shards, ranks, strict=True)
        ]
        replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
        plan.plan.setdefault(option.path, EmbeddingModuleShardingPlan())[option.name] = (
            ParameterSharding(
                sharding_type=option.sharding_type,
                compute_kernel=option.compute_kernel,
                ranks=ranks,
                sharding_spec=None if replicated else EnumerableShardingSpec(shards),
                cache_params=option.cache_params,
                bounds_check_mode=option.bounds_check_mode,
                output_dtype=option.output_dtype,
            )
        )
    return plan


@dataclass
class _Tried:
    """Result of planning.

    Attributes:
        started: Start time in seconds.
        num_proposals: Number of distinct proposals.
        num_plans: Number of proposals that fit.
        best: Options of the plan.
    """

    started: float
    num_proposals: int = 1
    num_plans: int = 1
    best: list[ShardingOption] = field(default_factory=list)


def _shards_of(option: ShardingOption, entry: ParameterSharding) -> list[Shard]:
    if entry.sharding_spec is None:
        whole = list(option.tensor.shape)
        return [Shard(list(whole), [0, 0], rank=rank) for rank in entry.ranks or ()]
    return [
        Shard(list(shard.shard_sizes), list(shard.shard_offsets), rank=shard.rank)
        for shard in entry.sharding_spec.shards
    ]


def _several(given: _T | Sequence[_T] | None) -> list[_T]:
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) else [given]


def _check_unused(**others: object) -> None:
    """Raise ValueError for an argument that has no effect on proposals."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"EmbeddingShardingPlanner.{name} is only for the planner's own search; received a "
                f"{type(value).__name__} together with components that try proposals. Remove it, "
                "or the enumerator, proposer, partitioner, performance_model and callbacks."
            )

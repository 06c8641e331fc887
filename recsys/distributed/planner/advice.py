"""Remedies for tables that do not fit, and changes that would make a plan faster.

Changes are evaluated by planning again. Other options for one table are evaluated by the search's
greedy choice of ranks, with all other tables unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import sub
from typing import NamedTuple, final

import numpy as np

from recsys.distributed.placement.plan import EmbeddingComputeKernel, ShardingType, format_table
from recsys.distributed.planner.assignment import Assignment
from recsys.distributed.planner.formatting import mib, shorten
from recsys.distributed.planner.option_lister import OptionLister
from recsys.distributed.planner.options import Reach, TableOption
from recsys.distributed.planner.placement import InfeasibleError, Problem, Ranks, SearchResult
from recsys.distributed.planner.plan_cost import PlanCost, TableCost
from recsys.distributed.planner.search import search
from recsys.distributed.planner.shard_arrays import ShardArrays
from recsys.distributed.planner.tables import Bytes, PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType

_ANY_GAP = 1e4  # tolerance that accepts nearly any placement that fits
_SECONDS = 3.0  # time limit for all remedies
_SEARCH_SECONDS = 1.0  # time limit for one remedy
_MOST_RANKS = 4096
_FULL = 0.8  # used share of a memory above which more memory is suggested

Constraints = Mapping[str, ParameterConstraints]


def problem_of(
    topology: Topology, budgets: Sequence[Bytes], options: Sequence[Sequence[TableOption]]
) -> Problem:
    """Return the input of the search.

    Args:
        topology: Machine.
        budgets: Bytes that are free for tables, by rank.
        options: Options of each table.
    """
    ranks = Ranks(
        # a reservation may exceed the memory; a negative capacity would count as a rank that is
        # full before any table is placed
        memory_caps=[(max(budget.device, 0), max(budget.host, 0)) for budget in budgets],
        kinds=topology.kinds,
        node_size=topology.local_world_size,
    )
    return Problem(ranks=ranks, tables=options)


def plan_again(
    lister: OptionLister,
    tables: Sequence[PlannedTable],
    budgets: Sequence[Bytes],
    *,
    seconds: float | None = None,
    tolerance: float = 1e-3,
) -> SearchResult | None:
    """Place tables on a machine.

    Args:
        lister: Lists the options of a table on the machine.
        tables: Tables to place.
        budgets: Bytes that are free for them, by rank.
        seconds: Time limit of the search; none if None.
        tolerance: Gap at which the search may stop.

    Returns:
        The placement; None if no placement was found or a table has no option.
    """
    options = [lister.options_of(table) for table in tables]
    if not all(options):
        return None
    try:
        problem = problem_of(lister.topology, budgets, options)
        return search(problem, time_limit=seconds, tolerance=tolerance)
    except InfeasibleError:
        return None


def unconstrained(constraints: Constraints) -> dict[str, ParameterConstraints]:
    """Return the constraints on sharding types or kernels, by table, without these restrictions."""
    return {
        name: replace(of_table, sharding_types=None, compute_kernels=None, cache_params=None)
        for name, of_table in constraints.items()
        if (of_table.sharding_types, of_table.compute_kernels) != (None, None)
    }


def with_half_weights(tables: Sequence[PlannedTable]) -> tuple[PlannedTable, ...]:
    """Return the tables with weights of at most 16 bits."""
    return tuple(replace(t, element_bytes=2) if t.element_bytes > 2 else t for t in tables)


# -- changes that would make a plan faster ---------------------------------------------------------


class Gain(NamedTuple):
    """Result of a change.

    Attributes:
        text: Description of the change.
        slowest_ms: Milliseconds of the slowest rank in the plan found with it.
    """

    text: str
    slowest_ms: float


def gains_of(rating: PlanCost, *, left: Callable[[], float], least: float = 0.01) -> Iterator[Gain]:
    """Plan again under each change, and yield the changes that make the slowest rank faster.

    Yields nothing for plans of components written for TorchRec, which would plan differently.

    Args:
        rating: Costs of the plan.
        left: Returns the remaining seconds.
        least: Least share of the slowest rank's time that a change must save.
    """
    for text, tables, budgets in () if rating.is_custom else _changes(rating):
        if left() <= 0:
            return
        # no time limit for one change, so its result is reproducible; a gap of `least` could hide a
        # gain of this size
        result = plan_again(rating.lister, tables, budgets, tolerance=least / 2)
        if result is not None and result.slowest_ms <= rating.slowest_ms * (1 - least):
            yield Gain(text=text, slowest_ms=result.slowest_ms)


def _changes(rating: PlanCost) -> Iterator[tuple[str, tuple[PlannedTable, ...], tuple[Bytes, ...]]]:
    """Yield possible changes, each with the tables and budgets after it."""
    tables = tuple(rated.table for rated in rating.tables)
    budgets = rating.budgets
    if rating.placement is None:
        yield "Let the planner place all tables", tables, budgets
    for text, freed in _freed(rating, tables):
        yield text, freed, budgets
    if rating.topology.world_size > 1 and any(max(t.wire_bytes) > 2 for t in tables):
        there_and_back = [(min(t.wire_bytes[0], 2.0), min(t.wire_bytes[1], 2.0)) for t in tables]
        pairs = zip(tables, there_and_back, strict=True)
        narrow = tuple(replace(table, wire_bytes=wire) for table, wire in pairs)
        text = "Send embeddings and their gradients in 16 bits (qcomm_codecs_registry)"
        yield text, narrow, budgets
    halves = with_half_weights(tables)
    if halves != tables:
        yield "Keep weights in 16 bits (data_type=DataType.FP16)", halves, budgets
    if fullness(rating) > _FULL:
        more = tuple(budget + budget for budget in budgets)
        yield "Have twice the memory free for tables", tables, more


def _freed(
    rating: PlanCost, tables: tuple[PlannedTable, ...]
) -> Iterator[tuple[str, tuple[PlannedTable, ...]]]:
    """Yield changes that remove the constraints on one costly table, or on all tables."""
    freed = {(table.path, table.name): table for table in rating.unconstrained}
    longest = sorted(rating.placed[rating.slowest_rank], key=lambda entry: -entry[1])
    keys = dict.fromkeys((rated.table.path, rated.table.name) for _, _, rated in longest)
    costly = [key for key in keys if key in freed][:2]
    lifts = [(f"table {key[1]!r}", {key: freed[key]}) for key in costly]
    if set(costly) != freed.keys():
        lifts.append((f"all {len(freed)} tables that have some", freed))
    for which, lifted in lifts:
        text = f"Lift the constraints on {which}"
        yield text, tuple(lifted.get((t.path, t.name), t) for t in tables)


def fullness(rating: PlanCost) -> float:
    """Return the used share of the fullest memory of a rank."""
    return max(
        used / max(free, 1) for both in rating.memory for used, free in zip(*both, strict=True)
    )


# -- other options for one table -------------------------------------------------------------------


class Alternative(NamedTuple):
    """Another option for a table, with all other tables unchanged.

    Attributes:
        option: Option.
        slowest_ms: Milliseconds of the slowest rank, on the best ranks found.
        work_ms: Milliseconds of the table on all ranks together.
        bytes_over: Missing bytes on the emptiest ranks; 0 if it fits.
        host: Whether host memory is missing.
    """

    option: TableOption
    slowest_ms: float
    work_ms: float
    bytes_over: int = 0
    host: bool = False


def alternatives(
    rating: PlanCost, table: TableCost, options: Sequence[TableOption]
) -> list[Alternative]:
    """Return the best option of each sharding type and kernel, without the plan's own option.

    Args:
        rating: Costs of the plan.
        table: Placement of the table in the plan.
        options: All options of the table.

    Returns:
        Best first: options that fit, then least time of the slowest rank, then least work.
    """
    plan_shape = _shape(table.option)
    others = [option for option in options if _shape(option) != plan_shape]
    ranks = _ranks_without(rating, table)
    # each option is a table of its own: options of one table would lose the dominated ones, and the
    # index of an option would not be its number
    arrays = ShardArrays(Problem(ranks=ranks, tables=[[option] for option in others]))
    assignment = Assignment(arrays, arrays.most_ms())
    best: dict[tuple[ShardingType, object], Alternative] = {}
    for index, option in enumerate(others):
        assignment.add(index, assignment.best_ranks(index)[0])
        # not the running sums, since repeated `add` and `remove` accumulate rounding errors
        ms_R, free_RM = assignment.exact_loads()
        over = arrays.both_pools(np.maximum(-free_RM, 0).max(axis=0))
        other = Alternative(
            option=option,
            slowest_ms=float(ms_R.max()),
            work_ms=float((ms_R - arrays.base_R).sum()),
            bytes_over=max(over),
            host=over[1] > over[0],
        )
        assignment.remove(index)
        key = (option.sharding_type, option.compute_kernel)
        if key not in best or _order(other) < _order(best[key]):
            best[key] = other
    return sorted(best.values(), key=_order)


def _ranks_without(rating: PlanCost, table: TableCost) -> Ranks:
    """Return the ranks with the loads of a plan without one table."""
    problem = problem_of(rating.topology, rating.budgets, [])
    loads = [cost.total for cost in rating.costs]
    used = [stored.total for stored in rating.storage]
    for rank, shard, shard_ms in table.shards:
        # the difference of sums of floats may be slightly negative
        loads[rank] = max(loads[rank] - shard_ms, 0.0)
        used[rank] = Bytes(*map(sub, used[rank], shard.memory))
    return replace(problem.ranks, base_ms=loads, base_memory=used)


def _order(alternative: Alternative) -> tuple[int, float, float]:
    # rounded, so that rounding errors do not break ties
    slowest_ms = float(f"{alternative.slowest_ms:.6g}")
    return alternative.bytes_over, slowest_ms, alternative.work_ms


def _shape(option: TableOption) -> tuple[object, ...]:
    """Return a key of an option that does not depend on how identical shards are grouped."""
    sizes = [(run.rows, run.cols) for run in option.shards for _ in range(run.count)]
    return option.sharding_type, option.compute_kernel, sizes


# -- tables that do not fit ------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class InfeasibilityReport:
    """Tables for which no placement was found.

    Args:
        lister: Lists the options of a table on the machine.
        listed: All tables with their options.
        budgets: Bytes that are free for tables, by rank.
        constraints: Constraints by table name.
        tables_under: Returns the tables under other constraints.
    """

    lister: OptionLister
    listed: Sequence[tuple[PlannedTable, Sequence[TableOption]]]
    budgets: Sequence[Bytes]
    constraints: Constraints
    tables_under: Callable[[Constraints], Sequence[PlannedTable]]

    def error(self, error: InfeasibleError) -> PlannerError:
        """Return the error to raise, with tables, missing bytes and remedies."""
        misfit = self._one_too_big(error) if error.too_big else self._all_too_big(error)
        message = f"{misfit}\n{self._remedies(error)}"
        return PlannerError(message, PlannerErrorType.INSUFFICIENT_STORAGE)

    @property
    def _tables(self) -> list[PlannedTable]:
        return [table for table, _ in self.listed]

    def _one_too_big(self, error: InfeasibleError) -> str:
        table, options = self.listed[error.too_big[0]]
        others = [f"{self._tables[index].name!r}" for index in error.too_big[1:]]
        also = f"\nThe same holds for {shorten(others)}." if others else ""
        return f"{_describe(table)} does not fit on {self._where()} of {self._tried(options)}{also}"

    def _all_too_big(self, error: InfeasibleError) -> str:
        over = ", and ".join(
            f"{mib(size)} more of {name} memory than there is"
            for size, name in zip(error.bytes_over, self._caps, strict=True)
            if size
        )
        largest = sorted(self._tables, key=lambda t: -sum(t.whole))[:3]
        verdict = "do not fit" if error.proven else "were not found to fit"
        budget = max(self.budgets, key=sum)
        return (
            f"The {len(self._tables)} tables {verdict} on {self._where()} of "
            f"{mib(self.lister.topology.memory_cap)} each, of which {mib(max(budget.device, 0))} "
            f"are free for tables: they need at least {over or 'memory that no rank has left'}. "
            f"The largest: {'; '.join(map(_describe, largest))}."
        )

    def _where(self) -> str:
        return f"the {self.lister.topology.world_size} {self.lister.topology.compute_device} ranks"

    @property
    def _caps(self) -> dict[str, int]:
        """Bytes of each memory of a rank, by its name."""
        topology = self.lister.topology
        return {topology.compute_device: topology.memory_cap, "host": topology.host_cap}

    def _tried(self, options: Sequence[TableOption]) -> str:
        """Return the available memory, and a table with the memory that each option needs."""
        rows, scarce = [], {}
        for option in options:
            # FIXED options need memory on every rank, including the smallest
            budget = (min if option.reach is Reach.FIXED else max)(self.budgets, key=sum)
            for pool, memory in enumerate(self._caps):
                needed = max(shard.memory[pool] for shard in option.shards)
                if needed > budget[pool]:
                    kind, ranks = option.sharding_type.value, str(option.num_ranks)
                    rows.append((kind, ranks, mib(needed), mib(needed - budget[pool]), memory))
                    scarce[memory] = budget[pool]
        budgets = ", and ".join(
            f"{mib(self._caps[memory])}{' of host memory' if memory == 'host' else ''} each, of "
            f"which {mib(max(free, 0))} are free for it"
            for memory, free in scarce.items()
        )
        head = ("sharding type", "ranks", "bytes per rank", "over by", "memory")
        return f"{budgets}. Tried:\n{format_table(head, rows)}"

    def _remedies(self, error: InfeasibleError) -> str:
        """Return the changes with which everything fits, each found by planning with it."""
        deadline = time.monotonic() + _SECONDS
        nodes = self.lister.topology.num_nodes
        remedies = [
            text
            for text, tables in self._other_tables()
            if time.monotonic() < deadline and self._fits(tables, nodes)
        ]
        world_size = self._ranks_that_do(error, deadline)
        if world_size is not None:
            remedies.append(f"{world_size} ranks like these")
        if remedies:
            return f"Each of these changes would suffice: {'; '.join(remedies)}."
        return (
            "No change was found to suffice: other sharding types, weights of 16 bits, tables in "
            "host memory, more ranks. Make tables smaller, or reserve less memory."
        )

    def _other_tables(self) -> Iterator[tuple[str, Sequence[PlannedTable]]]:
        if free := unconstrained(self.constraints):
            text = "the tables without constraints on sharding_types and compute_kernels"
            yield text, self.tables_under({**self.constraints, **free})
        yield "weights of 16 bits (data_type=DataType.FP16)", with_half_weights(self._tables)
        if self.lister.topology.compute_device == "cuda":
            kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
            in_host = {
                table.name: replace(
                    self.constraints.get(table.name, ParameterConstraints()),
                    compute_kernels=[kernel],
                    # True is an error with this kernel
                    enforce_hbm=None,
                )
                for table in self._tables
            }
            text = f"tables in host memory (compute_kernels=[{kernel!r}])"
            yield text, self.tables_under(in_host)

    def _ranks_that_do(self, error: InfeasibleError, deadline: float) -> int | None:
        """Return the least number of ranks found to suffice, in whole nodes."""
        node, too_few = self.lister.topology.local_world_size, self.lister.topology.num_nodes
        tables = self._tables
        enough = max(-(-(error.ranks_needed or 0) // node), too_few + 1)
        while enough * node <= _MOST_RANKS and time.monotonic() < deadline:
            if self._fits(tables, enough):
                break
            too_few, enough = enough, 2 * enough
        else:  # without `break`: no number of nodes within the limits was found
            return None
        while enough - too_few > 1 and time.monotonic() < deadline:
            # invariant: `enough` nodes fit, `too_few` nodes do not
            middle = (too_few + enough) // 2
            fits = self._fits(tables, middle)
            too_few, enough = (too_few, middle) if fits else (middle, enough)
        return enough * node

    def _fits(self, tables: Sequence[PlannedTable], num_nodes: int) -> bool:
        """Return whether a placement is found on this machine with another number of nodes."""
        topology = self.lister.topology.with_nodes(num_nodes)
        # the order in which `with_nodes` repeats the ranks
        budgets = [self.budgets[r % len(self.budgets)] for r in range(topology.world_size)]
        limits = {"seconds": _SEARCH_SECONDS, "tolerance": _ANY_GAP}
        return plan_again(self.lister.on(topology), tables, budgets, **limits) is not None


def check_fits(rating: PlanCost) -> None:
    """Raise unless every rank has enough memory for a plan.

    Raises:
        PlannerError: Names the rank that lacks most memory, its largest tables, and the missing
            bytes.
    """
    over = {
        (rank, pool): used - free
        for rank, both in enumerate(rating.memory)
        for pool, (used, free) in enumerate(zip(*both, strict=True))
        if used > free
    }
    if not over:
        return
    rank, pool = worst = max(over, key=lambda place: over[place])
    sizes = [(shard.memory[pool], rated.table) for shard, _, rated in rating.placed[rank]]
    largest = sorted(sizes, key=lambda entry: -entry[0])
    tables = [f"{table.name!r} of module {table.path!r} ({mib(size)})" for size, table in largest]
    memory = "host" if pool else rating.topology.compute_device
    ranks = len({owner for owner, _ in over})
    others = f"; {ranks - 1} other ranks lack some, too" if ranks > 1 else ""
    needed, free = (size[pool] for size in rating.memory[rank])
    raise PlannerError(
        f"A plan must fit into memory; received one that needs {mib(needed)} of {memory} memory on "
        f"rank {rank}, which has {mib(free)} free for tables: {mib(over[worst])} too much{others}. "
        f"On rank {rank} are {shorten(tables)}. Move or split some of them.",
        PlannerErrorType.INSUFFICIENT_STORAGE,
    )


def _describe(table: PlannedTable) -> str:
    state = " with its gradient" if table.has_gradient else ""
    if table.optimizer is not None:
        state = " with optimizer state"
    return (
        f"Table {table.name!r} of module {table.path!r} ({table.rows} x {table.dim}, "
        f"{mib(sum(table.whole))}{state})"
    )

"""Exact search of small problems by a mixed-integer program (HiGHS).

Loads and bytes are in units of a known feasible value, since the solver treats anything below a
millionth as zero. Identical shards share their variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from recsys.distributed.planner.assignment import OVERFULL, Assignment
from recsys.distributed.planner.options import Reach
from recsys.distributed.planner.shard_arrays import Floats, Ints, ShardArrays

_ZERO = 1e-6  # to the solver
_Terms: TypeAlias = list[tuple[int, float]]  # variables with their coefficients


class Solved(NamedTuple):
    """Result of the exact search.

    Attributes:
        assignment: Best placement; None if none is better than the known one.
        bound_ms: Lower bound on the slowest rank of any placement.
        finished: Whether no limit ended the search.
    """

    assignment: Assignment | None
    bound_ms: float
    finished: bool


def solve_exactly(
    arrays: ShardArrays,
    options: Ints,
    *,
    bound_ms: float,
    known_ms: float,
    unit_ms: float | None = None,
    seconds: float = np.inf,
    max_nodes: int | None = None,
) -> Solved:
    """Search all placements that may be better than the known one.

    Args:
        arrays: Problem.
        options: Options that a best placement may contain.
        bound_ms: Lower bound on the slowest rank.
        known_ms: Upper bound on the slowest rank of the best placement.
        unit_ms: Unit of the assignment's loads; `known_ms` if None.
        seconds: Time limit.
        max_nodes: Limit of the search tree, which is reproducible, unlike a time limit.
    """
    # imported when a problem is solved, since scipy is slow to import:
    # docs/decisions/planner.md, "Bounds, packing, and exact solutions of small problems"
    from scipy.optimize import Bounds, LinearConstraint, milp

    program = _Program(arrays, options, unit_ms=known_ms)
    integral = np.append(0, np.ones(program.num_columns - 1))
    # slightly below the bound, whose rounding error could exclude the optimum
    low = (1 - integral) * min(bound_ms / known_ms, 1.0) * (1 - _ZERO)
    limits = {"time_limit": seconds, **({"node_limit": max_nodes} if max_nodes else {})}
    result = milp(
        1 - integral,
        integrality=integral,
        bounds=Bounds(low, np.ones(program.num_columns)),
        constraints=LinearConstraint(*program.rows()),
        # the default of HiGHS, 1e-4, is above the 1e-5 of `SearchResult.optimal`
        options={"mip_rel_gap": 1e-7, **limits},
    )
    # 0: optimal; 2: infeasible; other values: a limit or an error
    finished = result.status in (0, 2)
    assignment = None
    if result.x is not None:
        assignment = program.assignment(result.x, unit_ms or known_ms)
        if assignment.peak >= OVERFULL:  # fits only within the solver's tolerance
            assignment, finished = None, False
    # status 2: nothing below the limit
    # None: a limit ended the solver before it had a bound
    bound = 1.0 if result.status == 2 else result.mip_dual_bound or 0.0
    return Solved(
        assignment=assignment,
        bound_ms=max(bound_ms, min(bound, 1.0) * (1 - _ZERO) * known_ms),
        finished=finished,
    )


def count_variables(arrays: ShardArrays, options: Ints) -> int:
    """Return the approximate number of variables of the program."""
    runs = [
        1 if arrays.is_fixed_O[option] else len(arrays.options[option].shards) * arrays.num_ranks
        for option in options.tolist()
    ]
    return sum(runs) + len(options)


class _Run(NamedTuple):
    """Identical shards of one option.

    Attributes:
        shards: Their numbers.
        column_of_rank: For each rank the variable whether it has one of them. Ranks of a node share
            it if either all or none of them have a shard.
    """

    shards: Ints
    column_of_rank: list[int]


@final
class _Program:
    """Variables and rows. Variable 0 is the load of the slowest rank, the others are binary.

    Args:
        arrays: Problem.
        options: Options that may be chosen.
        unit_ms: Milliseconds of a load of 1.
    """

    def __init__(self, arrays: ShardArrays, options: Ints, *, unit_ms: float) -> None:
        self._arrays = arrays
        self._unit_ms = unit_ms
        self._rows: list[tuple[_Terms, float, float]] = []
        self.num_columns = 1
        self._column_of = {int(option): self._columns(1)[0] for option in options}
        self._runs = {option: self._add_shards(option) for option in self._column_of}
        self._add_tables()
        self._add_ranks()

    def _add(self, terms: _Terms, low: float, high: float) -> None:
        """Add `low <= terms <= high`."""
        self._rows.append((terms, low, high))

    def rows(self) -> tuple[Any, Sequence[float], Sequence[float]]:
        """Return all rows: a sparse matrix, and the lower and upper limit of each."""
        from scipy.sparse import coo_array

        terms = [(row, *term) for row, (of_row, _, _) in enumerate(self._rows) for term in of_row]
        rows, columns, values = zip(*terms, strict=True)
        shape = (len(self._rows), self.num_columns)
        _, low, high = zip(*self._rows, strict=True)
        return coo_array((values, (rows, columns)), shape=shape).tocsr(), low, high

    def _columns(self, count: int) -> list[int]:
        self.num_columns += count
        return list(range(self.num_columns - count, self.num_columns))

    def _add_shards(self, option: int) -> list[_Run]:
        """Add the constraints on the ranks of an option's shards."""
        arrays, shards = self._arrays, self._arrays.shards_of(option)
        reach, chosen = arrays.options[option].reach, self._column_of[option]
        if reach is Reach.FIXED:
            return []
        if reach is Reach.ANYWHERE:
            runs = self._add_runs(shards)
            for run in runs:
                self._add_sum(run.column_of_rank, chosen, len(run.shards))
            for columns in zip(*(run.column_of_rank for run in runs), strict=True):
                self._add_sum(columns, chosen, 1, at_most=True)
            return runs
        size = arrays.node_size
        num_nodes = arrays.num_ranks // size
        groups = [shards] if reach is Reach.ONE_NODE else list(shards.reshape(-1, size))
        if len(groups[0]) == size and (arrays.run_P[shards] == arrays.run_P[shards[0]]).all():
            nodes = self._columns(num_nodes)
            self._add_sum(nodes, chosen, len(groups))
            return [_Run(shards=shards, column_of_rank=[n for n in nodes for _ in range(size)])]
        runs = []
        nodes_of_groups: list[list[int]] = []
        for group in groups:
            nodes = self._columns(num_nodes)
            nodes_of_groups.append(nodes)
            self._add_sum(nodes, chosen, 1)
            of_group = self._add_runs(group)
            for run in of_group:
                for node, column in enumerate(nodes):
                    here = run.column_of_rank[node * size : (node + 1) * size]
                    self._add_sum(here, column, len(run.shards))
            for columns in zip(*(run.column_of_rank for run in of_group), strict=True):
                # at most one shard of the table on a rank
                self._add([(column, 1.0) for column in columns], -np.inf, 1)
            runs += of_group
        # Reach.NODES: each group has a node of its own
        for columns in zip(*nodes_of_groups, strict=True):
            self._add_sum(columns, chosen, 1, at_most=True)
        return runs

    def _add_runs(self, shards: Ints) -> list[_Run]:
        """Add a variable for each rank and each run of identical shards."""
        ends = np.flatnonzero(np.diff(self._arrays.run_P[shards])) + 1
        return [
            _Run(shards=shards[a:b], column_of_rank=self._columns(self._arrays.num_ranks))
            for a, b in pairwise([0, *ends.tolist(), len(shards)])
        ]

    def _add_sum(
        self, columns: Sequence[int], whole: int, times: int, *, at_most: bool = False
    ) -> None:
        """Add that variables sum to a multiple of another variable, or to at most that."""
        terms = [*((column, 1.0) for column in columns), (whole, -times)]
        self._add(terms, -np.inf if at_most else 0, 0)

    def _add_tables(self) -> None:
        """Add that each table has one option, and that the slowest rank takes at least as long."""
        arrays, of_table = self._arrays, dict[int, _Terms]()
        for option, column in self._column_of.items():
            if arrays.is_fixed_O[option]:
                cost_N, _ = arrays.fixed(option)
                peak = (cost_N + arrays.base_R[: len(cost_N)]).max()
            else:
                cost_PK = arrays.cost_PK[arrays.shards_of(option)]
                peak = cost_PK[:, np.unique(arrays.kind_R)].min(axis=1).max()
            of_option = (column, float(peak) / self._unit_ms)
            of_table.setdefault(int(arrays.table_O[option]), []).append(of_option)
        for peaks in of_table.values():
            self._add([(column, 1.0) for column, _ in peaks], 1, 1)
            # the rows of the ranks imply this for whole numbers; it raises the bound of the
            # relaxation
            self._add([*peaks, (0, -1.0)], -np.inf, 0)

    def _add_ranks(self) -> None:
        """Add the load and the memory of each rank."""
        arrays, all_R = self._arrays, np.arange(self._arrays.num_ranks)
        unit_X = np.append(self._unit_ms, np.maximum(arrays.free_RM.max(axis=0, initial=0), 1))
        # rows of time: costs minus the load of the slowest rank are at most minus the base
        free_RX = np.column_stack([-arrays.base_R, arrays.free_RM]) / unit_X
        terms = [[[(0, -1.0)], *(_Terms() for _ in arrays.pools)] for _ in arrays.kind_R]
        for option, column in self._column_of.items():
            parts = []
            if arrays.is_fixed_O[option]:
                parts = [([column] * arrays.num_ranks, *arrays.fixed(option))]
            for run in self._runs[option]:
                alike_R = np.full(arrays.num_ranks, run.shards[0])
                parts.append((run.column_of_rank, *arrays.added_by(alike_R, all_R)))
            for columns, cost_N, memory_NM in parts:
                taken_NX = np.column_stack([cost_N, memory_NM]) / unit_X
                # not strict: a FIXED option may have fewer shards than there are ranks
                for of_rank, where, taken_X in zip(terms, columns, taken_NX, strict=False):
                    for of_row, taken in zip(of_rank, taken_X, strict=True):
                        of_row.append((where, taken))
        for of_rank, free_X in zip(terms, free_RX, strict=True):
            for of_row, free in zip(of_rank, free_X, strict=True):
                self._add(of_row, -np.inf, free)

    def assignment(self, values: Floats, unit_ms: float) -> Assignment:
        """Return the placement of a solution."""
        assignment = Assignment(self._arrays, unit_ms)
        for option, column in self._column_of.items():
            # the solver returns binary variables with a tolerance
            if values[column] < 0.5:
                continue
            ranks = np.zeros(len(self._arrays.shards_of(option)), dtype=np.int64)
            for run in self._runs[option]:
                there = np.flatnonzero(values[run.column_of_rank] > 0.5)
                ranks[run.shards - self._arrays.first_O[option]] = there
            assignment.add(option, ranks)
        return assignment

"""The problem as a mixed-integer program (HiGHS), for problems that are small.

Loads and bytes are in units of what is known to be possible, so that the solver, to which anything
below a millionth is zero, sees numbers near 1. Like pieces share their variables, as it does not
matter which of them is where.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, final

import numpy as np

from recsys.distributed.planner.packing import OVERFULL, Packing
from recsys.distributed.planner.piece_arrays import Floats, Ints, PieceArrays
from recsys.distributed.planner.placement import Reach

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_ZERO = 1e-6  # to the solver


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """What the exact search found.

    Attributes:
        packing: the best placement; None if none is better than what was known.
        bound_ms: no placement has a slowest rank that takes less.
        finished: whether no limit ended the search.
    """

    packing: Packing | None
    bound_ms: float
    finished: bool


def solve_exactly(
    arrays: PieceArrays,
    options: Ints,
    *,
    bound_ms: float,
    known_ms: float,
    seconds: float = np.inf,
    max_nodes: int | None = None,
) -> Solved:
    """Searches all placements that may be better than what is known.

    Args:
        arrays: what to place.
        options: those that a best placement may contain.
        bound_ms: a lower bound on the slowest rank.
        known_ms: an upper bound on the slowest rank of the best placement.
        seconds: time limit.
        max_nodes: limit of the tree, which unlike a time limit ends it in the same place always.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    program = _Program(arrays, options, unit_ms=known_ms)
    integral = np.ones(program.num_columns)
    integral[0] = 0
    low, high = np.zeros(program.num_columns), np.ones(program.num_columns)
    low[0] = min(bound_ms / known_ms, 1.0) * (1 - _ZERO)
    objective = 1 - integral
    limits = {"time_limit": seconds} if np.isfinite(seconds) else {}
    result = milp(
        objective,
        integrality=integral,
        bounds=Bounds(low, high),
        constraints=LinearConstraint(program.rows.matrix(program.num_columns), *program.rows.sides),
        options={"mip_rel_gap": 1e-7, **limits, **({"node_limit": max_nodes} if max_nodes else {})},
    )
    finished = result.status in (0, 2)
    packing = None
    if result.x is not None:
        packing = program.packing(result.x)
        if packing.peak >= OVERFULL:  # fits only to the solver's eyes
            packing, finished = None, False
    if result.status == 2:  # nothing below the limit
        bound = 1.0
    else:
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else 0.0
    return Solved(
        packing=packing,
        bound_ms=max(bound_ms, min(bound, 1.0) * (1 - _ZERO) * known_ms),
        finished=finished,
    )


def count_variables(arrays: PieceArrays, options: Ints) -> int:
    """Returns about how many variables the program has."""
    runs_O = np.array(
        [
            1 if reach is Reach.FIXED else len(option.pieces) * arrays.num_ranks
            for reach, option in zip(arrays.reach_O, arrays.options, strict=True)
        ]
    )
    return int(runs_O[options].sum()) + len(options)


@final
@dataclass(kw_only=True, slots=True)
class _Rows:
    """Linear constraints ``low <= coefficients @ x <= high`` in the making."""

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    at: list[tuple[int, int]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        row = len(self.low)
        self.low.append(low)
        self.high.append(high)
        self.at += [(row, column) for column, _ in terms]
        self.values += [value for _, value in terms]

    @property
    def sides(self) -> tuple[list[float], list[float]]:
        return self.low, self.high

    def matrix(self, num_columns: int) -> csr_array:
        from scipy.sparse import coo_array

        rows, columns = np.array(self.at).T
        shape = (len(self.low), num_columns)
        return coo_array((self.values, (rows, columns)), shape=shape).tocsr()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Like pieces of one option.

    Attributes:
        pieces: their numbers.
        column_of_rank: the variable that says whether one of them is on a rank. Ranks of a node
            share it where all of them get a piece or none.
    """

    pieces: Ints
    column_of_rank: list[int]


@final
class _Program:
    """Variables and rows. Variable 0 is the load of the slowest rank, the others are yes or no.

    Args:
        arrays: what to place.
        options: those that may be chosen.
        unit_ms: load that variable 0 counts as 1.
    """

    def __init__(self, arrays: PieceArrays, options: Ints, *, unit_ms: float) -> None:
        self._arrays = arrays
        self._unit_ms = unit_ms
        self.rows = _Rows()
        self.num_columns = 1
        self._column_of = {int(option): self._columns(1)[0] for option in options}
        self._runs = {option: self._add_pieces(option) for option in self._column_of}
        self._add_tables()
        self._add_ranks()

    def _columns(self, count: int) -> list[int]:
        self.num_columns += count
        return list(range(self.num_columns - count, self.num_columns))

    def _add_pieces(self, option: int) -> list[_Run]:
        """Adds what says where the pieces of an option may go."""
        arrays, reach, rows = self._arrays, self._arrays.reach_O[option], self.rows
        chosen, pieces = self._column_of[option], self._arrays.pieces_of(option)
        if reach is Reach.FIXED:
            return []
        if reach is Reach.ANYWHERE:
            runs: list[_Run] = []
            for alike in _runs_of(arrays, pieces):
                runs.append(_Run(pieces=alike, column_of_rank=self._columns(arrays.num_ranks)))
                terms = [(column, 1.0) for column in runs[-1].column_of_rank]
                rows.add([*terms, (chosen, -len(alike))], 0, 0)
            for rank in range(arrays.num_ranks):
                columns = [run.column_of_rank[rank] for run in runs]
                rows.add([*((column, 1.0) for column in columns), (chosen, -1)], -np.inf, 0)
            return runs
        size = arrays.ranks.node_size
        num_nodes = arrays.num_ranks // size
        groups = [pieces] if reach is Reach.ONE_NODE else list(pieces.reshape(-1, size))
        if len(groups[0]) == size and (arrays.run_P[pieces] == arrays.run_P[pieces[0]]).all():
            nodes = self._columns(num_nodes)
            rows.add([*((node, 1.0) for node in nodes), (chosen, -len(groups))], 0, 0)
            columns_of_rank = [column for column in nodes for _ in range(size)]
            return [_Run(pieces=pieces, column_of_rank=columns_of_rank)]
        runs = []
        nodes_of_groups: list[list[int]] = []
        for group in groups:
            nodes = self._columns(num_nodes)
            nodes_of_groups.append(nodes)
            rows.add([*((node, 1.0) for node in nodes), (chosen, -1)], 0, 0)
            of_group = [
                _Run(pieces=alike, column_of_rank=self._columns(arrays.num_ranks))
                for alike in _runs_of(arrays, group)
            ]
            for run in of_group:
                for node, column in enumerate(nodes):
                    here = run.column_of_rank[node * size : (node + 1) * size]
                    rows.add([*((c, 1.0) for c in here), (column, -len(run.pieces))], 0, 0)
            for rank in range(arrays.num_ranks):
                rows.add([(run.column_of_rank[rank], 1.0) for run in of_group], -np.inf, 1)
            runs += of_group
        for node in range(num_nodes):
            terms = [(nodes[node], 1.0) for nodes in nodes_of_groups]
            rows.add([*terms, (chosen, -1)], -np.inf, 0)
        return runs

    def _add_tables(self) -> None:
        """Adds that each table has one option, which takes no longer than the slowest rank."""
        arrays = self._arrays
        of_table: dict[int, list[int]] = {}
        for option in self._column_of:
            of_table.setdefault(int(arrays.table_O[option]), []).append(option)
        for options in of_table.values():
            self.rows.add([(self._column_of[option], 1.0) for option in options], 1, 1)
            peaks = [
                (self._column_of[option], self._peak_ms(option) / self._unit_ms)
                for option in options
            ]
            self.rows.add([*peaks, (0, -1.0)], -np.inf, 0)

    def _peak_ms(self, option: int) -> float:
        if self._arrays.reach_O[option] is Reach.FIXED:
            ranks, cost_N, _ = self._arrays.fixed_at(option)
            return float((cost_N + self._arrays.ranks.base_R[ranks]).max())
        pieces = self._arrays.pieces_of(option)
        of_kind_K = np.isin(np.arange(self._arrays.num_kinds), self._arrays.ranks.kind_R)
        return float(self._arrays.cost_PK[pieces][:, of_kind_K].min(axis=1).max())

    def _add_ranks(self) -> None:
        """Adds the load and the memory of each rank."""
        arrays, ranks = self._arrays, self._arrays.ranks
        sorts = len(ranks.sorts)
        loads: list[list[tuple[int, float]]] = [[(0, -1.0)] for _ in ranks.kind_R]
        unit_M = np.maximum(ranks.free_RM.max(axis=0, initial=0), 1)
        sizes: list[list[list[tuple[int, float]]]] = [
            [[] for _ in range(sorts)] for _ in ranks.kind_R
        ]
        for option, column in self._column_of.items():
            if arrays.reach_O[option] is Reach.FIXED:
                for rank, cost, memory_M in zip(*arrays.fixed_at(option), strict=True):
                    loads[rank].append((column, cost / self._unit_ms))
                    for m in range(sorts):
                        sizes[rank][m].append((column, memory_M[m] / unit_M[m]))
            for run in self._runs[option]:
                piece = run.pieces[0]
                for rank, where in enumerate(run.column_of_rank):
                    cost = arrays.cost_PK[piece, ranks.kind_R[rank]]
                    loads[rank].append((where, cost / self._unit_ms))
                    for m in range(sorts):
                        sizes[rank][m].append((where, arrays.memory_PM[piece, m] / unit_M[m]))
        for rank, terms in enumerate(loads):
            self.rows.add(terms, -np.inf, -ranks.base_R[rank] / self._unit_ms)
            for m in range(sorts):
                self.rows.add(sizes[rank][m], -np.inf, ranks.free_RM[rank, m] / unit_M[m])

    def packing(self, values: Floats) -> Packing:
        """Returns the placement that a solution describes."""
        packing = Packing(self._arrays, self._unit_ms)
        for option, column in self._column_of.items():
            if values[column] < 0.5:
                continue
            ranks = np.zeros(len(self._arrays.pieces_of(option)), dtype=np.int64)
            for run in self._runs[option]:
                there = np.flatnonzero(values[run.column_of_rank] > 0.5)
                ranks[run.pieces - self._arrays.first_O[option]] = there
            packing.add(option, ranks)
        return packing


def _runs_of(arrays: PieceArrays, pieces: Ints) -> list[Ints]:
    """Splits pieces where like ones end."""
    ends = np.flatnonzero(np.diff(arrays.run_P[pieces])) + 1
    return [pieces[a:b] for a, b in pairwise([0, *ends.tolist(), len(pieces)])]

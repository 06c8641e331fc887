"""Assignment of shards to ranks, and its greedy construction.

One number measures a rank, its load: its time in a given unit, plus a penalty above any time if its
memory is exceeded. Assignments that do not fit thus compare like slow ones, and moving load off the
slowest rank also makes it fit.

Shape suffixes as in `shard_arrays`; also S slots of a rank, N shards of one option, and J nodes.
"""

from __future__ import annotations

import copy
import time
from typing import final

import numpy as np

from recsys.distributed.planner.options import Reach
from recsys.distributed.planner.placement import Choice, Method, SearchResult
from recsys.distributed.planner.shard_arrays import Flags, Floats, Ints, ShardArrays

OVERFULL = 1e6  # load of a rank whose memory is exceeded
_MAX_RESCUES = 200  # tables that receive another option than requested


@final
class Assignment:
    """Partial or complete placement.

    Args:
        arrays: Problem.
        unit_ms: Milliseconds of a load of 1.

    Attributes:
        option_T: Option of each table, -1 if it is not placed.
        rank_P: Rank of each shard, -1 if its option is not chosen.
        load_R: Load of each rank.
        slots_RS: Shards on each rank, without FIXED options; -1 in free slots.
    """

    def __init__(self, arrays: ShardArrays, unit_ms: float) -> None:
        self.arrays = arrays
        # the unit is 0 if no shard takes time
        self._unit_ms = max(unit_ms, 1e-300)
        self._ms_R = arrays.base_R.copy()
        self._free_RM = arrays.free_RM.copy()
        # at least 1, as penalties divide by it
        self._full_M = np.maximum(arrays.free_RM.max(axis=0, initial=1.0), 1.0)
        self.option_T = np.full(arrays.num_tables, -1)
        # with thousands of tables on thousands of ranks there are millions of shards
        self.rank_P = np.full(len(arrays.table_P), -1, dtype=np.int32)
        self._slot_P = np.full(len(arrays.table_P), -1, dtype=np.int32)
        self.slots_RS = np.full((arrays.num_ranks, 8), -1)
        self.count_R = np.zeros(arrays.num_ranks, dtype=np.int64)
        self._even_memory = False
        self.load_R = self.loads(self._ms_R, self._free_RM)

    def copy(self) -> Assignment:
        """Return an independent copy."""
        # the problem is shared, since it does not change
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(twin, name, value.copy())
        return twin

    @property
    def peak(self) -> float:
        """Makespan: load of the slowest rank."""
        return float(self.load_R.max())

    def loads(self, ms_X: Floats, free_XM: Floats) -> Floats:
        """Return loads from milliseconds and free bytes, any shape X."""
        load_X = ms_X / self._unit_ms
        for m in range(free_XM.shape[-1]):
            free_X = free_XM[..., m]
            if (free_X < 0).any():
                # the penalty grows with the missing bytes, so each step toward a fit is a gain
                penalty_X = OVERFULL * (1 - free_X / self._full_M[m])
                load_X = load_X + np.where(free_X < 0, penalty_X, 0.0)
        return load_X

    def loads_after(self, ranks_X: Ints, added_ms_X: Floats, added_bytes_XM: Floats) -> Floats:
        """Return the loads of ranks, any shape X, with an additional load."""
        return self.loads(self._ms_R[ranks_X] + added_ms_X, self._free_RM[ranks_X] - added_bytes_XM)

    def add(self, option: int, ranks_N: Ints) -> None:
        """Place a table that is not placed."""
        table = int(self.arrays.table_O[option])
        self.option_T[table] = option
        if self.arrays.is_fixed_O[option]:
            self._shift(self.ranks_of(table), *self.arrays.fixed(option), 1.0)
        else:
            self.put(self.arrays.shards_of(option), ranks_N)

    def remove(self, table: int) -> None:
        """Remove a placed table."""
        option = int(self.option_T[table])
        if self.arrays.is_fixed_O[option]:
            self._shift(self.ranks_of(table), *self.arrays.fixed(option), -1.0)
        else:
            self.lift(self.arrays.shards_of(option))
        self.option_T[table] = -1

    def ranks_of(self, table: int) -> Ints:
        """Return the ranks of the shards of a placed table, in order."""
        option = int(self.option_T[table])
        if self.arrays.is_fixed_O[option]:
            return np.arange(self.arrays.options[option].num_ranks)
        return self.rank_P[self.arrays.first_O[option] : self.arrays.first_O[option + 1]]

    def put(self, shards_N: Ints, ranks_N: Ints) -> None:
        """Put unplaced shards on ranks, at most one on each."""
        slots_N = self.count_R[ranks_N]
        if slots_N.max(initial=0) >= self.slots_RS.shape[1]:
            # doubled, so that the copies of all growth together cost linear time
            self.slots_RS = np.hstack([self.slots_RS, np.full_like(self.slots_RS, -1)])
        self.slots_RS[ranks_N, slots_N] = shards_N
        self._slot_P[shards_N] = slots_N
        self.rank_P[shards_N] = ranks_N
        self.count_R[ranks_N] += 1
        self._shift(ranks_N, *self.arrays.added_by(shards_N, ranks_N), 1.0)

    def lift(self, shards_N: Ints) -> None:
        """Remove shards from their ranks, at most one from each."""
        ranks_N, slots_N = self.rank_P[shards_N], self._slot_P[shards_N]
        # the last shard of a rank fills the gap; its old slot is cleared last, since it may be the
        # shard that is removed
        last_N = self.count_R[ranks_N] - 1
        moved_N = self.slots_RS[ranks_N, last_N]
        self.slots_RS[ranks_N, slots_N] = moved_N
        self._slot_P[moved_N] = slots_N
        self.slots_RS[ranks_N, last_N] = -1
        self.count_R[ranks_N] = last_N
        self.rank_P[shards_N] = -1
        self._shift(ranks_N, *self.arrays.added_by(shards_N, ranks_N), -1.0)

    def _shift(self, ranks_N: Ints, cost_N: Floats, memory_NM: Floats, sign: float) -> None:
        # `+=` through an index array counts a repeated rank once, so ranks must be distinct
        self._ms_R[ranks_N] += sign * cost_N
        self._free_RM[ranks_N] -= sign * memory_NM
        self.load_R[ranks_N] = self.loads(self._ms_R[ranks_N], self._free_RM[ranks_N])

    def best_ranks(self, option: int) -> tuple[Ints, float]:
        """Return ranks for the shards of an unplaced table, and the load of the slowest of them."""
        arrays, reach = self.arrays, self.arrays.options[option].reach
        if reach is Reach.FIXED:
            ranks = np.arange(arrays.options[option].num_ranks)
            return ranks, float(self.loads_after(ranks, *arrays.fixed(option)).max())
        shards = arrays.shards_of(option)
        if reach is Reach.ANYWHERE:
            return self._best_anywhere(shards)
        free_J = np.ones(arrays.num_ranks // arrays.node_size, dtype=bool)
        groups = shards.reshape(-1, min(len(shards), arrays.node_size))  # ONE_NODE: one
        ranks, peak = np.empty_like(groups), 0.0
        # the group with the longest shard is placed first
        for group in np.argsort(-arrays.cost_PK[groups].max(axis=(1, 2)), kind="stable"):
            ranks[group], load = self._best_node(groups[group], free_J)
            free_J[ranks[group, 0] // arrays.node_size] = False
            peak = max(peak, load)
        return ranks.ravel(), peak

    def _loads_with(self, shard: int) -> Floats:
        """Return the load of every rank with a shard added to it."""
        arrays = self.arrays
        cost_K = arrays.cost_PK[shard]
        cost = cost_K[arrays.kind_R] if len(cost_K) > 1 else cost_K
        left_RM = self._free_RM - arrays.memory_PM[shard]
        load_R = self.loads(self._ms_R + cost, left_RM)
        if self._even_memory:
            for m, full in enumerate(self._full_M):
                # a full memory and a load of one unit count the same
                np.maximum(load_R, 1 - left_RM[:, m] / full, out=load_R)
        return load_R

    def _best_anywhere(self, shards: Ints) -> tuple[Ints, float]:
        arrays = self.arrays
        if len(shards) == 1:
            load_R = self._loads_with(int(shards[0]))
            rank = int(load_R.argmin())
            return np.array([rank]), float(load_R[rank])
        ranks, peak = np.empty_like(shards), 0.0
        order = np.argsort(-arrays.cost_PK[shards].max(axis=1), kind="stable")
        ends = np.flatnonzero(np.diff(arrays.run_P[shards[order]])) + 1
        used: Ints = np.empty(0, dtype=np.int64)
        for places in np.split(order, ends):  # identical shards
            # all ranks are compared once for a whole run; each takes at most one shard of a table
            load_R = self._loads_with(int(shards[places[0]]))
            load_R[used] = np.inf
            # stable: ties choose the lowest rank, and equal problems give equal plans:
            # docs/decisions/planner.md, "Bounds, packing, and exact solutions of small problems"
            ranks[places] = np.argsort(load_R, kind="stable")[: len(places)]
            peak = max(peak, float(load_R[ranks[places[-1]]]))
            used = np.append(used, ranks[places])
        return ranks, peak

    def _best_node(self, shards: Ints, free_J: Flags) -> tuple[Ints, float]:
        """Return ranks of the free node with the least load after the shards are added."""
        arrays, size = self.arrays, self.arrays.node_size
        order = np.argsort(-arrays.cost_PK[shards].max(axis=1), kind="stable")
        longest = int(shards[order[0]])
        # longest shard on the least loaded rank of the node, and so on
        before_JS = self._loads_with(longest).reshape(-1, size)
        # runs are numbered in order, so equal ends mean identical shards, and sorted loads suffice
        if arrays.run_P[shards[0]] == arrays.run_P[shards[-1]]:
            load_JN = np.sort(before_JS, axis=1)[:, : len(shards)]
        else:
            ranks_JN = np.argsort(before_JS, axis=1, kind="stable")[:, : len(shards)]
            ranks_JN = ranks_JN + np.arange(len(before_JS))[:, None] * size
            load_JN = self.loads_after(ranks_JN, *arrays.added_by(shards[order], ranks_JN))
        load_J = np.where(free_J, load_JN.max(axis=1), np.inf)
        node = int(load_J.argmin())
        ranks = np.empty_like(shards)
        ranks[order] = node * size + np.argsort(before_JS[node], kind="stable")[: len(shards)]
        return ranks, float(load_J[node])

    def fill(
        self,
        options: Ints,
        price_O: Floats,
        *,
        noise: Floats | None = None,
        even_memory: bool = False,
    ) -> None:
        """Place unplaced tables, in descending order of their longest shard.

        Args:
            options: One option for each table; if it does not fit, the cheapest option that fits is
                used.
            price_O: Prices of all options.
            noise: Factors that perturb the order.
            even_memory: Whether to balance the share of used memory as well as the load.
        """
        # read by `_loads_with`; local search afterwards compares loads only
        self._even_memory = even_memory
        # load of the longest shard of each option; FIXED options are first
        size_N = self.arrays.longest_O[options] / self._unit_ms
        if even_memory:
            share_NM = self.arrays.biggest_OM[options] / self._full_M
            size_N = np.maximum(size_N, share_NM.max(axis=1, initial=0.0))
        if noise is not None:
            size_N = size_N * noise
        rescues = _MAX_RESCUES
        for option in options[np.argsort(-size_N, kind="stable")].tolist():
            ranks, peak = self.best_ranks(option)
            if peak >= OVERFULL and rescues:
                rescues -= 1
                option, ranks = self._least_overfull(option, ranks, peak, price_O)
            self.add(option, ranks)
        self._even_memory = False

    def _least_overfull(
        self, option: int, ranks: Ints, peak: float, price_O: Floats
    ) -> tuple[int, Ints]:
        """Return the cheapest option of the same table that fits, or else the best one."""
        arrays = self.arrays
        table = arrays.table_O[option]
        others = np.arange(arrays.first_T[table], arrays.first_T[table + 1])
        for other in others[np.argsort(price_O[others], kind="stable")].tolist():
            if other != option and arrays.misses_O[other] == 0:
                other_ranks, other_peak = self.best_ranks(other)
                if other_peak < peak:
                    option, ranks, peak = other, other_ranks, other_peak
                if peak < OVERFULL:
                    break
        return option, ranks

    def placement(
        self, bound_ms: float, started: float, method: Method, timed_out: bool = False
    ) -> SearchResult:
        """Return the result of a search that started at a given time; all tables must be placed."""
        ms_R, _ = self.exact_loads()
        indices_T = enumerate(self.arrays.index_O[self.option_T].tolist())
        return SearchResult(
            choices=tuple(
                Choice(option=i, ranks=tuple(self.ranks_of(t).tolist())) for t, i in indices_T
            ),
            load_ms=tuple(ms_R.tolist()),
            # rounding errors may put the bound above the placement
            bound_ms=min(bound_ms, float(ms_R.max())),
            method=method,
            seconds=time.monotonic() - started,
            timed_out=timed_out,
        )

    def exact_loads(self) -> tuple[Floats, Floats]:
        """Return milliseconds, [R], and free bytes, [R, M], computed from the placements."""
        arrays, ms_R, free_RM = self.arrays, self.arrays.base_R.copy(), self.arrays.free_RM.copy()
        placed = self.option_T[self.option_T >= 0]
        for option in placed[np.argsort(arrays.is_fixed_O[placed], kind="stable")].tolist():
            ranks_N = self.ranks_of(int(arrays.table_O[option]))
            cost_N, memory_NM = arrays.added(option, ranks_N)
            ms_R[ranks_N] += cost_N
            free_RM[ranks_N] -= memory_NM
        return ms_R, free_RM

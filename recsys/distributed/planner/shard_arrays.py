"""A problem as flat arrays, without dominated options.

Shapes: T tables, O remaining options, P shards of the options that are not FIXED, R ranks,
K kinds of rank, M pools of memory in use (device, host).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from recsys.distributed.planner.options import Reach, Shards, TableOption
from recsys.distributed.planner.placement import InfeasibleError, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.signedinteger[Any]]
Flags = NDArray[np.bool_]

_FEW_RANKS = 256  # with more ranks, caching the arrays of FIXED options takes gigabytes


@final
class ShardArrays:
    """Numbered ranks, options and shards. Bytes are floats, exact up to 2 ** 53.

    Args:
        problem: Problem.

    Attributes:
        pools: Pools of memory in use: device (0), host (1).
        kind_R: Kind of each rank.
        base_R: Milliseconds before anything is placed.
        free_RM: Free bytes; negative if the base exceeds the capacity.
        node_size: Ranks per node.
        options: Options, [O].
        index_O: Index of each option among all options of its table.
        table_O: Table of each option.
        first_T: First option of each table; one more entry ends the last table.
        is_fixed_O: Whether the option is FIXED.
        first_O: First shard of each option among P; one more entry ends the last option. FIXED
            options have no shards here.
        table_P: Table of each shard.
        run_P: Number of each shard's run of identical shards.
        cost_PK: Milliseconds.
        memory_PM: Bytes.
    """

    def __init__(self, problem: Problem) -> None:
        ranks = problem.ranks
        lists = {id(options): options for options in problem.tables}  # tables may share one
        runs = [run for options in lists.values() for option in options for run in option.shards]
        taken = [*(run.memory for run in runs), *ranks.base_memory]
        self.pools = [m for m in (0, 1) if any(both[m] for both in taken)]
        free_R2 = np.array(ranks.memory_caps, dtype=np.float64)
        if ranks.base_memory:
            free_R2 = free_R2 - np.array(ranks.base_memory, dtype=np.float64)
        self.kind_R = np.array(ranks.kinds or [0] * len(ranks), dtype=np.int64)
        self.base_R = np.array(ranks.base_ms or [0.0] * len(ranks), dtype=np.float64)
        self.free_RM = free_R2[:, self.pools]
        self.node_size = ranks.node_size or len(ranks)
        self.num_ranks, self.num_kinds = len(ranks), ranks.num_kinds

        undominated = {key: _undominated(options) for key, options in lists.items()}
        kept = [undominated[id(options)] for options in problem.tables]
        self.options = [problem.tables[t][i] for t, indices in enumerate(kept) for i in indices]
        num_kept = [len(indices) for indices in kept]
        self.num_tables = len(kept)
        self.index_O = np.array([i for indices in kept for i in indices], dtype=np.int64)
        self.table_O = np.repeat(np.arange(len(kept)), num_kept)
        self.first_T = np.concatenate([[0], np.cumsum(num_kept, dtype=np.int64)])
        self.is_fixed_O = np.array([o.reach is Reach.FIXED for o in self.options], dtype=bool)

        num_shards = [0 if o.reach is Reach.FIXED else o.num_ranks for o in self.options]
        runs = [run for o in self.options if o.reach is not Reach.FIXED for run in o.shards]
        counts = [run.count for run in runs]
        self.first_O = np.concatenate([[0], np.cumsum(num_shards, dtype=np.int64)])
        # int32, since there may be millions of shards
        self.table_P = np.repeat(self.table_O.astype(np.int32), num_shards)
        self.run_P = np.repeat(np.arange(len(runs), dtype=np.int32), counts)
        self.cost_PK, self.memory_PM = self._numbers(runs)
        self._fixed: dict[int, tuple[Floats, Floats]] = {}

    @cached_property
    def longest_O(self) -> Floats:
        """Milliseconds of each option's longest shard; inf if it is FIXED."""
        return self._largest(self.cost_PK.max(axis=1, initial=0.0), np.inf)

    @cached_property
    def biggest_OM(self) -> Floats:
        """Bytes of each option's biggest shard; 0 if it is FIXED."""
        return self._largest(self.memory_PM, 0.0)

    def _largest(self, values_PX: Floats, fixed: float) -> Floats:
        largest_OX = np.full((len(self.options), *values_PX.shape[1:]), fixed)
        if not self.is_fixed_O.all():
            starts = self.first_O[:-1][~self.is_fixed_O]
            largest_OX[~self.is_fixed_O] = np.maximum.reduceat(values_PX, starts)
        return largest_OX

    @cached_property
    def misses_O(self) -> Floats:
        """Bytes by which the option's worst shard exceeds the rank where it fits best."""
        # mostly few rows, as ranks have equal memories
        free_XM = np.unique(self.free_RM, axis=0)
        over = [np.maximum(self.memory_PM - free, 0).sum(axis=1) for free in free_XM]
        misses_O = self._largest(np.min(over, axis=0), 0.0)
        least_M = list(zip(self.pools, free_XM.min(axis=0).tolist(), strict=True))
        for option in np.flatnonzero(self.is_fixed_O):
            runs = self.options[option].shards
            # only options that exceed the smallest rank need their arrays, of one row for each rank
            if not all(run.memory[pool] <= free for run in runs for pool, free in least_M):
                _, memory_NM = self.fixed(int(option))
                over_NM = np.maximum(memory_NM - self.free_RM[: len(memory_NM)], 0)
                misses_O[option] = over_NM.sum(axis=1).max()
        return misses_O

    def check_each_fits(self) -> None:
        """Raise if a table does not fit even with all ranks to itself.

        Raises:
            InfeasibleError: With these tables, or with the missing bytes if the ranks are too full
                before any table is placed.
        """
        over_M = np.maximum(-self.free_RM, 0).sum(axis=0)
        if over_M.any():
            raise InfeasibleError(bytes_over=self.both_pools(over_M))
        if not self.num_tables:
            return
        misses_T = np.minimum.reduceat(self.misses_O, self.first_T[:-1])
        if misses_T.any():
            raise InfeasibleError(too_big=tuple(np.flatnonzero(misses_T).tolist()))

    def both_pools(self, bytes_M: Floats) -> tuple[int, int]:
        """Return bytes on device and host, rounded up."""
        both = [0, 0]
        for pool, size in zip(self.pools, bytes_M.tolist(), strict=True):
            both[pool] = int(np.ceil(size))
        return both[0], both[1]

    def most_ms(self) -> float:
        """Return a load that no rank exceeds in any placement."""
        longest_O = [max(max(run.cost_ms) for run in option.shards) for option in self.options]
        longest_T = np.maximum.reduceat(longest_O, self.first_T[:-1]) if longest_O else np.zeros(1)
        return float(self.base_R.max() + longest_T.sum())

    def shards_of(self, option: int) -> Ints:
        """Return the numbers of an option's shards, in order; none if it is FIXED."""
        return np.arange(self.first_O[option], self.first_O[option + 1])

    def added(self, option: int, ranks_N: Ints) -> tuple[Floats, Floats]:
        """Return the load that an option adds to the ranks of its shards, [N] and [N, M]."""
        if self.is_fixed_O[option]:
            return self.fixed(option)
        return self.added_by(self.shards_of(option), ranks_N)

    def added_by(self, shards_N: Ints, ranks_N: Ints) -> tuple[Floats, Floats]:
        """Return the load that shards add to their ranks, [N] and [N, M]."""
        return self.cost_PK[shards_N, self.kind_R[ranks_N]], self.memory_PM[shards_N]

    def fixed(self, option: int) -> tuple[Floats, Floats]:
        """Return the load that a FIXED option adds to the first N ranks, [N] and [N, M]."""
        shards = self.options[option].shards
        # `options` keeps the shards alive, so the key stays valid
        load = self._fixed.get(id(shards))
        if load is None:
            cost_NK, memory_NM = self._numbers(shards)
            places = np.arange(len(cost_NK))
            load = cost_NK[places, self.kind_R[places]], memory_NM
            if self.num_ranks <= _FEW_RANKS:
                self._fixed[id(shards)] = load
        return load

    def _numbers(self, runs: Sequence[Shards]) -> tuple[Floats, Floats]:
        """Return the cost on each kind and the bytes of every shard of some runs."""
        kinds = self.num_kinds
        both_PX = _numbers(runs).reshape(-1, kinds + 2)
        # copies, since slices would not be contiguous
        pools = [kinds + pool for pool in self.pools]
        return np.array(both_PX[:, :kinds], order="C"), np.array(both_PX[:, pools], order="C")


def _undominated(options: Sequence[TableOption]) -> list[int]:
    """Return the options that no other one dominates in every shard; of equals the first."""
    groups: dict[object, list[int]] = {}
    for index, option in enumerate(options):
        # an option dominates another one only if both may use the same ranks
        groups.setdefault((option.reach, option.num_ranks), []).append(index)
    kept = []
    for group in groups.values():
        numbers = (
            [_numbers(options[index].shards) for index in group]
            if len(group) > 1
            else [np.zeros(1)]
        )
        # sorted by the sum, options that dominate another one precede it
        left: list[int] = []
        for place in np.argsort([of.sum() for of in numbers], kind="stable").tolist():
            if not any((numbers[other] <= numbers[place]).all() for other in left):
                left.append(place)
        kept += [group[place] for place in left]
    return sorted(kept)


def _numbers(runs: Sequence[Shards]) -> Floats:
    """Return the costs and the bytes of every shard of some runs in one row."""
    of_runs = np.array([[*run.cost_ms, *run.memory] for run in runs], dtype=np.float64)
    return np.repeat(of_runs, [run.count for run in runs], axis=0).ravel()

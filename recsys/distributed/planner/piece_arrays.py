"""A problem as flat arrays, without the options that cannot be part of a best placement.

Shape suffixes: T tables, O options that are left, P pieces of the options that are not FIXED,
R ranks, K kinds of rank, M sorts of memory that are taken (device, host).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from recsys.distributed.planner.placement import Option, Pieces, Problem, Ranks, Reach

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_FEW_RANKS = 256  # with more, keeping what FIXED options add to every rank takes gigabytes


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankArrays:
    """The ranks: what is free and what is done already. Bytes are floats, exact up to 2 ** 53.

    Attributes:
        kind_R: kind of each rank.
        base_R: load in milliseconds before anything is placed.
        free_RM: bytes that may be taken; negative where the base exceeds the cap.
        node_size: ranks per node.
        sorts: which of device (0) and host (1) memory the M are.
    """

    kind_R: Ints
    base_R: Floats
    free_RM: Floats
    node_size: int
    sorts: tuple[int, ...]

    @classmethod
    def build(cls, ranks: Ranks, sorts: tuple[int, ...]) -> RankArrays:
        """Builds the arrays with the given sorts of memory."""
        free = np.array(ranks.memory_caps, dtype=np.float64)
        if ranks.base_memory:
            free = free - np.array(ranks.base_memory, dtype=np.float64)
        return cls(
            kind_R=np.array(ranks.kinds or [0] * len(ranks), dtype=np.int64),
            base_R=np.array(ranks.base_ms or [0.0] * len(ranks), dtype=np.float64),
            free_RM=free[:, list(sorts)],
            node_size=ranks.node_size or len(ranks),
            sorts=sorts,
        )


@final
class PieceArrays:
    """Options and pieces, numbered through.

    Args:
        problem: what to place.

    Attributes:
        options: the objects, [O].
        index_O: each option's index among all options of its table.
        table_O: each option's table.
        first_T: each table's first option; one more entry ends the last.
        first_O: each option's first piece among P; one more entry ends the last. FIXED options
            have no pieces here.
        table_P: each piece's table.
        run_P: number of the run of like pieces that each belongs to.
        cost_PK: milliseconds.
        memory_PM: bytes.
    """

    def __init__(self, problem: Problem) -> None:
        pieces = [p for options in problem.tables for o in options for p in o.pieces]
        sizes = [*(piece.memory for piece in pieces), *problem.ranks.base_memory]
        sorts = tuple(m for m in (0, 1) if any(both[m] for both in sizes))
        self.ranks = RankArrays.build(problem.ranks, sorts)
        lists = {id(options): options for options in problem.tables}  # some share one
        undominated = {key: _undominated(options) for key, options in lists.items()}
        kept = [undominated[id(options)] for options in problem.tables]
        self.options: list[Option] = [
            problem.tables[t][i] for t, indices in enumerate(kept) for i in indices
        ]
        num_kept = [len(indices) for indices in kept]
        self.index_O = np.array([i for indices in kept for i in indices], dtype=np.int64)
        self.table_O = np.repeat(np.arange(len(kept)), num_kept)
        self.first_T = np.concatenate([[0], np.cumsum(num_kept, dtype=np.int64)])
        self.reach_O = [option.reach for option in self.options]

        floating = [option.reach is not Reach.FIXED for option in self.options]
        num_pieces = [
            option.num_pieces if floats else 0
            for option, floats in zip(self.options, floating, strict=True)
        ]
        runs = [
            piece
            for option, floats in zip(self.options, floating, strict=True)
            if floats
            for piece in option.pieces
        ]
        counts = [run.count for run in runs]
        self.first_O = np.concatenate([[0], np.cumsum(num_pieces, dtype=np.int64)])
        self.table_P = np.repeat(self.table_O, num_pieces)
        self.run_P = np.repeat(np.arange(len(runs)), counts)
        num_kinds = problem.ranks.num_kinds
        self.cost_PK = np.repeat(self._costs(runs, num_kinds), counts, axis=0)
        self.memory_PM = np.repeat(self._bytes(runs), counts, axis=0)
        self._fixed: dict[int, tuple[Ints, Floats, Floats]] = {}
        self._ranks_of: dict[range | tuple[int, ...], Ints] = {}

    @property
    def num_tables(self) -> int:
        """T."""
        return len(self.first_T) - 1

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.ranks.kind_R)

    @cached_property
    def width_T(self) -> Ints:
        """Number of options of each table."""
        return np.diff(self.first_T)

    @cached_property
    def longest_O(self) -> Floats:
        """Milliseconds of each option's longest piece; inf if it is FIXED."""
        return self._largest(self.cost_PK.max(axis=1, initial=0.0), np.inf)

    @cached_property
    def biggest_OM(self) -> Floats:
        """Bytes of each option's biggest piece; 0 if it is FIXED."""
        return self._largest(self.memory_PM, 0.0)

    def _largest(self, values_PX: Floats, fixed: float) -> Floats:
        largest_OX = np.full((len(self.options), *values_PX.shape[1:]), fixed)
        floating = np.diff(self.first_O) > 0
        if floating.any():
            starts = self.first_O[:-1][floating]
            largest_OX[floating] = np.maximum.reduceat(values_PX, starts)
        return largest_OX

    @cached_property
    def misses_O(self) -> Floats:
        """Bytes by which the option's worst piece exceeds the rank where it fits best."""
        rooms = np.unique(self.ranks.free_RM, axis=0)
        over = [np.maximum(self.memory_PM - room, 0).sum(axis=1) for room in rooms]
        misses = self._largest(np.min(over, axis=0), 0.0)
        floating = np.diff(self.first_O) > 0
        least = list(zip(self.ranks.sorts, self.ranks.free_RM.min(axis=0).tolist(), strict=True))
        for option in np.flatnonzero(~floating):
            runs = self.options[option].pieces
            if all(run.memory[sort] <= free for run in runs for sort, free in least):
                continue  # fits everywhere
            ranks, _, memory_NM = self.fixed_at(int(option))
            over = np.maximum(memory_NM - self.ranks.free_RM[ranks], 0).sum(axis=1)
            misses[option] = over.max()
        return misses

    def most_ms(self) -> float:
        """Returns a load that no placement exceeds on any rank."""
        if not self.num_tables:
            return float(self.ranks.base_R.max())
        longest_O = np.array(
            [max(max(run.cost_ms) for run in option.pieces) for option in self.options]
        )
        longest_T = np.maximum.reduceat(longest_O, self.first_T[:-1])
        return float(self.ranks.base_R.max() + longest_T.sum())

    def pieces_of(self, option: int) -> Ints:
        """Returns the numbers of an option's pieces, in order; none if it is FIXED."""
        return np.arange(self.first_O[option], self.first_O[option + 1])

    def fixed_at(self, option: int) -> tuple[Ints, Floats, Floats]:
        """Returns the ranks of a FIXED option, [N], and what it adds there, [N] and [N, M]."""
        fixed = self.options[option]
        found = self._fixed.get(id(fixed))
        if found is not None:
            return found
        key = _key(fixed.ranks)
        ranks = self._ranks_of.get(key)
        if ranks is None:
            ranks = self._ranks_of[key] = np.array(key, dtype=np.int64)
        counts = [run.count for run in fixed.pieces]
        cost_KN = np.repeat(self._costs(fixed.pieces, self.num_kinds), counts, axis=0).T
        memory_NM = np.repeat(self._bytes(fixed.pieces), counts, axis=0)
        cost_N = cost_KN[self.ranks.kind_R[ranks], np.arange(len(ranks))]
        if self.num_ranks <= _FEW_RANKS:
            self._fixed[id(fixed)] = ranks, cost_N, memory_NM
        return ranks, cost_N, memory_NM

    @property
    def num_kinds(self) -> int:
        """K."""
        return int(self.cost_PK.shape[1])

    def _costs(self, runs: Sequence[Pieces], num_kinds: int) -> Floats:
        costs = np.array([run.cost_ms for run in runs], dtype=np.float64)
        return costs.reshape(len(runs), num_kinds)

    def _bytes(self, runs: Sequence[Pieces]) -> Floats:
        sizes = np.array([run.memory for run in runs], dtype=np.float64)
        return sizes.reshape(len(runs), 2)[:, list(self.ranks.sorts)]


def _key(ranks: Sequence[int]) -> range | tuple[int, ...]:
    return ranks if isinstance(ranks, range) else tuple(ranks)


def _undominated(options: Sequence[Option]) -> list[int]:
    """Returns the options that no other one beats in every piece; the first of equals stays."""
    alike: dict[object, list[int]] = {}
    for index, option in enumerate(options):
        key = (option.reach, option.num_pieces, _key(option.ranks))
        alike.setdefault(key, []).append(index)
    kept = []
    for group in alike.values():
        if len(group) == 1:
            kept += group
            continue
        numbers = np.array([_numbers(options[index]) for index in group])
        # in order of the sum, what beats an option comes before it
        left: list[int] = []
        for place in np.argsort(numbers.sum(axis=1), kind="stable"):
            if not any((numbers[other] <= numbers[place]).all() for other in left):
                left.append(int(place))
        kept += [group[place] for place in left]
    return sorted(kept)


def _numbers(option: Option) -> Floats:
    runs = np.array([[*run.cost_ms, *run.memory] for run in option.pieces], dtype=np.float64)
    return np.repeat(runs, [run.count for run in option.pieces], axis=0).ravel()

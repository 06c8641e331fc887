"""Local search: moves load off the slowest rank of an assignment, step by step.

A step exchanges up to two shards of the slowest rank for up to two shards of another rank, or
changes the option of one of its tables. If no step helps, the assignment is perturbed: some tables
receive their cheapest option even if it does not fit, or the tables of some ranks are removed and
placed again in another order with options drawn from the cheap ones. The result of a perturbation
is kept unless it is worse.

Shape suffixes as in `assignment`; also A sets of shards of the slowest rank, S other ranks, B sets
of shards on each of them; a set is a row of shard numbers, padded with -1.
"""

from __future__ import annotations

import time
from itertools import count, pairwise
from typing import final

import numpy as np

from recsys.distributed.planner.assignment import OVERFULL, Assignment
from recsys.distributed.planner.options import Reach
from recsys.distributed.planner.shard_arrays import Floats, Ints, ShardArrays

_LEAST_GAIN = 1e-9
_MANY_RANKS = 64  # with more, only some ranks are tried for an exchange
_PAIR_RANKS = 12  # ranks tried for pairs
_MOST_EXCHANGES = 500_000  # tried in one step, some 100 bytes each
_OPTIONS = 6  # cheapest options of a table that are tried
_STEPS_AFTER_PERTURBATION = 60
_LEAST_PROGRESS = 5e-4  # of a perturbation, or of many steps, as a share of the score
_FORCED = 4  # most tables that receive their cheapest option at once
_FIXED_TABLES = 4  # tables with FIXED options that are tried in addition


@final
class LocalSearch:
    """Improves assignments of one problem.

    Args:
        arrays: Problem.
        price_O: Load of each option on all ranks together; inf excludes it.
        target: Peak that is good enough.
        seed: Seed of all random choices.
        deadline: Time of `time.monotonic`.
    """

    def __init__(
        self, arrays: ShardArrays, price_O: Floats, *, target: float, seed: int, deadline: float
    ) -> None:
        self._arrays = arrays
        self._price_O = price_O
        self._target = target
        self._random = np.random.default_rng(seed)
        self._deadline = deadline
        anywhere_O = np.array([o.reach is Reach.ANYWHERE for o in arrays.options], dtype=bool)
        sizes = np.diff(arrays.first_O)
        # the last entry is for -1, no shard
        self._movable_P = np.append(np.repeat(anywhere_O, sizes), True)
        self._table_P = np.append(arrays.table_P, arrays.num_tables)
        self._single_P = np.append(np.repeat(sizes == 1, sizes), True)
        self._cost_PK = np.vstack([arrays.cost_PK, np.zeros(arrays.num_kinds)])
        self._memory_PM = np.vstack([arrays.memory_PM, np.zeros(arrays.memory_PM.shape[1])])
        self._cheap_T = [self._cheap_options(*ends) for ends in pairwise(arrays.first_T.tolist())]

    def descend(self, assignment: Assignment, max_steps: int) -> int:
        """Take steps until they help too little, or the target or the deadline is reached.

        Returns:
            The number of steps.
        """
        mark, steps_to_mark = np.inf, max(100, len(assignment.load_R))
        for step in range(max_steps):
            if assignment.peak <= self._target or self._is_over():
                return step
            if step % steps_to_mark == 0:
                if assignment.peak > mark * (1 - _LEAST_PROGRESS):
                    return step
                mark = assignment.peak
            rank = int(assignment.load_R.argmax())
            if not (
                self._exchange(assignment, rank, pairs=False)
                or self._exchange(assignment, rank, pairs=True)
                or self._replace(assignment, rank)
            ):
                return step
        return max_steps

    def perturb(self, assignment: Assignment, patience: int) -> Assignment:
        """Perturb an assignment and descend repeatedly; return the best assignment.

        Args:
            assignment: Start.
            patience: Number of perturbations without progress before giving up.
        """
        best, score = assignment, self._score(assignment)
        mark, since = score, 0
        for number in count():
            if best.peak <= self._target or since >= patience or self._is_over():
                break
            trial = assignment.copy()
            # every second perturbation forces cheapest options:
            # docs/decisions/planner.md, "Bounds, packing, and exact solutions of small problems"
            if number % 2:
                self._reassign(trial)
            else:
                self._force_cheaper(trial)
            self.descend(trial, _STEPS_AFTER_PERTURBATION)
            # equal scores are accepted, so that the search can leave a plateau
            if self._score(trial) <= score:
                assignment, score = trial, self._score(trial)
            if trial.peak <= best.peak:
                best = trial
            since += 1
            if score < mark * (1 - _LEAST_PROGRESS):
                mark, since = score, 0
        return best

    def cheapen(self, assignment: Assignment) -> None:
        """Choose cheaper options for tables as long as the slowest rank does not get slower."""
        saved_T = self._saved(assignment)
        for table in np.argsort(-saved_T, kind="stable")[: int((saved_T > 0).sum())].tolist():
            if self._is_over():
                return
            now, ranks_now = int(assignment.option_T[table]), assignment.ranks_of(table).copy()
            # `ranks_now` is a copy: `ranks_of` returns a view, which `remove` overwrites
            limit = assignment.peak
            assignment.remove(table)
            chosen = now, ranks_now
            for option in self._cheap_T[table].tolist():
                if self._price_O[option] >= self._price_O[now]:
                    break
                ranks, peak = assignment.best_ranks(option)
                if peak < limit:
                    chosen = option, ranks
                    break
            assignment.add(*chosen)

    def _force_cheaper(self, assignment: Assignment) -> None:
        """Choose the cheapest option for some tables, even if it does not fit."""
        saved_T = self._saved(assignment)
        tables = np.flatnonzero(saved_T > _LEAST_GAIN)
        if not len(tables):
            self._reassign(assignment)
            return
        most = min(len(tables), int(self._random.integers(1, _FORCED + 1)))
        share_T = saved_T[tables] / saved_T[tables].sum()
        for table in self._random.choice(tables, most, replace=False, p=share_T).tolist():
            assignment.remove(table)
            option = int(self._cheap_T[table][0])
            assignment.add(option, assignment.best_ranks(option)[0])

    def _saved(self, assignment: Assignment) -> Floats:
        """Return the price difference between each table's option and its cheapest option."""
        least_T: Floats = np.minimum.reduceat(self._price_O, self._arrays.first_T[:-1])
        # options that no better assignment contains have price inf
        saved_T: Floats = np.minimum(self._price_O[assignment.option_T] - least_T, 1.0)
        return saved_T

    def _score(self, assignment: Assignment) -> float:
        """Return the score of an assignment: mean of its peak and its mean load."""
        if assignment.peak >= OVERFULL:
            return assignment.peak
        # the gap that remains is mostly a mix of expensive options, spread evenly:
        # docs/decisions/planner.md, "Bounds, packing, and exact solutions of small problems"
        return 0.5 * (assignment.peak + float(assignment.load_R.mean()))

    def _is_over(self) -> bool:
        return time.monotonic() > self._deadline

    def _exchange(self, assignment: Assignment, rank: int, *, pairs: bool) -> bool:
        """Make the best exchange with the slowest rank, if one helps."""
        mine = assignment.slots_RS[rank, : assignment.count_R[rank]]
        mine = mine[self._movable_P[mine]]
        if not len(mine) or len(assignment.load_R) == 1:
            return False
        ranks_S = self._partners(assignment, rank, _PAIR_RANKS if pairs else _MANY_RANKS)
        # a sample of the shards if all exchanges would take too much memory and time
        most = _MOST_EXCHANGES / len(ranks_S)
        mine = self._sample(mine, most**0.5, pairs)
        slots = np.arange(int(assignment.count_R[ranks_S].max()))
        slots = self._sample(slots, most / _num_sets(len(mine), pairs), pairs)
        single_SB = assignment.slots_RS[ranks_S[:, None], slots]
        none_S = np.full((len(ranks_S), 1), -1)
        if pairs:
            sets_A2 = _with_pairs(mine[None])[0]
            sets_SB2 = _with_pairs(np.hstack([single_SB, none_S]))
        else:
            sets_A2 = mine[:, None]
            sets_SB2 = np.hstack([none_S, single_SB])[:, :, None]
        return self._exchange_sets(assignment, rank, sets_A2, ranks_S, sets_SB2)

    def _sample(self, values_N: Ints, max_sets: float, pairs: bool) -> Ints:
        """Return the values, or a random sample of them that forms at most so many sets."""
        if _num_sets(len(values_N), pairs) <= max_sets:
            return values_N
        most = int((2 * max_sets) ** 0.5 if pairs else max_sets)
        return self._random.choice(values_N, max(most - 1, 1), replace=False)

    def _partners(self, assignment: Assignment, rank: int, most: int) -> Ints:
        """Return the other ranks to try: all, or half of them least loaded and half random."""
        num_ranks = len(assignment.load_R)
        if num_ranks - 1 <= most:
            return np.delete(np.arange(num_ranks), rank)
        order = np.argsort(assignment.load_R, kind="stable")[:-1]
        order = order[order != rank]
        # enough for both halves even if a tie for the highest load dropped another rank than `rank`
        others = self._random.choice(len(order) - most // 2, most - most // 2, replace=False)
        return np.concatenate([order[: most // 2], order[most // 2 :][others]])

    def _exchange_sets(
        self, assignment: Assignment, rank: int, sets_A: Ints, ranks_S: Ints, sets_SB: Ints
    ) -> bool:
        """Make the exchange of two sets of shards that helps most, if any."""
        kind, kind_S = self._arrays.kind_R[rank], self._arrays.kind_R[ranks_S]
        cost_PK, memory_PM = self._cost_PK, self._memory_PM
        # on `rank`: given [A], received [S, B]; on the partner: received [A, S], given [S, B]
        lost_A = cost_PK[sets_A, kind].sum(axis=-1)
        back_SB = cost_PK[sets_SB, kind].sum(axis=-1)
        if cost_PK.shape[1] == 1:
            won_AS, away_SB = lost_A[:, None], back_SB
        else:
            won_AS = cost_PK[sets_A[:, None], kind_S[:, None]].sum(axis=-1)
            away_SB = cost_PK[sets_SB, kind_S[:, None, None]].sum(axis=-1)
        bytes_AM, bytes_SBM = memory_PM[sets_A].sum(axis=1), memory_PM[sets_SB].sum(axis=2)
        swapped_ASBM = bytes_AM[:, None, None] - bytes_SBM
        here_ASB = assignment.loads_after(
            np.array(rank), back_SB - lost_A[:, None, None], -swapped_ASBM
        )
        there_ASB = assignment.loads_after(
            ranks_S[:, None], won_AS[:, :, None] - away_SB, swapped_ASBM
        )
        peak_ASB = np.maximum(here_ASB, there_ASB)
        # a rank must not hold two shards of one table
        here_T = np.zeros(self._arrays.num_tables + 1, dtype=bool)
        here_T[self._table_P[assignment.slots_RS[rank, : assignment.count_R[rank]]]] = True
        free_SB = (self._movable_P[sets_SB] & ~here_T[self._table_P[sets_SB]]).all(axis=-1)
        peak_ASB[:, ~free_SB] = np.inf
        for column in sets_A.T:
            for row in np.flatnonzero(~self._single_P[column]):
                used_R = np.zeros(len(assignment.load_R), dtype=bool)
                used_R[assignment.ranks_of(int(self._table_P[column[row]]))] = True
                peak_ASB[row, used_R[ranks_S]] = np.inf
        best = int(peak_ASB.argmin())
        if peak_ASB.flat[best] >= assignment.load_R[rank] - _LEAST_GAIN:
            return False
        a, s, b = np.unravel_index(best, peak_ASB.shape)
        for shards, goal in ((sets_A[a], ranks_S[s]), (sets_SB[s, b], rank)):
            for shard in shards[shards >= 0]:
                assignment.lift(np.array([shard]))
                assignment.put(np.array([shard]), np.array([goal]))
        return True

    def _replace(self, assignment: Assignment, rank: int) -> bool:
        """Change the option of one table of the slowest rank, if that helps."""
        arrays, load = self._arrays, assignment.load_R[rank]
        shards = assignment.slots_RS[rank, : assignment.count_R[rank]]
        tables = np.unique(arrays.table_P[shards])
        fixed = self._fixed_on(assignment, rank)
        # an option that adds more than the load above the mean cannot help
        slack = load - assignment.load_R.mean() if load < OVERFULL else np.inf
        best_score, best_option, best_ranks = np.inf, -1, shards
        for table in (*tables.tolist(), *fixed):
            now = int(assignment.option_T[table])
            options = self._cheap_T[table]
            options = options[self._price_O[options] - self._price_O[now] <= slack]
            # a copy: `ranks_of` returns a view, which `remove` overwrites
            ranks_now = assignment.ranks_of(table).copy()
            assignment.remove(table)
            left = float(assignment.load_R[ranks_now].max())
            for option in options.tolist():
                ranks, peak = assignment.best_ranks(option)
                peak = max(peak, left)
                score = peak + self._price_O[option] - self._price_O[now]
                if peak < load - _LEAST_GAIN and score < best_score:
                    best_score, best_option, best_ranks = score, option, ranks
            assignment.add(now, ranks_now)
        if best_option < 0:
            return False
        assignment.remove(int(arrays.table_O[best_option]))
        assignment.add(best_option, best_ranks)
        return True

    def _fixed_on(self, assignment: Assignment, rank: int) -> list[int]:
        """Return some tables with FIXED options on a rank."""
        arrays = self._arrays
        fixed = np.flatnonzero(arrays.is_fixed_O[assignment.option_T])
        if len(fixed) > _FIXED_TABLES:
            fixed = self._random.choice(fixed, _FIXED_TABLES, replace=False)
        return [int(table) for table in fixed if rank in assignment.ranks_of(int(table))]

    def _cheap_options(self, first: int, last: int) -> Ints:
        """Return the cheapest of some options."""
        price_N = self._price_O[first:last]
        order = np.argsort(price_N, kind="stable")[:_OPTIONS]
        return first + order[np.isfinite(price_N[order])]

    def _reassign(self, assignment: Assignment) -> None:
        """Remove the tables of the slowest and some other ranks, and place them in another way."""
        slowest = int(assignment.load_R.argmax())
        others = self._partners(assignment, slowest, 4)
        others = self._random.permutation(others)[: self._random.integers(1, 4)]
        ranks = np.append(others, slowest)
        shards = assignment.slots_RS[ranks].ravel()
        tables = np.unique(self._arrays.table_P[shards[shards >= 0]]).tolist()
        tables += self._fixed_on(assignment, slowest)
        options = []
        for table in tables:
            option = int(assignment.option_T[table])
            assignment.remove(table)
            cheap = self._cheap_T[table]
            if len(cheap) > 1 and self._random.random() < 0.5:
                # mostly the first
                option = int(cheap[min(int(self._random.exponential(0.8)), len(cheap) - 1)])
            options.append(option)
        noise = self._random.uniform(0.7, 1.4, len(options))
        assignment.fill(np.array(options, dtype=np.int64), self._price_O, noise=noise)


def _num_sets(num_shards: int, pairs: bool) -> int:
    """Return the number of sets of up to one or two shards, with the empty one."""
    return 1 + num_shards + pairs * num_shards * (num_shards - 1) // 2


def _with_pairs(sets_XN: Ints) -> Ints:
    """Return every single shard and every pair of each row, [X, N + N * (N - 1) / 2, 2]."""
    first, other = np.triu_indices(sets_XN.shape[1], 1)
    singles = np.stack([sets_XN, np.full_like(sets_XN, -1)], axis=-1)
    return np.concatenate(
        [singles, np.stack([sets_XN[:, first], sets_XN[:, other]], axis=-1)], axis=1
    )

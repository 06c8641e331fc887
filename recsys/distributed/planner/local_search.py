"""Makes the highest rank of a packing lower, step by step.

A step exchanges up to two pieces of the highest rank for up to two of another rank, or places one
of its tables in another way. Where no step helps, a kick makes room for some that do: a few tables
get their cheapest option, also where that does not fit, or the tables of a few ranks are taken off
and put back in a disturbed order, with options drawn from the cheap ones. What follows a kick is
kept unless it is worse.

Shape suffixes as in ``packing``; also A sets of pieces of the highest rank, S other ranks, B sets
of pieces on each of them; a set is a row of piece numbers, padded with -1.
"""

from __future__ import annotations

import itertools
import time
from typing import final

import numpy as np

from recsys.distributed.planner.packing import OVERFULL, Packing
from recsys.distributed.planner.piece_arrays import Floats, Ints, PieceArrays
from recsys.distributed.planner.placement import Reach

_LEAST_GAIN = 1e-9
_MANY_RANKS = 64  # above, only some ranks are tried for an exchange
_PAIR_RANKS = 12  # ranks that are tried for pairs
_OPTIONS = 6  # options of a table that are tried, the cheapest ones
_STEPS_AFTER_KICK = 60
_WORTH_A_KICK = 5e-4  # share of the score that has to be won
_FORCED = 4  # most tables that get their cheapest option at once
_FIXED_TABLES = 4  # tables of FIXED options that are tried besides those with pieces on a rank


@final
class LocalSearch:
    """Improves packings of one problem.

    Args:
        arrays: what to place.
        price_O: what an option costs all ranks together, as height; inf forbids it.
        target: peak that is good enough.
        seed: of all random choices.
        deadline: of ``time.monotonic``.

    Attributes:
        cut: whether the deadline ended anything.
    """

    def __init__(
        self, arrays: PieceArrays, price_O: Floats, *, target: float, seed: int, deadline: float
    ) -> None:
        self._arrays = arrays
        self._price_O = price_O
        self._target = target
        self._random = np.random.default_rng(seed)
        self._deadline = deadline
        self.cut = False
        anywhere_O = np.array([reach is Reach.ANYWHERE for reach in arrays.reach_O], dtype=bool)
        sizes = np.diff(arrays.first_O)
        # one more entry is what -1, no piece, stands for
        self._movable_P = np.append(np.repeat(anywhere_O, sizes), True)
        self._table_P = np.append(arrays.table_P, arrays.num_tables)
        self._single_P = np.append(np.repeat(sizes == 1, sizes), True)
        self._cost_PK = np.vstack([arrays.cost_PK, np.zeros(arrays.num_kinds)])
        self._memory_PM = np.vstack([arrays.memory_PM, np.zeros(arrays.memory_PM.shape[1])])
        self._cheap_T: dict[int, Ints] = {}

    def descend(self, packing: Packing, max_steps: int) -> int:
        """Takes steps until none helps, the target or the deadline is reached.

        Returns:
            The number of steps.
        """
        for step in range(max_steps):
            if packing.peak <= self._target or self._is_over():
                return step
            rank = int(packing.height_R.argmax())
            if not (
                self._exchange(packing, rank, pairs=False)
                or self._exchange(packing, rank, pairs=True)
                or self._replace(packing, rank)
            ):
                return step
        return max_steps

    def kick(self, packing: Packing, patience: int) -> Packing:
        """Disturbs a packing and descends, again and again; returns the best packing.

        Args:
            packing: where to start.
            patience: how many kicks may bring next to nothing before it is given up.
        """
        best, score = packing, self._score(packing)
        mark, since = score, 0
        for number in itertools.count():
            if best.peak <= self._target or since >= patience or self._is_over():
                break
            trial = packing.copy()
            if number % 2:
                self._disturb(trial)
            else:
                self._force_cheaper(trial)
            self.descend(trial, _STEPS_AFTER_KICK)
            if self._score(trial) <= score:
                packing, score = trial, self._score(trial)
            if trial.peak <= best.peak:
                best = trial
            since += 1
            if score < mark * (1 - _WORTH_A_KICK):
                mark, since = score, 0
        return best

    def cheapen(self, packing: Packing) -> None:
        """Gives tables cheaper options where no rank gets higher than the highest is."""
        saved_T = self._saved(packing)
        for table in np.argsort(-saved_T, kind="stable")[: int((saved_T > 0).sum())].tolist():
            if self._is_over():
                return
            now, ranks_now = int(packing.option_T[table]), packing.ranks_of(table).copy()
            limit = packing.peak
            packing.remove(table)
            for option in self._cheap_options(table).tolist():
                if self._price_O[option] >= self._price_O[now]:
                    packing.add(now, ranks_now)
                    break
                ranks, peak = packing.best_ranks(option)
                if peak < limit:
                    packing.add(option, ranks)
                    break
            else:
                packing.add(now, ranks_now)

    def _force_cheaper(self, packing: Packing) -> None:
        """Gives a few tables their cheapest option, even where that does not fit."""
        saved_T = self._saved(packing)
        tables = np.flatnonzero(saved_T > _LEAST_GAIN)
        if not len(tables):
            self._disturb(packing)
            return
        most = min(len(tables), int(self._random.integers(1, _FORCED + 1)))
        share_T = saved_T[tables] / saved_T[tables].sum()
        for table in self._random.choice(tables, most, replace=False, p=share_T).tolist():
            packing.remove(table)
            option = int(self._cheap_options(table)[0])
            packing.add(option, packing.best_ranks(option)[0])

    def _saved(self, packing: Packing) -> Floats:
        """Returns by how much the cheapest option of each table is cheaper than the one it has."""
        least_T: Floats = np.minimum.reduceat(self._price_O, self._arrays.first_T[:-1])
        # an option that no better packing has is priced at inf
        saved_T: Floats = np.minimum(self._price_O[packing.option_T] - least_T, 1.0)
        return saved_T

    def _score(self, packing: Packing) -> float:
        """Returns how good a packing is: its peak, and above all its mean, as peaks can be cut."""
        if packing.peak >= OVERFULL:
            return packing.peak
        return 0.5 * (packing.peak + float(packing.height_R.mean()))

    def _is_over(self) -> bool:
        self.cut = self.cut or time.monotonic() > self._deadline
        return self.cut

    def _exchange(self, packing: Packing, rank: int, *, pairs: bool) -> bool:
        """Makes the best exchange with the highest rank, if one helps."""
        mine = packing.slots_RS[rank, : packing.count_R[rank]]
        mine = mine[self._movable_P[mine]]
        if not len(mine):
            return False
        ranks_S = self._partners(packing, rank, _PAIR_RANKS if pairs else _MANY_RANKS)
        if not len(ranks_S):
            return False
        width = int(packing.count_R[ranks_S].max())
        single_SB = packing.slots_RS[ranks_S, :width]
        none_S = np.full((len(ranks_S), 1), -1)
        if pairs:
            sets_A2 = _with_pairs(mine[None])[0]
            sets_SB2 = _with_pairs(np.hstack([single_SB, none_S]))
        else:
            sets_A2 = mine[:, None]
            sets_SB2 = np.hstack([none_S, single_SB])[:, :, None]
        found = self._best_exchange(packing, rank, sets_A2, ranks_S, sets_SB2)
        if found is None:
            return False
        given, partner, taken = found
        for pieces, goal in ((given, partner), (taken, rank)):
            for piece in pieces:
                packing.lift(np.array([piece]))
                packing.put(np.array([piece]), np.array([goal]))
        return True

    def _partners(self, packing: Packing, rank: int, most: int) -> Ints:
        """Returns the other ranks to try: all, or half of them lowest and half random."""
        num_ranks = len(packing.height_R)
        if num_ranks - 1 <= most:
            return np.delete(np.arange(num_ranks), rank)
        order = np.argsort(packing.height_R, kind="stable")[:-1]
        order = order[order != rank]
        others = self._random.choice(len(order) - most // 2, most - most // 2, replace=False)
        return np.concatenate([order[: most // 2], order[most // 2 :][others]])

    def _best_exchange(
        self, packing: Packing, rank: int, sets_A: Ints, ranks_S: Ints, sets_SB: Ints
    ) -> tuple[list[int], int, list[int]] | None:
        """Returns the pieces to give, the rank to give them to, and the pieces to take from it."""
        kind, kind_S = self._arrays.ranks.kind_R[rank], self._arrays.ranks.kind_R[ranks_S]
        cost_PK, memory_PM = self._cost_PK, self._memory_PM
        # what rank loses: [A], [S, B]; what the partner wins: [A, S], [S, B]
        lost_A = cost_PK[sets_A, kind].sum(axis=-1)
        back_SB = cost_PK[sets_SB, kind].sum(axis=-1)
        if cost_PK.shape[1] == 1:
            won_AS, away_SB = lost_A[:, None], back_SB
        else:
            won_AS = cost_PK[sets_A[:, None], kind_S[:, None]].sum(axis=-1)
            away_SB = cost_PK[sets_SB, kind_S[:, None, None]].sum(axis=-1)
        bytes_AM, bytes_SBM = memory_PM[sets_A].sum(axis=1), memory_PM[sets_SB].sum(axis=2)
        swapped_ASBM = bytes_AM[:, None, None] - bytes_SBM
        here_ASB = packing.heights_after(
            np.array(rank), back_SB - lost_A[:, None, None], -swapped_ASBM
        )
        there_ASB = packing.heights_after(
            ranks_S[:, None], won_AS[:, :, None] - away_SB, swapped_ASBM
        )
        peak_ASB = np.maximum(here_ASB, there_ASB)
        # no two pieces of one table may meet
        here_T = np.zeros(self._arrays.num_tables + 1, dtype=bool)
        here_T[self._table_P[packing.slots_RS[rank, : packing.count_R[rank]]]] = True
        free_SB = (self._movable_P[sets_SB] & ~here_T[self._table_P[sets_SB]]).all(axis=-1)
        peak_ASB[:, ~free_SB] = np.inf
        for column in sets_A.T:
            for row in np.flatnonzero(~self._single_P[column]):
                used_R = np.zeros(len(packing.height_R), dtype=bool)
                used_R[packing.ranks_of(int(self._table_P[column[row]]))] = True
                peak_ASB[row, used_R[ranks_S]] = np.inf
        best = int(peak_ASB.argmin())
        if peak_ASB.flat[best] >= packing.height_R[rank] - _LEAST_GAIN:
            return None
        a, s, b = np.unravel_index(best, peak_ASB.shape)
        given = [piece for piece in sets_A[a].tolist() if piece >= 0]
        taken = [piece for piece in sets_SB[s, b].tolist() if piece >= 0]
        return given, int(ranks_S[s]), taken

    def _replace(self, packing: Packing, rank: int) -> bool:
        """Places one table of the highest rank in another way, if that helps."""
        arrays, height = self._arrays, packing.height_R[rank]
        pieces = packing.slots_RS[rank, : packing.count_R[rank]]
        tables = np.unique(arrays.table_P[pieces])
        fixed = self._fixed_on(packing, rank)
        # an option that adds more than the height above the mean cannot help
        slack = height - packing.height_R.mean() if height < OVERFULL else np.inf
        best_score, best_option, best_ranks = np.inf, -1, pieces
        for table in (*tables.tolist(), *fixed):
            now = int(packing.option_T[table])
            options = self._cheap_options(table)
            options = options[self._price_O[options] - self._price_O[now] <= slack]
            ranks_now = packing.ranks_of(table).copy()
            packing.remove(table)
            left = float(packing.height_R[ranks_now].max())
            for option in options.tolist():
                ranks, peak = packing.best_ranks(option)
                peak = max(peak, left)
                score = peak + self._price_O[option] - self._price_O[now]
                if peak < height - _LEAST_GAIN and score < best_score:
                    best_score, best_option, best_ranks = score, option, ranks
            packing.add(now, ranks_now)
        if best_option < 0:
            return False
        packing.remove(int(arrays.table_O[best_option]))
        packing.add(best_option, best_ranks)
        return True

    def _fixed_on(self, packing: Packing, rank: int) -> list[int]:
        """Returns a few tables of FIXED options."""
        arrays = self._arrays
        placed = packing.option_T
        fixed = np.flatnonzero(arrays.first_O[placed] == arrays.first_O[placed + 1])
        if len(fixed) > _FIXED_TABLES:
            fixed = self._random.choice(fixed, _FIXED_TABLES, replace=False)
        return [int(table) for table in fixed if rank in packing.ranks_of(int(table))]

    def _cheap_options(self, table: int) -> Ints:
        """Returns the cheapest options of a table."""
        cheap = self._cheap_T.get(table)
        if cheap is None:
            first, last = self._arrays.first_T[table], self._arrays.first_T[table + 1]
            price_N = self._price_O[first:last]
            order = np.argsort(price_N, kind="stable")[:_OPTIONS]
            cheap = self._cheap_T[table] = first + order[np.isfinite(price_N[order])]
        return cheap

    def _disturb(self, packing: Packing) -> None:
        """Takes the tables off the highest and a few other ranks and puts them back otherwise."""
        highest = int(packing.height_R.argmax())
        others = self._partners(packing, highest, 4)
        others = self._random.permutation(others)[: self._random.integers(1, 4)]
        ranks = np.append(others, highest)
        pieces = packing.slots_RS[ranks].ravel()
        tables = np.unique(self._arrays.table_P[pieces[pieces >= 0]]).tolist()
        tables += self._fixed_on(packing, highest)
        options = []
        for table in tables:
            option = int(packing.option_T[table])
            packing.remove(table)
            cheap = self._cheap_options(table)
            if len(cheap) > 1 and self._random.random() < 0.5:
                # mostly the first
                option = int(cheap[min(int(self._random.exponential(0.8)), len(cheap) - 1)])
            options.append(option)
        noise = self._random.uniform(0.7, 1.4, len(options))
        packing.fill(np.array(options, dtype=np.int64), self._price_O, noise=noise)


def _with_pairs(sets_XN: Ints) -> Ints:
    """Returns, [X, N + N * (N - 1) / 2, 2], every single piece and every pair of a row."""
    one, other = np.triu_indices(sets_XN.shape[1], 1)
    singles = np.stack([sets_XN, np.full_like(sets_XN, -1)], axis=-1)
    return np.concatenate(
        [singles, np.stack([sets_XN[:, one], sets_XN[:, other]], axis=-1)], axis=1
    )

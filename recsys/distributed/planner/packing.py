"""Where all pieces are at one moment, and the greedy way to put them there.

How bad a rank is, is one number, its height: its load in units of a given time, or, as soon as it
holds more bytes than it may, something above any load. So packings that do not fit (yet) compare
like slow ones, and what makes the highest rank lower also makes it fit.

Shape suffixes as in ``piece_arrays``; also S slots of a rank, N pieces of one option, and J nodes.
"""

from __future__ import annotations

import copy
from typing import final

import numpy as np

from recsys.distributed.planner.piece_arrays import Flags, Floats, Ints, PieceArrays
from recsys.distributed.planner.placement import Choice, Reach

OVERFULL = 1e6  # height from which on a rank holds too many bytes
_MAX_RESCUES = 200  # tables that get another option than asked for


@final
class Packing:
    """A placement in the making.

    Args:
        arrays: what to place.
        unit_ms: the load that has height 1.

    Attributes:
        option_T: option of each table, -1 while it is not placed.
        rank_P: rank of each piece, -1 if it is of another option.
        height_R: height of each rank.
        slots_RS: pieces on each rank, without those of FIXED options; -1 in free slots.
    """

    def __init__(self, arrays: PieceArrays, unit_ms: float) -> None:
        self.arrays = arrays
        self._unit_ms = max(unit_ms, 1e-300)
        ranks = arrays.ranks
        self._load_R = ranks.base_R.copy()
        self._room_RM = ranks.free_RM.copy()
        self._full_M = np.maximum(ranks.free_RM.max(axis=0, initial=1.0), 1.0)
        self.option_T = np.full(arrays.num_tables, -1)
        self.rank_P = np.full(len(arrays.table_P), -1)
        self._slot_P = np.full(len(arrays.table_P), -1)
        self.slots_RS = np.full((arrays.num_ranks, 8), -1)
        self.count_R = np.zeros(arrays.num_ranks, dtype=np.int64)
        self._even_memory = False
        self.height_R = self.heights(self._load_R, self._room_RM)

    def copy(self) -> Packing:
        """Returns an independent copy."""
        twin = copy.copy(self)
        for name in (
            *("_load_R", "_room_RM", "option_T", "rank_P"),
            *("_slot_P", "slots_RS", "count_R", "height_R"),
        ):
            setattr(twin, name, getattr(self, name).copy())
        return twin

    @property
    def peak(self) -> float:
        """Height of the highest rank."""
        return float(self.height_R.max())

    def heights(self, load_X: Floats, room_XM: Floats) -> Floats:
        """Returns heights for loads in milliseconds and bytes left, any shape X."""
        height_X = load_X / self._unit_ms
        for m in range(room_XM.shape[-1]):
            over_X = room_XM[..., m]
            if (over_X < 0).any():
                height_X = height_X + np.where(
                    over_X < 0, OVERFULL * (1 - over_X / self._full_M[m]), 0.0
                )
        return height_X

    def heights_after(self, ranks_X: Ints, added_ms_X: Floats, added_bytes_XM: Floats) -> Floats:
        """Returns the heights of ranks, any shape X, with something more on them."""
        return self.heights(
            self._load_R[ranks_X] + added_ms_X, self._room_RM[ranks_X] - added_bytes_XM
        )

    def add(self, option: int, ranks_N: Ints) -> None:
        """Places a table that is not placed."""
        arrays = self.arrays
        self.option_T[arrays.table_O[option]] = option
        if arrays.reach_O[option] is Reach.FIXED:
            self._shift_fixed(option, 1.0)
            return
        self.put(arrays.pieces_of(option), ranks_N)

    def remove(self, table: int) -> None:
        """Takes a placed table away."""
        option = int(self.option_T[table])
        self.option_T[table] = -1
        if self.arrays.reach_O[option] is Reach.FIXED:
            self._shift_fixed(option, -1.0)
            return
        self.lift(self.arrays.pieces_of(option))

    def ranks_of(self, table: int) -> Ints:
        """Returns the ranks of the pieces of a placed table, in order."""
        option = int(self.option_T[table])
        if self.arrays.reach_O[option] is Reach.FIXED:
            return np.asarray(self.arrays.options[option].ranks)
        return self.rank_P[self.arrays.first_O[option] : self.arrays.first_O[option + 1]]

    def put(self, pieces_N: Ints, ranks_N: Ints) -> None:
        """Puts pieces that are nowhere on ranks, no two on one."""
        slots_N = self.count_R[ranks_N]
        if slots_N.max(initial=0) >= self.slots_RS.shape[1]:
            self.slots_RS = np.hstack([self.slots_RS, np.full_like(self.slots_RS, -1)])
        self.slots_RS[ranks_N, slots_N] = pieces_N
        self._slot_P[pieces_N] = slots_N
        self.rank_P[pieces_N] = ranks_N
        self.count_R[ranks_N] += 1
        self._shift(pieces_N, ranks_N, 1.0)

    def lift(self, pieces_N: Ints) -> None:
        """Takes pieces off their ranks, no two off one."""
        ranks_N, slots_N = self.rank_P[pieces_N], self._slot_P[pieces_N]
        last_N = self.count_R[ranks_N] - 1
        moved_N = self.slots_RS[ranks_N, last_N]
        self.slots_RS[ranks_N, slots_N] = moved_N
        self._slot_P[moved_N] = slots_N
        self.slots_RS[ranks_N, last_N] = -1
        self.count_R[ranks_N] = last_N
        self.rank_P[pieces_N] = -1
        self._shift(pieces_N, ranks_N, -1.0)

    def _shift(self, pieces_N: Ints, ranks_N: Ints, sign: float) -> None:
        arrays = self.arrays
        self._load_R[ranks_N] += sign * arrays.cost_PK[pieces_N, arrays.ranks.kind_R[ranks_N]]
        self._room_RM[ranks_N] -= sign * arrays.memory_PM[pieces_N]
        self.height_R[ranks_N] = self.heights(self._load_R[ranks_N], self._room_RM[ranks_N])

    def _shift_fixed(self, option: int, sign: float) -> None:
        ranks, cost_N, memory_NM = self.arrays.fixed_at(option)
        self._load_R[ranks] += sign * cost_N
        self._room_RM[ranks] -= sign * memory_NM
        self.height_R[ranks] = self.heights(self._load_R[ranks], self._room_RM[ranks])

    def best_ranks(self, option: int) -> tuple[Ints, float]:
        """Returns ranks for the pieces of a table that is not placed, and the highest's height."""
        arrays, reach = self.arrays, self.arrays.reach_O[option]
        if reach is Reach.FIXED:
            ranks, cost_N, memory_NM = arrays.fixed_at(option)
            return ranks, float(self.heights_after(ranks, cost_N, memory_NM).max())
        pieces = arrays.pieces_of(option)
        if reach is Reach.ANYWHERE:
            return self._best_anywhere(pieces)
        free_J = np.ones(arrays.num_ranks // arrays.ranks.node_size, dtype=bool)
        if reach is Reach.ONE_NODE:
            return self._best_node(pieces, free_J)
        groups = pieces.reshape(-1, arrays.ranks.node_size)
        ranks, peak = np.empty_like(groups), 0.0
        # the group with the longest piece chooses first
        for group in np.argsort(-arrays.cost_PK[groups].max(axis=(1, 2)), kind="stable"):
            ranks[group], height = self._best_node(groups[group], free_J)
            free_J[ranks[group, 0] // arrays.ranks.node_size] = False
            peak = max(peak, height)
        return ranks.ravel(), peak

    def _piece_heights(self, piece: int) -> Floats:
        """Returns the height of every rank if a piece were added to it."""
        arrays = self.arrays
        cost_K = arrays.cost_PK[piece]
        cost = cost_K[arrays.ranks.kind_R] if len(cost_K) > 1 else cost_K
        height_R = self.heights(self._load_R + cost, self._room_RM - arrays.memory_PM[piece])
        if self._even_memory:
            for m in range(self._room_RM.shape[1]):
                left_R = self._room_RM[:, m] - arrays.memory_PM[piece, m]
                np.maximum(height_R, 1 - left_R / self._full_M[m], out=height_R)
        return height_R

    def _best_anywhere(self, pieces: Ints) -> tuple[Ints, float]:
        arrays = self.arrays
        if len(pieces) == 1:
            height_R = self._piece_heights(int(pieces[0]))
            rank = int(height_R.argmin())
            return np.array([rank]), float(height_R[rank])
        ranks, peak = np.empty_like(pieces), 0.0
        used: list[int] = []
        order = np.argsort(-arrays.cost_PK[pieces].max(axis=1), kind="stable")
        last, height_R = -1, np.zeros(0)
        for place in order.tolist():
            piece = int(pieces[place])
            if last < 0 or arrays.run_P[piece] != arrays.run_P[last]:
                height_R = self._piece_heights(piece)
                height_R[used] = np.inf
                last = piece
            rank = int(height_R.argmin())
            peak = max(peak, float(height_R[rank]))
            height_R[rank] = np.inf
            used.append(rank)
            ranks[place] = rank
        return ranks, peak

    def _best_node(self, pieces: Ints, free_J: Flags) -> tuple[Ints, float]:
        """Returns ranks of the free node that is least high with the pieces on it."""
        arrays, size = self.arrays, self.arrays.ranks.node_size
        order = np.argsort(-arrays.cost_PK[pieces].max(axis=1), kind="stable")
        longest = int(pieces[order[0]])
        # the longest piece to the lowest rank of the node, and so on
        before_JS = self._piece_heights(longest).reshape(-1, size)
        if arrays.run_P[pieces[0]] == arrays.run_P[pieces[-1]]:
            height_JN = np.sort(before_JS, axis=1)[:, : len(pieces)]
        else:
            ranks_JN = np.argsort(before_JS, axis=1, kind="stable")[:, : len(pieces)]
            ranks_JN = ranks_JN + np.arange(len(before_JS))[:, None] * size
            sorted_N = pieces[order]
            cost_JN = arrays.cost_PK[sorted_N, arrays.ranks.kind_R[ranks_JN]]
            height_JN = self.heights_after(ranks_JN, cost_JN, arrays.memory_PM[sorted_N])
        height_J = np.where(free_J, height_JN.max(axis=1), np.inf)
        node = int(height_J.argmin())
        ranks = np.empty_like(pieces)
        ranks[order] = node * size + np.argsort(before_JS[node], kind="stable")[: len(pieces)]
        return ranks, float(height_J[node])

    def fill(
        self,
        options: Ints,
        price_O: Floats,
        *,
        noise: Floats | None = None,
        even_memory: bool = False,
    ) -> None:
        """Places tables that are not placed, the one with the longest piece first.

        Args:
            options: one option per table; where it does not fit, the cheapest that does.
            price_O: of all options.
            noise: factors by which the order may be off.
            even_memory: whether to look at the share of memory that is taken as at the load.
        """
        self._even_memory = even_memory
        size_N = self._sizes(options)
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

    def _sizes(self, options: Ints) -> Floats:
        """Returns the height of the longest piece of each option; FIXED ones come before all."""
        size_N = self.arrays.longest_O[options] / self._unit_ms
        if self._even_memory:
            share_NM = self.arrays.biggest_OM[options] / self._full_M
            size_N = np.maximum(size_N, share_NM.max(axis=1, initial=0.0))
        return size_N

    def _least_overfull(
        self, option: int, ranks: Ints, peak: float, price_O: Floats
    ) -> tuple[int, Ints]:
        """Returns the cheapest option of the same table that fits, else the one that does best."""
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

    def choices(self) -> tuple[Choice, ...]:
        """Returns the options and ranks of all tables, which must be placed."""
        arrays = self.arrays
        return tuple(
            Choice(
                option=int(arrays.index_O[option]),
                ranks=arrays.options[option].ranks or tuple(self.ranks_of(table).tolist()),
            )
            for table, option in enumerate(self.option_T.tolist())
        )

    def exact_loads(self) -> tuple[Floats, Floats]:
        """Returns loads, [R], and bytes left, [R, M], added up afresh."""
        arrays = self.arrays
        load_R, room_RM = arrays.ranks.base_R.copy(), arrays.ranks.free_RM.copy()
        placed = np.flatnonzero(self.rank_P >= 0)
        rank_N = self.rank_P[placed]
        np.add.at(load_R, rank_N, arrays.cost_PK[placed, arrays.ranks.kind_R[rank_N]])
        np.subtract.at(room_RM, rank_N, arrays.memory_PM[placed])
        for option in self.option_T.tolist():
            if option >= 0 and arrays.reach_O[option] is Reach.FIXED:
                at, cost_N, memory_NM = arrays.fixed_at(option)
                load_R[at] += cost_N
                room_RM[at] -= memory_NM
        return load_R, room_RM

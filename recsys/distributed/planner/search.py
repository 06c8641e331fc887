"""Finds the placement whose slowest rank is done soonest, and says how far from the best it may be.

First the bound (``bounds``). It comes with a mix of options, which is packed greedily
(``packing``) in a few variants: with long pieces forbidden, which packs better and costs more; with
some memory kept as air. The most promising are improved by local search (``local_search``). What is
small is searched exhaustively in the end (``exact``).
"""

from __future__ import annotations

import time

import numpy as np

from recsys.distributed.planner.bounds import Relaxation
from recsys.distributed.planner.exact import count_variables, solve_exactly
from recsys.distributed.planner.local_search import LocalSearch
from recsys.distributed.planner.memory_check import check_all_fit, check_each_fits, not_found
from recsys.distributed.planner.packing import OVERFULL, Packing
from recsys.distributed.planner.piece_arrays import Floats, PieceArrays
from recsys.distributed.planner.placement import Placement, Problem

_CEILINGS = (0.7, 0.5, 0.35)  # of pieces, in units of the bound
_AIR = (0.95, 0.8, 0.4, 0.0)  # share of the memory that need not be taken, to be kept free
_SCARCE = 0.3  # share of all memory that has to be taken; below, memory hardly matters
_DESCENTS = 3  # of the variants, the most promising ones
_STEPS_PER_RANK = 5
_UNEVENNESS_LEFT = 0.2
_PATIENCE = 12  # kicks in a row that bring nothing, where no time limit asks for more
_PATIENCE_OF_ALL_RANKS = 320  # and the ranks are not so few that more are cheap
_ENDLESS = 1_000_000  # where there is a time limit
_SHARE_OF_KICKS = 0.4  # of a time limit where there is an exact search, too
_ROUNDING = 1e-9
_SMALL = 200  # variables up to which a problem is searched exhaustively
_MEDIUM = 5000  # and up to which it is if a time limit says for how long
_MAX_NODES = 300  # of the search tree where there is no time limit


def search(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit: float | None = None,
    tolerance: float = 2e-3,
) -> Placement:
    """Places all tables.

    The same arguments give the same placement, unless a time limit cuts the search.

    Args:
        problem: tables and ranks.
        seed: of the random choices.
        time_limit: in seconds, after which the best so far is returned. By default the effort
            depends on the size of the problem alone: 0.5 s up to some hundred tables and 64
            ranks, 30 s for 5,000 tables and 1,024 ranks. A longer limit is used to search on.
        tolerance: gap that is good enough to stop.

    Returns:
        The placement with its bound.

    Raises:
        InfeasibleError: if nothing fits into memory, or, with ``proven`` false, no placement that
            fits was found.
        ValueError: if ``time_limit`` or ``tolerance`` is negative.

    Example:
        >>> from recsys.distributed.planner.placement import Option, Pieces, Ranks, Reach
        >>> whole = Option(
        ...     reach=Reach.ANYWHERE, pieces=(Pieces(cost_ms=(1.0,), memory=(10, 0)),)
        ... )
        >>> halves = Option(
        ...     reach=Reach.ANYWHERE, pieces=(Pieces(count=2, cost_ms=(0.6,), memory=(5, 0)),)
        ... )
        >>> ranks = Ranks(memory_caps=[(20, 0)] * 2)
        >>> found = search(Problem(ranks=ranks, tables=[[whole, halves]] * 3))
        >>> found.slowest_ms, found.optimal
        (1.6, True)
    """
    for name, value in (("time_limit", time_limit), ("tolerance", tolerance)):
        if value is not None and not value >= 0:
            raise ValueError(f"search: {name} must not be negative; received {value}.")
    started = time.monotonic()
    arrays = PieceArrays(problem)
    check_each_fits(arrays)
    if not arrays.num_tables:
        base_ms = float(arrays.ranks.base_R.max())
        return _placement(Packing(arrays, 1.0), base_ms, started, exact=True, cut=False)
    hunt = _Hunt(arrays, seed, tolerance, np.inf if time_limit is None else started + time_limit)
    hunt.pack()
    hunt.descend()
    hunt.solve_exactly(_SMALL)
    hunt.kick()
    if time_limit is not None:
        hunt.solve_exactly(_MEDIUM)
    return hunt.placement(started)


class _Hunt:
    """What is known so far, and the steps that add to it.

    Args:
        arrays: what to place.
        seed: of random choices.
        tolerance: gap that is good enough.
        deadline: of ``time.monotonic``; without one, counts limit the effort.
    """

    def __init__(self, arrays: PieceArrays, seed: int, tolerance: float, deadline: float) -> None:
        self._arrays = arrays
        self._seed = seed
        self._tolerance = tolerance
        self._deadline = deadline
        self._relaxation = Relaxation(arrays)
        self._fullness = check_all_fit(arrays, self._relaxation)
        self._relaxed = self._relaxation.lower_bound(deadline)
        self._bound_ms = self._relaxed.bound_ms
        # no rank's load comes near OVERFULL in this unit
        self._most_ms = arrays.most_ms()
        self._unit_ms = max(self._bound_ms, 10 * self._most_ms / OVERFULL, 1e-300)
        self._packings: list[Packing] = []
        self._seen: set[tuple[bool, bytes]] = set()
        self._exact = False

    @property
    def _target(self) -> float:
        return self._bound_ms / self._unit_ms * (1 + self._tolerance)

    @property
    def _best(self) -> Packing:
        return min(self._packings, key=lambda packing: packing.peak)

    @property
    def _known_ms(self) -> float:
        """Load of the slowest rank of the best packing; if none fits, what none exceeds."""
        peak = self._best.peak
        return peak * self._unit_ms if peak < OVERFULL else self._most_ms or 1.0

    def pack(self) -> None:
        """Packs the relaxation's mix of options greedily, in some variants."""
        best_peak, best = self._pack(1.0, 1.0, even_memory=False), (1.0, False)
        if self._fullness > _SCARCE or best_peak >= OVERFULL:
            for air in _AIR:
                room = 1 - air * (1 - self._fullness)
                peaks = [self._pack(1.0, room, even_memory=even) for even in (False, True)]
                if min(peaks) < best_peak:
                    best_peak, best = min(peaks), (room, peaks[0] > min(peaks))
                if min(peaks) >= OVERFULL > best_peak:
                    break  # less air will not do either
        for ceiling in _CEILINGS:
            self._pack(ceiling, *best)

    def _pack(self, ceiling: float, room: float, even_memory: bool) -> float:
        """Returns the peak of one variant; inf if it is none or a known one."""
        if self._packings and self._is_done():
            return np.inf
        mix = self._relaxation.solve(ceiling * self._bound_ms, room=room)
        if mix is None and not self._packings:
            mix = self._relaxed
        if mix is None or (even_memory, mix.option_T.tobytes()) in self._seen:
            return np.inf
        self._seen.add((even_memory, mix.option_T.tobytes()))
        packing = Packing(self._arrays, self._unit_ms)
        packing.fill(mix.option_T, mix.price_O, even_memory=even_memory)
        self._packings.append(packing)
        return packing.peak

    def descend(self) -> None:
        """Improves the most promising packings."""
        promising = sorted(self._packings, key=_promise)[:_DESCENTS]
        local = self._local_search(self._deadline)
        steps = _STEPS_PER_RANK * self._arrays.num_ranks + 100
        for packing in promising:
            local.descend(packing, steps)
            local.cheapen(packing)
            local.descend(packing, steps)

    def kick(self) -> None:
        """Improves the best packing as long as is worth it."""
        if self._is_done():
            return
        deadline = self._deadline
        patience = max(_PATIENCE, _PATIENCE_OF_ALL_RANKS // self._arrays.num_ranks)
        if np.isfinite(deadline):
            patience = _ENDLESS
            if self._num_variables() <= _MEDIUM:  # leave time for the exact search
                now = time.monotonic()
                deadline = now + _SHARE_OF_KICKS * (deadline - now)
        self._packings.append(self._local_search(deadline).kick(self._best, patience))

    def _is_done(self) -> bool:
        """Returns whether the best packing is good enough, the best there is, or all in time."""
        good = self._exact or self._best.peak <= self._target
        return good or time.monotonic() > self._deadline

    def _local_search(self, deadline: float) -> LocalSearch:
        return LocalSearch(
            self._arrays,
            self._prices() / self._unit_ms,
            target=self._target,
            seed=self._seed,
            deadline=deadline,
        )

    def _num_variables(self) -> int:
        options = np.flatnonzero(np.isfinite(self._prices()))
        return count_variables(self._arrays, options)

    def _prices(self) -> Floats:
        """Returns the prices of options; inf if none better than the best packing has them."""
        known_ms = self._known_ms * (1 + _ROUNDING)
        relaxed = self._relaxation.solve(known_ms)
        if relaxed is None:  # for rounding
            return self._relaxed.price_O
        price_O = relaxed.price_O.copy()
        least_T = np.minimum.reduceat(price_O, self._arrays.first_T[:-1])
        # with this option, all others at their cheapest, the bound is higher by that
        above_O = price_O - least_T[self._arrays.table_O]
        price_O[(above_O > 0) & (relaxed.bound_ms + above_O > known_ms)] = np.inf
        return price_O

    def solve_exactly(self, max_variables: int) -> None:
        """Searches exhaustively, if the problem is small enough."""
        while not self._is_done() and self._num_variables() <= max_variables:
            known_ms = self._known_ms
            solved = solve_exactly(
                self._arrays,
                np.flatnonzero(np.isfinite(self._prices())),
                bound_ms=self._bound_ms,
                known_ms=known_ms,
                seconds=max(self._deadline - time.monotonic(), 0.0),
                max_nodes=_MAX_NODES if np.isinf(self._deadline) else None,
            )
            self._bound_ms = max(self._bound_ms, solved.bound_ms)
            if solved.packing is None:
                self._exact = solved.finished
                return
            first = self._best.peak >= OVERFULL
            self._packings.append(self._in_unit(solved.packing))
            if not first:
                self._exact = solved.finished
                return
            # the first that fits at all: with a true upper bound the solver is more precise

    def _in_unit(self, packing: Packing) -> Packing:
        """Returns the same placement with heights in the unit of this search."""
        twin = Packing(self._arrays, self._unit_ms)
        for table, option in enumerate(packing.option_T.tolist()):
            twin.add(option, packing.ranks_of(table))
        return twin

    def placement(self, started: float) -> Placement:
        """Returns the best placement.

        Raises:
            InfeasibleError: if none fits.
        """
        best = self._best
        if best.peak >= OVERFULL:
            raise not_found(self._arrays, best, self._fullness, proven=self._exact)
        good = self._exact or best.peak <= self._target
        cut = not good and bool(np.isfinite(self._deadline))
        return _placement(best, self._bound_ms, started, exact=self._exact, cut=cut)


def _promise(packing: Packing) -> float:
    """Returns a guess of the peak after local search, which takes most of the unevenness away."""
    mean = float(packing.height_R.mean())
    return mean + _UNEVENNESS_LEFT * (packing.peak - mean)


def _placement(
    packing: Packing, bound_ms: float, started: float, *, exact: bool, cut: bool
) -> Placement:
    load_R, _ = packing.exact_loads()
    return Placement(
        choices=packing.choices(),
        load_ms=tuple(load_R.tolist()),
        bound_ms=min(bound_ms, float(load_R.max())),
        method="exact" if exact else "heuristic",
        seconds=time.monotonic() - started,
        cut=cut,
    )

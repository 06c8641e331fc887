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
_AIR = (0.0, 0.5, 0.8, 0.95)  # share of the memory that need not be taken, to be kept free
_SCARCE = 0.3  # share of all memory that has to be taken; below, memory hardly matters
_GOOD_START = 1.1  # peak at which no more air is needed
_DESCENTS = 3  # of the variants, the most promising ones
_STEPS_PER_RANK = 5
_UNEVENNESS_LEFT = 0.2
_KICKS = 40
_MANY_KICKS = 1_000_000  # where there is a time limit
_ROUNDING = 1e-9
_SMALL = 250  # variables up to which a problem is searched exhaustively
_MEDIUM = 5000  # and up to which it is if a time limit says for how long
_MAX_NODES = 2000  # of the search tree where there is no time limit


def search(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit: float | None = None,
    tolerance: float = 1e-3,
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
    hunt.improve()
    hunt.solve_exactly()
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
        self._exact = False
        self._cut = False

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
        return peak * self._unit_ms if peak < OVERFULL else self._most_ms

    def pack(self) -> None:
        """Packs the relaxation's mix of options greedily, in some variants."""
        scarce = self._fullness > _SCARCE
        best = (1.0, False)
        for air in _AIR if scarce else _AIR[:1]:
            room = 1 - air * (1 - self._fullness)
            for even_memory in (False, True) if scarce else (False,):
                peak = self._best.peak if self._packings else np.inf
                self._pack(1.0, room, even_memory)
                if self._best.peak < peak:
                    best = (room, even_memory)
            if self._best.peak < _GOOD_START:
                break
        for ceiling in _CEILINGS:
            self._pack(ceiling, *best)

    def _pack(self, ceiling: float, room: float, even_memory: bool) -> None:
        if self._packings and (self._is_over() or self._best.peak <= self._target):
            return
        mix = self._relaxation.solve(ceiling * self._bound_ms, room=room)
        if mix is None and not self._packings:
            mix = self._relaxed
        if mix is None:
            return
        packing = Packing(self._arrays, self._unit_ms)
        packing.fill(mix.option_T, even_memory=even_memory)
        self._packings.append(packing)

    def improve(self) -> None:
        """Improves the most promising packings, then the best of them as long as is worth it."""
        promising = sorted(self._packings, key=_promise)[:_DESCENTS]
        local = self._local_search()
        for packing in promising:
            for _ in range(2):
                local.descend(packing, _STEPS_PER_RANK * self._arrays.num_ranks + 100)
                local.cheapen(packing)
        local = self._local_search()
        kicks = _KICKS if np.isinf(self._deadline) else _MANY_KICKS
        self._packings = [local.kick(self._best, kicks)]
        self._cut = self._cut or local.cut

    def _local_search(self) -> LocalSearch:
        return LocalSearch(
            self._arrays,
            self._prices() / self._unit_ms,
            target=self._target,
            seed=self._seed,
            deadline=self._deadline,
        )

    def _prices(self) -> Floats:
        """Returns the prices of options; inf if none better than the best packing has them."""
        known_ms = self._known_ms * (1 + _ROUNDING)
        relaxed = self._relaxation.solve(known_ms)
        if relaxed is None:  # for rounding
            return self._relaxed.price_O
        price_O = relaxed.price_O.copy()
        least_T = np.minimum.reduceat(price_O, self._arrays.first_T[:-1])
        with np.errstate(invalid="ignore"):
            above_O = price_O - least_T[self._arrays.table_O]
        # with this option, all others at their cheapest, the bound is higher by that
        price_O[relaxed.bound_ms + above_O > known_ms] = np.inf
        return price_O

    def solve_exactly(self) -> None:
        """Searches a small problem exhaustively."""
        limited = np.isfinite(self._deadline)
        while self._best.peak > self._target and not (limited and self._is_over()):
            options = np.flatnonzero(np.isfinite(self._prices()))
            size = count_variables(self._arrays, options)
            if size > (_MEDIUM if limited else _SMALL):
                return
            known_ms = self._known_ms
            solved = solve_exactly(
                self._arrays,
                options,
                bound_ms=self._bound_ms,
                known_ms=known_ms,
                seconds=self._deadline - time.monotonic(),
                max_nodes=None if limited else _MAX_NODES,
            )
            feasible = self._best.peak < OVERFULL
            if solved.packing is not None:
                self._packings.append(self._in_unit(solved.packing))
            self._bound_ms = max(self._bound_ms, solved.bound_ms)
            self._exact = solved.finished
            # a first packing that fits is a far better start than none
            if feasible or solved.packing is None:
                return

    def _in_unit(self, packing: Packing) -> Packing:
        """Returns the same placement with heights in the unit of this search."""
        twin = Packing(self._arrays, self._unit_ms)
        for table, option in enumerate(packing.option_T.tolist()):
            twin.add(option, packing.ranks_of(table))
        return twin

    def _is_over(self) -> bool:
        self._cut = self._cut or time.monotonic() > self._deadline
        return self._cut

    def placement(self, started: float) -> Placement:
        """Returns the best placement.

        Raises:
            InfeasibleError: if none fits.
        """
        best = self._best
        if best.peak >= OVERFULL:
            raise not_found(self._arrays, best, self._fullness, proven=self._exact)
        cut = self._cut and best.peak > self._target and not self._exact
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

"""Search for the placement whose slowest rank finishes first, with a lower bound.

First, the relaxation (`bounds`) gives the bound and a mix of options. The mix is assigned to ranks
greedily (`assignment`) in several variants: without long shards, which balances better and costs
more; with some memory kept free. Local search (`local_search`) improves the most promising
variants. Small problems are then searched exhaustively (`exact`).
"""

from __future__ import annotations

import time

import numpy as np

from recsys.distributed.planner.assignment import OVERFULL, Assignment
from recsys.distributed.planner.bounds import Relaxation
from recsys.distributed.planner.exact import count_variables, solve_exactly
from recsys.distributed.planner.local_search import LocalSearch
from recsys.distributed.planner.placement import Method, Problem, SearchResult
from recsys.distributed.planner.shard_arrays import Floats, Ints, ShardArrays

_CEILINGS = (0.7, 0.5, 0.35)  # longest shards, in units of the bound
_SPARED = (0.95, 0.8, 0.4, 0.0)  # share of the spare memory that is kept free
_SCARCE = 0.3  # used share of all memory below which memory hardly matters
_DESCENTS = 3  # most promising variants
_STEPS_PER_RANK = 5
_UNEVENNESS_LEFT = 0.2
_PATIENCE = 12  # perturbations in a row without progress, without a time limit
_PATIENCE_OF_ALL_RANKS = 320  # divided by the ranks: more perturbations if they are cheap
_ENDLESS = 1_000_000  # with a time limit
_SHARE_OF_PERTURBATIONS = 0.4  # of a time limit, if an exact search follows
_ROUNDING = 1e-9
_SMALL = 200  # variables up to which the search is exhaustive
_MEDIUM = 5000  # the same with a time limit
_MAX_NODES = 300  # of the search tree, without a time limit


# a tolerance of 1e-3 takes a fifth more processor time without a better plan:
# docs/decisions/planner.md, "Bounds, packing, and exact solutions of small problems"
def search(
    problem: Problem, *, seed: int = 0, time_limit: float | None = None, tolerance: float = 2e-3
) -> SearchResult:
    """Place all tables.

    Equal arguments give equal placements, unless a time limit ends the search.

    Args:
        problem: Tables and ranks.
        seed: Seed of the random choices.
        time_limit: Seconds after which the best placement so far is returned. By default, the
            effort depends only on the size of the problem: 0.5 s up to some hundred tables and 64
            ranks, 30 s for 5,000 tables and 1,024 ranks. A longer limit continues the search.
        tolerance: Gap at which the search may stop.

    Returns:
        The placement with its bound.

    Raises:
        InfeasibleError: Nothing fits into memory, or, with `proven` false, no placement was found.

    Example:
        >>> from recsys.distributed.planner.costs import Cost
        >>> from recsys.distributed.planner.options import Reach, Shards, TableOption
        >>> from recsys.distributed.planner.placement import Ranks
        >>> from recsys.distributed.planner.tables import Bytes, RankMemory
        >>> from recsys.distributed.placement.plan import EmbeddingComputeKernel, ShardingType
        >>> def split(count, ms, size):
        ...     shards = Shards(
        ...         count=count, rows=1, cols=64 // count, costs=(Cost(forward=ms),),
        ...         storage=RankMemory(weights=Bytes(size)),
        ...     )
        ...     return TableOption(
        ...         sharding_type=ShardingType.COLUMN_WISE, reach=Reach.ANYWHERE,
        ...         compute_kernel=EmbeddingComputeKernel.FUSED, shards=(shards,),
        ...     )
        >>> ranks = Ranks(memory_caps=[(20, 0)] * 2)
        >>> found = search(Problem(ranks=ranks, tables=[[split(1, 1.0, 10), split(2, 0.6, 5)]] * 3))
        >>> found.slowest_ms, found.optimal
        (1.6, True)
    """
    started = time.monotonic()
    arrays = ShardArrays(problem)
    arrays.check_each_fits()
    if not arrays.num_tables:
        return Assignment(arrays, 1.0).placement(arrays.most_ms(), started, "exact")
    deadline = np.inf if time_limit is None else started + time_limit
    steps = _Search(arrays, seed, tolerance, deadline)
    steps.assign()
    steps.descend()
    steps.solve_exactly(_SMALL)
    steps.perturb()
    if time_limit is not None:
        steps.solve_exactly(_MEDIUM)
    return steps.placement(started)


class _Search:
    """State of a search, and its steps.

    Args:
        arrays: Problem.
        seed: Seed of random choices.
        tolerance: Gap at which the search may stop.
        deadline: Time of `time.monotonic`; inf limits the effort by counts.
    """

    def __init__(self, arrays: ShardArrays, seed: int, tolerance: float, deadline: float) -> None:
        self._arrays = arrays
        self._seed = seed
        self._tolerance = tolerance
        self._deadline = deadline
        self._relaxation = Relaxation(arrays)
        self._fullness = self._relaxation.check_memory()
        self._relaxed = self._relaxation.lower_bound(deadline)
        self._bound_ms = self._relaxed.bound_ms
        # in this unit, times stay far below OVERFULL
        self._most_ms = arrays.most_ms()
        self._unit_ms = max(self._bound_ms, 10 * self._most_ms / OVERFULL, 1e-300)
        self._assignments: list[Assignment] = []
        self._seen: set[tuple[bool, bytes]] = set()
        self._exact = False

    @property
    def _target(self) -> float:
        return self._bound_ms / self._unit_ms * (1 + self._tolerance)

    @property
    def _best(self) -> Assignment:
        return min(self._assignments, key=lambda assignment: assignment.peak)

    @property
    def _known_ms(self) -> float:
        """Load of the slowest rank of the best assignment; if none fits, an upper limit."""
        peak = self._best.peak
        return peak * self._unit_ms if peak < OVERFULL else self._most_ms or 1.0

    @property
    def _is_good(self) -> bool:
        """True if the best assignment is good enough or optimal."""
        return self._exact or self._best.peak <= self._target

    @property
    def _is_done(self) -> bool:
        return self._is_good or time.monotonic() > self._deadline

    def assign(self) -> None:
        """Assign the relaxation's mix of options greedily, in several variants."""
        best_peak, best = self._assign(1.0, 1.0, even_memory=False), (1.0, False)
        if self._fullness > _SCARCE or best_peak >= OVERFULL:
            for spared in _SPARED:
                budget = 1 - spared * (1 - self._fullness)
                peaks = [self._assign(1.0, budget, even_memory=even) for even in (False, True)]
                if min(peaks) < best_peak:
                    best_peak, best = min(peaks), (budget, peaks[0] > min(peaks))
                if min(peaks) >= OVERFULL > best_peak:
                    break  # less free memory will not help either
        for ceiling in _CEILINGS:
            self._assign(ceiling, *best)

    def _assign(self, ceiling: float, budget: float, even_memory: bool) -> float:
        """Return the peak of one variant; inf if there is none or it is known."""
        if self._assignments and self._is_done:
            return np.inf
        mix = self._relaxation.solve(ceiling * self._bound_ms, budget=budget)
        if mix is None and not self._assignments:
            mix = self._relaxed
        if mix is None or (even_memory, mix.option_T.tobytes()) in self._seen:
            return np.inf
        self._seen.add((even_memory, mix.option_T.tobytes()))
        assignment = Assignment(self._arrays, self._unit_ms)
        assignment.fill(mix.option_T, mix.price_O, even_memory=even_memory)
        self._assignments.append(assignment)
        return assignment.peak

    def descend(self) -> None:
        """Improve the most promising assignments by local search."""
        # estimate of the peak after local search, which removes most of the imbalance
        means = [float(assignment.load_R.mean()) for assignment in self._assignments]
        pairs = zip(means, self._assignments, strict=True)
        guesses = [mean + _UNEVENNESS_LEFT * (tried.peak - mean) for mean, tried in pairs]
        promising = [self._assignments[i] for i in np.argsort(guesses, kind="stable")[:_DESCENTS]]
        local = self._local_search(self._deadline)
        steps = _STEPS_PER_RANK * self._arrays.num_ranks + 100
        for assignment in promising:
            local.descend(assignment, steps)
            local.cheapen(assignment)
            local.descend(assignment, steps)

    def perturb(self) -> None:
        """Perturb the best assignment as long as it improves."""
        if self._is_done:
            return
        deadline = self._deadline
        patience = max(_PATIENCE, _PATIENCE_OF_ALL_RANKS // self._arrays.num_ranks)
        if np.isfinite(deadline):
            patience = _ENDLESS
            if count_variables(self._arrays, _finite(self._prices())) <= _MEDIUM:
                # reserve time for the exact search
                now = time.monotonic()
                deadline = now + _SHARE_OF_PERTURBATIONS * (deadline - now)
        self._assignments.append(self._local_search(deadline).perturb(self._best, patience))

    def _local_search(self, deadline: float) -> LocalSearch:
        return LocalSearch(
            self._arrays,
            self._prices() / self._unit_ms,
            target=self._target,
            seed=self._seed,
            deadline=deadline,
        )

    def _prices(self) -> Floats:
        """Return the prices of options; inf for options of no better assignment."""
        known_ms = self._known_ms * (1 + _ROUNDING)
        relaxed = self._relaxation.solve(known_ms)
        if relaxed is None:  # by rounding errors
            return self._relaxed.price_O
        price_O = relaxed.price_O.copy()
        least_T = np.minimum.reduceat(price_O, self._arrays.first_T[:-1])
        # increase of the bound with this option and the cheapest options of all other tables
        above_O = price_O - least_T[self._arrays.table_O]
        price_O[(above_O > 0) & (relaxed.bound_ms + above_O > known_ms)] = np.inf
        return price_O

    def solve_exactly(self, max_variables: int) -> None:
        """Search exhaustively if the problem is small enough."""
        while not self._is_done:
            options = _finite(self._prices())  # options of better assignments
            if count_variables(self._arrays, options) > max_variables:
                return
            solved = solve_exactly(
                self._arrays,
                options,
                bound_ms=self._bound_ms,
                known_ms=self._known_ms,
                unit_ms=self._unit_ms,
                seconds=max(self._deadline - time.monotonic(), 0.0),
                max_nodes=_MAX_NODES if np.isinf(self._deadline) else None,
            )
            self._bound_ms = max(self._bound_ms, solved.bound_ms)
            # first assignment that fits: solve again with its load as the upper bound
            is_first = self._best.peak >= OVERFULL and solved.assignment is not None
            if solved.assignment is not None:
                self._assignments.append(solved.assignment)
            if not is_first:
                self._exact = solved.finished
                return

    def placement(self, started: float) -> SearchResult:
        """Return the best placement.

        Raises:
            InfeasibleError: No assignment fits.
        """
        best = self._best
        if best.peak >= OVERFULL:
            over_M = np.maximum(-best.exact_loads()[1], 0).sum(axis=0)
            raise self._relaxation.infeasible(self._fullness, over_M, proven=self._exact)
        timed_out = not self._is_good and bool(np.isfinite(self._deadline))
        method: Method = "exact" if self._exact else "heuristic"
        return best.placement(self._bound_ms, started, method, timed_out)


def _finite(price_O: Floats) -> Ints:
    return np.flatnonzero(np.isfinite(price_O))

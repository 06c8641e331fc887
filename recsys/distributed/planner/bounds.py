"""Lower bound on the slowest rank, with the mix of options that attains it.

The relaxation treats the ranks of one kind as one: their load is shared evenly, their memory is one
pool, a shard may be on any kind, and a table may mix its options. This is a linear program with a
row for each table and a few rows that couple the tables. With prices for these few rows (load and
bytes of each kind), every table chooses its cheapest option independently. At any prices, the sum
of these choices is a lower bound. Kelley's cutting planes find the best prices: a small linear
program proposes prices, and the choices at these prices are its next row.

The relaxation ignores that shards cannot be split; a ceiling accounts for it. Options with a shard
that takes longer than the ceiling are excluded. The bound is the least ceiling that the relaxation
under this ceiling does not exceed.

Shape suffixes as in `shard_arrays`; also B bundles (shards of an option that share a price) and C
cuts.
"""

from __future__ import annotations

import time
from typing import NamedTuple, final

import numpy as np

from recsys.distributed.planner.placement import InfeasibleError
from recsys.distributed.planner.shard_arrays import Flags, Floats, Ints, ShardArrays

_MAX_CUTS = 200
_TOLERANCE = 1e-6
_ROUNDING = 1e-9
_HIGHEST_PRICE = 1e3  # of all memory of a kind, in units of the bound without memory prices


class Relaxed(NamedTuple):
    """Solution of the relaxation.

    Attributes:
        bound_ms: Lower bound on the slowest rank of any placement within the ceiling.
        price_O: Price of each option at the best prices, in milliseconds; inf if it does not fit.
        option_T: Options of each table that mix to the solution.
    """

    bound_ms: float
    price_O: Floats
    option_T: Ints


class _Cut(NamedTuple):
    """Choice of options at some prices.

    Its cost at any prices is `value @ prices`: prices of the loads [K], which sum to 1, and of the
    memory [K * M].
    """

    value: Floats
    option_T: Ints
    price_O: Floats


@final
class Relaxation:
    """Relaxed problem.

    Args:
        arrays: Problem with at least one table.
    """

    def __init__(self, arrays: ShardArrays) -> None:
        self._arrays = arrays
        self._most_ms = arrays.most_ms()
        # equal ranks are interchangeable and share their prices:
        # docs/decisions/planner.md, "Bounds, packing, and exact solutions of small problems"
        self._of_kind_KR = arrays.kind_R == np.arange(arrays.num_kinds)[:, None]
        self._size_K = np.maximum(self._of_kind_KR.sum(axis=1), 1)
        self._base_K = self._of_kind_KR @ arrays.base_R
        self._free_KM = self._of_kind_KR @ arrays.free_RM
        self._unit_KM = np.maximum(self._free_KM, 0.5)  # nothing free: any byte is too many
        self._bundles = _Bundles(arrays, self._of_kind_KR)
        width_T = np.diff(arrays.first_T)
        options = np.arange(width_T.max())
        self._option_TO = np.where(
            options < width_T[:, None], arrays.first_T[:-1, None] + options, -1
        )
        # memory that always suffices needs no price
        most_OM = np.add.reduceat(self._bundles.memory_BKM.sum(axis=1), self._bundles.first_O)
        most_TM = np.maximum.reduceat(most_OM, arrays.first_T[:-1])
        self._scarce_KM = most_TM.sum(axis=0) > self._free_KM

    def check_memory(self) -> float:
        """Raise if the memory of all ranks together is too small.

        Returns:
            The least fullness: bytes of all tables divided by bytes of all ranks, for the fuller
                pool.

        Raises:
            InfeasibleError: With the missing bytes and a sufficient number of ranks, if it exceeds
                1.
        """
        memory_OM = self._bundles.memory_OM
        sorts = memory_OM.shape[1]
        if not sorts:
            return 0.0
        free_M = np.maximum(self._free_KM.sum(axis=0), 0.5)
        values: list[Floats] = []
        best, taken_M = -1.0, np.zeros(sorts)
        share_M = np.full(sorts, 1 / sorts)
        for _ in range(_MAX_CUTS):
            price_O = (memory_OM / free_M) @ share_M
            price_O[~self._bundles.fits_O] = np.inf
            totals_M = memory_OM[self._cheapest(price_O)].sum(axis=0)
            values.append(totals_M / free_M)
            if values[-1] @ share_M > best:
                best, taken_M = float(values[-1] @ share_M), totals_M
            upper, share_M, _ = _master(np.array(values), sorts, np.zeros(0), 1.0)
            if upper <= best * (1 + _TOLERANCE) + 1e-12:
                break
        if best > 1 + _ROUNDING:
            raise self.infeasible(best, taken_M - self._arrays.free_RM.sum(axis=0))
        return best

    def infeasible(
        self, fullness: float, over_M: Floats, *, proven: bool = True
    ) -> InfeasibleError:
        """Return the error for missing bytes.

        Args:
            fullness: Share of all memory that is needed.
            over_M: Missing bytes.
            proven: Whether nothing fits; otherwise nothing was found.
        """
        arrays, ranks_needed = self._arrays, None
        if np.isfinite(fullness) and arrays.free_RM.sum(axis=0).all():
            nodes = np.ceil(arrays.num_ranks * fullness / arrays.node_size - _ROUNDING)
            ranks_needed = int(nodes) * arrays.node_size
        bytes_over = arrays.both_pools(np.maximum(over_M, 0))
        return InfeasibleError(bytes_over=bytes_over, ranks_needed=ranks_needed, proven=proven)

    def solve(
        self, ceiling: float = np.inf, *, budget: float = 1.0, above: float = np.inf
    ) -> Relaxed | None:
        """Return the solution with no shard above a ceiling, or None if there is none.

        Args:
            ceiling: Most milliseconds of a rank.
            budget: Share of the memory that may be used. Less than 1 leaves memory for uneven
                shards.
            above: Milliseconds; a bound above this need not be the best one.
        """
        kinds = self._arrays.num_kinds
        allowed_BK = self._bundles.peak_BK <= ceiling
        prices = np.concatenate([self._size_K / self._size_K.sum(), np.zeros(self._free_KM.size)])
        cuts: list[_Cut] = []
        best, best_bound = None, -np.inf
        weights = np.ones(1)
        for _ in range(_MAX_CUTS):
            cut = self._cut(prices, allowed_BK, budget)
            if cut is None:
                return None
            cuts.append(cut)
            bound = float(cut.value @ prices)
            if bound > best_bound:
                best, best_bound = cut, bound
            if len(cuts) == 1:
                unit_ms = max(bound, 1e-6 * self._most_ms, 1e-300)
                limit_KM = np.where(self._scarce_KM.ravel(), _HIGHEST_PRICE, 0.0)
                if kinds == 1 and (cut.value[1:] <= 0).all():
                    break  # memory suffices, so it has no price
            if best_bound > above:
                break
            upper, prices, weights = _master(
                np.array([c.value for c in cuts]), kinds, limit_KM, unit_ms
            )
            if upper <= best_bound + _TOLERANCE * abs(best_bound):
                break
        assert best is not None
        # the number of options from each cut is about proportional to its weight: multiples of the
        # golden ratio spread neighbouring tables evenly over [0, 1)
        spread_T = np.arange(1, self._arrays.num_tables + 1) * 0.6180339887498949 % 1.0
        cut_T = np.searchsorted(np.cumsum(weights)[:-1], spread_T)
        option_T = np.array([cut.option_T for cut in cuts])[cut_T, np.arange(len(cut_T))]
        return Relaxed(bound_ms=max(best_bound, 0.0), price_O=best.price_O, option_T=option_T)

    def lower_bound(self, deadline: float = np.inf) -> Relaxed:
        """Return the solution at the least ceiling that it does not exceed.

        Args:
            deadline: Time of `time.monotonic` after which the bound may be lower than possible.
        """
        start = self.solve()
        assert start is not None, "tables without an option that fits are refused before"
        floor = max(start.bound_ms, float(self._arrays.base_R.max()))
        # Ceilings from one peak to before the next admit the same options.
        peaks = self._bundles.peak_BK
        peaks = np.unique(peaks[(peaks > floor) & np.isfinite(peaks)])
        ceilings = np.concatenate([[floor], peaks])
        ends = np.concatenate([peaks, [np.inf]])
        solution = start
        low, high, step = -1, len(ceilings) - 1, 1  # the optimum is above ends[low]
        while low + 1 < high or (low < high and solution is start):
            if time.monotonic() > deadline:
                break
            # gallop first: it mostly is among the lowest
            middle = min(low + step, (low + high + 1) // 2 if step > 1 else low + 1, high)
            tried = self.solve(float(ceilings[middle]), above=float(ends[middle]))
            if tried is None or tried.bound_ms > ends[middle]:
                low, step = middle, 2 * step
            else:
                high, step, solution = middle, high, tried
        bound = max(floor, float(ends[low]) if low >= 0 else 0.0)
        if high == low + 1 and solution is not start:
            bound = max(bound, solution.bound_ms)
        return Relaxed(bound_ms=bound, price_O=solution.price_O, option_T=solution.option_T)

    def _cut(self, prices: Floats, allowed_BK: Flags, budget: float) -> _Cut | None:
        """Return the choice of options at some prices; None if a table has no allowed option."""
        bundles, kinds = self._bundles, self._arrays.num_kinds
        price_BK = bundles.cost_BK * (prices[:kinds] / self._size_K)
        memory_price_KM = prices[kinds:].reshape(self._free_KM.shape) / self._unit_KM
        for m in np.flatnonzero(memory_price_KM.sum(axis=0)):
            price_BK += bundles.memory_BKM[:, :, m] * memory_price_KM[:, m]
        # FIXED bundles are on every kind, others on the cheapest kind
        price_BK[~allowed_BK] = np.inf
        kind_B = price_BK.argmin(axis=1)
        price_B = np.where(
            bundles.fixed_B, price_BK.sum(axis=1), price_BK[np.arange(len(kind_B)), kind_B]
        )
        price_O = np.add.reduceat(price_B, bundles.first_O)
        option_T = self._cheapest(price_O)
        if not np.isfinite(price_O[option_T]).all():
            return None
        chosen_O = np.zeros(len(price_O), dtype=bool)
        chosen_O[option_T] = True
        chosen = np.flatnonzero(chosen_O[bundles.owner_B])
        here = bundles.fixed_B[chosen, None] | (kind_B[chosen, None] == np.arange(kinds))
        load_K = (bundles.cost_BK[chosen] * here).sum(axis=0) + self._base_K
        taken_KM = (bundles.memory_BKM[chosen] * here[:, :, None]).sum(axis=0)
        missing_KM = (taken_KM - budget * self._free_KM) / self._unit_KM
        value = np.concatenate([load_K / self._size_K, missing_KM.ravel()])
        return _Cut(value=value, option_T=option_T, price_O=price_O)

    def _cheapest(self, price_O: Floats) -> Ints:
        place_T: Ints = np.append(price_O, np.inf)[self._option_TO].argmin(axis=1)
        return self._arrays.first_T[:-1] + place_T


@final
class _Bundles:
    """Shards that share a price, in the order of their options.

    The shards of a FIXED option form one bundle. Runs of identical shards of other options choose
    their kind of rank and form a bundle each; with one kind of rank, one bundle for all.

    Attributes:
        owner_B: Option.
        fixed_B: Whether it is FIXED.
        cost_BK: Milliseconds on each kind, of all shards or of those fixed there.
        memory_BKM: Bytes, likewise.
        peak_BK: Load of a rank with the longest shard alone; inf if a shard does not fit.
        first_O: First bundle of each option.
        memory_OM: Bytes of each option.
        fits_O: Whether all shards fit on some rank.
    """

    def __init__(self, arrays: ShardArrays, of_kind_KR: Flags) -> None:
        kinds, num_options = arrays.num_kinds, len(arrays.options)
        begins_P = np.zeros(len(arrays.cost_PK), dtype=bool)
        if kinds > 1:
            numbers = np.hstack([arrays.cost_PK, arrays.memory_PM])
            begins_P[1:] = (numbers[1:] != numbers[:-1]).any(axis=1)
        begins_P[arrays.first_O[:-1][~arrays.is_fixed_O]] = True
        starts = np.flatnonzero(begins_P)
        option_P = np.repeat(np.arange(num_options), np.diff(arrays.first_O))
        self.owner_B = np.sort(
            np.concatenate([option_P[starts], np.flatnonzero(arrays.is_fixed_O)]), kind="stable"
        )
        self.fixed_B = arrays.is_fixed_O[self.owner_B]
        self.cost_BK = np.zeros((len(self.owner_B), kinds))
        self.memory_BKM = np.zeros((*self.cost_BK.shape, len(arrays.pools)))
        self.peak_BK = np.zeros(self.cost_BK.shape)
        if len(starts):  # reduceat needs at least one
            self.cost_BK[~self.fixed_B] = np.add.reduceat(arrays.cost_PK, starts)
            self.memory_BKM[~self.fixed_B] = np.add.reduceat(arrays.memory_PM, starts)[:, None]
            peak_PK = _peaks(arrays, of_kind_KR)
            self.peak_BK[~self.fixed_B] = np.maximum.reduceat(peak_PK, starts)
        known: dict[int, tuple[Floats, Floats, float]] = {}  # by option: tables may share one
        for bundle in np.flatnonzero(self.fixed_B).tolist():
            option = int(self.owner_B[bundle])
            if (key := id(arrays.options[option])) not in known:
                cost_N, memory_NM = arrays.fixed(option)
                there, of_kind_KN = slice(len(cost_N)), of_kind_KR[:, : len(cost_N)]
                fits = (memory_NM <= arrays.free_RM[there]).all()
                peak = float((cost_N + arrays.base_R[there]).max()) if fits else np.inf
                known[key] = of_kind_KN @ cost_N, of_kind_KN @ memory_NM, peak
            self.cost_BK[bundle], self.memory_BKM[bundle], self.peak_BK[bundle] = known[key]
        self.first_O = np.searchsorted(self.owner_B, np.arange(num_options))
        of_all_BM = np.where(
            self.fixed_B[:, None], self.memory_BKM.sum(axis=1), self.memory_BKM.max(axis=1)
        )
        self.memory_OM = np.add.reduceat(of_all_BM, self.first_O)
        self.fits_O = np.logical_and.reduceat(np.isfinite(self.peak_BK).any(axis=1), self.first_O)


def _peaks(arrays: ShardArrays, of_kind_KR: Flags) -> Floats:
    """Return the load of a rank with each shard alone, inf on kinds where it does not fit."""
    peak_PK: Floats = arrays.cost_PK + [
        arrays.base_R[mine].min(initial=np.inf) for mine in of_kind_KR
    ]
    for kind, mine in enumerate(of_kind_KR):
        free_XM = np.unique(arrays.free_RM[mine], axis=0)
        fits_P = np.any(np.all(arrays.memory_PM[:, None] <= free_XM, axis=2), axis=1)
        peak_PK[~fits_P, kind] = np.inf
    return peak_PK


def _master(
    values_CX: Floats, shares: int, limits: Floats, unit: float
) -> tuple[float, Floats, Floats]:
    """Find the prices that maximize the least cut.

    Args:
        values_CX: One row for each cut.
        shares: Number of leading prices, which sum to 1.
        limits: Limits of the other prices, in `unit`.
        unit: Unit of cuts and of the other prices; numbers near 1 suit the solver.

    Returns:
        The value of the least cut, the prices, and the weights of the cuts in the mix that
        certifies it.
    """
    num_cuts, num_prices = values_CX.shape
    if num_prices == 1:  # nothing to choose
        least = values_CX[:, 0].argmin()
        return float(values_CX[least, 0]), np.ones(1), np.eye(num_cuts)[least]
    from scipy.optimize import linprog  # imported late, since it is slow

    units = np.where(np.arange(num_prices) < shares, unit, 1.0)
    result = linprog(
        np.concatenate([[-1.0], np.zeros(num_prices)]),
        A_ub=np.hstack([np.ones((num_cuts, 1)), -values_CX / units]),
        b_ub=np.zeros(num_cuts),
        A_eq=np.concatenate([[0.0], np.ones(shares), np.zeros(num_prices - shares)])[None],
        b_eq=[1.0],
        bounds=[(None, None), *[(0, None)] * shares, *((0, limit) for limit in limits)],
        method="highs-ds",
    )
    assert result.status == 0, result.message
    prices = np.maximum(result.x[1:], 0.0)
    prices[:shares] /= prices[:shares].sum()
    prices[shares:] *= unit
    weights = np.maximum(-result.ineqlin.marginals, 0.0)
    return -float(result.fun) * unit, prices, weights / weights.sum()

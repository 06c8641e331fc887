"""What there is to say about a plan, found once for text and page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import final

from recsys.distributed.planner.alternatives import Alternative, alternatives
from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.options import TableOption
from recsys.distributed.planner.rating import RatedTable, Rating
from recsys.distributed.planner.tables import Bytes, PlannedTable, Storage
from recsys.distributed.planner.what_if import Gain, gains_of

COST_PARTS = tuple(part.name for part in fields(Cost))
"""The parts of a rank's time, in order."""

_NEARLY_FULL = 0.95
_HOT = 0.9  # share of the slowest rank's time that a table takes which binds all
_EVEN = 0.02
_WIDE_GAP = 0.02  # worth a longer search


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TableFacts:
    """What there is to say about a table.

    Attributes:
        rated: where it is.
        busiest_ms: on the rank where it takes longest.
        work_ms: on all ranks together.
        memory: on all ranks together.
    """

    rated: RatedTable
    busiest_ms: float
    work_ms: float
    memory: Bytes

    @property
    def name(self) -> str:
        """The table's name after its module's path."""
        table = self.rated.table
        return f"{table.path}.{table.name}" if table.path else table.name


@final
class Explanation:
    """What there is to say about a plan.

    Args:
        rating: of the plan.
        seconds: how long to try changes for.
    """

    def __init__(self, rating: Rating, seconds: float) -> None:
        self.rating = rating
        self.seconds = seconds
        self._undemanded = {(table.path, table.name): table for table in rating.undemanded}
        deadline = time.monotonic() + seconds
        self.gains: list[Gain] = sorted(
            gains_of(rating, left=lambda: deadline - time.monotonic()), key=lambda g: g.slowest_ms
        )
        self.tables = sorted(
            (self._facts_of(table) for table in rating.tables), key=lambda t: -t.busiest_ms
        )

    def _facts_of(self, rated: RatedTable) -> TableFacts:
        kinds = self.rating.topology.kinds
        times = [part.costs[kinds[rank]].total for rank, part in rated.shards()]
        stored = Storage().total
        for part in rated.option.shards:
            stored = stored.plus(Bytes(*(part.count * size for size in part.memory)))
        return TableFacts(rated=rated, busiest_ms=max(times), work_ms=sum(times), memory=stored)

    def others(self, table: TableFacts, most: int = 2) -> list[Alternative]:
        """Returns the best other ways to place a table, one for each sharding type and kernel.

        Where the user's constraints leave no other, those that there would be without them.
        """
        rated = table.rated
        found = self._nearest(rated, rated.options or self._listed(rated.table))
        key = (rated.table.path, rated.table.name)
        if not found and key in self._undemanded:
            found = self._nearest(rated, self._listed(self._undemanded[key]))
        return found[:most]

    def _nearest(self, rated: RatedTable, options: Sequence[TableOption]) -> list[Alternative]:
        return alternatives(self.rating, rated, options)

    def _listed(self, table: PlannedTable) -> Sequence[TableOption]:
        return self.rating.lister.options_of(table)

    def headline(self) -> str:
        """Returns the one sentence."""
        rating = self.rating
        ranks = rating.topology.world_size
        slowest = f"The slowest of {ranks} ranks, rank {rating.slowest_rank}, takes"
        if ranks == 1:
            slowest = "The only rank takes"
        text = f"{slowest} {ms(rating.slowest_ms)} per step for its tables."
        found = rating.placement
        if found is None:
            return f"{text} The plan was given, not searched for."
        cut = ", ended by the time limit" if found.timed_out else ""
        how = found.method if found.method == "partitioner" else f"{found.method} search"
        how = f"({how}, {found.seconds:.1f} s{cut})"
        if found.optimal:
            return f"{text} No plan is faster {how}."
        longer = ""
        if found.method == "heuristic" and found.gap >= _WIDE_GAP:
            longer = (
                " A longer search may narrow it: timeout_seconds of the planner, --timeout of "
                "python -m recsys plan."
            )
        return (
            f"{text} No plan takes less than {ms(found.bound_ms)}: the gap is {percent(found.gap)} "
            f"{how}.{longer}"
        )

    def binding(self) -> list[str]:
        """Returns what the slowest rank's time is bound by, a sentence each."""
        rating = self.rating
        found = [self._share_of_parts()]
        if rating.topology.world_size > 1:
            found += self._hot_table()
            found.append(self._balance())
        return found + self._memory()

    def _share_of_parts(self) -> str:
        cost = self.rating.costs[self.rating.slowest_rank]
        shares = sorted(((getattr(cost, part), part) for part in COST_PARTS), reverse=True)
        total = cost.total or 1.0
        texts = [f"{percent(time / total)} {part}" for time, part in shares if time >= 5e-4 * total]
        return f"Time of rank {self.rating.slowest_rank}: {', '.join(texts) or 'none'}."

    def _hot_table(self) -> list[str]:
        slowest, total = self.rating.slowest_rank, self.rating.slowest_ms
        kind = self.rating.topology.kinds[slowest]
        times = [
            (part.costs[kind].total, table.rated)
            for table in self.tables
            for rank, part in table.rated.shards()
            if rank == slowest
        ]
        if not times:
            return []
        most_ms, rated = max(times, key=lambda entry: entry[0])
        if most_ms < _HOT * total:
            return []
        share = f"{percent(most_ms / total)} of the time of rank {slowest} ({ms(most_ms)})"
        if rated.option.num_ranks == 1:
            return [f"Table {rated.table.name!r} is too hot for one rank: it takes {share}."]
        return [f"Table {rated.table.name!r} is hot: one of its parts takes {share}."]

    def _balance(self) -> str:
        times = [cost.total for cost in self.rating.costs]
        mean = sum(times) / len(times)
        slowest = self.rating.slowest_ms
        if slowest <= mean * (1 + _EVEN):
            return (
                f"All ranks are equally busy ({ms(mean)} on average): only less work for all of "
                "them makes a step faster."
            )
        return (
            f"The mean rank takes {ms(mean)}, {percent(1 - mean / slowest)} less than the slowest."
        )

    def _memory(self) -> list[str]:
        rating = self.rating
        found = []
        for pool, memory in enumerate((rating.topology.compute_device, "host")):
            full = [
                rank
                for rank, room in enumerate(rating.rooms)
                if 0 < rating.storage[rank].total[pool] >= _NEARLY_FULL * room[pool]
            ]
            if full:
                which = f"rank{'' if len(full) == 1 else 's'} {show_ranks(full)}"
                found.append(
                    f"The {memory} memory that is free for tables is at least {_NEARLY_FULL:.0%} "
                    f"full on {which}."
                )
        return found


def way(option: TableOption, ranks: Sequence[int] = (), world_size: int = 0) -> str:
    """Returns an option in words, such as "row_wise on all 8 ranks".

    Args:
        option: the way.
        ranks: of its parts, if they are known.
        world_size: how many ranks there are, if the ranks are known.
    """
    kernel = option.compute_kernel.value
    known = "" if kernel in ("fused", "dense") else f" ({kernel})"
    name = f"{option.sharding_type.value}{known} on"
    distinct = sorted(set(ranks))
    if not distinct:
        return f"{name} {option.num_ranks} rank{'' if option.num_ranks == 1 else 's'}"
    if len(distinct) == 1:
        return f"{name} rank {distinct[0]}"
    if len(distinct) == world_size:
        return f"{name} all {world_size} ranks"
    return f"{name} {len(distinct)} ranks ({show_ranks(distinct)})"


def other_way(alternative: Alternative, rated: RatedTable) -> str:
    """Returns an alternative in words, and whether the user's constraints rule it out."""
    option = alternative.option
    ruled_out = option.compute_kernel not in rated.table.kernels.get(option.sharding_type, ())
    return f"{way(alternative.option)}{' (if its constraints allowed)' if ruled_out else ''}"


def verdict(alternative: Alternative, slowest_ms: float, work_ms: float) -> str:
    """Returns what an alternative would cost, in words.

    Args:
        alternative: where one table is placed another way, all others stay.
        slowest_ms: of the slowest rank as it is.
        work_ms: of the table on all ranks as it is.
    """
    if alternative.bytes_over:
        memory = "host memory" if alternative.host else "memory"
        return f"no room, {size_of(alternative.bytes_over)} of {memory} short"
    change = alternative.slowest_ms / slowest_ms - 1 if slowest_ms else 0.0
    if abs(change) >= 5e-4:
        return f"slowest rank {ms(alternative.slowest_ms)} ({change:+.1%})"
    more = alternative.work_ms - work_ms
    sign = "-" if more <= -1e-4 else "+"  # less is shown as 0
    return f"slowest rank the same, {sign}{ms(abs(more))} on all ranks together"


def ms(milliseconds: float) -> str:
    """Returns a time with three significant digits.

    Example:
        >>> ms(0.01204), ms(99.96), ms(1234.5)
        ('0.0120 ms', '100 ms', '1,234 ms')
    """
    if milliseconds >= 99.95:
        return f"{milliseconds:,.0f} ms"
    return f"{milliseconds:#.3g} ms" if milliseconds >= 1e-4 else "0 ms"


def size_of(num_bytes: int) -> str:
    """Returns bytes in the largest unit that makes them at least 1.

    Example:
        >>> size_of(512), size_of(40_000_000_000)
        ('512 B', '37.3 GiB')
    """
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:,.0f} {units[0]}" if units[0] == "B" else f"{size:,.1f} {units[0]}"


def percent(share: float) -> str:
    """Returns a share with one digit.

    Example:
        >>> percent(0.0234)
        '2.3%'
    """
    return f"{share:.1%}"


def show_ranks(ranks: Sequence[int], most: int = 4) -> str:
    """Returns ranks in order as runs.

    Example:
        >>> show_ranks([0, 1, 2, 5])
        '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    rest = sum(map(len, runs[most:]))
    return ", ".join([*texts[:most], *([f"... and {rest} more"] if rest else [])])

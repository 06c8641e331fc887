"""Content of plan reports, shared by the text and the HTML page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import final

from recsys.distributed.planner.advice import Alternative, Gain, alternatives, gains_of
from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.formatting import ms, show_ranks, size_of
from recsys.distributed.planner.options import TableOption
from recsys.distributed.planner.plan_cost import PlanCost, TableCost

COST_PARTS = tuple(part.name for part in fields(Cost))
"""Phases of a rank's time, in order."""

_NEARLY_FULL = 0.95
_HOT = 0.9  # share of the slowest rank's time from which a table is reported as hot
_EVEN = 0.02
_WIDE_GAP = 0.02  # gap from which a longer search is suggested


@final
class Explanation:
    """Content of the report on a plan.

    Args:
        rating: Costs of the plan.
        seconds: Time limit for trying changes.
    """

    def __init__(self, rating: PlanCost, seconds: float) -> None:
        self.rating = rating
        self.seconds = seconds
        self._unconstrained = {(t.path, t.name): t for t in rating.unconstrained}
        deadline = time.monotonic() + seconds
        self.gains: list[Gain] = sorted(
            gains_of(rating, left=lambda: deadline - time.monotonic()), key=lambda g: g.slowest_ms
        )
        self.tables = sorted(rating.tables, key=lambda table: -table.busiest_ms)

    def place(self, rated: TableCost) -> str:
        """Return the option and the ranks of a table as text."""
        return describe_option(rated.option, rated.ranks, self.rating.topology.world_size)

    def others(self, rated: TableCost, most: int = 2) -> list[str]:
        """Return the best other options for a table as text, one for each sharding type and kernel.

        If the constraints leave no other option, options without the constraints are shown.
        """
        list_options = self.rating.lister.options_of
        others = alternatives(self.rating, rated, rated.options or list_options(rated.table))
        free = self._unconstrained.get((rated.table.path, rated.table.name))
        if not others and free is not None:
            others = alternatives(self.rating, rated, list_options(free))
        return [self._sentence(other, rated) for other in others[:most]]

    def _sentence(self, other: Alternative, rated: TableCost) -> str:
        """Return the costs of an alternative as text, and whether constraints exclude it."""
        option, slowest_ms = other.option, self.rating.slowest_ms
        allowed = option.compute_kernel in rated.table.kernels.get(option.sharding_type, ())
        name = f"{describe_option(option)}{'' if allowed else ' (if its constraints allowed)'}"
        if other.bytes_over:
            memory = "host memory" if other.host else "memory"
            return f"{name}: does not fit, {size_of(other.bytes_over)} of {memory} short"
        change = other.slowest_ms / slowest_ms - 1 if slowest_ms else 0.0
        # smaller changes would show as 0.0%
        if abs(change) >= 5e-4:
            return f"{name}: slowest rank {ms(other.slowest_ms)} ({change:+.1%})"
        more = other.work_ms - rated.work_ms
        sign = "-" if more <= -1e-4 else "+"  # less is shown as 0
        return f"{name}: slowest rank the same, {sign}{ms(abs(more))} on all ranks together"

    def gain_sentences(self) -> list[str]:
        """Return the result of each change as text."""
        now = self.rating.slowest_ms
        return [
            f"{gain.text}: {ms(gain.slowest_ms)} instead of {ms(now)} "
            f"(-{1 - gain.slowest_ms / now:.1%})."
            for gain in self.gains
        ]

    def scope(self) -> str:
        """Return the numbers of tables, ranks and samples as text."""
        rating, topology = self.rating, self.rating.topology
        nodes = "1 node" if topology.num_nodes == 1 else f"{topology.num_nodes} nodes"
        return (
            f"{len(rating.tables):,} tables on {topology.world_size:,} {topology.compute_device} "
            f"ranks ({nodes}), {rating.batch_size:,} samples per rank and step"
        )

    def headline(self) -> str:
        """Return the time of the slowest rank and the quality of the plan as text."""
        rating = self.rating
        ranks = rating.topology.world_size
        slowest = f"The slowest of {ranks} ranks, rank {rating.slowest_rank}, takes"
        if ranks == 1:
            slowest = "The only rank takes"
        text = f"{slowest} {ms(rating.slowest_ms)} per step for its tables."
        placement = rating.placement
        if placement is None:
            return f"{text} The plan was passed in, not searched for."
        ended = ", ended by the time limit" if placement.timed_out else ""
        how = f"({placement.method} search, {placement.seconds:.1f} s{ended})"
        if placement.optimal:
            return f"{text} No plan is faster {how}."
        longer = ""
        if placement.method == "heuristic" and placement.gap >= _WIDE_GAP:
            longer = (
                " A longer search may narrow it: timeout_seconds of the planner, --timeout of "
                "python -m recsys plan."
            )
        return (
            f"{text} No plan takes less than {ms(placement.bound_ms)}: the gap is "
            f"{placement.gap:.1%} {how}.{longer}"
        )

    def binding(self) -> list[str]:
        """Return sentences on the factors that limit the slowest rank."""
        rating, slowest, total = self.rating, self.rating.slowest_rank, self.rating.slowest_ms
        parts = sorted(zip(rating.costs[slowest].parts, COST_PARTS, strict=True), reverse=True)
        shares = [(time / (total or 1.0), part) for time, part in parts]
        texts = [f"{share:.1%} {part}" for share, part in shares if share >= 5e-4]
        sentences = [f"Time of rank {slowest}: {', '.join(texts) or 'none'}."]
        shards = rating.placed[slowest]
        _, most_ms, hot = max(shards, key=lambda entry: entry[1], default=(None, 0.0, None))
        mean = sum(cost.total for cost in rating.costs) / len(rating.costs)
        is_alone = rating.topology.world_size == 1
        if not is_alone and hot is not None and most_ms >= _HOT * total:
            share = f"{most_ms / total:.1%} of the time of rank {slowest} ({ms(most_ms)})"
            how = "is hot: one of its shards takes"
            if hot.option.num_ranks == 1:
                how = "is too hot for one rank: it takes"
            sentences.append(f"Table {hot.table.name!r} {how} {share}.")
        if not is_alone and total <= mean * (1 + _EVEN):
            sentences.append(
                f"All ranks are equally busy ({ms(mean)} on average): only less work on all of "
                "them makes a step faster."
            )
        elif not is_alone:
            less = f"{1 - mean / total:.1%} less than the slowest"
            sentences.append(f"The mean rank takes {ms(mean)}, {less}.")
        for pool, memory in enumerate(rating.pools):
            full = [
                rank
                for rank, (used, budget) in enumerate(rating.memory)
                # 0 <: an unused memory is not full, even if no byte of it is free
                if 0 < used[pool] >= _NEARLY_FULL * budget[pool]
            ]
            if full:
                sentences.append(
                    f"The {memory} memory that is free for tables is at least {_NEARLY_FULL:.0%} "
                    f"full on rank{'' if len(full) == 1 else 's'} {show_ranks(full)}."
                )
        return sentences


def describe_option(option: TableOption, ranks: Sequence[int] = (), world_size: int = 0) -> str:
    """Return an option as text, such as "row_wise on all 8 ranks".

    Args:
        option: Option.
        ranks: Ranks of its shards, if they are known.
        world_size: Number of ranks of the machine, if `ranks` are known.
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

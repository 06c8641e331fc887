"""A plan explained in text: what it costs, why it is so, and what would make it faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from recsys.distributed.placement.plan import format_table
from recsys.distributed.planner.explanation import COST_PARTS, Explanation
from recsys.distributed.planner.plan_cost import Rating
from recsys.distributed.planner.words import ms, percent, size_of

_MOST_RANKS = 16
_SLOWEST = 3
_MOST_TABLES = 20


def report(explanation: Explanation) -> str:
    """Returns the report of a plan."""
    return "\n\n".join(
        [
            explanation.headline(),
            f"What binds\n{_bullets(explanation.binding())}",
            *_gains(explanation),
            f"Ranks, in ms per step\n{_ranks(explanation.rating)}",
            "Tables, the longest first; below each, the two next best ways and what the slowest "
            "rank would take\nif this table alone went there, to the best ranks that were found\n"
            + "\n".join(_tables(explanation)),
        ]
    )


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _gains(explanation: Explanation) -> Iterator[str]:
    now = explanation.rating.slowest_ms
    if explanation.gains:
        lines = (
            f"{gain.text}: {ms(gain.slowest_ms)} instead of {ms(now)} "
            f"(-{percent(1 - gain.slowest_ms / now)})."
            for gain in explanation.gains
        )
        yield f"What would gain most, each planned again by itself\n{_bullets(lines)}"


def _ranks(rating: Rating) -> str:
    labels = _labels(rating)
    rows = []
    for rank, label in labels.items():
        cost, (used, budget) = rating.costs[rank], rating.memory[rank]
        row = [f"{rank}{label}", *(f"{ms:.3f}" for ms in (*cost.parts, cost.total))]
        for pool in range(len(rating.pools)):
            row += [size_of(used[pool]), size_of(budget[pool] - used[pool])]
        rows.append(tuple(row))
    memory = [("memory", "free"), ("host memory", "free")][: len(rating.pools)]
    head = ("rank", *COST_PARTS, "total", *(name for pair in memory for name in pair))
    text = format_table(head, rows, numbers=range(1, len(head)))
    left_out = len(rating.costs) - len(rows)
    return f"{text}\n... and {left_out} more" if left_out else text


def _labels(rating: Rating) -> dict[int, str]:
    """Returns the ranks to show, each with what it is among many."""
    totals = [cost.total for cost in rating.costs]
    order = sorted(range(len(totals)), key=lambda rank: (-totals[rank], rank))
    if len(order) <= _MOST_RANKS:
        return dict.fromkeys(range(len(order)), "")
    labels = dict.fromkeys(order[:_SLOWEST], " slowest")
    labels |= {order[len(order) // 2]: " median", order[-1]: " fastest"}
    fullest = max(order, key=lambda rank: rating.memory[rank][0].device)
    labels[fullest] = f"{labels.get(fullest, '')} fullest"
    return labels


def _tables(explanation: Explanation) -> Iterator[str]:
    for facts in explanation.tables[:_MOST_TABLES]:
        table, time = facts.rated.table, ms(facts.busiest_ms)
        if facts.rated.option.num_ranks > 1:
            time = f"at most {time} on one, {ms(facts.work_ms)} on all together"
        size = f"{table.rows:,} x {table.dim}, {size_of(sum(facts.memory))}"
        yield f"{facts.name}, {size}: {facts.place}, {time}"
        yield from (f"    {other}" for other in explanation.others(facts))
    if len(explanation.tables) > _MOST_TABLES:
        yield f"... and {len(explanation.tables) - _MOST_TABLES} more"

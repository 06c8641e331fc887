"""A plan explained in text: what it costs, why it is so, and what would make it faster."""

from __future__ import annotations

from collections.abc import Iterator

from recsys.distributed.placement.plan import format_table
from recsys.distributed.planner.explanation import (
    COST_PARTS,
    Explanation,
    TableFacts,
    ms,
    other_way,
    percent,
    size_of,
    verdict,
    way,
)
from recsys.distributed.planner.rating import Rating

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
            f"{_tables(explanation)}",
        ]
    )


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _gains(explanation: Explanation) -> Iterator[str]:
    now = explanation.rating.slowest_ms
    if explanation.gains:
        lines = [
            f"{gain.text}: {ms(gain.slowest_ms)} instead of {ms(now)} "
            f"(-{percent(1 - gain.slowest_ms / now)})."
            for gain in explanation.gains
        ]
        yield f"What would gain most, each planned again by itself\n{_bullets(lines)}"


def _ranks(rating: Rating) -> str:
    totals = [cost.total for cost in rating.costs]
    order = sorted(range(len(totals)), key=lambda rank: (-totals[rank], rank))
    labels = {rank: "" for rank in range(len(totals))}
    if len(order) > _MOST_RANKS:
        fullest = max(order, key=lambda rank: rating.storage[rank].total.device)
        labels = dict.fromkeys(order[:_SLOWEST], " slowest")
        for rank, label in ((order[len(order) // 2], " median"), (order[-1], " fastest")):
            labels[rank] = label
        labels[fullest] = f"{labels.get(fullest, '')} fullest"
    has_host = any(stored.total.host for stored in rating.storage)
    rows = []
    for rank, label in labels.items():
        cost, stored, room = rating.costs[rank], rating.storage[rank].total, rating.rooms[rank]
        times = [f"{getattr(cost, part):.3f}" for part in COST_PARTS]
        row = (f"{rank}{label}", *times, f"{cost.total:.3f}", size_of(stored.device))
        row += (size_of(room.device - stored.device),)
        if has_host:
            row += (size_of(stored.host), size_of(room.host - stored.host))
        rows.append(row)
    head = ("rank", *COST_PARTS, "total", "memory", "free")
    if has_host:
        head += ("host memory", "free")
    text = format_table(head, rows, numbers=range(1, len(head)))
    left_out = len(order) - len(rows)
    return f"{text}\n... and {left_out} more" if left_out else text


def _tables(explanation: Explanation) -> str:
    shown = explanation.tables[:_MOST_TABLES]
    lines = [line for table in shown for line in _table(explanation, table)]
    left_out = len(explanation.tables) - len(shown)
    if left_out:
        lines.append(f"... and {left_out} more")
    return "\n".join(lines)


def _table(explanation: Explanation, table: TableFacts) -> Iterator[str]:
    rated = table.rated
    owned = rated.table
    time = ms(table.busiest_ms)
    if rated.option.num_ranks > 1:
        time = f"at most {time} on one, {ms(table.work_ms)} on all together"
    place = way(rated.option, rated.ranks, explanation.rating.topology.world_size)
    memory = size_of(sum(table.memory))
    yield f"{table.name}, {owned.rows:,} x {owned.dim}, {memory}: {place}, {time}"
    slowest_ms = explanation.rating.slowest_ms
    for other in explanation.others(table):
        yield f"    {other_way(other, rated)}: {verdict(other, slowest_ms, table.work_ms)}"

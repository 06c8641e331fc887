"""Plans once more with something changed: what reports and refusals know of changes is found so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from recsys.distributed.planner.option_lister import OptionLister
from recsys.distributed.planner.options import TableOption
from recsys.distributed.planner.placement import InfeasibleError, Placement, Problem, Ranks
from recsys.distributed.planner.rating import Rating
from recsys.distributed.planner.search import search
from recsys.distributed.planner.tables import Bytes, PlannedTable
from recsys.distributed.planner.topology import Topology

ANY_GAP = 1e4
"""A tolerance with which the search ends at nearly any placement that fits."""


def problem_of(
    topology: Topology, rooms: Sequence[Bytes], options: Sequence[Sequence[TableOption]]
) -> Problem:
    """Returns what the search is asked.

    Args:
        topology: the machine.
        rooms: memory that is free for tables, per rank.
        options: of each table.
    """
    ranks = Ranks(
        memory_caps=[(max(room.device, 0), max(room.host, 0)) for room in rooms],
        kinds=topology.kinds,
        node_size=topology.local_size,
    )
    return Problem(ranks=ranks, tables=options)


def plan_again(
    topology: Topology,
    lister: OptionLister,
    tables: Sequence[PlannedTable],
    rooms: Sequence[Bytes],
    *,
    seconds: float | None = None,
    tolerance: float = 1e-3,
) -> Placement | None:
    """Places tables on a machine.

    Args:
        topology: the machine.
        lister: of the ways to place a table on it.
        tables: to place.
        rooms: memory that is free for them, per rank.
        seconds: that the search may take; all that it likes if None.
        tolerance: gap that is good enough.

    Returns:
        The placement; None if nothing was found to fit, or a table has no option.
    """
    options = [lister.options_of(table) for table in tables]
    if not all(options):
        return None
    try:
        problem = problem_of(topology, rooms, options)
        return search(problem, time_limit=seconds, tolerance=tolerance)
    except InfeasibleError:
        return None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Something that a user could change.

    Attributes:
        text: what, as a demand: "Keep ...".
        tables: after it.
        rooms: after it, per rank.
    """

    text: str
    tables: tuple[PlannedTable, ...]
    rooms: tuple[Bytes, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What a change would give.

    Attributes:
        text: the change.
        slowest_ms: of the plan that was found with it.
    """

    text: str
    slowest_ms: float


def gains_of(rating: Rating, *, left: Callable[[], float], least: float = 0.01) -> Iterator[Gain]:
    """Plans again under each change, and yields those that make the slowest rank faster.

    None where the user's own enumerator or partitioner plans, which would not plan like this.

    Args:
        rating: of the plan as it is.
        left: returns the seconds that there are still.
        least: share of the slowest rank's time that is worth a line.
    """
    for change in () if rating.is_custom else _changes(rating):
        if left() <= 0:
            return
        placement = plan_again(
            rating.topology, rating.lister, change.tables, change.rooms, tolerance=least / 2
        )
        if placement is not None and placement.slowest_ms <= rating.slowest_ms * (1 - least):
            yield Gain(text=change.text, slowest_ms=placement.slowest_ms)


def _changes(rating: Rating) -> Iterator[Change]:
    tables = tuple(rated.table for rated in rating.tables)
    rooms = rating.rooms
    if rating.placement is None:
        yield Change(text="Let the planner place all tables", tables=tables, rooms=rooms)
    yield from _freed(rating, tables)
    if rating.topology.world_size > 1 and any(max(t.wire_bytes) > 2 for t in tables):
        narrow = [
            replace(t, wire_bytes=(min(t.wire_bytes[0], 2.0), min(t.wire_bytes[1], 2.0)))
            for t in tables
        ]
        text = "Send embeddings and their gradients in 16 bits (qcomm_codecs_registry)"
        yield Change(text=text, tables=tuple(narrow), rooms=rooms)
    halves = with_half_weights(tables)
    if halves != tables:
        text = "Keep weights in 16 bits (data_type=DataType.FP16)"
        yield Change(text=text, tables=halves, rooms=rooms)
    if fullness(rating) > 0.8:
        more = tuple(Bytes(2 * room.device, 2 * room.host) for room in rooms)
        yield Change(text="Have twice the memory free for tables", tables=tables, rooms=more)


def _freed(rating: Rating, tables: tuple[PlannedTable, ...]) -> Iterator[Change]:
    """Yields what it is to lift the demands on one costly table, and on all."""
    freed = {(table.path, table.name): table for table in rating.undemanded}
    slowest = rating.slowest_rank
    kind = rating.topology.kinds[slowest]
    there = {
        (rated.table.path, rated.table.name): part.costs[kind].total
        for rated in rating.tables
        for rank, part in rated.shards()
        if rank == slowest
    }
    costly = sorted(freed.keys() & there.keys(), key=lambda key: -there[key])[:2]
    for one in costly:
        lifted = tuple(freed[one] if (t.path, t.name) == one else t for t in tables)
        text = f"Lift the constraints on table {one[1]!r}"
        yield Change(text=text, tables=lifted, rooms=rating.rooms)
    if set(costly) != freed.keys():
        lifted = tuple(freed.get((t.path, t.name), t) for t in tables)
        text = f"Lift the constraints on all {len(freed)} tables that have some"
        yield Change(text=text, tables=lifted, rooms=rating.rooms)


def with_half_weights(tables: tuple[PlannedTable, ...]) -> tuple[PlannedTable, ...]:
    """Returns tables whose weights have at most 16 bits."""
    return tuple(replace(t, element_bytes=2) if t.element_bytes > 2 else t for t in tables)


def fullness(rating: Rating) -> float:
    """Returns the share that the fullest rank uses of a memory that is free for tables."""
    return max(
        used / max(free, 1)
        for stored, room in zip(rating.storage, rating.rooms, strict=True)
        for used, free in zip(stored.total, room, strict=True)
    )

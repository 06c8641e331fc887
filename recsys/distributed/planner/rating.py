"""What a plan costs each rank, table by table: what planners know and reports show."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import final

from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.options import Part, TableOption
from recsys.distributed.planner.placement import Placement
from recsys.distributed.planner.tables import Bytes, PlannedTable, Storage
from recsys.distributed.planner.topology import Topology
from recsys.distributed.types import ShardingPlan


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RatedTable:
    """Where a plan puts one table.

    Attributes:
        table: what is placed.
        option: how.
        ranks: of the option's parts, in order.
        options: all ways to place it that were weighed; none for a plan that was given.
    """

    table: PlannedTable
    option: TableOption
    ranks: tuple[int, ...]
    options: tuple[TableOption, ...] = ()

    def parts(self) -> Iterator[tuple[int, Part]]:
        """Yields the rank of each part, and the part."""
        alike = (part for part in self.option.parts for _ in range(part.count))
        yield from zip(self.ranks, alike, strict=True)


@final
@dataclass(frozen=True, kw_only=True)
class Rating:
    """What a plan costs.

    Attributes:
        topology: the machine.
        batch_size: samples per rank and step.
        tables: where each is.
        rooms: memory that is free for tables, per rank.
        placement: what the search answered; None for a plan that was given.
        batch: what each rank holds of its own samples under any plan; neither in ``storage`` nor in
            ``rooms``.
    """

    topology: Topology
    batch_size: int
    tables: tuple[RatedTable, ...]
    rooms: tuple[Bytes, ...]
    placement: Placement | None = None
    batch: Storage = field(default_factory=Storage)

    @functools.cached_property
    def costs(self) -> tuple[Cost, ...]:
        """Milliseconds of a step, per rank."""
        costs = [Cost()] * self.topology.world_size
        kinds = self.topology.kinds
        for table in self.tables:
            for rank, part in table.parts():
                costs[rank] = costs[rank].plus(part.costs[kinds[rank]])
        return tuple(costs)

    @functools.cached_property
    def storage(self) -> tuple[Storage, ...]:
        """Memory, per rank."""
        storage = [Storage()] * self.topology.world_size
        for table in self.tables:
            for rank, part in table.parts():
                storage[rank] = storage[rank].plus(part.storage)
        return tuple(storage)

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step: its phases end together, each with the rank that is last."""
        phases: list[float] = [
            max(getattr(cost, part.name) for cost in self.costs) for part in fields(Cost)
        ]
        return self.topology.slowest.step_ms + sum(phases)

    @property
    def slowest_rank(self) -> int:
        """The rank that is done last."""
        return max(range(len(self.costs)), key=lambda rank: self.costs[rank].total)

    @property
    def slowest_ms(self) -> float:
        """What that rank takes."""
        return self.costs[self.slowest_rank].total


@dataclass
class RatedPlan(ShardingPlan):
    """A plan that knows what it costs.

    Attributes:
        rating: milliseconds and memory of each rank and table; None once it is edited or loaded.
    """

    rating: Rating | None = field(default=None, compare=False, repr=False)

"""What a plan costs each rank, table by table: what planners know and reports show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import final

from recsys.distributed.placement.plan import ParameterSharding
from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.option_lister import OptionLister
from recsys.distributed.planner.options import Shards, TableOption
from recsys.distributed.planner.placement import Placement
from recsys.distributed.planner.tables import Bytes, PlannedTable, Storage
from recsys.distributed.planner.topology import Topology


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RatedTable:
    """Where a plan puts one table.

    Attributes:
        table: what is placed.
        option: how.
        ranks: of the option's shards, in order.
        options: all ways to place it that were weighed; none for a plan that was given.
    """

    table: PlannedTable
    option: TableOption
    ranks: tuple[int, ...]
    options: tuple[TableOption, ...] = ()

    def shards(self) -> Iterator[tuple[int, Shards]]:
        """Yield the rank of each shard, and the shard."""
        each = (shard for shard in self.option.shards for _ in range(shard.count))
        yield from zip(self.ranks, each, strict=True)

    def is_placed_by(self, sharding: ParameterSharding) -> bool:
        """Return whether a plan's entry still says what this does."""
        kind, kernel = self.option.sharding_type.value, self.option.compute_kernel.value
        if (sharding.sharding_type, sharding.compute_kernel) != (kind, kernel):
            return False
        if sharding.sharding_spec is None:
            return sharding.ranks is None or set(self.ranks) <= set(sharding.ranks)
        sizes, own = Counter[int](), Counter[int]()
        for shard in sharding.sharding_spec.shards:
            sizes[shard.rank] += math.prod(shard.shard_sizes)
        for rank, alike in self.shards():
            own[rank] += alike.rows * alike.cols
        return +sizes == own  # without those that are empty


@final
@dataclass(frozen=True, kw_only=True)
class Rating:
    """What a plan costs.

    Attributes:
        lister: lists the ways to place a table; knows the machine and the batch size.
        tables: where each is.
        budgets: memory that is free for tables, per rank.
        placement: what the search answered; None for a plan that was given.
        batch: what each rank holds of its own samples under any plan; neither in `storage` nor in
            `budgets`.
        is_custom: whether the planner has an enumerator or a partitioner of the user's: what would
            come of changes is not known then.
        unconstrained: tables whose sharding types or kernels the user restricts, as if they were
            not.
    """

    lister: OptionLister
    tables: tuple[RatedTable, ...]
    budgets: tuple[Bytes, ...]
    placement: Placement | None = None
    batch: Storage = field(default_factory=Storage)
    is_custom: bool = False
    unconstrained: tuple[PlannedTable, ...] = ()

    @property
    def topology(self) -> Topology:
        """The machine."""
        return self.lister.topology

    @property
    def batch_size(self) -> int:
        """Samples per rank and step."""
        return self.lister.batch_size

    @cached_property
    def placed(self) -> list[list[tuple[Shards, RatedTable]]]:
        """The shards on each rank, and of which table each is."""
        placed: list[list[tuple[Shards, RatedTable]]] = [[] for _ in self.topology.hardware]
        for table in self.tables:
            for rank, shard in table.shards():
                placed[rank].append((shard, table))
        return placed

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """Milliseconds of a step, per rank."""
        ranks = zip(self.topology.kinds, self.placed, strict=True)
        return tuple(
            reduce(Cost.plus, (s.costs[kind] for s, _ in on), Cost()) for kind, on in ranks
        )

    @cached_property
    def storage(self) -> tuple[Storage, ...]:
        """Memory, per rank."""
        return tuple(
            reduce(Storage.plus, (s.storage for s, _ in on), Storage()) for on in self.placed
        )

    @cached_property
    def memory(self) -> list[tuple[Bytes, Bytes]]:
        """What tables take, and what is free for them, per rank."""
        return [(used.total, free) for used, free in zip(self.storage, self.budgets, strict=True)]

    @property
    def pools(self) -> list[str]:
        """The memory that tables take something of: the device's, and the host's if it is used."""
        uses_host = any(used.host for used, _ in self.memory)
        return [self.topology.compute_device, "host"][: 1 + uses_host]

    def times_on(self, rank: int) -> list[tuple[float, RatedTable]]:
        """Return the milliseconds of each table that has a shard on a rank."""
        kind = self.topology.kinds[rank]
        return [(shard.cost_ms[kind], table) for shard, table in self.placed[rank]]

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step: its phases end together, each with the rank that is last."""
        phases: list[float] = [max(of) for of in zip(*(c.parts for c in self.costs), strict=True)]
        return self.topology.slowest.step_ms + sum(phases)

    @cached_property
    def slowest_rank(self) -> int:
        """The rank that is done last."""
        return max(range(len(self.costs)), key=lambda rank: self.costs[rank].total)

    @property
    def slowest_ms(self) -> float:
        """What that rank takes."""
        return self.costs[self.slowest_rank].total

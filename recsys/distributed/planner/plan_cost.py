"""Costs of a plan, by rank and by table. Planners compute them, reports show them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

from recsys.distributed.placement.plan import ParameterSharding
from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.option_lister import OptionLister
from recsys.distributed.planner.options import Shards, TableOption
from recsys.distributed.planner.placement import SearchResult
from recsys.distributed.planner.tables import Bytes, PlannedTable, RankMemory
from recsys.distributed.planner.topology import Topology


@final
@dataclass(frozen=True, kw_only=True)
class TableCost:
    """Placement of one table, and its costs.

    Attributes:
        table: Table.
        option: Option that places it.
        ranks: Rank of each of the option's shards, in order.
        kinds: Hardware kind of each rank.
        options: All options that the search compared; empty for a plan that was passed in.
    """

    table: PlannedTable
    option: TableOption
    ranks: tuple[int, ...]
    kinds: Sequence[int]
    options: tuple[TableOption, ...] = ()

    @cached_property
    def shards(self) -> list[tuple[int, Shards, float]]:
        """Rank, shard and milliseconds of each shard."""
        shards = [run for run in self.option.shards for _ in range(run.count)]
        pairs = zip(self.ranks, shards, strict=True)
        return [(rank, shard, shard.cost_ms[self.kinds[rank]]) for rank, shard in pairs]

    @property
    def busiest_ms(self) -> float:
        """Milliseconds on the rank where the table takes longest."""
        return max(ms for _, _, ms in self.shards)

    @property
    def work_ms(self) -> float:
        """Milliseconds on all ranks together."""
        return sum(ms for _, _, ms in self.shards)

    @property
    def memory(self) -> Bytes:
        """Bytes on all ranks together."""
        return sum((shard.memory for _, shard, _ in self.shards), Bytes(0))

    def matches(self, sharding: ParameterSharding) -> bool:
        """Return whether a plan's entry places the table in this way."""
        kind, kernel = self.option.sharding_type.value, self.option.compute_kernel.value
        if (sharding.sharding_type, sharding.compute_kernel) != (kind, kernel):
            return False
        if sharding.sharding_spec is None:
            # a rank has no shard if the rows or columns do not suffice for all
            return sharding.ranks is None or set(self.ranks) <= set(sharding.ranks)
        # values per rank: `rects_of` merges neighboring shards of a rank
        sizes, placed = Counter[int](), Counter[int]()
        for entry in sharding.sharding_spec.shards:
            sizes[entry.rank] += math.prod(entry.shard_sizes)
        for rank, shard, _ in self.shards:
            placed[rank] += shard.rows * shard.cols
        return +sizes == placed  # `+` drops empty shards


@final
@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """Costs of a plan.

    Attributes:
        lister: Lists the options of tables; has the machine and the batch size.
        tables: Placement and costs of each table.
        budgets: Bytes that are free for tables, by rank.
        placement: Result of the search; None for a plan that was passed in.
        batch: Memory of each rank's own batch under any plan, in neither `storage` nor `budgets`.
        is_custom: Whether components written for TorchRec made the plan. The planner then cannot
            estimate what changes would gain.
        unconstrained: Tables whose sharding types or kernels are constrained, without these
            constraints.
    """

    lister: OptionLister
    tables: tuple[TableCost, ...]
    budgets: tuple[Bytes, ...]
    placement: SearchResult | None = None
    batch: RankMemory = field(default_factory=RankMemory)
    is_custom: bool = False
    unconstrained: tuple[PlannedTable, ...] = ()

    @property
    def topology(self) -> Topology:
        """Machine."""
        return self.lister.topology

    @property
    def batch_size(self) -> int:
        """Samples per rank and step."""
        return self.lister.batch_size

    @cached_property
    def placed(self) -> list[list[tuple[Shards, float, TableCost]]]:
        """Shards on each rank, each with its milliseconds and its table."""
        placed: list[list[tuple[Shards, float, TableCost]]] = [[] for _ in self.topology.hardware]
        for table in self.tables:
            for rank, shard, ms in table.shards:
                placed[rank].append((shard, ms, table))
        return placed

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """Milliseconds of a step, by rank."""
        ranks = zip(self.topology.kinds, self.placed, strict=True)
        return tuple(sum((s.costs[kind] for s, _, _ in on), Cost()) for kind, on in ranks)

    @cached_property
    def storage(self) -> tuple[RankMemory, ...]:
        """Memory of tables, by rank."""
        return tuple(sum((s.storage for s, _, _ in on), RankMemory()) for on in self.placed)

    @cached_property
    def memory(self) -> list[tuple[Bytes, Bytes]]:
        """Bytes that tables need, and bytes that are free for them, by rank."""
        return [(used.total, free) for used, free in zip(self.storage, self.budgets, strict=True)]

    @property
    def pools(self) -> list[str]:
        """Names of the memories in use: the compute device, and "host" if it holds tables."""
        uses_host = any(used.host for used, _ in self.memory)
        return [self.topology.compute_device, "host"][: 1 + uses_host]

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step, if each phase ends on all ranks before the next one starts."""
        # overlap of exchanges with lookups is not modelled:
        # docs/decisions/planner.md, "Costs are bytes over measured speeds"
        phases: list[float] = [max(of) for of in zip(*(c.parts for c in self.costs), strict=True)]
        return self.topology.slowest.step_ms + sum(phases)

    @cached_property
    def slowest_rank(self) -> int:
        """Rank with the most milliseconds."""
        return max(range(len(self.costs)), key=lambda rank: self.costs[rank].total)

    @property
    def slowest_ms(self) -> float:
        """Milliseconds of the slowest rank."""
        return self.costs[self.slowest_rank].total

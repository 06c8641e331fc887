"""Options for placing a table: allowed ranks, and shards with their costs and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import final

from recsys.distributed.placement.plan import EmbeddingComputeKernel, ShardingType
from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.tables import Bytes, RankMemory


class Reach(Enum):
    """Ranks that the shards of an option may use."""

    ANYWHERE = "anywhere"
    """Any ranks, at most one shard on each."""
    ONE_NODE = "one_node"
    """Ranks of one node, at most one shard on each."""
    NODES = "nodes"
    """Groups of `node_size` shards, each group on all ranks of a node of its own."""
    FIXED = "fixed"
    """Shard `i` on rank `i`."""


@final
# no slots: `cached_property` needs a `__dict__`
@dataclass(frozen=True, kw_only=True)
class Shards:
    """Consecutive identical shards of a table.

    They are stored once, since a row-wise table on a thousand ranks has a thousand of them.

    Args:
        count: Number of shards.
        rows: Rows of one shard.
        cols: Columns of one shard.
        costs: Costs of one shard on each kind of rank.
        storage: Memory of one shard.

    Raises:
        ValueError: A number is negative or not finite, or `count` is not positive.
    """

    count: int = 1
    rows: int
    cols: int
    costs: tuple[Cost, ...]
    storage: RankMemory

    def __post_init__(self) -> None:
        times = [ms for cost in self.costs for ms in cost.parts]
        if self.count < 1:
            raise ValueError(f"Shards.count must be at least 1; received {self.count}.")
        if min(self.memory) < 0:
            raise ValueError(f"Shards.storage must not be negative; received {self.storage}.")
        if not all(ms >= 0 and math.isfinite(ms) for ms in times):
            raise ValueError(
                f"Shards.costs must be finite and not negative; received {self.costs}."
            )

    @cached_property
    def cost_ms(self) -> tuple[float, ...]:
        """Milliseconds of one shard on each kind of rank."""
        return tuple(cost.total for cost in self.costs)

    @cached_property
    def memory(self) -> Bytes:
        """Bytes of one shard."""
        return self.storage.total


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TableOption:
    """One option for placing a table.

    Attributes:
        sharding_type: Sharding type.
        compute_kernel: Compute kernel.
        reach: Ranks that the shards may use.
        shards: Shards in the order of the ranks that own them.
    """

    sharding_type: ShardingType
    compute_kernel: EmbeddingComputeKernel
    reach: Reach
    shards: tuple[Shards, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks that own a shard."""
        return sum(run.count for run in self.shards)

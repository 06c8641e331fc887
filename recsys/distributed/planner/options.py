"""A way to place a table: its shards, with their costs and their memory, and where they may go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import final

from recsys.distributed.placement.plan import EmbeddingComputeKernel, ShardingType
from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.tables import Bytes, Storage


class Reach(Enum):
    """Where the shards of an option may go."""

    ANYWHERE = "anywhere"
    """On any ranks, no two on one."""
    ONE_NODE = "one_node"
    """On ranks of one node, no two on one."""
    NODES = "nodes"
    """In groups of `node_size` shards, each group on all ranks of a node, no two on one node."""
    FIXED = "fixed"
    """Shard `i` on rank `i`."""


@final
@dataclass(frozen=True, kw_only=True)
class Shards:
    """Consecutive shards of a table that are alike.

    They are told once, since a row-wise table on a thousand ranks has a thousand.

    Args:
        count: how many.
        rows: of one.
        cols: of one.
        costs: of one, on a rank of each kind.
        storage: of one.

    Raises:
        ValueError: if a number is negative or not finite, or `count` is not positive.
    """

    count: int = 1
    rows: int
    cols: int
    costs: tuple[Cost, ...]
    storage: Storage

    def __post_init__(self) -> None:
        times = [ms for cost in self.costs for ms in cost.parts]
        if self.count < 1 or min(self.memory) < 0:
            raise ValueError(
                "Shards.count must be at least 1, and Shards.storage not negative; received "
                f"{self.count} and {self.storage}."
            )
        if not all(ms >= 0 and math.isfinite(ms) for ms in times):
            raise ValueError(
                f"Shards.costs must be finite and not negative; received {self.costs}."
            )

    @cached_property
    def cost_ms(self) -> tuple[float, ...]:
        """Milliseconds of one, on a rank of each kind."""
        return tuple(cost.total for cost in self.costs)

    @cached_property
    def memory(self) -> Bytes:
        """Bytes of one."""
        return self.storage.total


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TableOption:
    """One way to place a table.

    Attributes:
        sharding_type: the strategy.
        compute_kernel: where its shards live.
        reach: which ranks its shards may go to.
        shards: in the order of the ranks that own them.
    """

    sharding_type: ShardingType
    compute_kernel: EmbeddingComputeKernel
    reach: Reach
    shards: tuple[Shards, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks that own a shard."""
        return sum(alike.count for alike in self.shards)

"""A way to place a table: its parts, with their costs and their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from recsys.distributed.placement.plan import EmbeddingComputeKernel, ShardingType
from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.placement import Option, Pieces, Reach
from recsys.distributed.planner.tables import Bytes, Storage


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Parts of a table that are alike.

    Attributes:
        count: how many.
        rows: of one.
        cols: of one.
        costs: of one, on a rank of each kind.
        storage: of one.
    """

    count: int
    rows: int
    cols: int
    costs: tuple[Cost, ...]
    storage: Storage

    @property
    def size(self) -> Bytes:
        """Memory of one."""
        return self.storage.total


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TableOption:
    """One way to place a table.

    Attributes:
        sharding_type: the strategy.
        compute_kernel: where its parts live.
        reach: which ranks its parts may go to.
        parts: in the order of the ranks that own them.
    """

    sharding_type: ShardingType
    compute_kernel: EmbeddingComputeKernel
    reach: Reach
    parts: tuple[Part, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks that own a part."""
        return sum(part.count for part in self.parts)

    def for_search(self) -> Option:
        """Returns what the search must know of it."""
        pieces = tuple(
            Pieces(
                count=part.count,
                cost_ms=tuple(cost.total for cost in part.costs),
                memory=part.size,
            )
            for part in self.parts
        )
        fixed = range(self.num_ranks) if self.reach is Reach.FIXED else ()
        return Option(reach=self.reach, pieces=pieces, ranks=fixed)

"""What the search is asked and what it answers: options of tables, and ranks to put them on.

Of an option it reads where its shards may go, what each costs in milliseconds on every kind of rank
(`cost_ms`), and its bytes on device and host (`memory`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from recsys.distributed.planner.options import TableOption

Method: TypeAlias = Literal["exact", "heuristic"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The ranks that shards go to.

    Args:
        memory_caps: bytes on device and host, per rank.
        kinds: per rank; ranks of one kind are alike in speed. All of kind 0 if empty.
        node_size: ranks per node; consecutive ranks share a node. All on one node if 0.
        base_ms: what each rank has to do besides; nothing if empty.
        base_memory: bytes on device and host that are taken already, per rank; none if empty.
    """

    memory_caps: Sequence[tuple[int, int]]
    kinds: Sequence[int] = ()
    node_size: int = 0
    base_ms: Sequence[float] = ()
    base_memory: Sequence[tuple[int, int]] = ()

    def __len__(self) -> int:
        return len(self.memory_caps)

    @property
    def num_kinds(self) -> int:
        """One more than the largest kind."""
        return max(self.kinds, default=0) + 1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Tables to place on ranks so that the slowest rank is done soonest.

    Args:
        ranks: where to.
        tables: the options of each table, at least one.
    """

    ranks: Ranks
    tables: Sequence[Sequence[TableOption]]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How one table is placed.

    Attributes:
        option: index among the table's options.
        ranks: of its shards, in order.
    """

    option: int
    ranks: Sequence[int]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The best placement that was found, and how good it is.

    Attributes:
        choices: per table.
        load_ms: per rank, base load included.
        bound_ms: no placement has a slowest rank that takes less.
        method: "exact" if an exact search chose or confirmed the placement, else "heuristic".
        seconds: that the search took.
        timed_out: whether the time limit ended the search.
    """

    choices: tuple[Choice, ...]
    load_ms: tuple[float, ...]
    bound_ms: float
    method: Method
    seconds: float
    timed_out: bool

    @property
    def slowest_ms(self) -> float:
        """Load of the slowest rank."""
        return max(self.load_ms)

    @property
    def gap(self) -> float:
        """Share by which the slowest rank is above the bound: 0.01 is 1 %."""
        if self.slowest_ms <= self.bound_ms:
            return 0.0
        return self.slowest_ms / self.bound_ms - 1 if self.bound_ms > 0 else math.inf

    @property
    def optimal(self) -> bool:
        """Whether it is proven that nothing is better, to one part in 100,000."""
        return self.gap <= 1e-5


@final
@dataclass(eq=False, kw_only=True)
class InfeasibleError(ValueError):
    """No placement fits in memory: facts for whoever knows the names.

    Attributes:
        too_big: Indices of tables with no option that fits on empty ranks.
        bytes_over: bytes, on device and host, by which the memory of all ranks together is
            exceeded; by which the ranks of the best try are, where all together would do.
        ranks_needed: the least number of ranks like these, in whole nodes, whose memory together
            could hold all tables; None where more ranks do not help. Shards that every rank
            holds a copy of are counted as often as on these ranks.
        proven: whether it is certain that nothing fits, or none was found.
    """

    too_big: tuple[int, ...] = ()
    bytes_over: tuple[int, int] = (0, 0)
    ranks_needed: int | None = None
    proven: bool = True

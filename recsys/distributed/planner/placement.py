"""Input and output of the search: options of tables, and the ranks chosen for them.

The search reads the allowed ranks of an option, the milliseconds of its shards on each kind of rank
(`cost_ms`), and their bytes on device and host (`memory`).
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
    """Ranks to place shards on.

    Args:
        memory_caps: Bytes on device and host, by rank.
        kinds: Kind of each rank; ranks of one kind are equally fast. All are of kind 0 if empty.
        node_size: Ranks per node; consecutive ranks share a node. 0: all are on one node.
        base_ms: Milliseconds of other work, by rank; none if empty.
        base_memory: Bytes on device and host that are in use, by rank; none if empty.
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
    """Tables to place on ranks so that the slowest rank finishes as early as possible.

    Args:
        ranks: Ranks.
        tables: Options of each table, at least one.
    """

    ranks: Ranks
    tables: Sequence[Sequence[TableOption]]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Placement of one table.

    Attributes:
        option: Index among the table's options.
        ranks: Ranks of its shards, in order.
    """

    option: int
    ranks: Sequence[int]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Best placement found, and its distance from the optimum.

    Attributes:
        choices: Choice for each table.
        load_ms: Milliseconds of each rank, including its base load.
        bound_ms: Lower bound on the slowest rank of any placement.
        method: "exact" if an exact search found or confirmed the placement, else "heuristic".
        seconds: Duration of the search.
        timed_out: Whether the time limit ended the search.
    """

    choices: tuple[Choice, ...]
    load_ms: tuple[float, ...]
    bound_ms: float
    method: Method
    seconds: float
    timed_out: bool

    @property
    def slowest_ms(self) -> float:
        """Milliseconds of the slowest rank."""
        return max(self.load_ms)

    @property
    def gap(self) -> float:
        """Share by which the slowest rank exceeds the bound: 0.01 is 1%."""
        if self.slowest_ms <= self.bound_ms:
            return 0.0
        return self.slowest_ms / self.bound_ms - 1 if self.bound_ms > 0 else math.inf

    @property
    def optimal(self) -> bool:
        """True if no placement is better by more than one part in 100,000."""
        # bounds of the exact search have the tolerance of the solver, one millionth
        return self.gap <= 1e-5


@final
# `eq` would make the exception unhashable
@dataclass(eq=False, kw_only=True)
class InfeasibleError(ValueError):
    """Error that no placement fits into memory, for callers that know the names of tables.

    Attributes:
        too_big: Indices of tables with no option that fits on empty ranks.
        bytes_over: Missing bytes on device and host: of all ranks together, or, if they would
            suffice together, of the ranks of the best attempt.
        ranks_needed: Least number of such ranks, in whole nodes, with enough memory together; None
            if more ranks do not help. Shards with a copy on every rank are counted as on these
            ranks.
        proven: Whether it is certain that nothing fits.
    """

    too_big: tuple[int, ...] = ()
    bytes_over: tuple[int, int] = (0, 0)
    ranks_needed: int | None = None
    proven: bool = True

"""What the search is asked and what it answers: options of tables, and ranks to put them on.

Of an option it reads where its shards may go, what each costs in milliseconds on every kind of rank
(`cost_ms`), and its bytes on device and host (`memory`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias, final

from recsys.distributed.planner.options import Reach, TableOption

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

    Raises:
        ValueError: if the lengths disagree, a number is negative, or nodes are not full.
    """

    memory_caps: Sequence[tuple[int, int]]
    kinds: Sequence[int] = ()
    node_size: int = 0
    base_ms: Sequence[float] = ()
    base_memory: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        if not self.memory_caps:
            raise ValueError("Ranks.memory_caps must hold at least one rank; received none.")
        for name in ("kinds", "base_ms", "base_memory"):
            if len(getattr(self, name)) not in (0, len(self)):
                raise ValueError(
                    f"Ranks.{name} must hold one value for each of {len(self)} ranks, or none; "
                    f"received {len(getattr(self, name))}."
                )
        sizes = (size for both in (*self.memory_caps, *self.base_memory) for size in both)
        numbers = chain(self.kinds, self.base_ms, sizes)
        if not all(number >= 0 and math.isfinite(number) for number in numbers):
            raise ValueError("Ranks must hold finite numbers, none of them negative.")
        if self.node_size < 0 or (self.node_size and len(self) % self.node_size):
            raise ValueError(
                f"Ranks.node_size must divide the {len(self)} ranks; received {self.node_size}."
            )

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

    Raises:
        ValueError: if an option cannot be placed on any ranks of this shape.
    """

    ranks: Ranks
    tables: Sequence[Sequence[TableOption]]

    def __post_init__(self) -> None:
        for table, options in enumerate(self.tables):
            if not options:
                raise ValueError(f"Table {table} must have at least one option; received none.")
            for index, option in enumerate(options):
                rule, received = self._broken_rule(option)
                if rule:
                    raise ValueError(
                        f"Option {index} of table {table} must have {rule}; received {received}."
                    )

    def _broken_rule(self, option: TableOption) -> tuple[str, object]:
        """Return a rule that an option breaks, and what breaks it; none if it can be placed."""
        reach, count = option.reach, option.num_ranks
        node_size, num_kinds = self.ranks.node_size or len(self.ranks), self.ranks.num_kinds
        most = node_size if reach is Reach.ONE_NODE else len(self.ranks)
        if not 1 <= count <= most:
            return f"1 to {most} shards, placed {reach.value}", count
        if reach is Reach.NODES and count % node_size:
            return f"a multiple of {node_size} shards, one for each rank of its nodes", count
        for alike in option.shards:
            if len(alike.costs) != num_kinds:
                return f"a cost for each of {num_kinds} kinds of rank", alike.costs
        return "", None


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


class TooBig(NamedTuple):
    """A table with no option that fits on empty ranks.

    Attributes:
        table: its index.
        bytes_over: by how many bytes, device and host added, its most forgiving option misses.
    """

    table: int
    bytes_over: int


@final
@dataclass(eq=False, kw_only=True)
class InfeasibleError(ValueError):
    """No placement fits in memory: facts for whoever knows the names.

    Attributes:
        too_big: tables that fit nowhere even alone.
        bytes_over: bytes, on device and host, by which the memory of all ranks together is
            exceeded; by which the ranks of the best try are, where all together would do.
        ranks_needed: the least number of ranks like these, in whole nodes, whose memory together
            could hold all tables; None where more ranks do not help. Shards that every rank
            holds a copy of are counted as often as on these ranks.
        proven: whether it is certain that nothing fits, or none was found.
    """

    too_big: tuple[TooBig, ...] = ()
    bytes_over: tuple[int, int] = (0, 0)
    ranks_needed: int | None = None
    proven: bool = True

    def __str__(self) -> str:
        return (
            f"No placement must exceed the memory of a rank; received {len(self.too_big)} tables "
            f"that fit nowhere and {self.bytes_over[0]} device and {self.bytes_over[1]} host bytes "
            f"too many. Ranks that could hold all: {self.ranks_needed}."
        )

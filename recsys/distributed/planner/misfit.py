"""What to say, and what to try, when tables do not fit into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from recsys.distributed.placement.plan import EmbeddingComputeKernel, format_table
from recsys.distributed.planner.option_lister import OptionLister
from recsys.distributed.planner.options import Reach, TableOption
from recsys.distributed.planner.placement import InfeasibleError
from recsys.distributed.planner.rating import Rating
from recsys.distributed.planner.tables import Bytes, PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
)
from recsys.distributed.planner.what_if import ANY_GAP, plan_again, with_half_weights

_SECONDS = 3.0  # to look for what would fit
_SEARCH_SECONDS = 1.0  # of one try
_MOST_RANKS = 4096
_SHOWN = 3

Demands = Mapping[str, ParameterConstraints]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """Tables that were not found to fit.

    Args:
        topology: the machine.
        lister_on: makes what lists the ways to place a table on a machine.
        tables: all of them.
        options: of each table.
        rooms: memory that is free for tables, per rank.
        demands: the user's constraints, by table name.
        tables_under: lists the tables under other constraints.
        is_custom: whether the user's own enumerator or partitioner plans: changes are not tried.
    """

    topology: Topology
    lister_on: Callable[[Topology], OptionLister]
    tables: tuple[PlannedTable, ...]
    options: Sequence[Sequence[TableOption]]
    rooms: tuple[Bytes, ...]
    demands: Demands
    tables_under: Callable[[Demands], Sequence[PlannedTable]]
    is_custom: bool = False

    def error(self, error: InfeasibleError) -> PlannerError:
        """Returns what to raise: which tables, how many bytes, and what was found to fit."""
        misfit = self._one_too_big(error) if error.too_big else self._all_too_big(error)
        message = misfit if self.is_custom else f"{misfit}\n{self._remedies(error)}"
        return PlannerError(message, PlannerErrorType.INSUFFICIENT_STORAGE)

    def _one_too_big(self, error: InfeasibleError) -> str:
        number = error.too_big[0].table
        others = [f"{self.tables[big.table].name!r}" for big in error.too_big[1:]]
        also = f"\nNor do {shorten(others)}." if others else ""
        return (
            f"{_describe(self.tables[number])} does not fit on {self._where()} of "
            f"{self._tried(self.options[number])}{also}"
        )

    def _all_too_big(self, error: InfeasibleError) -> str:
        device = self.topology.compute_device
        over = ", and ".join(
            f"{mib(size)} more of {name} memory than there is"
            for size, name in zip(error.bytes_over, (device, "host"), strict=True)
            if size
        )
        largest = sorted(self.tables, key=lambda t: -sum(t.whole))
        verdict = "do not fit" if error.proven else "were not found to fit"
        room = max(self.rooms, key=sum)
        return (
            f"The {len(self.tables)} tables {verdict} on {self._where()} of "
            f"{mib(self.topology.memory_cap)} each, of which {mib(max(room.device, 0))} are free "
            f"for tables: they need at least {over or 'room that no rank has left'}. The largest: "
            f"{'; '.join(_describe(table) for table in largest[:_SHOWN])}."
        )

    def _where(self) -> str:
        return f"the {self.topology.world_size} {self.topology.compute_device} ranks"

    def _tried(self, options: Sequence[TableOption]) -> str:
        """Returns the memory there is, and a table of what each option would need of it."""
        topology = self.topology
        caps = {topology.compute_device: topology.memory_cap, "host": topology.host_cap}
        rows, scarce = [], {}
        for option in options:
            # what is fixed goes to every rank, the smallest too
            room = (min if option.reach is Reach.FIXED else max)(self.rooms, key=sum)
            for pool, memory in enumerate(caps):
                needed = max(part.memory[pool] for part in option.shards)
                if needed > room[pool]:
                    kind, ranks = option.sharding_type.value, str(option.num_ranks)
                    over = mib(needed - room[pool])
                    rows.append((kind, ranks, mib(needed), over, memory))
                    scarce[memory] = room[pool]
        rooms = ", and ".join(
            f"{mib(caps[memory])}{' of host memory' if memory == 'host' else ''} each, of which "
            f"{mib(max(free, 0))} are free for it"
            for memory, free in scarce.items()
        )
        head = ("sharding type", "ranks", "bytes per rank", "over by", "memory")
        return f"{rooms}. Tried:\n{format_table(head, rows)}"

    # -- what would fit ----------------------------------------------------------------------------

    def _remedies(self, error: InfeasibleError) -> str:
        """Returns the changes that make everything fit, each found by planning with it."""
        deadline = time.monotonic() + _SECONDS
        found = []
        for text, tables in self._other_demands():
            if time.monotonic() < deadline and self._fits(tables, self.topology, self.rooms):
                found.append(text)
        world_size = self._ranks_that_do(error, deadline)
        if world_size is not None:
            found.append(f"{world_size} ranks like these")
        if found:
            return f"What would fit, each by itself: {'; '.join(found)}."
        return (
            "Neither other sharding types, weights of 16 bits, tables in host memory nor more "
            "ranks were found to help. Make tables smaller, or reserve less storage."
        )

    def _other_demands(self) -> Iterator[tuple[str, tuple[PlannedTable, ...]]]:
        names = {table.name for table in self.tables}
        free = {
            name: replace(demand, sharding_types=None, compute_kernels=None, cache_params=None)
            for name, demand in self.demands.items()
        }
        if free != self.demands:
            yield (
                "the tables without sharding_types and compute_kernels demanded",
                (*self.tables_under(free),),
            )
        yield "weights of 16 bits (data_type=DataType.FP16)", with_half_weights(self.tables)
        if self.topology.compute_device == "cuda":
            kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
            in_host = {
                name: replace(
                    self.demands.get(name, ParameterConstraints()),
                    compute_kernels=[kernel],
                    enforce_hbm=None,
                )
                for name in names
            }
            yield (
                f"tables in host memory (compute_kernels=[{kernel!r}])",
                (*self.tables_under(in_host),),
            )

    def _ranks_that_do(self, error: InfeasibleError, deadline: float) -> int | None:
        """Returns the least number of ranks, in whole nodes, that was found to do."""
        node = self.topology.local_size
        nodes = self.topology.num_nodes

        def fits(num_nodes: int) -> bool:
            topology = _with_nodes(self.topology, num_nodes)
            rooms = [self.rooms[rank % len(self.rooms)] for rank in range(topology.world_size)]
            return self._fits(self.tables, topology, rooms)

        too_few = nodes
        enough = max(-(-(error.ranks_needed or 0) // node), too_few + 1)
        while enough * node <= _MOST_RANKS and time.monotonic() < deadline:
            if fits(enough):
                break
            too_few, enough = enough, 2 * enough
        else:
            return None
        while enough - too_few > 1 and time.monotonic() < deadline:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
        return enough * node

    def _fits(
        self, tables: Sequence[PlannedTable], topology: Topology, rooms: Sequence[Bytes]
    ) -> bool:
        placement = plan_again(
            topology,
            self.lister_on(topology),
            tables,
            rooms,
            seconds=_SEARCH_SECONDS,
            tolerance=ANY_GAP,
        )
        return placement is not None


def _with_nodes(topology: Topology, num_nodes: int) -> Topology:
    """Returns a topology with more nodes, which are like those there are in turn."""
    ranks = num_nodes * topology.local_size
    return Topology.from_hardware(
        [topology.hardware[rank % topology.world_size] for rank in range(ranks)],
        topology.local_size,
        lookup=topology.lookup,
        collectives=topology.collectives,
    )


def check_fits(rating: Rating) -> None:
    """Raises unless every rank has the memory that a plan takes.

    Raises:
        PlannerError: naming the fullest rank, its largest tables, and the bytes that it lacks.
    """
    over = [
        (max(used - free, 0), rank, pool)
        for rank, (stored, room) in enumerate(zip(rating.storage, rating.rooms, strict=True))
        for pool, (used, free) in enumerate(zip(stored.total, room, strict=True))
    ]
    bytes_over, rank, pool = max(over, key=lambda entry: (entry[0], -entry[1]))
    if not bytes_over:
        return
    there = sorted(
        (
            (part.memory[pool], rated.table)
            for rated in rating.tables
            for owner, part in rated.shards()
            if owner == rank
        ),
        key=lambda entry: -entry[0],
    )
    memory = "host" if pool else rating.topology.compute_device
    tables = [f"{table.name!r} of module {table.path!r} ({mib(size)})" for size, table in there]
    ranks = len({owner for missing, owner, _ in over if missing})
    others = f"; {ranks - 1} other ranks lack some, too" if ranks > 1 else ""
    needed, free = rating.storage[rank].total[pool], rating.rooms[rank][pool]
    raise PlannerError(
        f"A plan must fit into memory; received one that needs {mib(needed)} of {memory} memory on "
        f"rank {rank}, which has {mib(free)} free for tables: {mib(bytes_over)} too much{others}. "
        f"On rank {rank} are {shorten(tables)}. Move or split some of them.",
        PlannerErrorType.INSUFFICIENT_STORAGE,
    )


def shorten(texts: Sequence[str], most: int = _SHOWN) -> str:
    """Returns texts as one, the last of many left out.

    Example:
        >>> shorten(["a", "b", "c", "d", "e"])
        'a, b, c, ... and 2 more'
    """
    rest = [f"... and {len(texts) - most} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *rest])


def mib(size: int) -> str:
    """Returns bytes as MiB.

    Example:
        >>> mib(1536 << 10)
        '1.5 MiB'
    """
    return f"{size / (1 << 20):,.1f} MiB"


def _describe(table: PlannedTable) -> str:
    state = "its gradient" if table.has_gradient else "optimizer state"
    return (
        f"Table {table.name!r} of module {table.path!r} ({table.rows} x {table.dim}, "
        f"{mib(sum(table.whole))} with {state})"
    )

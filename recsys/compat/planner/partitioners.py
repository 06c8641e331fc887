"""Partitioners: place the shards of a proposal on ranks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, unique

from recsys.compat.planner.perf_models import NoopPerfModel, NoopStorageModel
from recsys.compat.planner.topology import Storage, Topology
from recsys.compat.planner.types import PartitionByType, Partitioner, Shard, ShardingOption
from recsys.distributed.planner.types import PlannerError, PlannerErrorType
from recsys.distributed.types import ShardingType


@unique
class SortBy(Enum):
    """Size of an option, by which a partitioner sorts."""

    STORAGE = "storage"
    """Bytes."""
    PERF = "perf"
    """Milliseconds."""


class GreedyPerfPartitioner(Partitioner):
    """Places one option after the other on the least loaded ranks, largest first.

    Options for every rank are placed first. A shard is placed on the rank with the fewest
    milliseconds and enough memory. Of equal ranks, the one with the lowest number in its node is
    used, so that shards are spread over nodes. Options for a node use the node with the fewest
    milliseconds and enough memory.

    Args:
        sort_by: Size of options.
        balance_modules: Whether to place the options of modules with few tables first, so that the
            tables of each module are spread over the ranks.
    """

    def __init__(self, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False) -> None:
        self._sort_by = sort_by
        self._balance_modules = balance_modules

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Set the rank of every shard, in place, and return the proposal.

        Args:
            proposal: One option for each table, with estimates.
            storage_constraint: Ranks with their free memory; not changed.

        Raises:
            PlannerError: Of type `PARTITION`, if an option does not fit.
            ValueError: A shard has no bytes or no milliseconds.
        """
        ranks = _Ranks(storage_constraint)
        for option in proposal:
            if option.partition_by == PartitionByType.UNIFORM.value:
                everywhere = range(len(ranks.free))
                if not ranks.place([(option.shards, everywhere)], _in_order):
                    raise _no_room(option)
        for group in self._groups(proposal):
            how = _in_order
            partition_by = PartitionByType(group[0].partition_by)
            if group[0].sharding_type == ShardingType.TABLE_COLUMN_WISE.value:
                how = _least_busy
            shards = [shard for option in group for shard in option.shards]
            placed = False
            if partition_by is PartitionByType.DEVICE:
                placed = ranks.place([(shards, range(len(ranks.free)))], _least_busy)
            elif partition_by is PartitionByType.HOST:
                per_option = [option.shards for option in group]
                placed = any(
                    ranks.place([(of_one, node) for of_one in per_option], how)
                    for node in ranks.nodes()
                )
            else:
                placed = ranks.place_nodes(shards)
            if not placed:
                raise _no_room(group[0])
        return proposal

    def _groups(self, proposal: Sequence[ShardingOption]) -> list[list[ShardingOption]]:
        """Return the options that are not for every rank, grouped by their dependency."""
        groups: dict[str, list[ShardingOption]] = {}
        for option in proposal:
            if option.partition_by != PartitionByType.UNIFORM.value:
                groups.setdefault(option.dependency or option.fqn, []).append(option)
        tables = Counter(option.path for option in proposal)

        def key(group: list[ShardingOption]) -> tuple[float, ...]:
            few = tables[group[0].path] if self._balance_modules else 0
            if self._sort_by is SortBy.PERF:
                return few, -sum(option.total_perf for option in group)
            sizes = [option.total_storage for option in group]
            return few, -sum(s.hbm for s in sizes), -sum(s.ddr for s in sizes)

        return sorted(groups.values(), key=key)


class MemoryBalancedPartitioner(Partitioner):
    """Balances memory among plans nearly as fast as the plan of `GreedyPerfPartitioner`.

    It places the proposal by milliseconds, and then repeatedly with less memory on every rank, by
    bisection.

    Args:
        max_search_count: Most placements after the first.
        tolerance: Share by which the slowest rank may become slower.
        balance_modules: As for `GreedyPerfPartitioner`.

    Raises:
        ValueError: The count or the share is negative.
    """

    def __init__(
        self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False
    ) -> None:
        if max_search_count < 0 or tolerance < 0:
            raise ValueError(
                "max_search_count and tolerance of MemoryBalancedPartitioner must be at least 0; "
                f"received {max_search_count} and {tolerance}."
            )
        self._max_search_count = max_search_count
        self._tolerance = tolerance
        self._greedy = GreedyPerfPartitioner(SortBy.PERF, balance_modules)

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Set the rank of every shard, in place, and return the proposal.

        Args:
            proposal: One option for each table, with estimates.
            storage_constraint: Ranks with their free memory; not changed.

        Raises:
            PlannerError: Of type `PARTITION`, if an option does not fit.
            ValueError: A shard has no bytes or no milliseconds.
        """
        shards = [shard for option in proposal for shard in option.shards]
        speed, memory = NoopPerfModel(storage_constraint), NoopStorageModel(storage_constraint)
        self._greedy.partition(proposal, storage_constraint)
        slowest_ms = speed.rate(proposal) * (1 + self._tolerance)
        best = [shard.rank for shard in shards]
        kind = "hbm" if storage_constraint.compute_device == "cuda" else "ddr"
        sizes = [getattr(_storage(shard), kind) for shard in shards]
        mean = -(-sum(sizes) // storage_constraint.world_size)
        too_little, enough = max([mean, *sizes]) - 1, int(memory.rate(proposal))
        for _ in range(self._max_search_count):
            if enough - too_little < 2:
                break
            budget = (too_little + enough) // 2
            try:
                self._greedy.partition(proposal, _at_most(storage_constraint, kind, budget))
            except PlannerError:
                too_little = budget
                continue
            if speed.rate(proposal) > slowest_ms:
                too_little = budget
            else:
                enough, best = int(memory.rate(proposal)), [shard.rank for shard in shards]
        for shard, rank in zip(shards, best, strict=True):
            shard.rank = rank
        return proposal


def _at_most(topology: Topology, kind: str, budget: int) -> Topology:
    """Return a copy of the machine with at most `budget` bytes of memory per rank."""
    smaller = copy.deepcopy(topology)
    for device in smaller.devices:
        setattr(device.storage, kind, min(getattr(device.storage, kind), budget))
    return smaller


_How = Callable[["_Ranks", Sequence[Shard], Sequence[int]], Iterator[int | None]]


class _Ranks:
    """Free memory and load of ranks."""

    def __init__(self, topology: Topology) -> None:
        self.free = [device.storage for device in topology.devices]
        self.load_ms = [device.perf.total for device in topology.devices]
        self.node_size = topology.local_world_size

    def nodes(self) -> list[range]:
        """Return the ranks of each node, least loaded node first."""
        size = self.node_size
        nodes = [range(first, first + size) for first in range(0, len(self.free), size)]
        return sorted(nodes, key=lambda node: sum(self.load_ms[rank] for rank in node))

    def place(self, parts: Sequence[tuple[Sequence[Shard], Sequence[int]]], how: _How) -> bool:
        """Place shards, each list on some of the given ranks, and return whether all fit.

        If not, nothing is placed.
        """
        before = list(self.free), list(self.load_ms)
        for shards, ranks in parts:
            places = how(self, shards, ranks)
            for shard in shards:
                rank = next(places, None)
                if rank is None or not _storage(shard).fits_in(self.free[rank]):
                    self.free, self.load_ms = before
                    return False
                self.free[rank] -= _storage(shard)
                self.load_ms[rank] += _perf_ms(shard)
                shard.rank = rank
        return True

    def place_nodes(self, shards: Sequence[Shard]) -> bool:
        """Place groups of shards, as many as a node has ranks, each group on a node."""
        parts = [shards[i : i + self.node_size] for i in range(0, len(shards), self.node_size)]
        nodes = iter(self.nodes())
        return all(any(self.place([(part, node)], _in_order) for node in nodes) for part in parts)


def _in_order(ranks: _Ranks, shards: Sequence[Shard], among: Sequence[int]) -> Iterator[int | None]:
    yield from among


def _least_busy(
    ranks: _Ranks, shards: Sequence[Shard], among: Sequence[int]
) -> Iterator[int | None]:
    for shard in shards:
        roomy = [rank for rank in among if _storage(shard).fits_in(ranks.free[rank])]
        yield min(
            roomy,
            key=lambda rank: (ranks.load_ms[rank], rank % ranks.node_size, rank),
            default=None,
        )


def _storage(shard: Shard) -> Storage:
    if shard.storage is None or shard.perf is None:
        raise ValueError(
            "GreedyPerfPartitioner.partition takes a proposal whose shards have storage and perf; "
            f"received {shard}. Estimators set them: enumerator.populate_estimates(options)."
        )
    return shard.storage


def _perf_ms(shard: Shard) -> float:
    return 0.0 if shard.perf is None else shard.perf.total


def _no_room(option: ShardingOption) -> PlannerError:
    sizes = [_storage(shard) for shard in option.shards]
    return PlannerError(
        f"Every shard must fit on a rank; received table {option.name!r}, "
        f"{option.sharding_type}, with {len(sizes)} shards of up to {max(sizes)} for "
        f"{option.partition_by}, which exceed the memory left by other tables. Propose other "
        "options.",
        PlannerErrorType.PARTITION,
    )

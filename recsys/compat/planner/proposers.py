"""Proposers: sequences of plans to try, one option for each table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from recsys.compat.planner.constants import MAX_PROPOSALS
from recsys.compat.planner.topology import Topology
from recsys.compat.planner.types import Enumerator, Proposer, ShardingOption, groups_of


class _Listed(Proposer):
    """Proposes the items of an iterator.

    Args:
        use_depth: Whether the best option of a table has the fastest slowest shard, instead of the
            fewest milliseconds in total.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth
        self._left: Iterator[list[ShardingOption]] = iter(())
        self._current: list[ShardingOption] | None = None

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Set the options to propose from.

        Args:
            search_space: All options of all tables, with estimates.
            enumerator: Unused.
        """
        self._left = self._proposals(search_space)
        self._current = next(self._left, None)

    def propose(self) -> list[ShardingOption] | None:
        """Return a proposal, or None if there are no more; the same one until `feedback`."""
        return self._current

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Advance to the next proposal.

        Args:
            partitionable: Unused.
            plan: Unused.
            perf_rating: Rating of the proposal, if the partitioner placed it.
            storage_constraint: Ranks with their free memory.
        """
        self._learn(perf_rating, storage_constraint)
        self._current = next(self._left, None)

    def _learn(self, perf_rating: float | None, storage_constraint: Topology | None) -> None:
        """Use the feedback before `feedback` advances; nothing by default."""

    def _groups(self, search_space: list[ShardingOption]) -> list[list[ShardingOption]]:
        """Return the options of each table, best first."""
        return [sorted(group, key=self._key) for group in groups_of(search_space).values()]

    def _key(self, option: ShardingOption) -> float:
        if not self._use_depth:
            return option.total_perf
        return max(shard.perf.total for shard in option.shards if shard.perf is not None)

    def _proposals(self, search_space: list[ShardingOption]) -> Iterator[list[ShardingOption]]:
        """Yield the proposals."""
        raise NotImplementedError


class GridSearchProposer(_Listed):
    """Proposes all combinations of the tables' options; none if there are too many.

    Args:
        max_proposals: Maximum number of combinations.
    """

    def __init__(self, max_proposals: int = MAX_PROPOSALS) -> None:
        super().__init__()
        self._max_proposals = max_proposals

    def _proposals(self, search_space: list[ShardingOption]) -> Iterator[list[ShardingOption]]:
        groups = self._groups(search_space)
        if groups and math.prod(map(len, groups)) <= self._max_proposals:
            yield from map(list, itertools.product(*groups))


class UniformProposer(_Listed):
    """Proposes one sharding type for all tables, for each type that all tables support.

    Args:
        use_depth: Whether the best option of a table has the fastest slowest shard, instead of the
            fewest milliseconds in total.
    """

    def _proposals(self, search_space: list[ShardingOption]) -> Iterator[list[ShardingOption]]:
        groups = self._groups(search_space)
        for name in dict.fromkeys(option.sharding_type for option in search_space):
            of_type = [[o for o in group if o.sharding_type == name] for group in groups]
            if all(of_type):
                yield [options[0] for options in of_type]


class GreedyProposer(_Listed):
    """Starts with the best option of each table, and trades memory for time.

    After each proposal, the table with the largest shard advances to its next best option, until no
    table has another one.

    Args:
        use_depth: Whether the best option of a table has the fastest slowest shard, instead of the
            fewest milliseconds in total.
        threshold: Number of consecutive ratings without progress after which it stops; None: never.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        super().__init__(use_depth)
        self._threshold = threshold
        self._best_rating = math.inf
        self._num_worse = 0

    def _learn(self, perf_rating: float | None, storage_constraint: Topology | None) -> None:
        if perf_rating is not None and self._threshold is not None:
            is_better = perf_rating < self._best_rating
            self._best_rating = min(self._best_rating, perf_rating)
            self._num_worse = 0 if is_better else self._num_worse + 1
            if self._num_worse > self._threshold:
                self._left = iter(())

    def _proposals(self, search_space: list[ShardingOption]) -> Iterator[list[ShardingOption]]:
        self._best_rating, self._num_worse = math.inf, 0
        groups = self._groups(search_space)
        chosen = [0] * len(groups)
        while groups:
            proposal = [group[place] for group, place in zip(groups, chosen, strict=True)]
            yield proposal
            movable = [i for i, group in enumerate(groups) if chosen[i] + 1 < len(group)]
            if not movable:
                return
            chosen[max(movable, key=lambda i: _memory(proposal[i]))] += 1


class DynamicProgrammingProposer(_Listed):
    """Proposes the fastest combination for less and less memory.

    The first proposal is the best option of each table. Its feedback contains the available memory.
    The next proposals are the combinations that are not dominated in total milliseconds and total
    bytes, fastest first. They are computed table by table (knapsack), with bytes rounded up to
    bins. Bytes are device memory, or host memory on a CPU.

    Args:
        hbm_bins_per_device: Bins for the memory of a rank. More bins are more exact and slower.

    Raises:
        ValueError: The number is less than 1.
    """

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        super().__init__(use_depth=False)
        if hbm_bins_per_device < 1:
            raise ValueError(
                "DynamicProgrammingProposer.hbm_bins_per_device must be at least 1; received "
                f"{hbm_bins_per_device}."
            )
        self._bins_per_rank = hbm_bins_per_device
        self._by_table: list[list[ShardingOption]] = []
        self._knows_memory = False

    def _learn(self, perf_rating: float | None, storage_constraint: Topology | None) -> None:
        if storage_constraint is not None and not self._knows_memory:
            self._knows_memory = True
            self._left = self._fastest_by_memory(storage_constraint)

    def _proposals(self, search_space: list[ShardingOption]) -> Iterator[list[ShardingOption]]:
        self._by_table, self._knows_memory = self._groups(search_space), False
        if self._by_table:
            yield [options[0] for options in self._by_table]

    def _fastest_by_memory(self, topology: Topology) -> Iterator[list[ShardingOption]]:
        kind = "hbm" if topology.compute_device == "cuda" else "ddr"
        num_bins = self._bins_per_rank * topology.world_size
        total = sum(getattr(device.storage, kind) for device in topology.devices)
        ms = torch.full((num_bins + 1,), math.inf, dtype=torch.float64)
        ms[0] = 0.0  # by used bins: least milliseconds of the tables so far
        chosen, shifts = [], []
        for options in self._by_table:
            sizes = [getattr(option.total_storage, kind) for option in options]
            bins = [math.ceil(num_bins * size / max(total, 1)) for size in sizes]
            after = torch.full((len(options), num_bins + 1), math.inf, dtype=torch.float64)
            for row, option, size in zip(after, options, bins, strict=True):
                if size <= num_bins:
                    row[size:] = ms[: num_bins + 1 - size] + option.total_perf
            ms, best = after.min(dim=0)
            chosen.append(best.tolist())
            shifts.append(bins)
        least = math.inf
        ends = []
        for end, total_ms in enumerate(ms.tolist()):
            if total_ms < least:
                least = total_ms
                ends.append(end)
        for end in reversed(ends):
            proposal, left = [], end
            for options, best_of, bins in zip(
                reversed(self._by_table), reversed(chosen), reversed(shifts), strict=True
            ):
                place = best_of[left]
                proposal.append(options[place])
                left -= bins[place]
            yield proposal[::-1]


def _memory(option: ShardingOption) -> tuple[int, int, int, int]:
    """Return the bytes of the largest shard and of all shards, on the device, then on the host."""
    sizes = [shard.storage for shard in option.shards if shard.storage is not None]
    hbm, ddr = [size.hbm for size in sizes], [size.ddr for size in sizes]
    return max(hbm), sum(hbm), max(ddr), sum(ddr)


def proposers_to_proposals_list(
    proposers_list: list[Proposer], search_space: list[ShardingOption]
) -> list[list[ShardingOption]]:
    """Return the distinct proposals of some proposers if every proposal fits.

    Args:
        proposers_list: Proposers, which are loaded and receive positive feedback.
        search_space: All options of all tables, with estimates.

    Example:
        >>> proposers_to_proposals_list([GridSearchProposer()], [])
        []
    """
    proposals: dict[tuple[int, ...], list[ShardingOption]] = {}
    for proposer in proposers_list:
        proposer.load(search_space)
        while (proposal := proposer.propose()) is not None:
            proposals.setdefault(tuple(sorted(map(hash, proposal))), proposal)
            proposer.feedback(partitionable=True)
    return list(proposals.values())

"""What the slowest rank would take if one table alone were placed another way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from recsys.distributed.placement.plan import ShardingType
from recsys.distributed.planner.options import Part, TableOption
from recsys.distributed.planner.placement import Reach
from recsys.distributed.planner.rating import RatedTable, Rating

_Floats: TypeAlias = NDArray[np.float64]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """Another way to place a table, all others staying where they are.

    Attributes:
        option: the way.
        slowest_ms: of the slowest rank then, in the best place that was found.
        work_ms: of the table, all ranks added up.
        bytes_over: that are missing on the emptiest ranks; 0 if it fits.
        host: whether it is host memory that is missing.
    """

    option: TableOption
    slowest_ms: float
    work_ms: float
    bytes_over: int = 0
    host: bool = False


@final
class OtherPlaces:
    """The ranks as a plan fills them, out of which one table at a time is taken.

    Args:
        rating: of the plan.
    """

    def __init__(self, rating: Rating) -> None:
        self._kinds_R = np.array(rating.topology.kinds)
        self._node_size = rating.topology.local_size
        self._load_R = np.array([cost.total for cost in rating.costs])
        used_RM = np.array([tuple(stored.total) for stored in rating.storage], np.float64)
        self._free_RM = np.array(rating.rooms, np.float64) - used_RM

    def nearest(self, table: RatedTable, options: Sequence[TableOption]) -> list[Alternative]:
        """Returns the best option of each sharding type and kernel, without the plan's own.

        Args:
            table: as the plan has it.
            options: all ways to place it.

        Returns:
            Best first: what fits, then least time of the slowest rank, then least work.
        """
        load_R, free_RM = self._without(table)
        own = _shape(table.option)
        found: dict[tuple[ShardingType, object], Alternative] = {}
        for option in options:
            if _shape(option) == own:
                continue
            other = self._place(option, load_R, free_RM)
            key = (option.sharding_type, option.compute_kernel)
            if key not in found or _order(other) < _order(found[key]):
                found[key] = other
        return sorted(found.values(), key=_order)

    def _without(self, table: RatedTable) -> tuple[_Floats, _Floats]:
        load_R, free_RM = self._load_R.copy(), self._free_RM.copy()
        for rank, part in table.parts():
            load_R[rank] -= part.costs[self._kinds_R[rank]].total
            free_RM[rank] += tuple(part.size)
        return np.maximum(load_R, 0), free_RM

    def _place(self, option: TableOption, load_R: _Floats, free_RM: _Floats) -> Alternative:
        load_R, free_RM = load_R.copy(), free_RM.copy()
        everywhere = np.arange(len(load_R))
        if option.reach is Reach.ANYWHERE:
            over_M, work_ms = self._spread(option.parts, [everywhere], load_R, free_RM)
        elif option.reach is Reach.FIXED:
            fixed = everywhere[: option.num_ranks]
            over_M, work_ms = self._spread(option.parts, [fixed], load_R, free_RM, in_order=True)
        else:
            nodes = list(everywhere.reshape(-1, self._node_size))
            over_M, work_ms = np.zeros(2), 0.0
            in_order = option.reach is Reach.NODES
            for parts in self._by_node(option) if in_order else [option.parts]:
                over, work = self._spread(parts, nodes, load_R, free_RM, in_order=in_order)
                over_M, work_ms = over_M + over, work_ms + work
        pool = int(np.argmax(over_M))
        return Alternative(
            option=option,
            slowest_ms=float(load_R.max()),
            work_ms=work_ms,
            bytes_over=int(over_M[pool]),
            host=pool == 1,
        )

    def _by_node(self, option: TableOption) -> Iterator[list[Part]]:
        """Yields the parts that fill one node, which are on all its ranks."""
        node: list[Part] = []
        for part in option.parts:
            node.append(part)
            if sum(alike.count for alike in node) == self._node_size:
                yield node
                node = []

    def _spread(
        self,
        groups: Sequence[Part],
        places: list[NDArray[np.int64]],
        load_R: _Floats,
        free_RM: _Floats,
        *,
        in_order: bool = False,
    ) -> tuple[_Floats, float]:
        """Puts parts on distinct ranks of one of the places: the one that is done first then.

        Args:
            groups: the parts to place.
            places: the ranks of each; the one that is taken is removed.
            load_R: per rank; added to.
            free_RM: per rank; taken from.
            in_order: whether part i goes to the i-th rank of a place.

        Returns:
            The bytes that are missing on device and host, and the milliseconds of all parts.
        """
        cost_GR = np.array(
            [[part.costs[kind].total for kind in range(self._kinds_R.max() + 1)] for part in groups]
        )[:, self._kinds_R]
        size_GM = np.array([tuple(part.size) for part in groups], np.float64)
        best: tuple[float, float, int, NDArray[np.int64], NDArray[np.int64]] | None = None
        for index, place in enumerate(places):
            if in_order:
                group_of = np.repeat(np.arange(len(groups)), [part.count for part in groups])
                ranks = place[: len(group_of)]
            else:
                ranks, group_of = _assign(groups, place, load_R, free_RM, cost_GR, size_GM)
            after = load_R[ranks] + cost_GR[group_of, ranks]
            over = np.maximum(size_GM[group_of] - free_RM[ranks], 0).sum()
            if best is None or (over, after.max()) < best[:2]:
                best = (float(over), float(after.max()), index, ranks, group_of)
        assert best is not None
        _, _, index, ranks, group_of = best
        places.pop(index)
        work_R = cost_GR[group_of, ranks]
        load_R[ranks] += work_R
        over_M = np.maximum(size_GM[group_of] - free_RM[ranks], 0).max(axis=0)
        free_RM[ranks] -= size_GM[group_of]
        return over_M, float(work_R.sum())


def _assign(
    groups: Sequence[Part],
    place: NDArray[np.int64],
    load_R: _Floats,
    free_RM: _Floats,
    cost_GR: _Floats,
    size_GM: _Floats,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the rank of each part and its group: the longest parts first, where they end first.

    Ranks without room are taken last, the emptiest first.
    """
    left = place
    ranks, group_of = [], []
    for group in sorted(range(len(groups)), key=lambda g: -cost_GR[g].max()):
        count = groups[group].count
        short = np.maximum(size_GM[group] - free_RM[left], 0).sum(axis=1)
        order = np.lexsort((load_R[left] + cost_GR[group, left], short))
        ranks.append(left[order[:count]])
        group_of.append(np.full(count, group))
        left = left[order[count:]]
    return np.concatenate(ranks), np.concatenate(group_of)


def _order(alternative: Alternative) -> tuple[int, float, float]:
    # ties of the slowest rank are ties in truth, not in the last bits
    slowest_ms = float(f"{alternative.slowest_ms:.6g}")
    return alternative.bytes_over, slowest_ms, alternative.work_ms


def _shape(option: TableOption) -> tuple[object, ...]:
    """Returns what tells options apart, also where a given plan lists alike parts one by one."""
    sizes = [(part.rows, part.cols) for part in option.parts for _ in range(part.count)]
    runs = tuple((size, len(list(alike))) for size, alike in groupby(sizes))
    return option.sharding_type, option.compute_kernel, runs

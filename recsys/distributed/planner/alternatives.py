"""What the slowest rank would take if one table alone were placed another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import final

import numpy as np

from recsys.distributed.placement.plan import ShardingType
from recsys.distributed.planner.advice import problem_of
from recsys.distributed.planner.assignment import Assignment
from recsys.distributed.planner.options import TableOption
from recsys.distributed.planner.placement import Problem, Ranks
from recsys.distributed.planner.rating import RatedTable, Rating
from recsys.distributed.planner.shard_arrays import ShardArrays


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


def alternatives(
    rating: Rating, table: RatedTable, options: Sequence[TableOption]
) -> list[Alternative]:
    """Returns the best option of each sharding type and kernel, without the plan's own.

    Args:
        rating: of the plan.
        table: as the plan has it.
        options: all ways to place it.

    Returns:
        Best first: what fits, then least time of the slowest rank, then least work.
    """
    own = _shape(table.option)
    others = [option for option in options if _shape(option) != own]
    ranks = _ranks_without(rating, table)
    arrays = ShardArrays(Problem(ranks=ranks, tables=[[option] for option in others]))
    assignment = Assignment(arrays, arrays.most_ms())
    found: dict[tuple[ShardingType, object], Alternative] = {}
    for index, option in enumerate(others):
        assignment.add(index, assignment.best_ranks(index)[0])
        ms_R, free_RM = assignment.exact_loads()
        over = arrays.both_pools(np.maximum(-free_RM, 0).max(axis=0))
        other = Alternative(
            option=option,
            slowest_ms=float(ms_R.max()),
            work_ms=float((ms_R - arrays.base_R).sum()),
            bytes_over=max(over),
            host=over[1] > over[0],
        )
        assignment.remove(index)
        key = (option.sharding_type, option.compute_kernel)
        if key not in found or _order(other) < _order(found[key]):
            found[key] = other
    return sorted(found.values(), key=_order)


def _ranks_without(rating: Rating, table: RatedTable) -> Ranks:
    """Returns the ranks as a plan fills them, without one table."""
    problem = problem_of(rating.topology, rating.budgets, [])
    kinds = rating.topology.kinds
    loads = [cost.total for cost in rating.costs]
    used = [stored.total for stored in rating.storage]
    for rank, shard in table.shards():
        loads[rank] = max(loads[rank] - shard.cost_ms[kinds[rank]], 0.0)
        used[rank] = used[rank].minus(shard.memory)
    return replace(problem.ranks, base_ms=loads, base_memory=used)


def _order(alternative: Alternative) -> tuple[int, float, float]:
    # ties of the slowest rank are ties in truth, not in the last bits
    slowest_ms = float(f"{alternative.slowest_ms:.6g}")
    return alternative.bytes_over, slowest_ms, alternative.work_ms


def _shape(option: TableOption) -> tuple[object, ...]:
    """Returns what tells options apart, also where a given plan lists alike shards one by one."""
    sizes = [(alike.rows, alike.cols) for alike in option.shards for _ in range(alike.count)]
    runs = tuple((size, len(list(alike))) for size, alike in groupby(sizes))
    return option.sharding_type, option.compute_kernel, runs

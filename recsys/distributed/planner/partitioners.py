"""A search of a user's own, in place of the planner's: checked, and held against the same bound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from recsys.distributed.planner.assignment import Assignment
from recsys.distributed.planner.bounds import Relaxation
from recsys.distributed.planner.options import Reach, TableOption
from recsys.distributed.planner.placement import Choice, Placement, Problem
from recsys.distributed.planner.shard_arrays import Ints, ShardArrays


class Partitioner(Protocol):
    """Chooses how and where every table is placed."""

    def partition(self, problem: Problem) -> Sequence[Choice]:
        """Return an option and its ranks for every table, in order.

        What the planner does itself is `search`.
        """


def partitioned(partitioner: Partitioner, problem: Problem) -> Placement:
    """Return what a partitioner chooses, with the loads that follow and a bound for any choice.

    Raises:
        InfeasibleError: if the tables cannot fit, which is seen before the partitioner is asked.
        ValueError: if its choices break a rule.
    """
    started = time.monotonic()
    arrays = ShardArrays(problem)
    arrays.check_each_fits()
    bound_ms = arrays.most_ms()
    if arrays.num_tables:
        relaxation = Relaxation(arrays)
        relaxation.check_memory()
        bound_ms = relaxation.lower_bound().bound_ms
    choices = tuple(partitioner.partition(problem))
    name = f"{type(partitioner).__name__}.partition"
    if len(choices) != len(problem.tables):
        raise ValueError(
            f"{name} must return a Choice for each of {len(problem.tables)} tables, in order; "
            f"received {len(choices)}."
        )
    num_ranks, chosen = len(problem.ranks), []
    for table, (options, choice) in enumerate(zip(problem.tables, choices, strict=True)):
        if not 0 <= choice.option < len(options):
            raise ValueError(
                f"{name} must choose one of the {len(options)} options of table {table}; received "
                f"number {choice.option}."
            )
        option, rank_N = options[choice.option], np.array(choice.ranks, dtype=np.int64)
        if not _may_be_there(option, rank_N, num_ranks, arrays.node_size):
            raise ValueError(
                f"{name} must place the {option.num_ranks} shards of option {choice.option} of "
                f"table {table} {option.reach.value}, no two on one of the {num_ranks} ranks; "
                f"received ranks {list(choice.ranks)}."
            )
        chosen.append([option])
    assignment = Assignment(ShardArrays(replace(problem, tables=chosen)), 1.0)
    for table, choice in enumerate(choices):
        assignment.add(table, np.array(choice.ranks, dtype=np.int64))
    least_free_R = assignment.exact_loads()[1].min(axis=1, initial=0)
    worst = int(least_free_R.argmin())
    if least_free_R[worst] < 0:
        raise ValueError(
            f"{name} must leave no rank with more bytes than it has; received choices that exceed "
            f"rank {worst} by {int(-least_free_R[worst])} bytes."
        )
    placement = assignment.placement(bound_ms, started, "partitioner")
    return replace(placement, choices=choices)


def _may_be_there(option: TableOption, rank_N: Ints, num_ranks: int, node_size: int) -> bool:
    """Return whether the shards of an option may be on these ranks."""
    distinct = len(np.unique(rank_N)) == len(rank_N) == option.num_ranks
    if not distinct or rank_N.min() < 0 or rank_N.max() >= num_ranks:
        return False
    if option.reach is Reach.FIXED:
        return bool((rank_N == np.arange(len(rank_N))).all())
    group = 1 if option.reach is Reach.ANYWHERE else min(len(rank_N), node_size)
    node_JS = (rank_N // node_size).reshape(-1, group)
    return bool((node_JS == node_JS[:, :1]).all())

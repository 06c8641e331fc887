"""A search of a user's own, in place of the planner's: checked, and held against the same bound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from recsys.distributed.planner.bounds import Relaxation
from recsys.distributed.planner.memory_check import check_all_fit, check_each_fits
from recsys.distributed.planner.piece_arrays import Ints, PieceArrays
from recsys.distributed.planner.placement import Choice, Option, Placement, Problem, Reach


class Partitioner(Protocol):
    """Chooses how and where every table is placed."""

    def partition(self, problem: Problem) -> Sequence[Choice]:
        """Returns an option and its ranks for every table, in order.

        What the planner does itself is :func:`~recsys.distributed.planner.search.search`.
        """


def partitioned(partitioner: Partitioner, problem: Problem) -> Placement:
    """Returns what a partitioner chooses, with the loads that follow and a bound for any choice.

    Raises:
        InfeasibleError: if the tables cannot fit, which is seen before the partitioner is asked.
        ValueError: if its choices break a rule.
    """
    started = time.monotonic()
    arrays = PieceArrays(problem)
    check_each_fits(arrays)
    bound_ms = max(problem.ranks.base_ms, default=0.0)
    if arrays.num_tables:
        relaxation = Relaxation(arrays)
        check_all_fit(arrays, relaxation)
        bound_ms = relaxation.lower_bound().bound_ms
    choices = tuple(partitioner.partition(problem))
    name = f"{type(partitioner).__name__}.partition"
    if len(choices) != len(problem.tables):
        raise ValueError(
            f"{name} must return a Choice for each of {len(problem.tables)} tables, in order; "
            f"received {len(choices)}."
        )
    ranks = problem.ranks
    load_R = np.array(ranks.base_ms or [0.0] * len(ranks), dtype=np.float64)
    left_R2 = np.array(ranks.memory_caps, dtype=np.float64)
    if ranks.base_memory:
        left_R2 -= np.array(ranks.base_memory, dtype=np.float64)
    kind_R = np.array(ranks.kinds or [0] * len(ranks))
    for table, (options, choice) in enumerate(zip(problem.tables, choices, strict=True)):
        if not 0 <= choice.option < len(options):
            raise ValueError(
                f"{name} must choose one of the {len(options)} options of table {table}; received "
                f"number {choice.option}."
            )
        option, rank_N = options[choice.option], np.array(choice.ranks, dtype=np.int64)
        if not _may_be_there(option, rank_N, len(ranks), ranks.node_size or len(ranks)):
            raise ValueError(
                f"{name} must place the {option.num_pieces} pieces of option {choice.option} of "
                f"table {table} {option.reach.value}, no two on one of the {len(ranks)} ranks; "
                f"received ranks {list(choice.ranks)}."
            )
        counts = [run.count for run in option.pieces]
        cost_NK = np.repeat([run.cost_ms for run in option.pieces], counts, axis=0)
        load_R[rank_N] += cost_NK[np.arange(len(rank_N)), kind_R[rank_N]]
        left_R2[rank_N] -= np.repeat([run.memory for run in option.pieces], counts, axis=0)
    worst = int(left_R2.min(axis=1).argmin())
    if left_R2[worst].min() < 0:
        raise ValueError(
            f"{name} must leave no rank with more bytes than it has; received choices that exceed "
            f"rank {worst} by {int(-left_R2[worst].min())} bytes."
        )
    return Placement(
        choices=choices,
        load_ms=tuple(load_R.tolist()),
        bound_ms=min(bound_ms, float(load_R.max())),
        method="partitioner",
        seconds=time.monotonic() - started,
        cut=False,
    )


def _may_be_there(option: Option, rank_N: Ints, num_ranks: int, node_size: int) -> bool:
    """Returns whether the pieces of an option may be on these ranks."""
    distinct = len(np.unique(rank_N)) == len(rank_N) == option.num_pieces
    if not distinct or rank_N.min() < 0 or rank_N.max() >= num_ranks:
        return False
    if option.reach is Reach.FIXED:
        return bool((np.array(option.ranks) == rank_N).all())
    node_N = rank_N // node_size
    if option.reach is Reach.ONE_NODE:
        return bool((node_N == node_N[0]).all())
    if option.reach is Reach.NODES:
        node_JS = node_N.reshape(-1, node_size)
        return bool((node_JS == node_JS[:, :1]).all())
    return True

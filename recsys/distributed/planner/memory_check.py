"""Refuses problems that cannot fit into memory, with the facts that tell a user why."""

from __future__ import annotations

import numpy as np

from recsys.distributed.planner.bounds import Relaxation
from recsys.distributed.planner.packing import Packing
from recsys.distributed.planner.piece_arrays import Floats, PieceArrays
from recsys.distributed.planner.placement import InfeasibleError, TooBig

_ROUNDING = 1e-9


def check_each_fits(arrays: PieceArrays) -> None:
    """Raises if a table does not fit that has all ranks to itself.

    Raises:
        InfeasibleError: naming such tables, or, if the ranks are too full before any table is
            placed, the bytes.
    """
    over_M = np.maximum(-arrays.ranks.free_RM, 0).sum(axis=0)
    if over_M.any():
        raise InfeasibleError(bytes_over=_both_sorts(arrays, over_M))
    if not arrays.num_tables:
        return
    misses_T = np.minimum.reduceat(arrays.misses_O, arrays.first_T[:-1])
    if misses_T.any():
        raise InfeasibleError(
            too_big=tuple(
                TooBig(table=int(table), bytes_over=int(misses_T[table]))
                for table in np.flatnonzero(misses_T)
            )
        )


def check_all_fit(arrays: PieceArrays, relaxation: Relaxation) -> float:
    """Raises if all memory together is too little.

    Returns:
        The share of all memory that has to be taken.

    Raises:
        InfeasibleError: with the bytes and the number of ranks that would do.
    """
    fullness, taken_M = relaxation.least_memory()
    if fullness > 1 + _ROUNDING:
        over_M = np.maximum(taken_M - arrays.ranks.free_RM.sum(axis=0), 0)
        raise InfeasibleError(
            bytes_over=_both_sorts(arrays, over_M),
            ranks_needed=_ranks_needed(arrays, fullness),
        )
    return fullness


def not_found(arrays: PieceArrays, packing: Packing, fullness: float, *, proven: bool) -> Exception:
    """Returns the error about a best packing that does not fit, though all memory would do."""
    _, room_RM = packing.exact_loads()
    return InfeasibleError(
        bytes_over=_both_sorts(arrays, np.maximum(-room_RM, 0).sum(axis=0)),
        ranks_needed=_ranks_needed(arrays, fullness),
        proven=proven,
    )


def _ranks_needed(arrays: PieceArrays, fullness: float) -> int | None:
    """Returns how many ranks have ``fullness`` times the memory, in whole nodes."""
    if not np.isfinite(fullness) or not arrays.ranks.free_RM.sum(axis=0).all():
        return None
    size = arrays.ranks.node_size
    return int(np.ceil(arrays.num_ranks * fullness / size - _ROUNDING)) * size


def _both_sorts(arrays: PieceArrays, bytes_M: Floats) -> tuple[int, int]:
    both = [0, 0]
    for sort, size in zip(arrays.ranks.sorts, bytes_M.tolist(), strict=True):
        both[sort] = int(np.ceil(size))
    return both[0], both[1]

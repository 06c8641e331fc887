"""Exchanges of a sharded pool: ids to the ranks that hold their rows, and rows in both directions.

Shapes: `R` ranks, `N` ids of this rank's call, `M` received ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from recsys.distributed.ranks import comm
from recsys.distributed.ranks.agreement import raise_together
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName

_FAILED = -1
"""A rank with invalid arguments sends this instead of its number of ids."""


@final
class PoolIds(NamedTuple):
    """The result of an exchange of ids."""

    order: Tensor
    """Positions in this rank's call of the ids that are sent, rank by rank."""
    sent: list[int]
    """`[R]` ids for each rank."""
    received: list[int]
    """`[R]` ids from each rank."""
    rows: Tensor
    """`[M]` row numbers of the received ids, in the block of this rank."""


def send_ids(
    env: ShardingEnv,
    ids: Tensor,
    block_size: int,
    copies: int,
    device: torch.device,
    error: Exception | None,
) -> PoolIds:
    """Send ids to the ranks that hold their rows. An error on one rank is raised on all.

    Args:
        env: The ranks.
        ids: `[N]`, in range; ignored if there is an error.
        block_size: Rows per rank.
        copies: Number of ranks that hold each row: one in each group of neighbouring ranks.
        device: Device of the pool.
        error: The error in this rank's arguments, or None.
    """
    what, num_ranks = ExchangeName.POOL_IDS, env.world_size
    if error is not None and num_ranks == 1:
        raise error
    # a failed rank sends -1 to all ranks, so that all of them raise
    sizes = torch.full((num_ranks,), _FAILED, device=device)
    if error is None:
        first_rank = torch.arange(copies, device=device) * (num_ranks // copies)
        owner = (ids.long() // block_size + first_rank[:, None]).view(-1)
        sizes = owner.bincount(minlength=num_ranks)
    ones = [1] * num_ranks
    received = comm.all_to_all(env, what, sizes, ones, ones).wait().tolist()
    if _FAILED in received:
        raise_together(env, what, error)
    order = torch.arange(len(ids), device=device).repeat(copies)[owner.argsort(stable=True)]
    sent = sizes.tolist()
    arrived = comm.all_to_all(env, what, ids.long()[order] % block_size, sent, received)
    return PoolIds(order, sent, received, arrived.wait())


def start_rows(
    env: ShardingEnv, rows: Sequence[Tensor], send: list[int], receive: list[int]
) -> Callable[[], list[Tensor]]:
    """Start to exchange rows. Of all tensors but the first, only the used columns are sent.

    Args:
        env: The ranks.
        rows: `[sum(send), columns]` each, from `RowPool.to_rows`.
        send: Rows for each rank.
        receive: Rows from each rank.

    Returns:
        A function that waits and returns the received rows, `[sum(receive), columns]` each.
    """
    what, head = ExchangeName.POOL_ROWS, rows[0]
    width = head.shape[1]
    send_sizes, receive_sizes = ([count * width for count in counts] for counts in (send, receive))
    pending = comm.all_to_all(env, what, head.reshape(-1), send_sizes, receive_sizes)
    if len(rows) == 1:
        return lambda: [pending.wait().view(sum(receive), width)]
    # the sizes of the other parts depend on the received lengths
    received = pending.wait().view(sum(receive), width)
    is_sent, send_sizes = _used(head, rows[1].shape[1], send)
    is_used, receive_sizes = _used(received, rows[1].shape[1], receive)
    parts = [
        comm.all_to_all(env, what, part[is_sent], send_sizes, receive_sizes) for part in rows[1:]
    ]

    def finish() -> list[Tensor]:
        values = [received]
        for part, sent in zip(parts, rows[1:], strict=True):
            padded = sent.new_zeros(is_used.shape)
            padded[is_used] = part.wait()
            values.append(padded)
        return values

    return finish


def _used(lengths_NK: Tensor, width: int, counts: list[int]) -> tuple[Tensor, list[int]]:
    """Return the mask of used columns, and the number of used values for each rank.

    Args:
        lengths_NK: Bag lengths of each row; their sum is its number of used columns.
        width: Columns of a row.
        counts: `[R]` rows of each rank.
    """
    used_N = lengths_NK.sum(1)
    is_used = torch.arange(width, device=used_N.device) < used_N[:, None]
    ends = [0, *itertools.accumulate(counts)]
    sums = torch.cat([used_N.new_zeros(1), used_N.cumsum(0)])[ends].tolist()
    return is_used, [end - begin for begin, end in itertools.pairwise(sums)]

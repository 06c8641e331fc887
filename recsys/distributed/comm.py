"""Collectives as the stages use them: plain tensors in, plain tensors out, finished later.

With one rank every exchange is the identity and no process group is needed. A CUDA tensor is
exchanged on the process group's own stream; ``Pending.wait`` makes the current stream wait for it
and does not block the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.types import ShardingEnv


@final
class Pending:
    """A tensor that an exchange is filling."""

    def __init__(self, tensor: Tensor, work: dist.Work | None, keep: Tensor | None = None) -> None:
        self._tensor = tensor
        self._work = work
        self._keep = keep  # the input must outlive the exchange

    def wait(self) -> Tensor:
        """Waits for the exchange and returns the tensor."""
        if self._work is not None:
            self._work.wait()
            self._work = self._keep = None
        return self._tensor


def all_to_all(
    env: ShardingEnv, send: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]
) -> Pending:
    """Starts an all-to-all of stretches of a flat tensor.

    Args:
        env: the ranks that take part.
        send: ``[sum(send_sizes)]``, the stretch for rank 0 first.
        send_sizes: elements for each rank.
        recv_sizes: elements from each rank.

    Returns:
        The pending ``[sum(recv_sizes)]``, the stretch from rank 0 first.
    """
    if env.world_size == 1:
        return Pending(send, None)
    received = send.new_empty(sum(recv_sizes))
    work = dist.all_to_all_single(
        received, send, list(recv_sizes), list(send_sizes), group=env.process_group, async_op=True
    )
    return Pending(received, work, send)


def all_reduce(env: ShardingEnv, tensor: Tensor) -> Pending:
    """Starts an in-place sum over ranks."""
    if env.world_size == 1:
        return Pending(tensor, None)
    return Pending(tensor, dist.all_reduce(tensor, group=env.process_group, async_op=True))


def broadcast_int(env: ShardingEnv, value: int, device: torch.device) -> int:
    """Returns rank 0's value on every rank (blocks the host)."""
    if env.world_size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.broadcast(tensor, group=env.process_group, group_src=0)
    return int(tensor.item())


def raise_together(env: ShardingEnv, error: Exception | None) -> None:
    """Raises the same error on every rank if any rank has one.

    Every rank must call it. The error of the lowest failing rank is raised, its message led by
    that rank's number.

    Args:
        env: the ranks that take part.
        error: this rank's error, or None.
    """
    errors: list[Exception | None] = [error]
    if env.world_size > 1:
        errors = [None] * env.world_size
        dist.all_gather_object(errors, error, group=env.process_group)
    for rank, failure in enumerate(errors):
        if failure is not None:
            raise type(failure)(f"On rank {rank}: {failure.args[0]}") from error

"""The mean over ranks of tensors that each of them holds, in place, bucket by bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName

BUCKET_BYTES = 64 << 20
"""How much travels in one all-reduce, and twice that is the most memory it takes."""


@final
class _Travelling(NamedTuple):
    """A bucket under way."""

    pieces: list[Tensor]
    pending: comm.Pending


@torch.no_grad()
def average_over_ranks(
    env: ShardingEnv,
    what: ExchangeName,
    tensors: Sequence[Tensor],
    device: torch.device,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Give every rank the mean of the ranks' tensors.

    Sums are fp32, whatever the tensors are, and divided once. A stretch of one tensor that fills a
    bucket travels from where it lies; smaller ones are put together.

    Args:
        env: the ranks; each must call it, with as many values in the same order.
        what: the exchange.
        tensors: contiguous, fp32, fp16 or bf16; changed in place.
        device: where they are exchanged; what is elsewhere is copied there and back.
        bucket_bytes: the most that travels at a time.

    Raises:
        LostContactError: if contact with another rank is lost.
    """
    if env.world_size == 1:
        return
    travelling: deque[_Travelling] = deque()
    for pieces in _buckets(tensors, max(bucket_bytes // 4, 1)):
        first = pieces[0]
        lies_ready = len(pieces) == 1 and first.dtype is torch.float32 and first.device == device
        flat = first if lies_ready else torch.cat([piece.to(device).float() for piece in pieces])
        travelling.append(_Travelling(pieces, comm.all_reduce(env, what, flat)))
        if len(travelling) > 1:  # the one before travels while this one is put together
            _arrive(travelling.popleft(), env.world_size)
    while travelling:
        _arrive(travelling.popleft(), env.world_size)


def _buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield stretches of the tensors that hold, together, at most `limit` values."""
    bucket: list[Tensor] = []
    free = limit
    for tensor in tensors:
        rest = tensor.view(-1)
        while rest.numel():
            # what fills a bucket alone need not be put together with anything
            if bucket and rest.numel() >= limit:
                yield bucket
                bucket, free = [], limit
            bucket.append(rest[:free])
            rest, free = rest[free:], free - bucket[-1].numel()
            if not free:
                yield bucket
                bucket, free = [], limit
    if bucket:
        yield bucket


def _arrive(bucket: _Travelling, num_ranks: int) -> None:
    total = bucket.pending.wait().div_(num_ranks)
    for piece, mean in zip(
        bucket.pieces, total.split([piece.numel() for piece in bucket.pieces]), strict=True
    ):
        if piece.data_ptr() != mean.data_ptr():
            piece.copy_(mean)

"""Average of replicated tensors over ranks, in place, in buckets."""

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
"""Bytes of one all-reduce; at most twice as many are allocated."""


@final
class _Bucket(NamedTuple):
    """A bucket in an all-reduce."""

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
    """Replace the tensors of every rank by their mean over the ranks.

    Sums are fp32 for all dtypes, and divided once. A range of one tensor that fills a bucket is
    sent without a copy; smaller tensors are concatenated.

    Args:
        env: The ranks; each must call it, with the same number of values in the same order.
        what: Name of the exchange.
        tensors: Contiguous, fp32, fp16 or bf16; changed in place.
        device: Device of the exchange; other tensors are copied to it and back.
        bucket_bytes: Most bytes of one all-reduce.

    Raises:
        LostContactError: Contact with another rank is lost.
    """
    if env.world_size == 1:
        return
    running: deque[_Bucket] = deque()
    for pieces in _buckets(tensors, max(bucket_bytes // 4, 1)):
        first = pieces[0]
        is_ready = len(pieces) == 1 and first.dtype is torch.float32 and first.device == device
        flat = first if is_ready else torch.cat([piece.to(device).float() for piece in pieces])
        running.append(_Bucket(pieces, comm.all_reduce(env, what, flat)))
        if len(running) > 1:  # overlaps with the concatenation of the next bucket
            _finish(running.popleft(), env.world_size)
    while running:
        _finish(running.popleft(), env.world_size)


def _buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield ranges of the tensors with at most `limit` values in total."""
    bucket: list[Tensor] = []
    free = limit
    for tensor in tensors:
        rest = tensor.view(-1)
        while rest.numel():
            # a range that fills a bucket alone needs no concatenation
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


def _finish(bucket: _Bucket, num_ranks: int) -> None:
    total = bucket.pending.wait().div_(num_ranks)
    for piece, mean in zip(
        bucket.pieces, total.split([piece.numel() for piece in bucket.pieces]), strict=True
    ):
        if piece.data_ptr() != mean.data_ptr():
            piece.copy_(mean)

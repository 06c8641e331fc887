"""The gradient of a batch's weights goes back to the ranks that sent them.

Weights travel with their ids, so their gradients return as embeddings without pooling do: one float
per id that was sent, rank by rank and stream by stream, in one exchange of the backward pass.

Shape names: ``N`` ids of this rank's batch, ``M`` ids it received, ``R`` ranks, ``S`` streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor

from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.kernels import ops


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRoute:
    """How weight gradients find back.

    Attributes:
        env: the ranks.
        places: places in the batch of the ids sent, rank by rank and stream by stream; None if this
            rank's weights need no gradient.
        num_ids: ``N``.
        sent_counts: ids sent to each rank.
        received_counts: ids received from each rank.
        stream_counts: ``[S * R]`` ids received in each stream from each rank.
        by_rank: ``[R * S]`` permutes those to each rank's streams.
    """

    env: ShardingEnv
    places: Tensor | None
    num_ids: int
    sent_counts: Sequence[int]
    received_counts: Sequence[int]
    stream_counts: Tensor
    by_rank: Tensor


def carry_weights(route: WeightRoute, given_N: Tensor, received_M: Tensor) -> tuple[Tensor, Tensor]:
    """Lets gradients flow from received weights to the given ones.

    The gradient is that of this rank's own loss, not divided by the number of ranks: what computes
    the weights is replicated, and its gradient averaged by DistributedDataParallel.

    Args:
        route: the way.
        given_N: this rank's weights; they may need no gradient while those of another rank do.
        received_M: the weights that arrived, stream by stream and rank by rank.

    Returns:
        The received weights in the graph, and an anchor ``[0]``: make the module's output depend
        on it, so that backward reaches every rank, also one that received nothing.
    """
    if not given_N.requires_grad:
        given_N = given_N.detach().requires_grad_()
    carried = _CarryWeights.apply(route, given_N, received_M)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], carried)


class _CarryWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, route: WeightRoute, given_N: Tensor, received_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.route = route
        return received_M.view_as(received_M), given_N.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor, anchor: Tensor) -> tuple[None, Tensor | None, None]:
        route: WeightRoute = ctx.route
        total = sum(route.received_counts)
        _, returned, _ = ops.permute_1d(route.by_rank, route.stream_counts, grad_M, None, total)
        arrived = comm.all_to_all(
            route.env,
            "send the gradients of weights back",
            returned,
            route.received_counts,
            route.sent_counts,
        ).wait()
        if route.places is None:
            return None, None, None
        # the output stage divided it, for the tables' sake
        whole = arrived * route.env.world_size
        return None, whole.new_zeros(route.num_ids).index_add_(0, route.places, whole), None

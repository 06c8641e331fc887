"""Gradients of per-sample weights, which return to the ranks that sent the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recsys.distributed.ranks import comm
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.bags import sent_places
from recsys.distributed.stages.batch import BatchContext, LookupInput
from recsys.kernels import ops


def with_weight_gradients(ctx: BatchContext, bags: LookupInput) -> tuple[LookupInput, Tensor]:
    """Let gradients flow from the received weights to the given ones.

    Weights are sent with their ids. Their gradients return in one exchange of the backward pass,
    one float per sent id. They are gradients of this rank's own loss, not divided by the number of
    ranks: DistributedDataParallel averages the gradients of the replicated module that computes
    the weights.

    Args:
        ctx: The batch, whose ids were received.
        bags: The received bags of all streams.

    Returns:
        The bags, and an anchor `[0]`. The module's output must depend on the anchor, so that
        backward reaches every rank, also one that received nothing.
    """
    prepared, stage, shape = ctx.prepared, ctx.stage, ctx.shape
    given_N = prepared.bags.weights
    assert given_N is not None
    if not given_N.requires_grad:  # the weights of another rank do
        given_N = given_N.detach().requires_grad_()
    places = sent_places(ctx.routes, prepared, ctx.header, ())
    num_ids, env, by_rank = prepared.bags.values.numel(), stage.module.env, stage.streams.by_rank
    sent = stage.per_rank(shape.ids_sent_D)
    received = shape.ids_received_RS.sum(1).tolist()
    stream_counts = shape.ids_received_RS.T.reshape(-1)

    def send_back(grad_M: Tensor) -> Tensor | None:
        returned = ops.move_segments(grad_M, by_rank, stream_counts)
        what = ExchangeName.GRADIENTS_OF_WEIGHTS
        arrived = comm.all_to_all(env.for_embeddings, what, returned, received, sent).wait()
        if not prepared.weights_need_grad:
            return None
        # the output stage divided gradients by the number of ranks, for the tables
        whole = arrived * env.world_size
        # an id is sent once for each table and column shard that reads it, hence the sum
        return whole.new_zeros(num_ids).index_add_(0, places, whole)

    weights, anchor = _CarryWeights.apply(  # type: ignore[no-untyped-call]
        send_back, given_N, bags.weights
    )
    return bags._replace(weights=weights), anchor


class _CarryWeights(torch.autograd.Function):
    """Autograd edge from the received weights to the given ones, with an anchor `[0]`."""

    @staticmethod
    def forward(
        ctx: Any,
        send_back: Callable[[Tensor], Tensor | None],
        given_N: Tensor,
        received_M: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.send_back = send_back
        return received_M.view_as(received_M), given_N.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor, anchor: Tensor) -> tuple[None, Tensor | None, None]:
        return None, ctx.send_back(grad_M), None

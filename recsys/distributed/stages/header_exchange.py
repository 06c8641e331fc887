"""Exchange of headers: one for all modules whose batches start together.

Under NCCL exchanges run in the order of the stream, so the copy of the headers to the host is
queued at once; reading them one step later does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recsys.distributed.ranks import comm
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.batch import BatchContext, CopiedHeaders
from recsys.distributed.stages.header import Header

_NO_COUNTS = np.zeros(0, dtype=np.int64)


def start_together(contexts: Sequence[BatchContext]) -> None:
    """Start the header exchange of prepared batches: one exchange for modules on the same ranks.

    Args:
        contexts: Prepared batches of different modules, in the same order on every rank.
    """
    stage = contexts[0].stage
    group = stage.env.process_group
    if any(ctx.stage.env.process_group is not group for ctx in contexts[1:]):
        of_groups: dict[int, list[BatchContext]] = {}
        for ctx in contexts:
            of_groups.setdefault(id(ctx.stage.env.process_group), []).append(ctx)
        for alike in of_groups.values():
            start_together(alike)
        return
    if stage.env.world_size == 1:
        contexts = [ctx for ctx in contexts if not ctx.stage.skip_header(ctx)]
        if not contexts:
            return
        stage = contexts[0].stage
    sent = stage.header_of(contexts[0])
    env, sizes, width = stage.env, stage.header_sizes, stage.header_width
    if len(contexts) > 1:
        headers = [sent, *(ctx.stage.header_of(ctx) for ctx in contexts[1:])]
        stages = [ctx.stage for ctx in contexts]
        parts = [h.split(s.header_sizes) for h, s in zip(headers, stages, strict=True)]
        sent = torch.cat([part for to_rank in zip(*parts, strict=True) for part in to_rank])
        sizes = [sum(of_rank) for of_rank in zip(*(s.header_sizes for s in stages), strict=True)]
        width = sum(stage.header_width for stage in stages)
    own = [width] * env.world_size
    pending = comm.all_to_all(env.for_ids, ExchangeName.ID_COUNTS, sent, sizes, own)
    if stage.is_ordered:
        copied = _copy_headers(pending, contexts)
        for ctx in contexts:
            ctx.pending_header = pending, contexts, copied
    else:
        for ctx in contexts:
            ctx.pending_header = pending, contexts, None


def _copy_headers(pending: comm.Pending, contexts: Sequence[BatchContext]) -> CopiedHeaders:
    """Start to copy received headers and the batches' counts to the host, in pinned memory."""
    arrived = pending.wait()
    parts = [arrived]
    for ctx in contexts:
        if ctx.error is None:
            counts = ctx.prepared.counts_G, ctx.prepared.given_counts_K
            parts += [part.to(arrived.dtype) for part in counts]
    host, event = torch.cat(parts), None
    if host.is_cuda:
        whole, host = host, torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        host.copy_(whole, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return parts, host, event


def read_headers(
    pending: comm.Pending, contexts: Sequence[BatchContext], copied: CopiedHeaders | None
) -> None:
    """Set the headers of batches whose headers were exchanged together.

    Args:
        pending: The exchange.
        contexts: The batches.
        copied: The copy on its way to the host; None if it was not started.
    """
    parts, host, event = copied or _copy_headers(pending, contexts)
    if event is not None:
        event.synchronize()  # the only wait of the host
    edges = np.cumsum([part.numel() for part in parts])
    headers, *counts = np.split(host.numpy(), edges[:-1])
    words_RH = headers.reshape(contexts[0].stage.env.world_size, -1)
    at = 0
    for ctx in contexts:
        end = at + ctx.stage.header_width
        counts_G, given_counts_K = _NO_COUNTS, _NO_COUNTS
        if ctx.error is None:
            counts_G, given_counts_K, *counts = counts
        ctx.header = Header(words_RH[:, at:end], counts_G, given_counts_K)
        ctx.pending_header = None
        at = end

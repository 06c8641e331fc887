"""Rows of a batch's ids, which return from the owners of the tables to the ranks of the ids.

Shapes: `N` ids of this rank's batch, `M` ids that this rank received, `R` ranks, `S` streams
of this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.ranks import comm
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.bags import joined, sent_places
from recsys.distributed.stages.batch import BatchContext
from recsys.kernels import ops


def return_rows(ctx: BatchContext) -> Callable[[], Tensor]:
    """Start the exchange of the rows that the lookups of a batch read.

    Args:
        ctx: The batch, whose ids were received. Its input stage has `keeps_places`.

    Returns:
        Function that waits and returns int64 `[N]`: the row in its whole table of each given id. If
        several tables read an id, the row of one table is returned.
    """
    stage, shape, prepared = ctx.stage, ctx.shape, ctx.prepared
    streams, env, device = stage.streams, stage.module.env, stage.module.device
    counts_RS = shape.ids_received_RS
    sizes = counts_RS.reshape(-1)[streams.reading]
    rank_streams = stage.module.layout.streams[env.rank]
    starts_S = np.array([stream.rect.row_start for stream in rank_streams], dtype=np.int64)
    starts = np.tile(starts_S, env.world_size)[streams.reading]
    none = torch.empty(0, dtype=torch.int64, device=device)
    rows_M = joined([bags.indices.long() for bags in ctx.received.lookups] or [none])
    rows_M = rows_M + ops.upload(starts, device).repeat_interleave(
        ops.upload(sizes, device), output_size=rows_M.numel()
    )
    pending = comm.all_to_all(
        env.for_embeddings,
        ExchangeName.ROWS_OF_IDS,
        ops.move_segments(rows_M, streams.by_rank, sizes),
        counts_RS.sum(1).tolist(),
        stage.per_rank(shape.ids_sent_D),
    )

    def wait() -> Tensor:
        rows_N = prepared.bags.values.long().clone()  # ids of replicated tables are rows
        places = sent_places(ctx.routes, prepared, ctx.header, ())
        rows_N.index_copy_(0, places, pending.wait())
        return rows_N.index_select(0, prepared.inverse) if stage.module.distinct else rows_N

    return wait

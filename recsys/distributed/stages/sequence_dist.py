"""Output stage for sequences: sends a row per id to the rank that has the id.

There is one exchange forward and one backward, without sums. Each rank returns a row per received
id in the order of arrival, and the receiver knows the position of each id in its batch. A row
consists of *chunks*: the chunk is the largest width that divides the columns of every stream, so
tables split by columns need no special case.

Shapes: `N` ids of this rank's output, slot by slot; `D` columns of every table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.ranks.wire import EXACT, QuantizedCommCodecs
from recsys.distributed.stages.bags import joined, sent_places
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.stages.exchanged_rows import Codecs
from recsys.distributed.stages.output_dist import Exchange, OutputStage
from recsys.distributed.stages.routes import lookup_order
from recsys.distributed.stages.row_gather import RowGather
from recsys.kernels import ops
from recsys.sparse import JaggedTensor
from recsys.sparse.features import FeatureViews


@final
class SequenceDist(OutputStage[dict[str, JaggedTensor]]):
    """Output stage for sequences.

    Args:
        args: As for `OutputStage`; the tables have one embedding dimension.
        need_indices: Whether to return the ids too.
    """

    def __init__(self, *args: Any, need_indices: bool) -> None:
        self._need_indices = need_indices
        super().__init__(*args)

    def _prepare(self, codecs: QuantizedCommCodecs) -> None:
        layout, env = self.layout, self.env
        self.dim = layout.slots[0].dim
        sent = [stream for streams in layout.streams for stream in streams]
        sent += layout.replica_streams
        first_cols = [stream.cols[0] - layout.slots[stream.slot].col for stream in sent]
        widths = [stream.rect.num_cols for stream in sent]
        self.chunk = gcd(self.dim, *first_cols, *widths)
        self.codecs = codecs.fitted(self.chunk)
        # of the streams of all ranks, then of replicated tables
        self.sent_slots = np.array([stream.slot for stream in sent])
        self.sent_first_chunks = np.array(first_cols) // self.chunk
        self.sent_chunks = np.array(widths) // self.chunk
        column_counts = [stream.rect.num_cols for stream in layout.streams[env.rank]]
        self.own_chunks = np.array(column_counts, dtype=np.int64) // self.chunk
        counts = [len(streams) for streams in layout.streams]
        self.sent_edges = np.cumsum([0, *counts])  # of the streams sent to each rank
        reading = lookup_order(layout.groups[env.rank], env.world_size, pooled=False)
        self.reading = reading
        self.keeps_order = bool((reading[:-1] < reading[1:]).all())
        self.to_lookups = reading.astype(np.int32)
        self.to_ranks = np.argsort(reading).astype(np.int32)
        # the rows of each slot are received as one block: they need not be moved
        self.is_whole = len(sent) == len(layout.slots) and self.chunk == self.dim
        self.slot_order: list[int] = self.sent_slots.tolist() if self.is_whole else []

    def start(
        self, ctx: BatchContext, lookups: Iterator[Tensor], replicas: Sequence[Tensor], trains: bool
    ) -> Callable[[], dict[str, JaggedTensor]]:
        """Start the exchange of `[ids, width]` per lookup; see the base class."""
        exchanged = SequenceRows(self, ctx)
        exchange = Exchange(self, self.env.for_embeddings, exchanged, ctx.stage.module.path)
        wait = exchange.start(list(lookups), replicas, trains)
        return lambda: self._views(wait(), exchanged, ctx)

    def _views(
        self, rows: Tensor, exchanged: SequenceRows, ctx: BatchContext
    ) -> dict[str, JaggedTensor]:
        bags, inverse = ctx.checked.given, ctx.prepared.inverse
        slots, strides = ctx.routes.slot_keys, bags.stride_per_key()
        counts_K, order = exchanged.counts_K, self.slot_order
        if ctx.stage.module.distinct:
            counts_K, order = ctx.header.given_counts_K, []
            # its backward adds up the gradients of repeated ids before they are sent
            rows = rows.index_select(0, exchanged.repeats(inverse.split(counts_K.tolist())))
        if rows.dtype is not self.dtype:
            rows = rows.to(self.dtype)
        lengths = ctx.checked.safe.lengths().split_with_sizes(strides)
        indices = None
        if self._need_indices:
            parts = bags.values().split(counts_K.tolist())
            indices = torch.cat([parts[k] for k in slots])
        views = FeatureViews(
            rows,
            indices,
            torch.cat([lengths[k] for k in slots]),
            counts_K[slots].tolist(),
            [strides[k] for k in slots],
            order or None,
        )
        return JaggedTensor.from_views(self.names, views)


@final
class SequenceRows:
    """Rows of a batch's ids.

    Args:
        stage: The stage.
        ctx: The batch.
    """

    adds_up = scales_early = False
    read_codecs: Codecs = (EXACT, EXACT)

    def __init__(self, stage: SequenceDist, ctx: BatchContext) -> None:
        routes, header = ctx.routes, ctx.header
        self.slot_keys = routes.slot_keys
        self.counts_K = counts_K = header.counts_G[: routes.num_keys]
        # ids of each slot, and the position in the batch of the first of them
        self.slot_counts = counts_K[self.slot_keys]
        self.slot_starts = (np.cumsum(counts_K) - counts_K)[self.slot_keys]
        of_replicas = [counts_K[positions.on_host] for positions in routes.replicas]
        sent_counts = np.concatenate([header.counts_G[routes.segments], *of_replicas])
        edges = np.concatenate([[0], np.cumsum(sent_counts * stage.sent_chunks)])
        # [R, S] chunks received from each rank in each stream
        self.received_chunks = ctx.shape.ids_received_RS * stage.own_chunks
        self.stage = stage
        self.sends: list[int] = (self.received_chunks.sum(1) * stage.chunk).tolist()
        self.receives: list[int] = (np.diff(edges[stage.sent_edges]) * stage.chunk).tolist()
        self.widths: list[int] = []
        if not stage.is_whole:
            slot_bases = np.cumsum(self.slot_counts) - self.slot_counts
            shifts = (slot_bases - self.slot_starts)[stage.sent_slots]
            columns = stage.sent_first_chunks, stage.sent_chunks
            places = sent_places(routes, ctx.prepared, header, ctx.received.replica_places)
            self._gather = RowGather(stage.dim, stage.chunk, *columns, sent_counts, shifts, places)

    def repeats(self, inverse_of_keys: Sequence[Tensor]) -> Tensor:
        """Return the output row of each id before deduplication, slot by slot.

        Args:
            inverse_of_keys: Per feature the positions of its ids among the batch's distinct ids.
        """
        counts, slots = self.slot_counts, self.stage.slot_order
        order = slots or list(range(len(counts)))
        shifts = -self.slot_starts
        shifts[order] += np.cumsum(counts[order]) - counts[order]
        pairs = zip(self.slot_keys, shifts, strict=True)
        return torch.cat([inverse_of_keys[k] + int(shift) for k, shift in pairs])

    def pack(self, lookups: Sequence[Tensor]) -> Tensor:
        """Return the send buffer, flat."""
        stage = self.stage
        self.widths = [x.shape[1] for x in lookups]
        rows = [x.reshape(-1) for x in lookups] or [torch.empty(0, device=stage.device)]
        sent = joined(rows)
        if not stage.keeps_order:
            sizes = self.received_chunks.reshape(-1)[stage.reading]
            sent = self._reorder(sent, stage.to_ranks, sizes)
        return sent

    def _reorder(self, rows: Tensor, order: np.ndarray, chunks: np.ndarray) -> Tensor:
        """Permute segments; `chunks` are their sizes in chunks."""
        return ops.move_segments(rows, order, chunks * self.stage.chunk)

    def gather(self, buffer: Tensor, _: Tensor) -> Tensor:
        """Return the output `[N, D]`."""
        if self.stage.is_whole:
            return buffer.detach().view(-1, self.stage.dim)
        return self._gather.gather(buffer)

    def scatter_grad(self, grad: Tensor, num_received: int) -> tuple[Tensor, Tensor]:
        """Return the gradient of the buffer, and of its `num_received` received elements."""
        grad = grad.reshape(-1) if self.stage.is_whole else self._gather.scatter_grad(grad)
        return grad, grad[:num_received]

    def unpack(self, grad: Tensor) -> list[Tensor]:
        """Return the gradients of the lookups, given the gradient of the send buffer."""
        stage = self.stage
        if not self.widths:
            return []
        if not stage.keeps_order:
            grad = self._reorder(grad, stage.to_lookups, self.received_chunks.reshape(-1))
        per_stream = self.received_chunks.sum(0)
        groups = stage.layout.groups[stage.env.rank]
        sizes = [int(per_stream[g.streams].sum()) * stage.chunk for g in groups]
        parts = zip(grad.split(sizes), self.widths, strict=True)
        return [part.view(-1, width) for part, width in parts]

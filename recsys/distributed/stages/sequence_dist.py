"""Third stage, sequences: looked-up embeddings go back to the ids they belong to.

One exchange forward and one backward. Nothing is added up, so the way back is the way of the ids:
each rank returns a row per id it received, in the order it came, and the sender knows from its
receipt which place of the batch each of them is for. A row is a number of *chunks*, the largest
width that divides every stretch of columns, so that tables split by columns need no code.

Shape names: ``N`` ids of this rank's output, slot by slot; ``D`` columns of every table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.placement.layout import Layout, Stream
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import QuantizedCommCodecs
from recsys.distributed.stages.exchange import Exchange, start_exchange
from recsys.distributed.stages.id_routes import IdRoute, index_tensor, lookup_order
from recsys.kernels import ops
from recsys.kernels.scaled_loss import TableUpdates


@final
class SequenceDist:
    """Sends one embedding per id back to the rank that has the id.

    Args:
        layout: the compiled placement of tables of one dim.
        env: the ranks.
        device: where the embeddings are.
        on_backward: called in every backward pass, on every rank in the same order.
        codecs: what embeddings and gradients look like while they travel.
        updates: the tables that take gradients, on any rank.
    """

    def __init__(
        self,
        layout: Layout,
        env: ShardingEnv,
        device: torch.device,
        on_backward: Callable[[], None],
        codecs: QuantizedCommCodecs,
        updates: TableUpdates,
    ) -> None:
        self.layout = layout
        self.env = env
        self.device = device
        self.on_backward = on_backward
        self.updates = updates
        self.dim = layout.slots[0].dim
        own = layout.streams[env.rank]
        self.num_streams = len(own)
        sent = [stream for streams in layout.streams for stream in streams]
        sent += layout.replica_streams
        first_cols = [stream.cols[0] - layout.slots[stream.slot].col for stream in sent]
        widths = [stream.rect.num_cols for stream in sent]
        self.chunk = gcd(self.dim, *first_cols, *widths)
        self.codecs = codecs.fitted(self.chunk)
        # of the streams sent to all ranks, then the replicas'
        self.sent_slots = np.array([stream.slot for stream in sent])
        self.sent_first_chunks = np.array(first_cols) // self.chunk
        self.sent_chunks = np.array(widths) // self.chunk
        self.own_chunks = np.array([_chunks(stream, self.chunk) for stream in own], dtype=np.int64)
        counts = [len(streams) for streams in layout.streams]
        self.sent_edges = np.cumsum([0, *counts])  # of the streams sent to each rank
        self.has_exchange = any(counts)
        reading = lookup_order(layout.groups[env.rank], env.world_size, pooled=False)
        self.reading = reading
        self.keeps_order = bool((reading[:-1] < reading[1:]).all())
        self.to_lookups = index_tensor(reading, device)
        self.to_ranks = index_tensor(np.argsort(reading), device)
        # each slot's rows arrive in one stretch: they need not be moved
        self.is_whole = len(sent) == len(layout.slots) and self.chunk == self.dim
        self.slot_order = self.sent_slots.tolist() if self.is_whole else None

    def start(
        self,
        lookups: Sequence[Tensor],
        replicas: Sequence[Tensor],
        route: IdRoute,
        trains: bool,
    ) -> Callable[[], Tensor]:
        """Starts the exchange.

        Args:
            lookups: per lookup group of this rank, ``[ids, width]``.
            replicas: per replica group, ``[ids, D]``.
            route: of the batch.
            trains: whether any table of the module, on any rank, takes gradients.

        Returns:
            What waits for the output ``[N, D]``, slot by slot: in order, or if given in that of
            ``slot_order``; call it once.
        """
        return start_exchange(_SequenceExchange(self, route), lookups, replicas, trains)

    def repeat(self, rows: Tensor, route: IdRoute, inverse: Tensor) -> Tensor:
        """Returns the rows of the ids as given, slot by slot in order.

        Args:
            rows: of the distinct ids, from :meth:`start`.
            route: of the batch.
            inverse: of the route.
        """
        order = np.arange(len(self.layout.slots)) if self.slot_order is None else self.slot_order
        shifts = -route.slot_starts
        shifts[order] += np.cumsum(route.slot_counts[order]) - route.slot_counts[order]
        parts = inverse.split(route.key_counts.tolist())
        index = [parts[k] + int(s) for k, s in zip(route.slot_keys, shifts, strict=True)]
        return rows.index_select(0, torch.cat(index))


def _chunks(stream: Stream, chunk: int) -> int:
    return stream.rect.num_cols // chunk


@final
class _SequenceExchange(Exchange[SequenceDist]):
    """One batch's way through the stage, forward and backward."""

    def __init__(self, stage: SequenceDist, route: IdRoute) -> None:
        self.num_out = int(route.slot_counts.sum())
        sent_chunks = route.sent_counts * stage.sent_chunks
        edges = np.concatenate([[0], np.cumsum(sent_chunks)])
        receives = (np.diff(edges[stage.sent_edges]) * stage.chunk).tolist()
        # [R, S] chunks received from each rank in each stream
        self.received_chunks = route.received_counts * stage.own_chunks
        sends = (self.received_chunks.sum(1) * stage.chunk).tolist()
        super().__init__(stage, sends, receives)
        if not stage.is_whole:
            self.target = self._target(route, int(edges[-1]))
        self.widths: list[int] = []

    def _target(self, route: IdRoute, total: int) -> Tensor:
        """Returns for each chunk of the buffer the chunk of the output it goes to."""
        stage = self.stage
        per_row = stage.dim // stage.chunk
        slot_bases = np.cumsum(route.slot_counts) - route.slot_counts
        shifts = (slot_bases - route.slot_starts)[stage.sent_slots]
        target = route.positions
        if shifts.any():
            target = target + self._repeat(shifts, route.sent_counts, target.numel())
        if per_row == 1:
            return target
        target = target * per_row
        if stage.sent_first_chunks.any():
            target += self._repeat(stage.sent_first_chunks, route.sent_counts, target.numel())
        chunks = self._repeat(stage.sent_chunks, route.sent_counts, target.numel())
        first = target - (chunks.cumsum(0) - chunks)
        return first.repeat_interleave(chunks, output_size=total) + torch.arange(
            total, device=stage.device
        )

    def _repeat(self, values: np.ndarray, counts: np.ndarray, total: int) -> Tensor:
        both = ops.upload(np.stack([values, counts]), self.stage.device)
        return both[0].repeat_interleave(both[1], output_size=total)

    def send(self, lookups: Sequence[Tensor], replicas: Sequence[Tensor]) -> Tensor:
        """Starts the exchange into one buffer; the replicas' output lies behind what arrives."""
        self.widths = [x.shape[1] for x in lookups]
        rows = [x.reshape(-1) for x in lookups] or [torch.empty(0, device=self.device)]
        sent = rows[0] if len(rows) == 1 else torch.cat(rows)
        if not self.stage.keeps_order:
            sizes = self.received_chunks.reshape(-1)[self.stage.reading]
            sent = self._reorder(sent, self.stage.to_ranks, sizes)
        return self.start_sending(sent, replicas)

    def _reorder(self, rows: Tensor, order: Tensor, chunks: np.ndarray) -> Tensor:
        """Permutes the segments of ``chunks`` chunks each."""
        sizes = ops.upload(chunks * self.stage.chunk, self.device)
        _, moved, _ = ops.permute_1d(order, sizes, rows, None, rows.numel())
        return moved

    def place(self, buffer: Tensor) -> Tensor:
        """Waits, and puts each row where its id is: ``[N, D]``."""
        self.wait()
        if self.stage.is_whole:
            return buffer.detach().view(-1, self.stage.dim)
        chunk = self.stage.chunk
        output = torch.empty_like(buffer, memory_format=torch.contiguous_format)
        output.view(-1, chunk).index_copy_(0, self.target, buffer.view(-1, chunk))
        return output.view(self.num_out, self.stage.dim)

    def spread(self, grad: Tensor) -> Tensor:
        """Transposed :meth:`place`: the gradient of the buffer; starts sending it back."""
        if self.stage.is_whole:
            whole = grad.reshape(-1)
            self.start_sending_back(whole)
            return whole
        chunk = self.stage.chunk
        spread = grad.reshape(-1, chunk).index_select(0, self.target).view(-1)
        self.start_sending_back(spread)
        return spread

    def send_back(self, grad: Tensor) -> list[Tensor]:
        """Transposed :meth:`send`: the gradients of the lookups' and replicas' outputs."""
        arrived = self.wait_for_grads()
        if arrived is None or not self.widths:
            return self.replica_grads(grad)
        if not self.stage.keeps_order:
            arrived = self._reorder(
                arrived, self.stage.to_lookups, self.received_chunks.reshape(-1)
            )
        per_stream = self.received_chunks.sum(0)
        groups = self.stage.layout.groups[self.env.rank]
        sizes = [int(per_stream[g.streams].sum()) * self.stage.chunk for g in groups]
        parts = zip(arrived.split(sizes), self.widths, strict=True)
        grads = [part.view(-1, width) for part, width in parts]
        return [*grads, *self.replica_grads(grad)]

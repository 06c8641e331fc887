"""Payload of a batch: the buffer of lengths, ids and weights that is sent after the header.

It is one buffer of 32-bit words (64-bit for tables beyond int32 ids): per destination the lengths,
the ids and the bits of the weights. Both ends pack and unpack it by one permutation of segments.

Shape names: `R` ranks, `S` streams of this rank, `D` streams of all destinations, `N` ids.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.placement.layout import Layout
from recsys.distributed.stages.batch import Bags, Segments
from recsys.distributed.stages.header import BatchShape, Header
from recsys.distributed.stages.routes import Routes, lookup_order
from recsys.kernels import ops


@final
class PayloadFormat:
    """Packs and unpacks payloads.

    Args:
        layout: The compiled placement.
        rank: This rank.
        world_size: Number of ranks.
        device: Device of batches and tables.
        is_weighted: Whether ids have weights.

    Attributes:
        num_parts: Parts of a payload: lengths, ids and weights.
        by_rank: int32, the received segments of ids in the order in which they arrived.
    """

    def __init__(
        self, layout: Layout, rank: int, world_size: int, device: torch.device, *, is_weighted: bool
    ) -> None:
        self._groups, self._world_size = layout.groups[rank], world_size
        self._device, self._is_weighted = device, is_weighted
        narrow = all(rect.num_rows < 2**31 for table in layout.tables for rect in table.rects)
        self._word = torch.int32 if narrow else torch.int64
        self._weight_word = torch.float32 if narrow else torch.float64
        self._reading = lookup_order(self._groups, world_size, pooled=layout.is_pooled)
        self.by_rank = np.argsort(self._reading).astype(np.int32)
        self.num_parts = 3 if is_weighted else 2
        # as received: [rank][part][stream]; as read: [part][stream in the order of lookups]
        num_streams = len(layout.send_segments[rank])
        order = np.arange(world_size * self.num_parts * num_streams).reshape(
            world_size, self.num_parts, num_streams
        )
        by_part = order.transpose(1, 0, 2).reshape(self.num_parts, -1)
        self._unpack_order = by_part[:, self._reading].reshape(-1).astype(np.int32)

    def pack(
        self, segments: Segments, routes: Routes, header: Header, batch_size: int, shape: BatchShape
    ) -> Tensor:
        """Return the payload: per destination its lengths, ids and weights."""
        counts = sent_segments(header.counts_G, routes)
        sizes = [np.full_like(counts, batch_size), *[counts] * (self.num_parts - 1)]
        order_P, sizes_M = routes.payload, np.concatenate(sizes)
        if shape.is_ragged:  # of a segment's lengths the first are sent: it counts as two
            kept_M = sizes_M.copy()
            kept_M[routes.sent] = shape.lengths_sent_D
            order_P, sizes_M = 2 * order_P, np.stack([kept_M, sizes_M - kept_M], 1).ravel()
        if self._device.type == "cuda" and ops.HAS_TRITON and len(segments.values) == 1:
            from recsys.kernels.ops_triton import pack

            plan, total = ops.plan_of_moves(order_P, sizes_M)
            weights_N = segments.weights[0] if segments.weights else None
            words = segments.lengths[0], segments.values[0], weights_N
            return pack(*words, ops.upload(plan, self._device), total, self._word)
        parts = [*segments.lengths, *segments.values]
        for weights in segments.weights:
            parts.append(weights.to(self._weight_word).view(self._word))
        num_words = sum(map(torch.numel, parts))
        source, at = torch.empty(num_words, dtype=self._word, device=self._device), 0
        for part in parts:
            source[at : at + part.numel()].copy_(part)
            at += part.numel()
        return ops.move_segments(source, order_P, sizes_M)

    def sent_sizes(self, shape: BatchShape) -> np.ndarray:
        """Return the `[D]` words sent for each stream."""
        sizes: np.ndarray = shape.lengths_sent_D + (self.num_parts - 1) * shape.ids_sent_D
        return sizes

    def received_sizes(self, shape: BatchShape) -> list[int]:
        """Return the words received from each rank."""
        words_RS = shape.lengths_received_RS + (self.num_parts - 1) * shape.ids_received_RS
        sizes: list[int] = words_RS.sum(1).tolist()
        return sizes

    def unpack(self, payload: Tensor, shape: BatchShape) -> Bags:
        """Return the bags of all streams of this rank from a received payload."""
        counts_RS = shape.ids_received_RS
        if self._world_size > 1:
            parts = [shape.lengths_received_RS, *[counts_RS] * (self.num_parts - 1)]
            order, sizes = self._unpack_order, np.stack(parts, 1).ravel()
            if shape.is_by_id:  # lengths of bags of one id were not sent: they are appended
                by_id = shape.by_id_RS.ravel()
                ones = np.where(by_id, counts_RS.ravel(), 0)
                payload = torch.cat([payload, payload.new_ones(int(ones.sum()))])
                order, (lengths,) = order.copy(), np.nonzero(by_id[self._reading])
                order[lengths] = len(sizes) + self._reading[lengths]
                sizes = np.concatenate([sizes, ones])
            payload = ops.move_segments(payload, order, sizes)
        num_bags, num_ids = int(shape.bags_received_RS.sum()), int(counts_RS.sum())
        weights = None
        if self._is_weighted:
            weights = payload[num_bags + num_ids :].view(self._weight_word).float()
        indices = payload[num_bags : num_bags + num_ids]
        return Bags(indices, ops.complete_cumsum(payload[:num_bags]), weights)

    def split_bags(
        self, bags: Bags, ids_S: np.ndarray, bags_RS: np.ndarray, *, is_ragged: bool
    ) -> list[Bags]:
        """Split the bags of all streams of this rank into those of its lookups.

        Args:
            bags: The bags of all streams.
            ids_S: `[S]` ids of each stream, of all ranks.
            bags_RS: `[R, S]` bags of each stream, of each rank.
            is_ragged: Whether streams may have different numbers of bags.
        """
        found = []
        start = first_bag = 0
        for group in self._groups:
            first, last = group.streams.start, group.streams.stop
            own = bags
            if len(self._groups) > 1:
                end = start + int(ids_S[first:last].sum())
                last_bag = first_bag + int(bags_RS[:, first:last].sum())
                own = Bags(
                    bags.indices[start:end],
                    bags.offsets[first_bag : last_bag + 1] - start,
                    None if bags.weights is None else bags.weights[start:end],
                )
                start, first_bag = end, last_bag
            if is_ragged:
                own = own._replace(of_features=bags_RS[:, first:last].T)
            if bags.indices.is_cuda:
                of_tables = np.bincount(
                    group.feature_table_map, ids_S[first:last], len(group.tables)
                )
                own = own._replace(ids_of_tables=of_tables.astype(np.int64).tolist())
            found.append(own)
        return found


def sent_segments(of_segments: np.ndarray, routes: Routes) -> np.ndarray:
    """Return the values of segments that may be sent: whole features only if any is."""
    return of_segments if routes.use_raw else of_segments[routes.num_keys :]

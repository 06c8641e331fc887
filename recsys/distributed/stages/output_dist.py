"""Third stage, pooled: looked-up embeddings go back to their samples, into their final columns.

One exchange forward and one backward, whatever the mix of strategies. Each rank sends to rank ``q``
the rows of ``q``'s samples as they lie in its lookups' output. What arrives is one buffer; one
gather lays it out as the unsharded module would have it, adding up the parts of row-split tables on
the way. Backward is the transposed gather, which starts the reverse exchange, and later its end.
What a model computes between the call and the first use of the output runs meanwhile, both ways.

Where a table's rows lie on the ranks of one node among several, there is a hop before: the ranks
of a node add up their parts for the samples of the ranks with one place in their nodes, and the
rank with that place sends the sums on (see :class:`NodeHop`).

Shape names: ``B`` samples of this rank, ``T`` samples of all ranks, ``D`` output columns, ``C``
columns of one rank's lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import gcd
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recsys.distributed.placement.layout import Layout, Stream, merge_ranges
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import QuantizedCommCodecs
from recsys.distributed.stages.exchange import Exchange, start_exchange
from recsys.distributed.stages.input_dist import Trip
from recsys.kernels import ops
from recsys.kernels.scaled_loss import TableUpdates

_MAX_CACHED_PLACEMENTS = 4  # one per batch size seen; datasets have few

_Ranges = Sequence[tuple[int, int]]


@final
class _Placement:
    """The gathers for one batch size, computed on the device from descriptors of the columns.

    ``collect`` lists, for each chunk of the output ``[B, D]``, the chunks of the buffer that add up
    to it; ``offsets`` says where each list begins, None if every list has one entry.
    """

    def __init__(self, gather: ColumnGather, batch_size: int) -> None:
        self._gather = gather
        num_entries = gather.first_E.numel()
        self.sample_B1 = torch.arange(batch_size, device=gather.first_E.device).unsqueeze(1)
        collect_BE = gather.first_E * batch_size + gather.place_E
        collect_BE = collect_BE + self.sample_B1 * gather.width_E
        fits = collect_BE.numel() < 2**31
        self._dtype = torch.int32 if fits else torch.int64
        self.collect = collect_BE.flatten().to(self._dtype)
        self.offsets: Tensor | None = None
        if gather.list_C is not None:
            offsets_BC = gather.list_C + self.sample_B1 * num_entries
            ends = torch.nn.functional.pad(offsets_BC.flatten(), (0, 1), value=collect_BE.numel())
            self.offsets = ends.to(self._dtype)

    @cached_property
    def spread(self) -> Tensor:
        """For each chunk of the buffer, the chunk of the output it goes to."""
        target_BE = self._gather.chunk_E + self.sample_B1 * self._gather.num_chunks
        spread = torch.empty_like(self.collect)
        return spread.scatter_(0, self.collect.long(), target_BE.flatten().to(self._dtype))


@final
class ColumnGather:
    """Lays out a buffer of blocks ``[B, columns of the block]`` as ``[B, D]``.

    Columns that several blocks hold are added up. The buffer is read as rows of ``chunk`` columns,
    the largest width that divides every stretch of columns. Entry ``e`` of ``E`` is a chunk that a
    block holds of each sample: chunk ``place_E`` of ``width_E`` in the block, before which lie
    ``first_E`` chunks of each sample; it goes to chunk ``chunk_E`` of the output. Entries are in
    the order of the output, then of the blocks.

    Args:
        blocks: per block the output columns (start, end) it holds, from left to right; together
            they hold every output column.
        width: output columns.
        device: of the index tensors.
    """

    def __init__(self, blocks: Sequence[_Ranges], width: int, device: torch.device) -> None:
        self._width = width
        self.chunk = gcd(
            width, *(edge for block in blocks for stretch in block for edge in stretch)
        )
        self.num_chunks = width // self.chunk if width else 0
        none = np.zeros(0, dtype=np.int64)
        of_blocks = [
            np.concatenate([none, *(np.arange(a // self.chunk, b // self.chunk) for a, b in block)])
            for block in blocks
        ]
        widths = np.array([len(chunks) for chunks in of_blocks], dtype=np.int64)
        chunks = np.concatenate([none, *of_blocks])
        firsts = np.cumsum(widths) - widths
        order = np.argsort(chunks, kind="stable")
        entries = np.stack(
            [
                np.repeat(firsts, widths),
                np.repeat(widths, widths),
                np.arange(len(chunks)) - np.repeat(firsts, widths),
                chunks,
            ]
        )[:, order]
        self.first_E, self.width_E, self.place_E, self.chunk_E = ops.upload(entries, device)
        self.list_C: Tensor | None = None  # where the entries of each chunk of the output begin
        if len(chunks) != self.num_chunks:
            lists = np.searchsorted(chunks[order], np.arange(self.num_chunks))
            self.list_C = ops.upload(lists, device)
        self._placements: dict[int, _Placement] = {}

    def collect(self, buffer: Tensor, batch_size: int) -> Tensor:
        """Returns ``[B, D]``."""
        if not batch_size:
            return buffer.new_empty(0, self._width)
        placement = self._placement(batch_size)
        rows = buffer.view(-1, self.chunk)
        if placement.offsets is None:
            output = rows.index_select(0, placement.collect)
        else:
            output = functional.embedding_bag(
                placement.collect, rows, placement.offsets, mode="sum", include_last_offset=True
            )
        return output.view(batch_size, self._width)

    def spread(self, grad_BD: Tensor) -> Tensor:
        """Transposed :meth:`collect`: the gradient of the flat buffer."""
        placement = self._placement(grad_BD.shape[0])
        return grad_BD.reshape(-1, self.chunk).index_select(0, placement.spread).view(-1)

    def _placement(self, batch_size: int) -> _Placement:
        found = self._placements.get(batch_size)
        if found is None:
            if len(self._placements) >= _MAX_CACHED_PLACEMENTS:
                self._placements.pop(next(iter(self._placements)))
            found = self._placements[batch_size] = _Placement(self, batch_size)
        return found


@final
class NodeHop:
    """Adds up the row parts of tables that lie within one node, before they leave it.

    Each rank stands for the samples of the ranks that have its own place in their nodes: for those
    it collects the node's parts, sums them, and sends the sums on.

    Args:
        layout: the compiled placement.
        env: the ranks.
        device: where the embeddings are.
        codecs: what they look like while they travel.
    """

    def __init__(
        self, layout: Layout, env: ShardingEnv, device: torch.device, codecs: QuantizedCommCodecs
    ) -> None:
        size = layout.node_size
        self._whole_env, self._size = env, size
        self._env: ShardingEnv | None = None  # of the node
        node, self._place = divmod(env.rank, size)
        self._num_nodes = env.world_size // size
        members = range(node * size, (node + 1) * size)
        self.columns = node_columns(layout, node)
        self.width = sum(end - start for start, end in self.columns)
        blocks = [_columns(layout, layout.streams[rank], in_node=True) for rank in members]
        self._widths = [sum(end - start for start, end in block) for block in blocks]
        self._gather = ColumnGather(
            [_within(self.columns, block) for block in blocks], self.width, device
        )
        self._codecs = codecs.fitted(self._gather.chunk) if self.width else codecs

    def forward(self, parts_TC: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """Turns this rank's parts into the node's sums.

        Args:
            parts_TC: ``[T, C]`` this rank's partial sums, for the samples of all ranks.
            batch_sizes: samples of each rank.

        Returns:
            ``[samples of the ranks this one stands for, width]``, in rank order.
        """
        if not self.width:
            return parts_TC.new_empty(0, 0)
        if self._env is None:  # all ranks are here; while they are built, one may have failed
            self._env = self._whole_env.of_node(self._size)
        by_rank = parts_TC.split(list(batch_sizes))
        sent = torch.cat([by_rank[rank].reshape(-1) for rank in self._by_place()])
        samples = self._samples(batch_sizes)
        own = parts_TC.shape[1]
        received = comm.all_to_all(
            self._env,
            "add up embeddings inside a node",
            sent,
            [count * own for count in samples],
            [samples[self._place] * width for width in self._widths],
            wire=self._codecs.forward,
        ).wait()
        return self._gather.collect(received, samples[self._place])

    def backward(self, grad: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """Transposed :meth:`forward`: the gradient of ``parts_TC``."""
        own = self._widths[self._place]
        if not self.width:
            return grad.new_empty(sum(batch_sizes), own)
        assert self._env is not None
        samples = self._samples(batch_sizes)
        sent = self._gather.spread(grad) if grad.shape[0] else grad.reshape(-1)
        received = comm.all_to_all(
            self._env,
            "send gradients back inside a node",
            sent,
            [samples[self._place] * width for width in self._widths],
            [count * own for count in samples],
            wire=self._codecs.backward,
        ).wait()
        order = self._by_place()
        pieces = received.view(sum(samples), own).split([batch_sizes[rank] for rank in order])
        ordered = sorted(zip(order, pieces, strict=True), key=lambda pair: pair[0])
        return torch.cat([piece for _, piece in ordered])

    def _by_place(self) -> list[int]:
        """All ranks, by their place in their node."""
        size = self._size
        return [node * size + place for place in range(size) for node in range(self._num_nodes)]

    def _samples(self, batch_sizes: Sequence[int]) -> list[int]:
        return [sum(batch_sizes[place :: self._size]) for place in range(self._size)]


def node_columns(layout: Layout, node: int) -> tuple[tuple[int, int], ...]:
    """Output columns, ascending, that a node's ranks add up among themselves."""
    members = range(node * layout.node_size, (node + 1) * layout.node_size)
    found = {
        stream.cols
        for rank in members
        for stream in layout.streams[rank]
        if layout.slots[stream.slot].table in layout.node_tables
    }
    return merge_ranges(sorted(found))


def _columns(layout: Layout, streams: Sequence[Stream], *, in_node: bool) -> _Ranges:
    return merge_ranges(
        stream.cols
        for stream in streams
        if (layout.slots[stream.slot].table in layout.node_tables) is in_node
    )


def _within(outer: _Ranges, inner: _Ranges) -> _Ranges:
    """Ranges of output columns, counted within the columns that ``outer`` lists."""
    starts = np.cumsum([0] + [end - start for start, end in outer])
    found = []
    for start, end in inner:
        i = next(i for i, (low, high) in enumerate(outer) if low <= start and end <= high)
        found.append((int(starts[i]) + start - outer[i][0], int(starts[i]) + end - outer[i][0]))
    return found


@final
class OutputDist:
    """Sends pooled embeddings to the samples' ranks and lays them out.

    Args:
        layout: the compiled placement.
        mean_slots: positions within ``layout.split_slots`` of the slots whose sums are divided by
            the bag length.
        env: the ranks.
        device: where the embeddings are.
        on_backward: called in every backward pass, on every rank in the same order.
        codecs: what embeddings and gradients look like while they travel.
        updates: the tables that take gradients, on any rank.
    """

    def __init__(
        self,
        layout: Layout,
        mean_slots: tuple[int, ...],
        env: ShardingEnv,
        device: torch.device,
        on_backward: Callable[[], None],
        codecs: QuantizedCommCodecs,
        updates: TableUpdates,
    ) -> None:
        self.layout = layout
        self.env = env
        self.device = device
        self.mean_slots = mean_slots
        self.mean_index = torch.tensor(mean_slots, dtype=torch.int64, device=device)
        self.on_backward = on_backward
        self.updates = updates
        self.has_exchange = any(layout.rank_widths)
        self.hop = NodeHop(layout, env, device, codecs) if layout.is_hierarchical else None
        # the columns of the received buffer, block by block: what each rank sends, then the
        # replicas'
        blocks: list[_Ranges] = []
        self.widths = []  # per source rank, columns of a sample of this rank
        size = layout.node_size
        self.stands_for = range(env.rank % size, env.world_size, size)  # ranks, see NodeHop
        for rank in range(env.world_size):
            sent = [_columns(layout, layout.streams[rank], in_node=False)]
            if self.hop is not None and rank in self.stands_for:
                sent.append(node_columns(layout, rank // size))
            blocks += sent
            self.widths.append(sum(end - start for block in sent for start, end in block))
        for group in layout.replica_groups:
            members = (layout.replica_streams[i] for i in group.streams)
            blocks.append(merge_ranges(stream.cols for stream in members))
        self.gather = ColumnGather(blocks, layout.width, device)
        self.codecs = codecs.fitted(self.gather.chunk)
        self._is_identity = (
            env.world_size == 1
            and not mean_slots
            and blocks == [((0, layout.width),)]
            and len(layout.groups[0]) == 1
        )

    def start(
        self,
        lookups: Sequence[Tensor],
        replicas: Sequence[Tensor],
        trip: Trip,
        trains: bool,
    ) -> Callable[[], Tensor]:
        """Starts the exchange.

        Args:
            lookups: per lookup group of this rank, ``[T, C_g]``.
            replicas: per replica group, ``[B, C_g]``.
            trip: of the batch.
            trains: whether any table of the module, on any rank, takes gradients.

        Returns:
            What waits for the output ``[B, D]``; call it once.
        """
        if self._is_identity:
            (whole,) = lookups
            return lambda: whole
        exchange = _PooledExchange(self, trip)
        return start_exchange(exchange, lookups, replicas, trains, trip.anchor)


@final
class _PooledExchange(Exchange[OutputDist]):
    """One batch's way through the stage, forward and backward."""

    def __init__(self, stage: OutputDist, trip: Trip) -> None:
        self.batch_sizes = trip.batch_sizes
        self.batch_size = trip.batch_sizes[stage.env.rank]
        self.own_groups = stage.layout.groups[stage.env.rank]
        self.flat_width = sum(group.width - group.node_width for group in self.own_groups)
        sends = [size * self.flat_width for size in self.batch_sizes]
        if stage.hop is not None:
            for rank in stage.stands_for:
                sends[rank] += self.batch_sizes[rank] * stage.hop.width
        super().__init__(stage, sends, [self.batch_size * width for width in stage.widths])
        self.scales = self._mean_scales(trip)

    def _mean_scales(self, trip: Trip) -> Tensor | None:
        """Returns ``[slots, B, 1]``, one over the bag length, of mean-pooled row-split slots."""
        if not self.stage.mean_slots:
            return None
        assert trip.bag_counts is not None
        counts = trip.bag_counts.view(-1, self.batch_size) if self.batch_size else trip.bag_counts
        counts = counts.index_select(0, self.stage.mean_index).clamp(min=1)
        return counts.float().reciprocal_().unsqueeze(2)

    def _scale_means(self, values_BD: Tensor) -> None:
        if self.scales is None or not self.batch_size:
            return
        layout = self.stage.layout
        for place, scale_B1 in zip(self.stage.mean_slots, self.scales, strict=True):
            slot = layout.slots[layout.split_slots[place]]
            values_BD[:, slot.col : slot.col + slot.dim].mul_(scale_B1)

    def send(self, lookups: Sequence[Tensor], replicas: Sequence[Tensor]) -> Tensor:
        """Starts the exchange into one buffer; the replicas' output lies behind what arrives."""
        return self.start_sending(self._outgoing(lookups), replicas)

    def _outgoing(self, lookups: Sequence[Tensor]) -> Tensor:
        hop = self.stage.hop
        if hop is None:
            return _join(lookups, self.stage).reshape(-1)
        edges = [group.width - group.node_width for group in self.own_groups]
        flat_TC = _join([x[:, :e] for x, e in zip(lookups, edges, strict=True)], self.stage)
        parts_TC = _join([x[:, e:] for x, e in zip(lookups, edges, strict=True)], self.stage)
        if not lookups:
            flat_TC = parts_TC = flat_TC.new_empty(sum(self.batch_sizes), 0)
        sums = hop.forward(parts_TC, self.batch_sizes)
        pieces: list[list[Tensor]] = [[rows] for rows in flat_TC.split(list(self.batch_sizes))]
        if hop.width:
            own = [self.batch_sizes[rank] for rank in self.stage.stands_for]
            for rank, rows in zip(self.stage.stands_for, sums.split(own), strict=True):
                pieces[rank].append(rows)
        return torch.cat([rows.reshape(-1) for to_rank in pieces for rows in to_rank])

    def place(self, buffer: Tensor) -> Tensor:
        """Waits and lays the buffer out: ``[B, D]``."""
        self.wait()
        output = self.stage.gather.collect(buffer, self.batch_size)
        self._scale_means(output)
        return output

    def spread(self, grad_BD: Tensor) -> Tensor:
        """Transposed :meth:`place`: the gradient of the buffer; starts sending it back."""
        if self.scales is not None:
            grad_BD = grad_BD.clone()
            self._scale_means(grad_BD)
        grad = self.stage.gather.spread(grad_BD)
        self.start_sending_back(grad)
        return grad

    def send_back(self, grad: Tensor) -> list[Tensor]:
        """Transposed :meth:`send`: the gradients of the lookups' and replicas' outputs."""
        arrived = self.wait_for_grads()
        if arrived is None or not (self.own_groups or self.stage.hop is not None):
            return self.replica_grads(grad)
        return [*self._to_lookups(arrived), *self.replica_grads(grad)]

    def _to_lookups(self, arrived: Tensor) -> list[Tensor]:
        hop = self.stage.hop
        if hop is None:
            width = self.stage.layout.rank_widths[self.env.rank]
            parts = arrived.view(-1, width).split([g.width for g in self.own_groups], dim=1)
            return [part.contiguous() for part in parts]
        flat, sums = [], []
        by_rank = arrived.split(self.sends)
        for rank, given in enumerate(by_rank):
            count = self.batch_sizes[rank]
            flat.append(given[: count * self.flat_width].view(count, self.flat_width))
            if rank in self.stage.stands_for:
                sums.append(given[count * self.flat_width :].view(count, hop.width))
        parts_TC = hop.backward(torch.cat(sums), self.batch_sizes)
        if not self.own_groups:
            return []
        flat_TC = torch.cat(flat)
        flat_widths = [group.width - group.node_width for group in self.own_groups]
        node_widths = [group.node_width for group in self.own_groups]
        pairs = zip(
            flat_TC.split(flat_widths, dim=1), parts_TC.split(node_widths, dim=1), strict=True
        )
        return [torch.cat(pair, dim=1) for pair in pairs]


def _join(outputs: Sequence[Tensor], stage: OutputDist) -> Tensor:
    """Joins outputs ``[T, C_g]`` into ``[T, C]``."""
    if not outputs:
        return torch.empty(0, device=stage.device)
    return outputs[0] if len(outputs) == 1 else torch.cat(tuple(outputs), dim=1)

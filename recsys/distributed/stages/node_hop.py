"""Sums within a node, for tables whose rows are on the ranks of one node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import final

import numpy as np
import torch

from recsys.distributed.placement.layout import Layout, Stream, merge_ranges
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.ranks.wire import EXACT, QuantizedCommCodecs
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.stages.column_gather import ColumnGather, PooledRows
from recsys.distributed.stages.exchanged_rows import NO_UPDATES, Codecs, Ranges, SentBlocks


def _columns(
    layout: Layout, streams: Iterable[Stream], *, in_node: bool
) -> Iterator[tuple[int, int]]:
    """Return the output columns of streams whose table is added up within a node, or is not."""
    return (
        stream.cols
        for stream in streams
        if (layout.slots[stream.slot].table in layout.node_tables) is in_node
    )


def output_columns_of(layout: Layout, streams: Iterable[Stream], *, in_node: bool) -> Ranges:
    """Return the output columns of streams whose table is added up within a node, or is not."""
    return merge_ranges(_columns(layout, streams, in_node=in_node))


def width_of(ranges: Ranges) -> int:
    """Return the number of columns."""
    return sum(end - start for start, end in ranges)


def may_add_up(
    blocks: Sequence[Ranges],
    env: ShardingEnv,
    device: torch.device,
    codecs: Codecs,
) -> bool:
    """Return whether a reduce-scatter replaces the all-to-all and the sums.

    All ranks must send the same columns, in fp32: sums of narrow formats would lose precision.

    Args:
        blocks: Columns that each rank sends.
        env: The ranks.
        device: Device of the embeddings.
        codecs: Wire formats of embeddings and of gradients.
    """
    # see docs/decisions/row_split.md, "Reduce-scatter over NCCL"
    is_exact = codecs == (EXACT, EXACT)
    is_uniform = len(blocks) > 1 and blocks[0] and all(block == blocks[0] for block in blocks)
    return bool(env.prefers_reduce_scatter(device) and is_exact and is_uniform)


def node_columns(layout: Layout, node: int) -> Ranges:
    """Return the output columns, ascending, whose partial sums are added up within a node."""
    members = range(node * layout.node_size, (node + 1) * layout.node_size)
    streams = (stream for rank in members for stream in layout.streams[rank])
    # the row shards of a column block have equal columns: the set counts them once
    return merge_ranges(sorted(set(_columns(layout, streams, in_node=True))))


@final
class NodeHop:
    """Sum of partial sums within a node, for tables whose rows are on the ranks of one node.

    Each rank receives the node's partial sums for the samples of the ranks with the same local rank
    (`sample_ranks`), adds them up and sends the sums on. Other tables are looked up, and updated in
    backward, during this exchange.

    Args:
        layout: The compiled placement.
        env: The ranks.
        device: Device of the embeddings.
        codecs: Wire formats of embeddings and of gradients.
    """

    tasks = ExchangeName.EMBEDDINGS_IN_NODE, ExchangeName.GRADIENTS_IN_NODE
    has_exchange = True
    # gradients arrive here from the main exchange, which scales them
    grad_scale = 1.0
    backward = NO_UPDATES

    def __init__(
        self, layout: Layout, env: ShardingEnv, device: torch.device, codecs: QuantizedCommCodecs
    ) -> None:
        self.device = device
        self._whole_env, self.size = env, layout.node_size
        node, place = divmod(env.rank, self.size)
        self.sample_ranks = range(place, env.world_size, self.size)
        group_widths = [g.width for g in layout.groups[env.rank] if g.in_node]
        ranks, width = np.arange(env.world_size), sum(group_widths)
        # a rank of the node receives the samples of all ranks with its local rank as one block
        by_place = ranks.reshape(-1, self.size).T.flatten().astype(np.int32)
        widths = np.full(self.size, width)
        self.sent = SentBlocks(group_widths, widths, [(ranks, width)], by_place)
        columns = node_columns(layout, node)
        self.width = width_of(columns)
        members = range(node * self.size, (node + 1) * self.size)
        blocks = [output_columns_of(layout, layout.streams[rank], in_node=True) for rank in members]
        self.widths = np.array([width_of(block) for block in blocks])
        parts = [_within(columns, block) for block in blocks]
        self.gather = ColumnGather(parts, self.width, device)
        # the chunk is 0 on a node without such tables
        self.codecs = codecs.fitted(self.gather.chunk or 1)
        self.read_codecs = self.gather.of_codecs(self.codecs, self.size)
        self.adds_up = may_add_up(parts, env, device, self.codecs)
        # after a reduce-scatter the equal blocks arrive as one sum
        self.sums = ColumnGather(parts[:1], self.width, device) if self.adds_up else self.gather

    @cached_property
    def env(self) -> ShardingEnv:
        """Process group of this node. The first access is a collective call."""
        return self._whole_env.for_embeddings.of_node(self.size)

    def rows(self, rank: int, ctx: BatchContext) -> PooledRows:
        """Return a batch's partial sums for the samples of all ranks, and their sums.

        Args:
            rank: This rank in the node.
            ctx: The batch.
        """
        samples = ctx.shape.batch_sizes_R.reshape(-1, self.size).sum(0)
        return PooledRows(self, rank, ctx, samples)


def _within(outer: Ranges, inner: Ranges) -> Ranges:
    """Return the positions of columns `inner` within the columns `outer`."""
    starts = np.cumsum([0] + [end - start for start, end in outer])
    positions = []
    for start, end in inner:
        i = next(i for i, (low, high) in enumerate(outer) if low <= start and end <= high)
        positions.append((int(starts[i]) + start - outer[i][0], int(starts[i]) + end - outer[i][0]))
    return positions

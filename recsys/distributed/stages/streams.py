"""Streams of a module: constants of its exchanges that follow from the layout.

Shapes: `R` ranks, `S` streams of this rank, `D` streams of all destinations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from recsys.distributed.placement.layout import Layout
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.stages.routes import COUNTS, lookup_order
from recsys.kernels.types import BoundsCheckMode


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StagedModule:
    """Properties of a sharded module that its stages share.

    Attributes:
        layout: The compiled placement.
        feature_names: The module's distinct features, in the layout's numbering.
        env: The ranks.
        device: Device of batches and tables.
        mode: Handling of ids outside their table.
        is_pooled: Whether bags are pooled.
        is_weighted: Whether ids have weights.
        distinct: Whether to send each id of a feature once, for sequences on several ranks.
        trains: Whether any of the tables trains.
        owner: Class name of the module, for messages.
        path: Path of the module in its model, for messages and to identify the module.
    """

    layout: Layout
    feature_names: tuple[str, ...]
    env: ShardingEnv
    device: torch.device
    mode: BoundsCheckMode
    is_pooled: bool
    is_weighted: bool
    distinct: bool
    trains: bool
    owner: str
    path: str


def readers_of(module: StagedModule) -> list[tuple[str, str, int]]:
    """Return the feature, the name and the rows of each table that reads row numbers."""
    tables, names = module.layout.tables, module.feature_names
    slots = [(names[slot.feature], tables[slot.table]) for slot in module.layout.slots]
    return [(feature, table.name, table.num_rows) for feature, table in slots if not table.hashed]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """Constants of a module's exchanges on one rank.

    Attributes:
        num_received: Streams that this rank receives from each rank, `S`.
        edges: `[R + 1]` of `D`, between destinations.
        dims_D: `[D]` columns of each sent stream.
        own_dims: `[S]` columns of each received stream.
        is_split: `[D]` whether the stream is of a row-split table.
        own_is_split: `[S]` the same of the received streams.
        split_dims: Columns of the sent streams of row-split tables.
        header_sizes: Words of the header for each destination.
        header_width: Words of the header received from each rank.
        count_words: `[D]` position in the headers of the count of each stream.
        num_parts: Parts of a payload: lengths, ids and, if weighted, weights.
        reading: `[R * S]` received segments in the order in which lookups read them.
        by_rank: int32, the inverse of `reading`.
        unpack_order: int32, segments of a received payload, part by part as lookups read them.
        word: dtype of ids in a payload.
    """

    num_received: int
    edges: np.ndarray
    dims_D: np.ndarray
    own_dims: np.ndarray
    is_split: np.ndarray
    own_is_split: np.ndarray
    split_dims: np.ndarray
    header_sizes: list[int]
    header_width: int
    count_words: np.ndarray
    num_parts: int
    reading: np.ndarray
    by_rank: np.ndarray
    unpack_order: np.ndarray
    word: torch.dtype

    @property
    def weight_word(self) -> torch.dtype:
        """Dtype of weights in a payload."""
        return torch.float32 if self.word is torch.int32 else torch.float64


def streams_of(module: StagedModule) -> Streams:
    """Return the streams of a module.

    Args:
        module: The module.
    """
    layout, rank, world_size = module.layout, module.env.rank, module.env.world_size
    num_received, num_parts = len(layout.send_segments[rank]), 3 if module.is_weighted else 2
    edges = np.cumsum([0, *map(len, layout.streams)])
    sent = [stream for of_rank in layout.streams for stream in of_rank]
    cols = np.array([stream.cols for stream in sent], dtype=np.int64).reshape(-1, 2)
    dims = cols[:, 1] - cols[:, 0]
    split_slots = set(layout.split_slots)
    is_split = np.array([stream.slot in split_slots for stream in sent], dtype=bool)
    rank_streams = slice(*edges[rank : rank + 2])
    destinations = np.repeat(np.arange(world_size), np.diff(edges))
    reading = lookup_order(layout.groups[rank], world_size, pooled=layout.is_pooled)
    # received: [rank][part][stream]; read: [part][streams in the order of lookups]
    order = np.arange(world_size * num_parts * num_received)
    by_part = order.reshape(world_size, num_parts, num_received).transpose(1, 0, 2)
    # row numbers count from the shard's first row. All tables are examined, so that both ends agree
    # docs/decisions/exchange.md, "One payload behind one header"
    narrow = not any(
        table.hashed or rect.num_rows >= 2**31 for table in layout.tables for rect in table.rects
    )
    return Streams(
        num_received=num_received,
        edges=edges,
        dims_D=dims,
        own_dims=dims[rank_streams],
        is_split=is_split,
        own_is_split=is_split[rank_streams],
        split_dims=dims[is_split],
        header_sizes=[len(segments) + COUNTS for segments in layout.send_segments],
        header_width=num_received + COUNTS,
        # each destination's words begin with flag and batch size
        count_words=np.arange(len(sent)) + (destinations + 1) * COUNTS,
        num_parts=num_parts,
        reading=reading,
        by_rank=np.argsort(reading).astype(np.int32),
        unpack_order=by_part.reshape(num_parts, -1)[:, reading].reshape(-1).astype(np.int32),
        word=torch.int32 if narrow else torch.int64,
    )

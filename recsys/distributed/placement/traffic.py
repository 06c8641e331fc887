"""Bytes that a layout sends between ranks in one forward pass.

Row ids are assumed to be spread evenly over a table's rows. Backward sends the gradients of the
embeddings in the other direction, with the same number of bytes.

Shapes: R ranks; the first R sends, the second receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from recsys.base.arguments import finite, whole, wrong_type
from recsys.base.checked import checked

if TYPE_CHECKING:
    from recsys.distributed.placement.layout import Layout

_ID_BYTES, _LENGTH_BYTES, _VALUE_BYTES = 4, 4, 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes between ranks, fp64 `[R, R]` on the CPU; the diagonal is data that stays on its rank.

    Attributes:
        ids_RR: Ids and lengths, sent to the owners.
        node_sums_RR: Embeddings, sent to the ranks of the owner's node that add them up.
        embeddings_RR: Embeddings, sent to the ranks of the samples.
    """

    ids_RR: Tensor
    node_sums_RR: Tensor
    embeddings_RR: Tensor


@checked
def traffic_of(
    layout: Layout, *, samples_per_rank: int = 1, ids_per_sample: float = 1.0, pooled: bool = True
) -> Traffic:
    """Return the bytes that one forward pass sends.

    Args:
        layout: Layout of one module.
        samples_per_rank: Batch size of each rank.
        ids_per_sample: Average number of ids per sample and feature.
        pooled: Whether one embedding per sample is returned, or one per id.

    Example:
        >>> from recsys.distributed.placement.layout import PlacedTable, Rect, build_layout
        >>> whole = Rect(row_start=0, row_end=10, col_start=0, col_end=8, rank=1)
        >>> table = PlacedTable(
        ...     name="t", num_rows=10, dim=8, features=(0,), group=0, rects=(whole,)
        ... )
        >>> traffic = traffic_of(build_layout([table], 1, world_size=2))
        >>> traffic.ids_RR[0].tolist(), traffic.embeddings_RR[1].tolist()
        ([0.0, 8.0], [32.0, 32.0])
    """
    if not hasattr(layout, "streams"):
        wrong_type("traffic_of: layout", "a Layout, as layout_of_plan returns it", layout)
    whole("traffic_of: samples_per_rank", samples_per_rank)
    finite("traffic_of: ids_per_sample", ids_per_sample, least=0)
    world_size, node_size = layout.world_size, layout.node_size
    ids, sums, embeddings = (
        torch.zeros(world_size, world_size, dtype=torch.float64) for _ in range(3)
    )
    for owner, streams in enumerate(layout.streams):
        node = range(owner - owner % node_size, owner - owner % node_size + node_size)
        for stream in streams:
            index = layout.slots[stream.slot].table
            share = stream.rect.num_rows / layout.tables[index].num_rows
            num_ids = samples_per_rank * ids_per_sample * share
            ids[:, owner] += num_ids * _ID_BYTES + samples_per_rank * _LENGTH_BYTES
            row = stream.rect.num_cols * _VALUE_BYTES
            if index not in layout.node_tables:
                embeddings[owner] += row * (samples_per_rank if pooled else num_ids)
                continue
            # each rank of the node adds up the samples of all ranks with its local rank
            sums[owner, list(node)] += row * samples_per_rank * (world_size // node_size)
            if stream.rect.row_start == 0:  # one sum per column block
                for adder in node:
                    embeddings[adder, adder % node_size :: node_size] += row * samples_per_rank
    return Traffic(ids_RR=ids, node_sums_RR=sums, embeddings_RR=embeddings)

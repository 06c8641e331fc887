"""Routes of a batch's ids: index tensors that depend on the layout and on the batch's keys.

Shapes: `K` features of the given batch, `H` words of the header, `S` streams of this
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.placement.layout import IdHash, Layout, PlacedLookup
from recsys.modules.tables.embedding_inputs import positions_of

FLAG, BATCH, COUNTS = 0, 1, 2  # positions in the header for one rank


@final
class Positions(NamedTuple):
    """Positions of features in a batch.

    Attributes:
        select: `[F]` int32, on the device.
        on_host: The same.
        is_whole: Whether they are all features of the batch in its order.
    """

    select: Tensor
    on_host: np.ndarray
    is_whole: bool


def positions_on(device: torch.device, positions: np.ndarray, num_keys: int) -> Positions:
    """Return positions in a batch of `num_keys` features, on a device too."""
    is_whole = np.array_equal(positions, np.arange(num_keys))
    on_host = np.ascontiguousarray(positions, dtype=np.int32)
    return Positions(torch.from_numpy(on_host).to(device), on_host, is_whole)


def reads_by_rank(group: PlacedLookup, *, pooled: bool) -> bool:
    """Return whether a lookup reads ids rank by rank instead of feature by feature.

    Ids that each return a row are read rank by rank, so that rows return without a copy. If several
    features read one table, its ids are read feature by feature: gradients are then added up in the
    order of the unsharded lookup, with bit-identical results. Hashed ids are mapped table by table.
    """
    if pooled or group.is_hashed:
        return False
    return len(set(group.feature_table_map)) == len(group.feature_table_map)


def lookup_order(groups: Sequence[PlacedLookup], world_size: int, *, pooled: bool) -> np.ndarray:
    """Return the segments `[rank][stream]` of one rank's lookups in the order of reading.

    Args:
        groups: Lookups of the rank.
        world_size: Number of ranks that send segments.
        pooled: Whether bags are pooled.
    """
    num_streams = sum(len(group.streams) for group in groups)
    by_rank = np.arange(world_size * num_streams).reshape(world_size, num_streams)
    segments = [np.zeros(0, dtype=np.int64)]
    for group in groups:
        of_group = by_rank[:, group.streams]
        segments.append(
            (of_group if reads_by_rank(group, pooled=pooled) else of_group.T).reshape(-1)
        )
    return np.concatenate(segments)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRound:
    """One call of the kernel that splits ids by rows: each feature for one table.

    Attributes:
        features: Positions of the features in the batch.
        num_blocks: Number of blocks of all features.
        blocks: By dtype of the ids: rows per block of each feature's table, and the boundaries of
            the blocks if a table is split unevenly.
        hashes: Assignment to regions of the ids of each feature; None where they are row numbers.
            Empty if all are.
    """

    features: Positions
    num_blocks: int
    blocks: dict[torch.dtype, tuple[Tensor, list[Tensor] | None]]
    hashes: tuple[IdHash | None, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Index tensors for batches with one order of keys. `D` is the streams of all destinations.

    Attributes:
        rounds: Rounds in which the ids of row-split slots are split.
        split_keys: int32, positions in the batch of the row-split slots' features.
        replicas: Per lookup of replicated tables the positions of its features.
        lookups: Per lookup of this rank the positions of its features, if `reads_whole`.
        use_raw: Whether whole features are sent to any rank.
        num_keys: Number of features, with padding.
        slot_keys: Per slot the position of its feature in the batch.
        header: `[H]`, gathers the header from `[flag, batch size, counts_G]`.
        payload: `[2D or 3D]` int32, segments in the order of sending: lengths, ids, weights.
        segments: `[D]` segments, destination by destination.
        stream_keys: `[D]` positions in the batch of the segments' features.
        sent: `[D]` int32, positions of the segments in the send buffers.
        is_identity: Whether one rank looks up the batch as it is.
        reads_whole: Whether there is one rank, whose lookups each read every feature once.
    """

    rounds: tuple[SplitRound, ...]
    split_keys: Tensor
    replicas: tuple[Positions, ...]
    lookups: tuple[Positions, ...]
    use_raw: bool
    num_keys: int
    slot_keys: np.ndarray
    header: Tensor
    payload: np.ndarray
    segments: np.ndarray
    stream_keys: np.ndarray
    sent: np.ndarray
    is_identity: bool
    reads_whole: bool


def _slots_of_rounds(split_keys: Sequence[int], num_keys: int, whole: bool) -> list[list[int]]:
    """Return per round the row-split slot of each of its features, -1 for none.

    The host must know the numbers of ids to select features of a batch. On a CPU it does, and one
    round splits the slots' features only. On a GPU it would have to wait, so `whole` batches are
    split: once, or several times if several tables split a feature.
    """
    if not whole:
        return [list(range(len(split_keys)))] if split_keys else []
    # see docs/decisions/exchange.md, "The host waits for the device once per step"
    slots_of_key: list[list[int]] = [[] for _ in range(num_keys)]
    for slot, key in enumerate(split_keys):
        slots_of_key[key].append(slot)
    return [
        [slots[turn] if turn < len(slots) else -1 for slots in slots_of_key]
        for turn in range(max(map(len, slots_of_key), default=0))
    ]


def _blocks_of(
    layout: Layout, slots: Sequence[int], device: torch.device
) -> dict[torch.dtype, tuple[Tensor, list[Tensor] | None]]:
    """Return `SplitRound.blocks`, without int32 if a table has more rows than that."""
    tables = [layout.tables[layout.slots[layout.split_slots[i]].table] for i in slots if i >= 0]
    num_edges = layout.num_buckets + 1
    edges_of = [table.row_edges for table in tables]
    is_even = all(edges[:-1] == tuple(range(0, edges[-1], edges[1])) for edges in edges_of)
    blocks = {}
    for dtype in (torch.int32, torch.int64):
        limit = torch.iinfo(dtype).max
        if max(edges[-1] for edges in edges_of) > limit:
            continue
        # a feature without a slot may have any blocks: they are not sent
        unused = (*(limit // layout.num_buckets * i for i in range(num_edges - 1)), limit)
        known = iter(edges_of)
        rows = np.array(
            [
                # a table with fewer blocks gets empty ones at its end, which no id falls into
                (edges + edges[-1:] * num_edges)[:num_edges]
                for edges in (next(known) if slot >= 0 else unused for slot in slots)
            ]
        )
        on_device = torch.from_numpy(rows).to(device, dtype)
        blocks[dtype] = on_device[:, 1].contiguous(), None if is_even else list(on_device)
    return blocks


def _rounds(
    layout: Layout, split: Sequence[int], num_keys: int, device: torch.device
) -> tuple[tuple[SplitRound, ...], np.ndarray]:
    """Return the rounds in which ids of row-split slots are split.

    Args:
        layout: The compiled placement.
        split: Position in the batch of each row-split slot's feature.
        num_keys: Number of features of the batch.
        device: Device of the batch.

    Returns:
        The rounds; and `[buckets, split slots]` the position of each block among all blocks.
    """
    whole = device.type == "cuda"
    positions = np.arange(num_keys) if whole else np.array(split, dtype=np.int64)
    features = positions_on(device, positions, num_keys)
    places = np.zeros((layout.num_buckets, len(split)), dtype=np.int64)
    rounds: list[SplitRound] = []
    first = 0
    for slots in _slots_of_rounds(split, num_keys, whole):
        for place, split_slot in enumerate(slots):
            if split_slot >= 0:
                places[:, split_slot] = first + place + np.arange(layout.num_buckets) * len(slots)
        num_blocks = layout.num_buckets * len(slots)
        blocks = _blocks_of(layout, slots, device)
        hashes = tuple(
            layout.tables[layout.slots[layout.split_slots[i]].table].hashed if i >= 0 else None
            for i in slots
        )
        rounds.append(
            SplitRound(
                features=features,
                num_blocks=num_blocks,
                blocks=blocks,
                hashes=hashes if any(hashes) else (),
            )
        )
        first += num_blocks
    return tuple(rounds), places


def build_routes(
    layout: Layout,
    feature_names: Sequence[str],
    keys: Sequence[str],
    is_weighted: bool,
    device: torch.device,
    num_padding: int = 0,
) -> Routes:
    """Return the routes of batches with these keys.

    Args:
        layout: The compiled placement.
        feature_names: The module's distinct features, in the layout's numbering.
        keys: Features of the batch.
        is_weighted: Whether ids have weights.
        device: Device of the batch.
        num_padding: Number of features without a name after the keys, which no table reads.

    Raises:
        KeyError: If the keys lack a feature that a table reads.
    """
    at = np.array(positions_of(feature_names, keys, "this module"), dtype=np.int64)
    use_raw = any(s < layout.num_features for segments in layout.send_segments for s in segments)
    num_keys = len(keys) + num_padding
    in_batch = partial(positions_on, device, num_keys=num_keys)
    split = [int(at[layout.slots[i].feature]) for i in layout.split_slots]
    rounds, place_of_block = _rounds(layout, split, num_keys, device)
    in_batch_order = np.concatenate([at, num_keys + place_of_block.reshape(-1)])
    segments = [in_batch_order[np.array(s, dtype=np.int64)] for s in layout.send_segments]
    skipped = 0 if use_raw else num_keys  # whole features are not in the payload's source
    num_segments = num_keys - skipped + sum(round_.num_blocks for round_ in rounds)
    parts = 3 if is_weighted else 2
    header = np.concatenate([np.concatenate([[FLAG, BATCH], s + COUNTS]) for s in segments])
    payload = np.concatenate(
        [s - skipped + part * num_segments for s in segments for part in range(parts)]
    )
    replicas = tuple(
        np.array([at[f] for t in group.tables for f in layout.tables[t].features])
        for group in layout.replica_groups
    )
    slot_keys = at[[slot.feature for slot in layout.slots]]
    is_alone, whole = layout.world_size == 1 and not split, np.arange(num_keys)
    local = [segments[0][list(group.streams)] for group in layout.groups[0]] if is_alone else []
    reads_whole = is_alone and all(
        np.array_equal(np.sort(positions), whole) for positions in (*local, *replicas)
    )

    return Routes(
        rounds=rounds,
        split_keys=in_batch(np.array(split, dtype=np.int64)).select,
        replicas=tuple(map(in_batch, replicas)),
        lookups=tuple(map(in_batch, local)) if reads_whole else (),
        reads_whole=reads_whole,
        use_raw=use_raw,
        num_keys=num_keys,
        slot_keys=slot_keys,
        header=torch.from_numpy(header).to(device),
        payload=payload.astype(np.int32),
        segments=np.concatenate(segments),
        stream_keys=slot_keys[[s.slot for streams in layout.streams for s in streams]],
        sent=(np.concatenate(segments) - skipped).astype(np.int32),
        is_identity=is_alone and np.array_equal(segments[0], whole),
    )

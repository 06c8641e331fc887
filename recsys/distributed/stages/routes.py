"""Where the ids of a batch go: index tensors that depend on the layout and on a batch's keys.

Shape names: `K` features of the given batch, `H` words of the header, `S` streams of this
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

from recsys.distributed.placement.layout import Layout, LookupGroup
from recsys.kernels.bounds import NO_LIMIT
from recsys.modules.embedding_inputs import positions_of

FLAG, BATCH, COUNTS = 0, 1, 2  # places in one rank's part of the header


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


def reads_by_rank(group: LookupGroup, *, pooled: bool) -> bool:
    """Return whether a lookup reads the ids of one rank after those of another.

    So it does if each id gets a row of its own: rows can then return as they are. Otherwise it
    reads feature by feature. It does so, too, where several features read a table, to add up that
    table's gradients in the order of the unsharded lookup: to the same bits.
    """
    return not pooled and len(set(group.feature_table_map)) == len(group.feature_table_map)


def lookup_order(groups: Sequence[LookupGroup], world_size: int, *, pooled: bool) -> np.ndarray:
    """Return the segments `[rank][stream]` of one rank's lookups in the order they are read.

    Args:
        groups: the lookups of the rank.
        world_size: the ranks that send segments.
        pooled: whether bags are pooled.
    """
    num_streams = sum(len(group.streams) for group in groups)
    by_rank = np.arange(world_size * num_streams).reshape(world_size, num_streams)
    found = [np.zeros(0, dtype=np.int64)]
    for group in groups:
        of_group = by_rank[:, group.streams]
        found.append((of_group if reads_by_rank(group, pooled=pooled) else of_group.T).reshape(-1))
    return np.concatenate(found)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRound:
    """Features whose ids are split by rows, each for one table, in one call of the kernel.

    Attributes:
        features: positions in the batch of the features.
        blocks: by the ids' dtype the rows per block of each feature's table, and the blocks'
            boundaries where a table is split unevenly.
        num_blocks: that the features are split into.
    """

    features: Positions
    num_blocks: int
    blocks: dict[torch.dtype, tuple[Tensor, list[Tensor] | None]]


@final
class RowLimits(NamedTuple):
    """Limits of the ids of a batch.

    Attributes:
        rows_K: `[K]` rows of the smallest table that reads each feature.
        least: The smallest of them.
        unread_K: `[K]` bool, features that no table reads; empty if there are none.
    """

    rows_K: Tensor
    least: int
    unread_K: Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Positions for batches with one particular order of keys: tensors are on the device."""

    rounds: tuple[SplitRound, ...]  # how the ids of row-split slots are split
    split_keys: Tensor  # positions in the batch of the row-split slots' features
    replicas: tuple[Positions, ...]  # per replica group, in the batch of its features
    lookups: tuple[Positions, ...]  # per lookup of this rank; none where not all read the whole
    use_raw: bool  # whether any destination is sent whole features
    num_keys: int
    slot_keys: np.ndarray  # per slot the position in the batch of its feature
    header: Tensor  # [H] gathers the header from [flag, batch size, counts_G]
    payload: np.ndarray  # [2S or 3S of all destinations] int32: the segments in the order sent
    segments: np.ndarray  # [streams of all destinations] the segments, destination by destination
    stream_keys: np.ndarray  # and for each the position in the batch of its feature
    sent: np.ndarray  # int32: the segments, numbered as those that may travel are
    limits: RowLimits
    is_identity: bool  # one rank whose streams are the batch as it is
    reads_whole: bool  # one rank whose lookups, and replicas', each read every feature once


def _slots_of_rounds(split_keys: Sequence[int], num_keys: int, whole: bool) -> list[list[int]]:
    """Return which row-split slot each feature of a round is split for; -1: for none.

    To pick features out of a batch, the host must know how many ids they have. On a CPU it does,
    so one round takes just the slots' features. On a GPU it would wait for that number, so
    `whole` batches are split: once, or where several tables split a feature as often as these are.
    """
    if not whole:
        return [list(range(len(split_keys)))] if split_keys else []
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
    """Return `blocks`; without int32 where a table is larger than that."""
    tables = [layout.tables[layout.slots[layout.split_slots[i]].table] for i in slots if i >= 0]
    num_edges = layout.num_buckets + 1
    edges_of = [table.ids.edges(table.row_starts) for table in tables]
    is_even = all(edges[:-1] == tuple(range(0, edges[-1], edges[1])) for edges in edges_of)
    found = {}
    for dtype in (torch.int32, torch.int64):
        limit = torch.iinfo(dtype).max
        if max(edges[-1] for edges in edges_of) > limit:
            continue
        # a feature without a slot: any block will do, as nobody is sent them
        nobodys = (*(limit // layout.num_buckets * i for i in range(num_edges - 1)), limit)
        known = iter(edges_of)
        rows = np.array(
            [
                (edges + edges[-1:] * num_edges)[:num_edges]
                for edges in (next(known) if slot >= 0 else nobodys for slot in slots)
            ]
        )
        on_device = torch.from_numpy(rows).to(device, dtype)
        found[dtype] = on_device[:, 1].contiguous(), None if is_even else list(on_device)
    return found


def _rounds(
    layout: Layout, split: Sequence[int], num_keys: int, device: torch.device
) -> tuple[tuple[SplitRound, ...], np.ndarray]:
    """Find the rounds in which row-split slots are split, and where their blocks stand.

    Args:
        layout: the compiled placement.
        split: position in the batch of each row-split slot's feature.
        num_keys: features of the batch.
        device: where the batch is.

    Returns:
        The rounds; and `[buckets, split slots]` the place of each block among those of all.
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
        rounds.append(SplitRound(features=features, num_blocks=num_blocks, blocks=blocks))
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
    """Find the ways of batches with these keys.

    Args:
        layout: the compiled placement.
        feature_names: the module's distinct features, in the layout's numbering.
        keys: features of the batch.
        is_weighted: whether the features carry weights.
        device: where the batch is.
        num_padding: features without a name behind those, which nobody reads.

    Raises:
        KeyError: if the keys lack a feature that a table reads.
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
    rows = np.full(len(keys), NO_LIMIT)
    for slot in layout.slots:
        place = at[slot.feature]
        rows[place] = min(rows[place], layout.tables[slot.table].ids.end)
    is_unread = rows == NO_LIMIT
    replicas = tuple(
        np.array([at[f] for t in group.tables for f in layout.tables[t].features])
        for group in layout.replica_groups
    )
    slot_keys = at[[slot.feature for slot in layout.slots]]
    is_alone, whole = layout.world_size == 1 and not split, np.arange(num_keys)
    own = [segments[0][list(group.streams)] for group in layout.groups[0]] if is_alone else []
    reads_whole = is_alone and all(
        np.array_equal(np.sort(positions), whole) for positions in (*own, *replicas)
    )

    return Routes(
        rounds=rounds,
        split_keys=in_batch(np.array(split, dtype=np.int64)).select,
        replicas=tuple(map(in_batch, replicas)),
        lookups=tuple(map(in_batch, own)) if reads_whole else (),
        reads_whole=reads_whole,
        use_raw=use_raw,
        num_keys=num_keys,
        slot_keys=slot_keys,
        header=torch.from_numpy(header).to(device),
        payload=payload.astype(np.int32),
        segments=np.concatenate(segments),
        stream_keys=slot_keys[[s.slot for streams in layout.streams for s in streams]],
        sent=(np.concatenate(segments) - skipped).astype(np.int32),
        limits=RowLimits(
            rows_K=torch.from_numpy(rows).to(device),
            least=int(rows.min()),
            unread_K=torch.from_numpy(is_unread[: len(rows) * is_unread.any()]).to(device),
        ),
        is_identity=is_alone and np.array_equal(segments[0], whole),
    )

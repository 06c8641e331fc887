"""Where the ids of a batch go, and where each that was sent came from.

:class:`Routes` are index tensors that depend only on the layout and the order of a batch's keys;
:class:`IdRoute` is how what belongs to an id (its embedding, or the gradient of its weight) finds
its way back.

Shape names: ``K`` features of the given batch, ``H`` words of the header, ``S`` streams of this
rank, ``R`` ranks, ``N`` ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.placement.layout import Layout, LookupGroup
from recsys.modules.embedding_inputs import positions_of

FLAG, BATCH, COUNTS = 0, 1, 2  # places in one rank's part of the header


def reads_by_rank(group: LookupGroup, *, pooled: bool) -> bool:
    """Returns whether a lookup reads the ids of one rank after those of another.

    So it does if each id gets a row of its own: rows can then return as they are. Otherwise it
    reads feature by feature. It does so, too, where several features read a table, to add up that
    table's gradients in the order of the unsharded lookup: to the same bits.
    """
    return not pooled and len(set(group.feature_table_map)) == len(group.feature_table_map)


def lookup_order(groups: Sequence[LookupGroup], world_size: int, *, pooled: bool) -> np.ndarray:
    """Returns the segments ``[rank][stream]`` of one rank's lookups in the order they are read.

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
    """Features whose ids are cut by rows, each for one table, in one call of the kernel.

    Attributes:
        select: positions in the batch of the features; None: the whole batch as it is.
        blocks: by the ids' dtype the rows per block of each feature's table, and the blocks'
            boundaries where a table is cut unevenly.
    """

    select: Tensor | None
    blocks: dict[torch.dtype, tuple[Tensor, list[Tensor] | None]]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Index tensors for batches with one particular order of keys, on the device."""

    rounds: tuple[SplitRound, ...]  # how the ids of row-split slots are cut
    split_keys: Tensor | None  # positions in the batch of the row-split slots' features
    replicas: tuple[Tensor, ...]  # per replica group, positions in the batch of its features
    replica_positions: tuple[np.ndarray, ...]
    use_raw: bool  # whether any destination is sent whole features
    num_keys: int
    slot_keys: np.ndarray  # per slot the position in the batch of its feature
    header: Tensor  # [H] gathers the header from [flag, batch size, counts_G]
    payload: Tensor  # [2S or 3S of all destinations] gathers segments
    segments: tuple[np.ndarray, ...]  # per destination, its segments
    sent: Tensor  # [streams of all destinations] gathers the ids' places in the batch
    check_rows: Tensor  # [K] rows of the smallest table that reads each feature of the batch
    min_rows: int  # the least of them
    unread: Tensor | None  # [K] bool: features that no table reads, None if there are none
    is_identity: bool  # one rank whose streams are the batch as it is


def index_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """Returns int32 positions on the device."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device)


def _slots_of_rounds(split_keys: Sequence[int], num_keys: int, whole: bool) -> list[list[int]]:
    """Which row-split slot each feature of a round is cut for; -1: for none.

    To pick features out of a batch, the host must know how many ids they have. On a CPU it does,
    so one round takes just the slots' features. On a GPU it would wait for that number, so
    ``whole`` batches are cut: once, or where several tables cut a feature as often as these are.
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
    """Returns :attr:`SplitRound.blocks`; without int32 where a table is larger than that."""
    cut = [layout.tables[layout.slots[layout.split_slots[i]].table] for i in slots if i >= 0]
    num_edges = layout.num_buckets + 1
    is_even = all(t.row_starts == tuple(range(0, t.num_rows, t.row_starts[1])) for t in cut)
    found = {}
    for dtype in (torch.int32, torch.int64):
        limit = torch.iinfo(dtype).max
        if max(t.num_rows for t in cut) > limit:
            continue
        tables = iter(cut)
        sizes, edges = [], []
        for slot in slots:
            if slot < 0:  # any block will do, as nobody is sent them
                sizes.append(limit // layout.num_buckets)
                edges.append([0] + [limit] * layout.num_buckets)
                continue
            table = next(tables)
            sizes.append(table.row_starts[1])
            starts = list(table.row_starts)
            edges.append((starts + [table.num_rows] * num_edges)[:num_edges])
        found[dtype] = (
            torch.tensor(sizes, dtype=dtype, device=device),
            None if is_even else [torch.tensor(e, dtype=dtype, device=device) for e in edges],
        )
    return found


def build_routes(
    layout: Layout,
    feature_names: Sequence[str],
    keys: Sequence[str],
    is_weighted: bool,
    device: torch.device,
    num_padding: int = 0,
) -> Routes:
    """Finds the ways of batches with these keys.

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

    def index(values: np.ndarray) -> Tensor:
        return index_tensor(values, device)

    at = np.array(positions_of(feature_names, keys, "this module"), dtype=np.int64)
    num_features = layout.num_features
    flat = [segment for segments in layout.send_segments for segment in segments]
    use_raw = any(segment < num_features for segment in flat)
    num_keys = len(keys) + num_padding

    split = [int(at[layout.slots[i].feature]) for i in layout.split_slots]
    slots_of_rounds = _slots_of_rounds(split, num_keys, whole=device.type == "cuda")
    # [buckets, split slots] the place of each block among those of all rounds
    place_of_block = np.zeros((layout.num_buckets, len(split)), dtype=np.int64)
    num_blocks = 0
    for slots in slots_of_rounds:
        for place, split_slot in enumerate(slots):
            if split_slot >= 0:
                bucket = np.arange(layout.num_buckets)
                place_of_block[:, split_slot] = num_blocks + bucket * len(slots) + place
        num_blocks += layout.num_buckets * len(slots)
    in_batch_order = np.concatenate([at, num_keys + place_of_block.reshape(-1)])

    def in_batch(segments: tuple[int, ...]) -> np.ndarray:
        return in_batch_order[np.array(segments, dtype=np.int64)]

    segments = tuple(in_batch(s) for s in layout.send_segments)
    skipped = 0 if use_raw else num_keys  # whole features are not in the payload's source
    num_segments = num_keys - skipped + num_blocks
    parts = 3 if is_weighted else 2
    header = np.concatenate([np.concatenate([[FLAG, BATCH], s + COUNTS]) for s in segments])
    payload = np.concatenate(
        [s - skipped + part * num_segments for s in segments for part in range(parts)]
    )
    no_limit = np.iinfo(np.int64).max
    rows = np.full(len(keys), no_limit)
    for slot in layout.slots:
        place = at[slot.feature]
        rows[place] = min(rows[place], layout.tables[slot.table].num_rows)
    replicas = tuple(
        np.array([at[f] for t in group.tables for f in layout.tables[t].features])
        for group in layout.replica_groups
    )
    return Routes(
        rounds=tuple(
            SplitRound(
                select=None
                if device.type == "cuda" or split == list(range(num_keys))
                else index(np.array(split)),
                blocks=_blocks_of(layout, slots, device),
            )
            for slots in slots_of_rounds
        ),
        split_keys=index(np.array(split)) if split else None,
        replicas=tuple(index(r) for r in replicas),
        replica_positions=replicas,
        use_raw=use_raw,
        num_keys=num_keys,
        slot_keys=at[[slot.feature for slot in layout.slots]],
        header=index(header).long(),
        payload=index(payload),
        segments=segments,
        sent=index(np.concatenate([s - skipped for s in segments])),
        check_rows=torch.from_numpy(rows).to(device),
        min_rows=int(rows.min()),
        unread=torch.from_numpy(rows == no_limit).to(device) if (rows == no_limit).any() else None,
        is_identity=layout.world_size == 1
        and not split
        and np.array_equal(segments[0], np.arange(num_keys)),
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class IdRoute:
    """Where each id that a rank sent came from, for embeddings that return to their ids.

    Attributes:
        positions: ``[N]`` places in the batch of the ids sent, rank by rank and stream by stream,
            then of the replicas' ids.
        sent_counts: ids in each of those streams.
        received_counts: ``[R, S]`` ids received from each rank in each stream.
        slot_counts: ids of each slot.
        slot_starts: places in the batch at which each slot's ids begin.
        inverse: where ids were made distinct: the place among the batch's distinct ids of each
            given id; else None.
        slot_keys: positions in the batch of each slot's feature.
        key_counts: ids of each of the batch's features as given.
    """

    positions: Tensor
    sent_counts: np.ndarray
    received_counts: np.ndarray
    slot_counts: np.ndarray
    slot_starts: np.ndarray
    inverse: Tensor | None
    slot_keys: np.ndarray
    key_counts: np.ndarray

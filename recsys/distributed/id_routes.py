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

from recsys.distributed.layout import Layout, LookupGroup

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
class Routes:
    """Index tensors for batches with one particular order of keys, on the device."""

    split: Tensor | None  # positions in the batch of the row-split slots' features
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


def build_routes(
    layout: Layout,
    feature_names: Sequence[str],
    keys: Sequence[str],
    is_weighted: bool,
    device: torch.device,
) -> Routes:
    """Finds the ways of batches with these keys.

    Raises:
        KeyError: if the keys lack a feature that a table reads.
    """

    def index(values: np.ndarray) -> Tensor:
        return index_tensor(values, device)

    position = {key: i for i, key in enumerate(keys)}
    missing = [name for name in feature_names if name not in position]
    if missing:
        raise KeyError(
            f"The batch lacks the features {missing}, which the tables of this module read; "
            f"received the features {list(keys)}. Add them (empty bags will do)."
        )
    at = np.array([position[name] for name in feature_names], dtype=np.int64)
    num_features = layout.num_features
    flat = [segment for segments in layout.send_segments for segment in segments]
    use_raw = any(segment < num_features for segment in flat)
    num_keys = len(keys)

    def in_batch(segments: tuple[int, ...]) -> np.ndarray:
        ids = np.array(segments, dtype=np.int64)
        raw = at[np.minimum(ids, num_features - 1)]
        return np.where(ids < num_features, raw, ids - num_features + num_keys)

    segments = tuple(in_batch(s) for s in layout.send_segments)
    skipped = 0 if use_raw else num_keys  # whole features are not in the payload's source
    num_segments = num_keys - skipped + layout.num_buckets * len(layout.split_slots)
    parts = 3 if is_weighted else 2
    header = np.concatenate([np.concatenate([[FLAG, BATCH], s + COUNTS]) for s in segments])
    payload = np.concatenate(
        [s - skipped + part * num_segments for s in segments for part in range(parts)]
    )
    no_limit = np.iinfo(np.int64).max
    rows = np.full(num_keys, no_limit)
    for slot in layout.slots:
        place = at[slot.feature]
        rows[place] = min(rows[place], layout.tables[slot.table].num_rows)
    split = [at[layout.slots[i].feature] for i in layout.split_slots]
    replicas = tuple(
        np.array([at[f] for t in group.tables for f in layout.tables[t].features])
        for group in layout.replica_groups
    )
    return Routes(
        split=index(np.array(split)) if split else None,
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

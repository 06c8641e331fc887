"""Windows: consecutive rows of a table as one large batch, which is shuffled and split at once.

No function loops over samples. Legend: `F` features, `W` rows of a window, `N` ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from recsys.datasets.utils import Batch
from recsys.sparse import KeyedJaggedTensor

__all__ = ["join_rows", "reorder_rows", "split_rows"]

_Array: TypeAlias = np.ndarray[Any, Any]


def reorder_rows(batch: Batch, order: _Array) -> Batch:
    """Return the rows of a batch in another order.

    Args:
        batch: a batch on the CPU.
        order: [W] int64, a permutation of the rows.

    Returns:
        A new batch.

    Example:
        >>> ids = KeyedJaggedTensor(["f"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 2]))
        >>> batch = Batch(torch.zeros(2, 0), ids, torch.tensor([0.0, 1.0]))
        >>> reorder_rows(batch, np.array([1, 0])).sparse_features.values().tolist()
        [8, 9, 7]
    """
    ids = batch.sparse_features
    values, weights = ids.values(), ids.weights_or_none()
    lengths = _lengths_of(batch).numpy()
    new_values = torch.empty_like(values)
    new_weights = None if weights is None else torch.empty_like(weights)
    new_lengths = np.empty_like(lengths)
    stop = 0
    # One feature at a time: its ids fit into the cache of a core.
    for feature, lengths_W in enumerate(lengths):
        start, stop = stop, stop + int(lengths_W.sum())
        lengths_W.take(order, out=new_lengths[feature], mode="clip")
        index = torch.from_numpy(_positions(lengths_W, order, stop - start))
        torch.index_select(values[start:stop], 0, index, out=new_values[start:stop])
        if weights is not None and new_weights is not None:
            torch.index_select(weights[start:stop], 0, index, out=new_weights[start:stop])
    rows = torch.from_numpy(order)
    return _with_rows(
        batch,
        KeyedJaggedTensor(ids.keys(), new_values, new_weights, torch.from_numpy(new_lengths)),
        {name: part.index_select(0, rows) for name, part in _row_parts(batch)},
    )


def split_rows(batch: Batch, edges: Sequence[int]) -> list[Batch]:
    """Split a batch at rows.

    Args:
        batch: a batch on the CPU.
        edges: rising row numbers; the first is 0 and the last the number of rows.

    Returns:
        A batch of the rows between each two edges, with memory of its own.

    Example:
        >>> ids = KeyedJaggedTensor(["f"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 2]))
        >>> batch = Batch(torch.zeros(2, 0), ids, torch.tensor([0.0, 1.0]))
        >>> [part.sparse_features.values().tolist() for part in split_rows(batch, [0, 1, 2])]
        [[7], [8, 9]]
    """
    ids = batch.sparse_features
    keys, weights = ids.keys(), ids.weights_or_none()
    count = len(edges) - 1
    sizes = np.diff(edges).tolist()
    rows = {name: part.split(sizes) for name, part in _row_parts(batch)}
    jagged = [ids] * count
    if keys:
        lengths = _lengths_of(batch).split(sizes, 1)
        num_ids = torch.stack([part.sum(1) for part in lengths], 1).flatten().tolist()
        values = ids.values().split(num_ids)
        given = None if weights is None else weights.split(num_ids)
        jagged = [
            KeyedJaggedTensor(
                keys,
                torch.cat(values[i::count]),
                None if given is None else torch.cat(given[i::count]),
                lengths[i].contiguous(),
            )
            for i in range(count)
        ]
    return [
        _with_rows(batch, jagged[i], {name: part[i].clone() for name, part in rows.items()})
        for i in range(count)
    ]


def join_rows(batches: Sequence[Batch]) -> Batch:
    """Join batches of the same features, row after row.

    Args:
        batches: at least one batch.

    Returns:
        A batch of all rows.

    Example:
        >>> ids = KeyedJaggedTensor(["f"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 2]))
        >>> batch = Batch(torch.zeros(2, 0), ids, torch.tensor([0.0, 1.0]))
        >>> join_rows([batch, batch]).labels.tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    if len(batches) == 1:
        return batches[0]
    jagged = [batch.sparse_features for batch in batches]
    keys = jagged[0].keys()
    lengths = [_lengths_of(batch) for batch in batches]
    num_ids = [part.sum(1).tolist() for part in lengths]

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        pieces = [one.split(sizes) for one, sizes in zip(tensors, num_ids, strict=True)]
        return torch.cat([piece for pair in zip(*pieces, strict=True) for piece in pair])

    ids = jagged[0]
    if keys:
        weights = None
        if ids.weights_or_none() is not None:
            weights = joined([one.weights() for one in jagged])
        values = joined([one.values() for one in jagged])
        ids = KeyedJaggedTensor(keys, values, weights, torch.cat(lengths, 1))
    parts = [dict(_row_parts(batch)) for batch in batches]
    return _with_rows(
        batches[0], ids, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    )


def _lengths_of(batch: Batch) -> Tensor:
    """Return [F, W]."""
    return batch.sparse_features.lengths().view(
        len(batch.sparse_features.keys()), len(batch.labels)
    )


def _positions(lengths_W: _Array, order: _Array, num_ids: int) -> _Array:
    """Return [N] int32, the old positions of the ids of reordered bags."""
    if len(lengths_W) == num_ids and (lengths_W == 1).all():
        return order.astype(np.int32)
    lengths = lengths_W.astype(np.int32)
    starts = np.cumsum(lengths, dtype=np.int32)
    starts -= lengths
    lengths, starts = lengths.take(order), starts.take(order)
    places = np.cumsum(lengths, dtype=np.int32)
    places -= lengths
    full = np.flatnonzero(lengths)
    lengths, starts, places = lengths.take(full), starts.take(full), places.take(full)
    # Each id follows the id before it, except for the first id of a bag, which jumps.
    steps = np.ones(num_ids, np.int32)
    jumps = starts.copy()
    jumps[1:] -= starts[:-1] + lengths[:-1] - 1
    steps[places] = jumps
    return np.cumsum(steps, dtype=np.int32, out=steps)


def _row_parts(batch: Batch) -> list[tuple[str, Tensor]]:
    """Return the parts of a batch with one row per sample."""
    parts = {
        "dense_features": batch.dense_features,
        "labels": batch.labels,
        "sample_weights": batch.sample_weights,
        "groups": batch.groups,
    }
    return [(name, part) for name, part in parts.items() if part is not None]


def _with_rows(batch: Batch, ids: KeyedJaggedTensor, parts: dict[str, Tensor]) -> Batch:
    changes: dict[str, Any] = {"sparse_features": ids, **parts}
    return replace(batch, **changes)

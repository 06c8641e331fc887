"""Windows: consecutive rows of a table as one large batch, which is shuffled and split at once.

No function loops over samples. Shapes: `F` features, `W` rows of a window, `N` ids.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from recsys.datasets.utils import Batch
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, ops

__all__ = ["join_rows", "split_rows", "take_rows"]


class _Memory(threading.local):
    """Memory of a thread for one window."""

    def __init__(self) -> None:
        self.values = torch.empty(0, dtype=torch.int64)
        self.weights = torch.empty(0, dtype=torch.float32)


_memory = _Memory()

_Array: TypeAlias = np.ndarray[Any, Any]


def split_rows(batch: Batch, edges: Sequence[int], order: _Array | None = None) -> list[Batch]:
    """Split a batch at rows.

    Args:
        batch: A batch on the CPU.
        edges: Rising row numbers; the first is 0 and the last the number of rows.
        order: [W] int64, a permutation of the rows to split; None: the rows as they are.

    Returns:
        A batch of the rows between each two edges, with memory of its own.

    Example:
        >>> ids = KeyedJaggedTensor(["f"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 2]))
        >>> batch = Batch(torch.zeros(2, 0), ids, torch.tensor([0.0, 1.0]))
        >>> [part.sparse_features.values().tolist() for part in split_rows(batch, [0, 1, 2])]
        [[7], [8, 9]]
        >>> (part,) = split_rows(batch, [0, 2], np.array([1, 0]))
        >>> part.sparse_features.values().tolist()
        [8, 9, 7]
    """
    ids = batch.sparse_features
    keys, values, weights = ids.keys(), ids.values(), ids.weights_or_none()
    lengths, parts = _lengths_of(batch), _row_parts(batch)
    if order is not None:
        rows = torch.from_numpy(order)
        parts = [(name, part.index_select(0, rows)) for name, part in parts]
        lengths, values, weights = _reordered(lengths.numpy(), values, weights, order)
    count = len(edges) - 1
    sizes = np.diff(edges).tolist()
    pieces = {name: part.split(sizes) for name, part in parts}
    jagged = [ids] * count
    if keys:
        lengths_of = lengths.split(sizes, 1)
        num_ids = torch.stack([part.sum(1) for part in lengths_of], 1).flatten().tolist()
        values_of = values.split(num_ids)
        weights_of = None if weights is None else weights.split(num_ids)
        jagged = [
            KeyedJaggedTensor(
                keys,
                torch.cat(values_of[i::count]),
                None if weights_of is None else torch.cat(weights_of[i::count]),
                lengths_of[i].contiguous(),
            )
            for i in range(count)
        ]
    return [
        _with_rows(batch, jagged[i], {name: part[i].clone() for name, part in pieces.items()})
        for i in range(count)
    ]


def take_rows(batch: Batch, rows: _Array) -> Batch:
    """Return a batch of the chosen rows, in the given order.

    Args:
        batch: A batch on the CPU.
        rows: int64 numbers of the rows.

    Example:
        >>> ids = KeyedJaggedTensor(["f"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 2]))
        >>> batch = Batch(torch.zeros(2, 0), ids, torch.tensor([0.0, 1.0]))
        >>> take_rows(batch, np.array([1])).sparse_features.values().tolist()
        [8, 9]
    """
    index = torch.from_numpy(rows)
    ids, lengths = batch.sparse_features, _lengths_of(batch)
    if ids.keys():
        num_features, num_rows = lengths.shape
        bags = (torch.arange(num_features).unsqueeze(1) * num_rows + index).flatten()
        taken, *weights = (
            ops.select(JaggedTensor(part, lengths=lengths.flatten()), bags)
            for part in (ids.values(), ids.weights_or_none())
            if part is not None
        )
        ids = KeyedJaggedTensor(
            ids.keys(),
            taken.values(),
            weights[0].values() if weights else None,
            lengths=taken.lengths(),
        )
    parts = {name: part.index_select(0, index) for name, part in _row_parts(batch)}
    return _with_rows(batch, ids, parts)


def join_rows(batches: Sequence[Batch]) -> Batch:
    """Join batches of the same features, row after row.

    Args:
        batches: At least one batch.

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
        pieces = [tensor.split(sizes) for tensor, sizes in zip(tensors, num_ids, strict=True)]
        return torch.cat([piece for pair in zip(*pieces, strict=True) for piece in pair])

    ids = jagged[0]
    if keys:
        weights = None
        if ids.weights_or_none() is not None:
            weights = joined([jagged_part.weights() for jagged_part in jagged])
        values = joined([jagged_part.values() for jagged_part in jagged])
        ids = KeyedJaggedTensor(keys, values, weights, torch.cat(lengths, 1))
    if any(batch.label_mask is not None for batch in batches):
        batches = [_with_mask(batch) for batch in batches]
    parts = [dict(_row_parts(batch)) for batch in batches]
    return _with_rows(
        batches[0], ids, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    )


def _lengths_of(batch: Batch) -> Tensor:
    """Return [F, W]."""
    return batch.sparse_features.lengths().view(
        len(batch.sparse_features.keys()), len(batch.labels)
    )


def _reordered(
    lengths: _Array, values: Tensor, weights: Tensor | None, order: _Array
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return lengths, ids and weights of reordered rows, in memory that the next call reuses.

    New memory for each window would cost as much time as the copies, for page faults.
    """
    num_ids = values.numel()
    if len(_memory.values) < num_ids:
        _memory.values = torch.empty(num_ids * 9 // 8, dtype=torch.int64)
    new_values = _memory.values[:num_ids]
    new_weights = None
    if weights is not None:
        if len(_memory.weights) < num_ids:
            _memory.weights = torch.empty(num_ids * 9 // 8, dtype=torch.float32)
        new_weights = _memory.weights[:num_ids]
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
    return torch.from_numpy(new_lengths), new_values, new_weights


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
    full = np.flatnonzero(lengths != 0)
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
        "label_mask": batch.label_mask,
    }
    return [(name, part) for name, part in parts.items() if part is not None]


def _with_mask(batch: Batch) -> Batch:
    """Return a batch with a mask of labels."""
    if batch.label_mask is not None:
        return batch
    return replace(batch, label_mask=torch.ones_like(batch.labels, dtype=torch.bool))


def _with_rows(batch: Batch, ids: KeyedJaggedTensor, parts: dict[str, Tensor]) -> Batch:
    changes: dict[str, Any] = {"sparse_features": ids, **parts}
    return replace(batch, **changes)

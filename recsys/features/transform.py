"""Ids of features, and their conversion to a `KeyedJaggedTensor`.

Shapes: `B` rows, `N` ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch

from recsys.sparse import KeyedJaggedTensor

__all__ = ["Bags", "jagged_of", "without_missing"]

_Array: TypeAlias = np.ndarray[Any, Any]


@final
class Bags(NamedTuple):
    """Ids of a feature, concatenated by row."""

    ids: _Array
    """[N] int64."""
    lengths: _Array | None
    """[B] int64; None: one id per row."""
    weights: _Array | None
    """[N] float32."""


def jagged_of(
    names: list[str], bags: Sequence[Bags], size: int, is_weighted: bool
) -> KeyedJaggedTensor:
    """Join the ids of features.

    Args:
        names: The features.
        bags: Their ids.
        size: Number of rows.
        is_weighted: True to give ids without weights the weight 1.
    """
    ones = np.ones(size, np.int64)
    lengths = [ones if bag.lengths is None else bag.lengths for bag in bags]
    weights = None
    if is_weighted:
        plain = [
            np.ones(len(bag.ids), np.float32) if bag.weights is None else bag.weights
            for bag in bags
        ]
        weights = torch.from_numpy(np.concatenate(plain))
    empty = [np.empty(0, np.int64)]
    return KeyedJaggedTensor(
        names,
        torch.from_numpy(np.concatenate([bag.ids for bag in bags] or empty)),
        weights,
        torch.from_numpy(np.concatenate(lengths or empty)),
    )


def without_missing(bags: Bags, is_missing: _Array | None) -> Bags:
    """Leave out missing ids.

    Args:
        bags: Ids of a feature.
        is_missing: [N] bool, or None.
    """
    if is_missing is None:
        return bags
    kept = ~is_missing
    lengths = kept.astype(np.int64)
    if bags.lengths is not None:
        ends = np.concatenate([[0], bags.lengths.cumsum()])
        before = np.concatenate([[0], lengths.cumsum()])
        lengths = before[ends[1:]] - before[ends[:-1]]
    weights = None if bags.weights is None else bags.weights[kept]
    return Bags(bags.ids[kept], lengths, weights)

"""Selection and sanitizing of the ids, offsets and weights that a lookup reads from a batch.

Shapes: `F` features of the lookup, `B` batch size, `N` ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple, final

import torch
from torch import Tensor

from recsys.base.arguments import MissingKeyError
from recsys.kernels import ops
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_bags import Parts
from recsys.sparse.validate import preview

__all__ = [
    "FeatureSelector",
    "SelectedBags",
    "expand_bags",
    "positions_of",
]


@final
class SelectedBags(NamedTuple):
    """The bags of a lookup's features, feature-major."""

    indices: Tensor
    """[N]."""
    offsets: Tensor
    """[F * B + 1]."""
    weights: Tensor | None
    """[N], or None."""


@final
class FeatureSelector:
    """Selector of a lookup's features from a batch, in the lookup's order.

    The permutation is cached for the keys of the last batch. A batch in the lookup's order is not
    copied.

    Args:
        features: [F] features of the lookup.
        tables: [F] table of each feature, for messages.
        owner: Class of the caller, for messages.

    Example:
        >>> kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([5, 6]), lengths=torch.tensor([1, 1]))
        >>> FeatureSelector(["b"], ["t"], "test").select(kjt.parts(), None).indices
        tensor([6])
    """

    def __init__(self, features: Sequence[str], tables: Sequence[str], owner: str) -> None:
        self._features = list(features)
        self._tables = list(tables)
        self._owner = owner
        self._keys: list[str] | None = None
        self._device: torch.device | None = None
        self.positions: list[int] = []
        """Positions of the features among the keys of the last batch."""
        self._permute_F: Tensor | None = None
        self._is_whole = False  # see `reads_whole`

    def select(self, bags: Parts, weights: Tensor | None) -> SelectedBags:
        """Select the features.

        Args:
            bags: The bags of a batch, with one batch size.
            weights: [N] weights of the whole batch, or None.

        Raises:
            KeyError: The batch lacks a feature.
        """
        device = bags.values.device
        if bags.keys != self._keys or device != self._device:
            self.route(bags.keys, device)
        if self._permute_F is None:
            return SelectedBags(bags.values, bags.offsets, weights)
        lengths_FB = bags.lengths.view(len(bags.keys), -1)
        known, total = bags.length_per_key, None
        if self._is_whole:
            total = bags.values.numel()
        elif known is not None:
            total = sum(known[position] for position in self.positions)
        lengths_FB, indices, weights = ops.permute_2d(
            self._permute_F, lengths_FB, bags.values, weights, total
        )
        return SelectedBags(indices, ops.complete_cumsum(lengths_FB.flatten()), weights)

    def reads_whole(self, keys: Sequence[str]) -> bool:
        """Return whether the lookup reads each of these keys exactly once."""
        return sorted(self._features) == sorted(keys) == sorted(set(keys))

    def route(self, keys: Sequence[str], device: torch.device) -> None:
        """Prepare for batches with these keys.

        Raises:
            KeyError: A feature is missing.
        """
        self.positions = positions_of(self._features, keys, self._owner, self._tables)
        self._permute_F = None
        self._is_whole = self.reads_whole(keys)
        if self.positions != list(range(len(keys))):
            self._permute_F = torch.tensor(self.positions, dtype=torch.int32, device=device)
        self._keys, self._device = list(keys), device


def positions_of(
    features: Sequence[str], keys: Sequence[str], owner: str, tables: Sequence[str] = ()
) -> list[int]:
    """Return the positions of a lookup's features among the keys of a batch.

    Args:
        features: [F] features of the lookup.
        keys: Keys of the batch.
        owner: Class of the caller, for messages.
        tables: [F] table of each feature, for messages; may be empty.

    Returns:
        [F] positions.

    Raises:
        KeyError: The batch lacks some of the features.
    """
    place = {key: i for i, key in enumerate(keys)}
    missing = [feature for feature in features if feature not in place]
    if missing:
        where = [table for table, name in zip(tables, features, strict=False) if name in missing]
        raise MissingKeyError(
            f"The batch lacks the features {missing}, which {owner} looks up"
            f"{f' in the tables {where}' if where else ''}; received the keys {preview(keys)}. Add "
            "them (bags may be empty), or remove them from the tables' feature_names."
        )
    return [place[feature] for feature in features]


def is_on_meta(features: object) -> bool:
    """Return whether a batch is on the `meta` device."""
    return isinstance(features, KeyedJaggedTensor) and features.values().is_meta


def expand_bags(
    pooled_BD: Tensor, dims: tuple[int, ...], names: tuple[str, ...], features: KeyedJaggedTensor
) -> Tensor:
    """Gather the bag of each sample by inverse indices, per feature.

    Args:
        pooled_BD: One row per bag; features with fewer bags are padded at the end.
        dims: [F] columns of each output.
        names: [F] feature of each output.
        features: The batch, with one batch size per key and inverse indices.

    Returns:
        [samples, sum of dims].
    """
    keys, bags_FB = features.inverse_indices()
    chunk, features_C = _feature_of_chunk(dims, names, tuple(keys), pooled_BD.device)
    num_chunks = features_C.numel()
    chunks_SC = bags_FB.index_select(0, features_C).t() * num_chunks
    chunks_SC = chunks_SC + torch.arange(num_chunks, device=pooled_BD.device)
    rows = pooled_BD.reshape(-1, chunk).index_select(0, chunks_SC.flatten())
    return rows.view(bags_FB.shape[1], num_chunks * chunk)


@lru_cache(maxsize=64)
def _feature_of_chunk(
    dims: tuple[int, ...], names: tuple[str, ...], keys: tuple[str, ...], device: torch.device
) -> tuple[int, Tensor]:
    """Return the width of a chunk, and the position of the inverse indices of each chunk."""
    chunk = gcd(*dims)
    place = {key: i for i, key in enumerate(keys)}
    features = [
        place[name] for name, dim in zip(names, dims, strict=True) for _ in range(0, dim, chunk)
    ]
    return chunk, torch.tensor(features, dtype=torch.int64, device=device)

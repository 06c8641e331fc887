"""Selection and sanitizing of the ids, offsets and weights that a lookup reads from a batch.

Legend: `F` features of the lookup, `B` batch size, `N` ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.kernels.bounds import are_bags_bad, safe_lengths
from recsys.kernels.types import BoundsCheckMode
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_bags import Parts
from recsys.sparse.per_key_checks import check_length_per_key
from recsys.sparse.validate import check_total, preview

__all__ = [
    "FeatureSelector",
    "SelectedBags",
    "are_checked_by_triton",
    "expand_bags",
    "make_safe",
    "padded_lengths",
    "positions_of",
    "safe_features",
    "safe_inverse_indices",
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
        >>> FeatureSelector(["b"], ["t"], "test").select(kjt, None).indices
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

    def select(self, batch: KeyedJaggedTensor, weights: Tensor | None) -> SelectedBags:
        """Select the features.

        Args:
            batch: The batch, with one batch size or one per key.
            weights: [N] weights of the whole batch, or None.

        Returns:
            The bags. With a batch size per key, features are padded with empty bags to the largest
            batch size.

        Raises:
            KeyError: The batch lacks a feature.
        """
        if batch.keys() != self._keys or batch.device() != self._device:
            self._route(batch)
        if batch.variable_stride_per_key():
            return self._select_variable(batch, weights)
        if self._permute_F is None:
            return SelectedBags(batch.values(), batch.offsets(), weights)
        lengths_FB = batch.lengths().view(len(batch.keys()), -1)
        known, total = batch.length_per_key_or_none(), None
        if self._is_whole:
            total = batch.values().numel()
        elif known is not None:
            total = sum(known[position] for position in self.positions)
        lengths_FB, indices, weights = ops.permute_2d(
            self._permute_F, lengths_FB, batch.values(), weights, total
        )
        return SelectedBags(indices, ops.complete_cumsum(lengths_FB.flatten()), weights)

    def _select_variable(self, batch: KeyedJaggedTensor, weights: Tensor | None) -> SelectedBags:
        lengths = padded_lengths(batch)
        lengths_FB = torch.stack([lengths[p] for p in self.positions])
        sizes = batch.length_per_key()
        values = batch.values().split_with_sizes(sizes)
        indices = torch.cat([values[p] for p in self.positions])
        if weights is not None:
            split_weights = weights.split_with_sizes(sizes)
            weights = torch.cat([split_weights[p] for p in self.positions])
        return SelectedBags(indices, ops.complete_cumsum(lengths_FB.flatten()), weights)

    def reads_whole(self, keys: Sequence[str]) -> bool:
        """Return whether the lookup reads each of these keys exactly once."""
        return sorted(self._features) == sorted(keys) == sorted(set(keys))

    def _route(self, batch: KeyedJaggedTensor) -> None:
        keys, device = batch.keys(), batch.device()
        self.positions = positions_of(self._features, keys, self._owner, self._tables)
        self._permute_F = None
        self._is_whole = self.reads_whole(keys)
        if self.positions != list(range(len(keys))):
            self._permute_F = torch.tensor(self.positions, dtype=torch.int32, device=device)
        self._keys, self._device = list(keys), device


def padded_lengths(batch: KeyedJaggedTensor) -> list[Tensor]:
    """Return the lengths of each key, padded with empty bags to the largest batch size."""
    strides = batch.stride_per_key()
    longest = max(strides, default=0)
    pieces = batch.lengths().split_with_sizes(strides)
    return [
        torch.nn.functional.pad(p, (0, longest - s)) for p, s in zip(pieces, strides, strict=True)
    ]


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
        raise KeyError(
            f"The batch lacks the features {missing}, which {owner} looks up"
            f"{f' in the tables {where}' if where else ''}; received the keys {preview(keys)}. Add "
            "them (bags may be empty), or remove them from the tables' feature_names."
        )
    return [place[feature] for feature in features]


def are_checked_by_triton(bags: Parts, mode: BoundsCheckMode) -> bool:
    """Return whether `make_safe` supports a batch and the mode.

    Args:
        bags: The bags of a batch after `check_features`, padded to one batch size.
        mode: Handling of bad ids.
    """
    return (
        bags.values.is_cuda
        and ops.HAS_TRITON
        and mode is not BoundsCheckMode.NONE
        and bags.lengths.numel() > 0
    )


def make_safe(
    bags: Parts, num_rows_F: Tensor, unpadded: Parts | None = None
) -> tuple[Tensor, Parts, Tensor]:
    """Sanitize a batch: replace bad bags and ids, without a host wait.

    Inverse indices are not changed: see `safe_inverse_indices`.

    Args:
        bags: The bags of a batch for which `are_checked_by_triton` holds, with one batch size.
        num_rows_F: [F] int64 rows of the table that each feature reads; the largest int64 if all
            ids are valid.
        unpadded: The same bags before padding, if they were padded to one batch size.

    Returns:
        [2] int32, whether bags and whether ids are bad; the batch with valid bags and with 0 for
        bad ids; and the [F] int64 number of ids of each feature.

    Raises:
        ValueError: `length_per_key` is inconsistent.
    """
    from recsys.kernels import ops_triton

    known, first_ids = bags.length_per_key, None
    if known is not None:
        check_length_per_key(bags.keys, known, bags.values)
        first_ids = ops.upload([0, *accumulate(known)], bags.values.device)
    given = None if unpadded is None else (unpadded.lengths, unpadded.offsets)
    found, lengths, offsets, values, counts = ops_triton.make_safe(
        bags.lengths, bags.offsets, bags.values, num_rows_F, first_ids, given
    )
    return found, bags._replace(lengths=lengths, offsets=offsets, values=values), counts


def safe_features(
    features: KeyedJaggedTensor, sizes: list[int] | None
) -> tuple[KeyedJaggedTensor, Tensor | None]:
    """Sanitize the bags of a batch on a device, without a host wait.

    On the CPU, `check_features` has raised errors already, and the batch is returned.

    Args:
        features: A batch after `check_features`.
        sizes: Its `length_per_key` if buffers are allocated by it, else None.

    Returns:
        The batch, with valid lengths and inverse indices. If `sizes` are given, they are the
        numbers of ids per feature. And a [] bool, whether the batch was bad; None if it cannot be.

    Raises:
        ValueError: A feature has ids but no bags, or `length_per_key` is inconsistent.
    """
    values, lengths = features.values(), features.lengths()
    num_ids = values.numel()
    if values.is_cpu or values.is_meta:
        return features, None
    known = None
    if sizes is not None:
        check_length_per_key(features.keys(), sizes, values)
    if not lengths.numel():
        check_total("KeyedJaggedTensor", 0, values)
        return features, None
    is_bad = are_bags_bad(lengths, features.offsets(), num_ids)
    if sizes is not None:
        first_bags, first_ids, sizes_F = _known_sizes(features, sizes)
        is_bad = is_bad | (features.offsets().index_select(0, first_bags) != first_ids).any()
        known = first_bags, sizes_F
    inverse, is_foreign = safe_inverse_indices(features)
    if is_foreign is not None:
        is_bad = is_bad | is_foreign
    safe = KeyedJaggedTensor.from_parts(
        features.keys(),
        values,
        features.weights_or_none(),
        safe_lengths(lengths, is_bad, num_ids, known),
        stride=features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() or None,
        length_per_key=sizes,
        inverse_indices=inverse,
    )
    return safe, is_bad


def safe_inverse_indices(
    features: KeyedJaggedTensor,
) -> tuple[tuple[list[str], Tensor] | None, Tensor | None]:
    """Clamp the inverse indices of a batch on a device to its bags, without a host wait.

    Args:
        features: A batch.

    Returns:
        The indices, or None; and a [] bool, whether an index was clamped, or None.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None or not inverse[1].numel():
        return inverse, None
    keys, rows = inverse
    strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    numbers = torch.iinfo(rows.dtype)
    limits = [(0, strides[k] - 1) if k in strides else (numbers.min, numbers.max) for k in keys]
    low, high = ops.upload(np.array(limits), rows.device, rows.dtype).unbind(1)
    safe_rows = torch.maximum(torch.minimum(rows, high.unsqueeze(1)), low.unsqueeze(1))
    return (keys, safe_rows), (safe_rows != rows).any()


def _known_sizes(features: KeyedJaggedTensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return the first bag, the first id and the number of ids of each feature with bags.

    Raises:
        ValueError: A feature has ids but no bags.
    """
    bags_F, sizes_F = np.array(features.stride_per_key()), np.array(sizes)
    has_bags = bags_F > 0
    if sizes_F[~has_bags].any():
        features.validate()
    before = [x.cumsum() - x for x in (bags_F, sizes_F)]
    known = np.stack([*before, sizes_F])[:, has_bags]
    return ops.upload(known, features.device()).unbind()


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

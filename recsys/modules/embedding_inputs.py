"""From a KeyedJaggedTensor to the ids, offsets and weights of the features a lookup reads.

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
from recsys.sparse.keyed_jagged import Parts
from recsys.sparse.per_key_checks import check_length_per_key
from recsys.sparse.validate import check_total, preview

__all__ = [
    "FeatureSelector",
    "SelectedBags",
    "are_checked_by_triton",
    "expand_bags",
    "make_safe",
    "positions_of",
    "safe_features",
    "safe_inverse_indices",
]


@final
class SelectedBags(NamedTuple):
    """The bags of a lookup's features, feature by feature."""

    indices: Tensor
    """[N]."""
    offsets: Tensor
    """[F * B + 1]."""
    weights: Tensor | None
    """[N], or None."""


@final
class FeatureSelector:
    """Picks a lookup's features from a batch, in the lookup's order.

    Batches usually have the same keys in the same order as the one before, so the permutation is
    kept; when the batch is in the lookup's order already, nothing is copied.

    Args:
        features: [F] the features the lookup reads.
        tables: [F] the table each of them reads, for messages.
        owner: Who asks, for messages.

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
        """Of the features among the batch's keys, for the batch seen last."""
        self._permute_F: Tensor | None = None
        self._is_whole = False  # see `reads_whole`

    def select(self, batch: KeyedJaggedTensor, weights: Tensor | None) -> SelectedBags:
        """Pick the features.

        Args:
            batch: With one batch size, or one per key.
            weights: [N] weights of the whole batch, or None.

        Returns:
            The bags; with a batch size per key, shorter features are padded with empty bags up to
            the longest of the batch.

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
        strides = batch.stride_per_key()
        longest = max(strides)
        pieces = batch.lengths().split_with_sizes(strides)
        lengths_FB = torch.stack(
            [torch.nn.functional.pad(pieces[p], (0, longest - strides[p])) for p in self.positions]
        )
        sizes = batch.length_per_key()
        values = batch.values().split_with_sizes(sizes)
        indices = torch.cat([values[p] for p in self.positions])
        if weights is not None:
            split_weights = weights.split_with_sizes(sizes)
            weights = torch.cat([split_weights[p] for p in self.positions])
        return SelectedBags(indices, ops.complete_cumsum(lengths_FB.flatten()), weights)

    def reads_whole(self, keys: Sequence[str]) -> bool:
        """Return whether every feature of batches with these keys is read, and once."""
        return sorted(self._features) == sorted(keys) == sorted(set(keys))

    def _route(self, batch: KeyedJaggedTensor) -> None:
        keys, device = batch.keys(), batch.device()
        self.positions = positions_of(self._features, keys, self._owner, self._tables)
        self._permute_F = None
        whole = list(range(len(keys)))
        self._is_whole = self.reads_whole(keys)
        if self.positions != whole:
            self._permute_F = torch.tensor(self.positions, dtype=torch.int32, device=device)
        self._keys, self._device = list(keys), device


def positions_of(
    features: Sequence[str], keys: Sequence[str], owner: str, tables: Sequence[str] = ()
) -> list[int]:
    """Return where the features that a lookup reads are among the keys of a batch.

    Args:
        features: [F].
        keys: Of the batch.
        owner: Who asks, for messages.
        tables: [F] the table each feature is looked up in, for messages; or none.

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
            "them (empty bags will do), or leave them out of the tables' feature_names."
        )
    return [place[feature] for feature in features]


def are_checked_by_triton(bags: Parts, mode: BoundsCheckMode) -> bool:
    """Return whether `make_safe` takes a batch, and does what the mode says.

    Args:
        bags: Of a batch that `check_features` has seen; with batch sizes of their own, features are
            to be padded to one size first.
        mode: What happens to bad ids.
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
    """Return a batch that can be read whatever its bags and ids are; no sync.

    Inverse indices stay as they are: see `safe_inverse_indices`.

    Args:
        bags: Of a batch that Triton checks, with one batch size.
        num_rows_F: [F] int64 rows of the table that each feature reads; the largest number where
            any id is good.
        unpadded: The same bags before they were padded to one batch size, if they were.

    Returns:
        [2] int32, whether bags are bad, and whether ids are; the batch, with other bags where they
        are, and 0 in place of bad ids; and [F] int64 how many ids each feature has now.

    Raises:
        ValueError: A `length_per_key` that cannot be.
    """
    from recsys.kernels import ops_triton

    told, first_ids = bags.length_per_key, None
    if told is not None:
        check_length_per_key(bags.keys, told, bags.values)
        first_ids = ops.upload([0, *accumulate(told)], bags.values.device)
    given = None if unpadded is None else (unpadded.lengths, unpadded.offsets)
    found, lengths, offsets, values, counts = ops_triton.make_safe(
        bags.lengths, bags.offsets, bags.values, num_rows_F, first_ids, given
    )
    return found, bags._replace(lengths=lengths, offsets=offsets, values=values), counts


def safe_features(
    features: KeyedJaggedTensor, sizes: list[int] | None
) -> tuple[KeyedJaggedTensor, Tensor | None]:
    """On a device: a batch whose bags can be read, and whether it had to be made so; no sync.

    On the CPU `check_features` has raised, and there is nothing to do.

    Args:
        features: A batch that `check_features` has seen.
        sizes: Its `length_per_key` if anything is sized by it, else None.

    Returns:
        The batch, with other lengths and inverse indices where they are bad; its features have as
        many ids as the sizes tell, if they do. And [] bool, None for certainly not.

    Raises:
        ValueError: Ids but no bags, or a `length_per_key` that cannot be.
    """
    values, lengths = features.values(), features.lengths()
    num_ids = values.numel()
    if values.is_cpu or values.is_meta:
        return features, None
    told = None
    if sizes is not None:
        check_length_per_key(features.keys(), sizes, values)
    if not lengths.numel():
        check_total("KeyedJaggedTensor", 0, values)
        return features, None
    is_bad = are_bags_bad(lengths, features.offsets(), num_ids)
    if sizes is not None:
        first_bags, first_ids, sizes_F = _told_sizes(features, sizes)
        is_bad = is_bad | (features.offsets().index_select(0, first_bags) != first_ids).any()
        told = first_bags, sizes_F
    inverse, is_foreign = safe_inverse_indices(features)
    if is_foreign is not None:
        is_bad = is_bad | is_foreign
    safe = KeyedJaggedTensor.from_parts(
        features.keys(),
        values,
        features.weights_or_none(),
        safe_lengths(lengths, is_bad, num_ids, told),
        stride=features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() or None,
        length_per_key=sizes,
        inverse_indices=inverse,
    )
    return safe, is_bad


def safe_inverse_indices(
    features: KeyedJaggedTensor,
) -> tuple[tuple[list[str], Tensor] | None, Tensor | None]:
    """On a device: inverse indices that name bags of the batch, and whether they did not; no sync.

    Args:
        features: A batch.

    Returns:
        The indices, if it has any; and [] bool, None for certainly not.
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


def _told_sizes(features: KeyedJaggedTensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return for each feature with bags the first, the first id, and how many ids there are.

    Raises:
        ValueError: A feature has ids but no bags.
    """
    bags_F, sizes_F = np.array(features.stride_per_key()), np.array(sizes)
    has_bags = bags_F > 0
    if sizes_F[~has_bags].any():
        features.validate()
    before = [x.cumsum() - x for x in (bags_F, sizes_F)]
    told = np.stack([*before, sizes_F])[:, has_bags]
    return ops.upload(told, features.device()).unbind()


def is_on_meta(features: object) -> bool:
    """Return whether a batch has shapes and no values."""
    return isinstance(features, KeyedJaggedTensor) and features.values().is_meta


def expand_bags(
    pooled_BD: Tensor, dims: tuple[int, ...], names: tuple[str, ...], features: KeyedJaggedTensor
) -> Tensor:
    """Give each sample the bag that its inverse index names, feature by feature.

    Args:
        pooled_BD: One row per bag; features of fewer bags are padded at the end.
        dims: [F] columns of each output.
        names: [F] the feature of each output.
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
    """Return the width of a chunk, and for each of a row the place of its inverse indices."""
    chunk = gcd(*dims)
    place = {key: i for i, key in enumerate(keys)}
    features = [
        place[name] for name, dim in zip(names, dims, strict=True) for _ in range(0, dim, chunk)
    ]
    return chunk, torch.tensor(features, dtype=torch.int64, device=device)

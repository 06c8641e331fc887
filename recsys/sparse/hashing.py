"""Hashing of ids into the rows of a table."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recsys.base.arguments import MissingKeyError, whole
from recsys.base.checked import checked_late
from recsys.sparse.keyed_jagged import KeyedJaggedTensor

STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shifts and factors of SplitMix64."""


@checked_late
def hash_ids(features: KeyedJaggedTensor, num_embeddings: Mapping[str, int]) -> KeyedJaggedTensor:
    """Hash ids of any size to rows of their tables.

    Equal ids get equal rows in all features whose tables have the same number of rows, on all
    ranks, devices and runs. Different ids may share a row: with n ids and r rows, an id has its own
    row with probability `(1 - 1/r) ** (n - 1)`. The hash spreads counters, time stamps and
    multiples of a number evenly, unlike `ids % rows`.

    The hash is the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014), modulo the number of rows. It does not wait for
    a device.

    Args:
        features: `int32` or `int64` ids of any size; they may be negative.
        num_embeddings: Number of rows of the table of each feature. Features without an entry are
            unchanged.

    Returns:
        The features with `int64` ids in `[0, num_embeddings[key])`, and the same lengths and
        weights.

    Raises:
        KeyError: `num_embeddings` has a key that is not a feature.
        ValueError: A number of rows is not positive.
        TypeError: Ids or numbers of rows are not integers.

    Example:
        >>> features = KeyedJaggedTensor(
        ...     ["user", "film"], torch.tensor([10**18, -1, 7]), lengths=torch.tensor([1, 2])
        ... )
        >>> hash_ids(features, {"user": 1000}).values()
        tensor([34, -1,  7])
    """
    keys = features.keys()
    for key, rows in num_embeddings.items():
        if key not in keys:
            raise MissingKeyError(
                f"num_embeddings must name features; received {key!r}, not in {keys}."
            )
        whole(f"num_embeddings[{key!r}]", rows)
    ids = features.values()
    if ids.is_floating_point() or ids.is_complex() or ids.dtype in (torch.bool, torch.uint64):
        hint = " Keep all 64 bits with .view(torch.int64)." if ids.dtype is torch.uint64 else ""
        raise TypeError(f"ids must be int32 or int64; received {ids.dtype}.{hint}")
    rows_F = torch.tensor([num_embeddings.get(key, 0) for key in keys], device=ids.device)
    rows_N = rows_F.repeat_interleave(features.values_per_key(), output_size=ids.numel())
    kept = ids.long()
    hashed = mix(kept) % rows_N.clamp(min=1)
    return features.with_values(torch.where(rows_N > 0, hashed, kept))


def mix(ids: Tensor) -> Tensor:
    """Output function of SplitMix64, without the sign bit."""
    for shift, factor in STEPS:
        high = (ids >> shift) & ((1 << (64 - shift)) - 1)  # a shift of int64 copies the sign
        ids = (ids ^ high) * (factor - (1 << 64) if factor >> 63 else factor)
    return ids & ((1 << 63) - 1)

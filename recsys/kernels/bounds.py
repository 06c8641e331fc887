"""Ids outside their table, found before a kernel reads or writes foreign memory with them.

Shape suffixes: N ids, F features, B bags per feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["bad_id_message", "check_ids", "find_bad_ids"]


def find_bad_ids(indices: Tensor, offsets: Tensor, num_rows_F: Tensor) -> Tensor:
    """Which ids are negative or too large for the table of their feature; no device sync.

    Args:
        indices: [N] int32 or int64.
        offsets: [F * B + 1].
        num_rows_F: [F] int64 rows of the table that each feature reads.

    Returns:
        [N] bool.

    Example:
        >>> find_bad_ids(torch.tensor([0, 5]), torch.tensor([0, 2]), torch.tensor([5]))
        tensor([False,  True])
    """
    num_bags = (offsets.numel() - 1) // num_rows_F.numel()
    if num_bags == 0 or indices.numel() == 0:
        return torch.zeros_like(indices, dtype=torch.bool)
    if num_rows_F.numel() == 1:
        return (indices < 0) | (indices >= num_rows_F)
    limit_N = num_rows_F.repeat_interleave(offsets[::num_bags].diff(), output_size=indices.numel())
    return (indices < 0) | (indices >= limit_N)


def check_ids(
    indices: Tensor,
    offsets: Tensor,
    num_rows_per_feature: Tensor,
    feature_names: Sequence[str],
    table_names: Sequence[str],
) -> None:
    """Raise if any id does not fit its table. On a device this waits for the result.

    Args:
        indices: [N] int32 or int64.
        offsets: [F * B + 1].
        num_rows_per_feature: [F] int64 rows of the table that each feature reads.
        feature_names: [F].
        table_names: [F] the table each feature reads.

    Raises:
        IndexError: Naming feature, table, id, position and table size.

    Example:
        >>> check_ids(torch.tensor([3]), torch.tensor([0, 1]), torch.tensor([3]), ["f"], ["t"])
        Traceback (most recent call last):
        ...
        IndexError: Id 3 of feature 'f' is out of range for table 't' with 3 rows (position 0 ...
    """
    bad_N = find_bad_ids(indices, offsets, num_rows_per_feature)
    if bool(bad_N.any()):
        raise IndexError(
            bad_id_message(
                bad_N, indices, offsets, num_rows_per_feature, feature_names, table_names
            )
        )


def bad_id_message(
    bad_N: Tensor,
    indices: Tensor,
    offsets: Tensor,
    num_rows_per_feature: Tensor,
    feature_names: Sequence[str],
    table_names: Sequence[str],
) -> str:
    """The text for the first of some bad ids; reads from the device.

    Args:
        bad_N: [N] bool, at least one True.
        indices: As for `check_ids`.
        offsets: As for `check_ids`.
        num_rows_per_feature: As for `check_ids`.
        feature_names: As for `check_ids`.
        table_names: As for `check_ids`.
    """
    places = bad_N.nonzero().flatten()
    place = int(places[0])
    num_bags = (offsets.numel() - 1) // len(feature_names)
    bag = int(torch.searchsorted(offsets.contiguous(), place, right=True)) - 1
    feature, sample = divmod(bag, num_bags)
    rows = int(num_rows_per_feature[feature])
    position = place - int(offsets[feature * num_bags])
    plural = "" if places.numel() == 1 else "s"
    return (
        f"Id {int(indices[place])} of feature '{feature_names[feature]}' is out of range for "
        f"table '{table_names[feature]}' with {rows} rows (position {position} of the feature's "
        f"ids, sample {sample}; {places.numel()} bad id{plural} in the batch). Ids must lie in "
        f"[0, {rows}): hash or remap them, enlarge num_embeddings, or choose another "
        "BoundsCheckMode."
    )

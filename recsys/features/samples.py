"""Labels, weights and groups of samples, and weights of ids.

Legend: `B` rows, `N` values.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from recsys.features.arrow import Values, read_keys, read_numbers, read_values, to_float32
from recsys.features.columns import Group, Label, SampleWeight, SparseColumn

__all__ = ["read_group", "read_id_weights", "read_label", "read_weight"]

_Array: TypeAlias = np.ndarray[Any, Any]
_REMOVE = "Remove the rows."


def read_label(table: Any, column: Label, is_alone: bool) -> tuple[_Array, _Array | None]:
    """Return [B] float32 labels, and [B] bool: whether they are present; None if all are.

    Args:
        table: an Arrow table.
        column: the description.
        is_alone: whether there is one label, which each row needs; of several, each may be missing.

    Raises:
        TypeError: the values are not numbers.
        ValueError: a label is NaN or out of its range; or it is missing, and alone.
    """
    values = read_values(table, column.name, False)
    numbers, is_missing = read_numbers(values)
    is_present = None
    if is_missing is not None and is_missing.any():
        if is_alone:
            values.reject(ValueError, "must have no missing value", is_missing, _REMOVE)
        is_present = ~is_missing
        numbers = np.where(is_present, numbers, 0)
    bad = (numbers < column.low) | (numbers > column.high)
    rule = f"must have labels from {column.low:g} to {column.high:g}"
    if is_present is not None:
        bad &= is_present
    values.reject(ValueError, rule, bad, "Set low and high of the Label.")
    return to_float32(values, numbers), is_present


def read_weight(table: Any, column: SampleWeight) -> _Array:
    """Return [B] float32 weights of samples.

    Raises:
        TypeError: the values are not numbers.
        ValueError: a weight is missing, NaN, infinite or negative.
    """
    values = read_values(table, column.name, False)
    numbers = _present(values)
    values.reject(ValueError, "must have weights from 0", numbers < 0, _REMOVE)
    return to_float32(values, numbers)


def read_group(table: Any, column: Group, kind: str | None) -> _Array:
    """Return [B] int64 keys of groups: whole numbers, or hashes of texts.

    Args:
        table: an Arrow table.
        column: the description.
        kind: "text" or "number"; None: both are legal.

    Raises:
        TypeError: the values are not whole numbers or texts, or not of the kind.
        ValueError: a key is missing.
    """
    values = read_values(table, column.name, False)
    keys = read_keys(values, unsigned=True)
    keys.check_kind(column.name, kind)
    if keys.is_missing is not None:
        values.reject(ValueError, "must have no missing key", keys.is_missing, _REMOVE)
    return np.array(keys.hashed())  # a copy: Arrow's memory is shared and read-only


def read_id_weights(
    table: Any, column: SparseColumn, lengths: _Array | None, is_missing: _Array | None
) -> _Array:
    """Return [N] float32 weights of ids.

    Args:
        table: an Arrow table.
        column: the column of ids, with the name of the column of weights.
        lengths: [B] int64, the number of ids of each row; None: one.
        is_missing: [N] bool, True for missing ids, which need no weight; None: no id is missing.

    Raises:
        KeyError: there is no column of weights.
        TypeError: the weights are not numbers.
        ValueError: a row has another number of weights than of ids; or a weight is missing, NaN or
            infinite.
    """
    values = read_values(table, str(column.weights), column.is_list)
    found, wanted = np.asarray(values.lengths), np.asarray(lengths)
    if column.is_list and not np.array_equal(found, wanted):
        row = int((found != wanted).argmax())
        raise ValueError(
            f"Column {column.weights!r} must have one weight for each id of {column.name!r}; "
            f"received {found[row]} weights and {wanted[row]} ids in row {row}."
        )
    numbers, lacks_weight = read_numbers(values)
    if lacks_weight is not None:
        bad = lacks_weight if is_missing is None else lacks_weight & ~is_missing
        values.reject(ValueError, "must have a weight for each id", bad, "Write 1.")
    return to_float32(values, numbers)


def _present(values: Values) -> _Array:
    numbers, is_missing = read_numbers(values)
    if is_missing is not None:
        values.reject(ValueError, "must have no missing value", is_missing, _REMOVE)
    return numbers

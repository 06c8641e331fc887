"""Parts of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from recsys.features.arrow import Values, decoded, read_integers
from recsys.features.columns import UNITS, Timestamp

__all__ = ["read_parts", "read_seconds"]

_Array: TypeAlias = np.ndarray[Any, Any]
_HOURS, _DAYS = 3600, 86_400
_FIRST, _LAST = -62_135_596_800, 253_402_300_799  # seconds of the years 1 to 9999


def read_parts(column: Timestamp, values: Values) -> list[_Array]:
    """Return the rows of each part of the times: 0 if missing, else 1 + the part from 0.

    Args:
        column: the description.
        values: the column of the table: times, dates, or whole numbers since 1970 in UTC.

    Returns:
        [N] int64 for each part.

    Raises:
        TypeError: the values are neither times nor whole numbers.
        ValueError: a time is outside the years 1 to 9999, as of numbers with another unit.
    """
    seconds, is_missing = read_seconds(values, UNITS[column.unit])
    parts: dict[str, Callable[[], _Array]] = {
        "hour": lambda: seconds // _HOURS % 24,
        "weekday": lambda: (seconds // _DAYS + 3) % 7,  # day 0 was a Thursday
        "day": lambda: _days(seconds) - _days(seconds).astype("M8[M]").astype("M8[D]"),
        "month": lambda: _days(seconds).astype("M8[M]").astype(np.int64) % 12,
    }
    rows = []
    for part in column.parts:
        row: _Array = parts[part]().astype(np.int64) + 1
        if is_missing is not None:
            row[is_missing] = 0
        rows.append(row)
    return rows


def read_seconds(values: Values, per_second: int) -> tuple[_Array, _Array | None]:
    """Read times as whole seconds since 1970 in UTC.

    Args:
        values: the column.
        per_second: unit of whole numbers, as parts of a second.

    Returns:
        [N] int64, rounded down, with 0 for missing times; and [N] bool, True for missing times, or
        None.

    Raises:
        TypeError: the values are neither times nor whole numbers.
        ValueError: a time is outside the years 1 to 9999, as of numbers with another unit.
    """
    array = decoded(values.array)
    if pa.types.is_date(array.type):
        array, per_second = array.cast(pa.timestamp("s")).cast(pa.int64()), 1
    elif pa.types.is_timestamp(array.type):
        array, per_second = array.cast(pa.int64()), UNITS[array.type.unit]
    numbers, is_missing = read_integers(values._replace(array=array), "times or whole numbers")
    seconds = numbers // per_second
    bad = (seconds < _FIRST) | (seconds > _LAST)
    values.reject(ValueError, "must have times of the years 1 to 9999", bad, "Set unit.")
    return seconds, is_missing


def _days(seconds: _Array) -> _Array:
    return (seconds // _DAYS).astype("M8[D]")

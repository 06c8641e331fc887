"""Columns of times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, final

import numpy as np
import pyarrow as pa

from recsys.base.arguments import names
from recsys.features.arrow import Values, read_integers, read_values, times_of
from recsys.features.columns import MISSING, Column, Feature, one_of
from recsys.features.transform import Bags

if TYPE_CHECKING:
    from recsys.features.fit import Fitted

__all__ = ["PART_SIZES", "UNITS", "Timestamp", "read_seconds"]

_Array: TypeAlias = np.ndarray[Any, Any]
PART_SIZES: Final = {"hour": 24, "weekday": 7, "day": 31, "month": 12}
"""Number of values of each part of a time."""
UNITS: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Units of times that are whole numbers, as parts of a second."""
_HOURS, _DAYS = 3600, 86_400
_FIRST, _LAST = -62_135_596_800, 253_402_300_799  # seconds of the years 1 to 9999


@final
@dataclass(frozen=True)
class Timestamp(Column):
    """Parts of a time in UTC, each a feature: `NAME_hour`, `NAME_weekday` (Monday is 1) and so on.

    Missing times have row 0 and parts start at row 1.

    Raises:
        TypeError: A value has another type.
        ValueError: A part or the unit is unknown.

    Example:
        >>> Timestamp("seen", parts=("hour",)).unit
        's'
    """

    name: str
    """Name of the column: times or dates, also as texts such as 2026-11-28, or whole numbers since
    1970."""
    _: KW_ONLY
    parts: tuple[str, ...] = ("hour", "weekday")
    """Some of "hour", "weekday", "day" (of the month) and "month"."""
    unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of whole numbers."""
    optional: bool = False
    """True if tables may lack the column: all its values are then missing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        subject = f"Timestamp {self.name!r}"
        parts = names(f"{subject}: parts", self.parts)
        for part in parts:
            one_of(f"{subject}: parts", part, PART_SIZES)
        object.__setattr__(self, "parts", tuple(parts))
        one_of(f"{subject}: unit", self.unit, UNITS)

    def feature_names(self) -> list[str]:
        """Return the names of the parts."""
        return [f"{self.name}_{part}" for part in self.parts]

    def features(self, fitted: Fitted) -> list[Feature]:
        """Return the feature of each part."""
        rows = [PART_SIZES[part] + 1 for part in self.parts]
        return [
            Feature(name, name, count, False, MISSING + 1)
            for name, count in zip(self.feature_names(), rows, strict=True)
        ]

    def read(self, table: Any, fitted: Fitted) -> list[Bags]:
        """Convert the times to rows: 0 if missing, else 1 + the part from 0."""
        values = read_values(table, self.name, False)
        seconds, is_missing = read_seconds(values, UNITS[self.unit])
        bags = []
        for part in self.parts:
            rows: _Array = _PARTS[part](seconds).astype(np.int64) + 1
            if is_missing is not None:
                rows[is_missing] = MISSING
            bags.append(Bags(rows, None, None))
        return bags

    def describe(
        self, fitted: Fitted, table: Any, tensors: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Return the entry of the column in the manifest of a package."""
        names = zip(self.parts, self.feature_names(), strict=True)
        return {
            "name": self.name,
            "kind": "time",
            "dtype": "int64",
            "per_second": UNITS[self.unit],
            "parts": [{"part": part, "tensor": tensors[name]} for part, name in names],
        }


def read_seconds(values: Values, per_second: int) -> tuple[_Array, _Array | None]:
    """Read times as whole seconds since 1970 in UTC.

    Args:
        values: The column.
        per_second: Unit of whole numbers, as parts of a second.

    Returns:
        [N] int64, rounded down, with 0 for missing times; and [N] bool, True for missing times, or
        None.

    Raises:
        TypeError: The values are neither times, texts of times nor whole numbers.
        ValueError: A time is outside the years 1 to 9999, as of numbers with another unit.
    """
    array = times_of(values, "times or whole numbers")
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


_PARTS: Final[dict[str, Callable[[_Array], _Array]]] = {
    "hour": lambda seconds: seconds // _HOURS % 24,
    "weekday": lambda seconds: (seconds // _DAYS + 3) % 7,  # day 0 was a Thursday
    "day": lambda seconds: _days(seconds) - _days(seconds).astype("M8[M]").astype("M8[D]"),
    "month": lambda seconds: _days(seconds).astype("M8[M]").astype(np.int64) % 12,
}
"""Each part of times in seconds since 1970, from 0."""

"""Division of rows into training, validation and test data."""

from __future__ import annotations

import zlib
from dataclasses import KW_ONLY, dataclass
from datetime import date, datetime
from typing import Any, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from recsys.base.arguments import finite, shown, wrong_type
from recsys.base.checked import check_fields
from recsys.features.arrow import key_kind, read_keys, read_values, times_of
from recsys.sparse.hashing import mix

__all__ = ["PARTS", "Split", "TimeSplit"]

_Array: TypeAlias = np.ndarray[Any, Any]
PARTS = ("train", "validation", "test")
"""The parts of a split."""


@final
@dataclass(frozen=True)
class Split:
    """A division by hash, of groups or of single rows.

    With `by`, the part of a row depends on `seed` and the row's value in this column alone: all
    rows of a user are in one part, also rows of later files. Strings are hashed by their UTF-8
    bytes, whole numbers by their 64 bits, so the column must have one of both in all files; in text
    files it has the type that a fitted spec has for it, else the type that is inferred. Without
    `by`, the part depends on `seed`, the name of the file with its partition folders (such as
    `day=7`) and without other folders, and the row's place in the file: its number, in CSV files
    the number of its block of 4 MiB and its number in the block. More files, other ranks and other
    batches do not change the part of a row; neither do rows that are appended to a file.

    Args:
        by: Column of strings or whole numbers; None: single rows.
        shares: Shares of training, validation and test rows, or of groups; they add up to 1.
        seed: Another number for another division.

    Raises:
        TypeError: A value has another type.
        ValueError: Shares are negative or do not add up to 1.

    Example:
        >>> data = pa.table({"user": ["ann", "bob", "ann", "cem"]})
        >>> Split("user", shares=(0.5, 0.25, 0.25)).parts_of(data, "x.parquet", np.arange(4))
        array([0, 0, 0, 2])
    """

    by: str | None = None
    _: KW_ONLY
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1)
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for share in self.shares:
            finite("Split.shares", share)
        if min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-9:
            raise ValueError(
                "Split.shares must be three numbers from 0 that add up to 1; received "
                f"{self.shares}."
            )

    @property
    def columns(self) -> list[str]:
        """Columns that `parts_of` reads."""
        return [] if self.by is None else [self.by]

    def filter_of(self, part: str, schema: Any) -> Any:
        """Return a filter of `pyarrow.dataset` that keeps at least the rows of a part, or None."""

    def parts_of(self, table: Any, file: str, rows: _Array) -> _Array:
        """Return the number of each row's part in `PARTS`.

        Args:
            table: An Arrow table with B rows.
            file: Name of the file.
            rows: [B] int64, places of the rows in the file.

        Raises:
            KeyError: The column is missing.
            TypeError: The column has neither strings nor whole numbers.
            ValueError: A value is missing.
        """
        if self.by is None:
            keys = rows ^ np.int64(zlib.crc32(file.encode()) << 31)
        else:
            values = read_values(table, self.by, False)
            read = read_keys(values, unsigned=True)
            if read.is_missing is not None:
                hint = "Remove the rows, or fill in a value."
                values.reject(ValueError, "must have no missing value", read.is_missing, hint)
            keys = read.hashed()
        salt = mix(torch.tensor([self.seed]))
        hashed = mix(mix(torch.from_numpy(np.array(keys, np.int64))) ^ salt).numpy()
        edges = np.cumsum(self.shares[:2]) * 2.0**53
        parts: _Array = np.searchsorted(edges, (hashed >> 10).astype(np.float64), "right")
        return parts


@final
@dataclass(frozen=True)
class TimeSplit:
    """A division by time: training before `validation`, tests from `test` on, and the rest between.

    Args:
        column: Column of times, dates or numbers, or of texts of times such as 2024-05-01.
        validation: First time of the validation data: a number, a date, a datetime, or an ISO 8601
            text such as "2024-05-01" for columns of times; a text without a zone is in UTC.
        test: First time of the test data.

    Raises:
        TypeError: A limit has another type.
        ValueError: `validation` is above `test`.

    Example:
        >>> split = TimeSplit("day", validation=20, test=25)
        >>> split.parts_of(pa.table({"day": [3, 20, 24, 25]}), "x.parquet", np.arange(4))
        array([0, 1, 1, 2])
    """

    column: str
    _: KW_ONLY
    validation: float | str | date | datetime
    test: float | str | date | datetime

    def __post_init__(self) -> None:
        for name in ("validation", "test"):
            limit = getattr(self, name)
            if isinstance(limit, bool) or not isinstance(limit, int | float | str | date):
                wrong_type(f"TimeSplit.{name}", "a number, a date, a datetime or a text", limit)
        if type(self.validation) is not type(self.test):
            raise TypeError(
                "TimeSplit.validation and TimeSplit.test must have one type; received "
                f"{shown(self.validation)} and {shown(self.test)}."
            )
        if self.validation > self.test:  # type: ignore[operator]  # of one type
            raise ValueError(
                "TimeSplit.validation must not be above TimeSplit.test; received "
                f"{shown(self.validation)} and {shown(self.test)}."
            )

    @property
    def columns(self) -> list[str]:
        """Columns that `parts_of` reads."""
        return [self.column]

    def filter_of(self, part: str, schema: Any) -> Any:
        """Return a filter of `pyarrow.dataset` that keeps at least the rows of a part, or None."""
        kind = schema.field(self.column).type
        if _is_text(kind):  # statistics compare texts
            return None
        low, high = self._limits(kind)
        field = pc.field(self.column)
        if part == "train":
            return (field < low) | field.is_null()  # missing times raise an error
        if part == "validation":
            return ((field >= low) & (field < high)) | field.is_null()
        return (field >= high) | field.is_null()

    def parts_of(self, table: Any, file: str, rows: _Array) -> _Array:
        """Return the number of each row's part in `PARTS`, as `Split.parts_of`."""
        values = read_values(table, self.column, False)
        times = times_of(values, "times, dates or numbers to divide by")
        is_missing = times.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
        values.reject(ValueError, "must have no missing time", is_missing, "Remove the rows.")
        low, high = self._limits(times.type)
        after = [
            pc.greater_equal(times, limit).to_numpy(zero_copy_only=False) for limit in (low, high)
        ]
        parts: _Array = after[0].astype(np.int64) + after[1]
        return parts

    def _limits(self, kind: Any) -> tuple[Any, Any]:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        try:
            first, second = pa.scalar(self.validation), pa.scalar(self.test)
            if pa.types.is_temporal(kind):
                if isinstance(self.validation, int | float):
                    raise pa.ArrowInvalid("numbers have no unit")
                return _as_time(first, kind), _as_time(second, kind)
            pc.greater_equal(pa.nulls(1, kind), first)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise TypeError(
                f"TimeSplit: the limits must have the type of column {self.column!r}, {kind}; "
                f"received {shown(self.validation)} and {shown(self.test)}."
            ) from error
        return first, second


def _is_text(kind: Any) -> bool:
    return key_kind(kind) == "text"


def _as_time(limit: Any, kind: Any) -> Any:
    """Convert a limit to a type of times; a text without a zone is in UTC.

    Raises:
        pyarrow.ArrowInvalid: the type does not have the limit exactly.
    """
    if pa.types.is_date(kind) and pa.types.is_timestamp(limit.type):
        day = limit.cast(kind)
        if day.cast(limit.type) != limit:
            raise pa.ArrowInvalid("the limit is within a day")
        return day
    if not pa.types.is_timestamp(kind) or kind.tz is None or not pa.types.is_string(limit.type):
        return limit.cast(kind)
    try:
        return limit.cast(kind)
    except pa.ArrowInvalid:
        return limit.cast(pa.timestamp(kind.unit)).cast(kind)

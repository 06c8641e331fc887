"""Rows and columns of files and tables, filtered, divided by a split and transformed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from recsys.base.arguments import MissingKeyError, shown, wrong_type
from recsys.datasets.partitions import file_name
from recsys.datasets.sources import Source, TextSource, Unit
from recsys.datasets.tables import located
from recsys.datasets.utils import Batch
from recsys.datasets.windows import join_rows

__all__ = [
    "PARTS",
    "PART_COLUMN",
    "RecordedSplit",
    "RowSplit",
    "Rows",
    "Selection",
    "Spec",
    "check_settings",
    "check_split",
    "filter_columns",
]

PARTS = ("train", "validation", "test")
"""Names of the parts of a split."""
PART_COLUMN = "part"
"""Partition column of prepared tables with the part of each row, in folders such as part=train."""
_Array: TypeAlias = np.ndarray[Any, Any]


class Spec(Protocol):
    """A description of columns, such as `recsys.features.FeatureSpec`."""

    def column_names(self, labels: bool = True) -> list[str]:
        """Return the names of the columns that `transform` reads."""

    def column_kinds(self) -> dict[str, str | None]:
        """Return "text", "number" or None, the kind of the values of each column of keys."""

    def optional_names(self) -> list[str]:
        """Return the names of the columns that tables may lack."""

    def transform(self, data: Any, *, labels: bool = True) -> Batch:
        """Convert a table to a batch."""


class RowSplit(Protocol):
    """A division of rows, such as `recsys.features.splits.Split`."""

    @property
    def columns(self) -> list[str]:
        """Columns that `parts_of` reads."""

    def filter_of(self, part: str, schema: Any) -> Any:
        """Return a filter of `pyarrow.dataset` that keeps at least the rows of a part, or None."""

    def parts_of(self, table: Any, file: str, rows: _Array) -> _Array:
        """Return the number of each row's part in `PARTS`."""


@final
@dataclass(frozen=True)
class RecordedSplit:
    """The parts that `recsys.prepare.prepare` wrote to folders such as part=train.

    Example:
        >>> RecordedSplit().parts_of(pa.table({"part": ["train", "test"]}), "x", np.arange(2))
        array([0, 2])
    """

    is_of_files = True
    """All rows of a file are of one part."""

    @property
    def columns(self) -> list[str]:
        """Columns that `parts_of` reads."""
        return [PART_COLUMN]

    def filter_of(self, part: str, schema: Any) -> Any:
        """Return a filter of `pyarrow.dataset` that keeps at least the rows of a part, or None."""

    def parts_of(self, table: Any, file: str, rows: _Array) -> _Array:
        """Return the number of each row's part in `PARTS`.

        Raises:
            ValueError: A value is not a part.
        """
        names = table.column(PART_COLUMN).to_pylist()
        for row, name in enumerate(names):
            if name not in PARTS:
                raise ValueError(
                    f"Column {PART_COLUMN!r} must have train, validation or test to read a part "
                    f"without split; received {shown(name)} in row {row}. Pass split, or write "
                    "the files by prepare(split=...)."
                )
        return np.array([PARTS.index(name) for name in names], np.int64)


class Rows(NamedTuple):
    """Rows of a unit that filter and split keep."""

    table: Any
    unit: Unit
    kept: _Array | None
    """Row numbers in the unit; None: all rows."""


@final
@dataclass(frozen=True)
class Selection:
    """The rows that a reader yields, and their columns.

    Raises:
        KeyError: A source does not have a column.
        TypeError: `spec` is not a spec, `split` not a split, or `filter` not an expression.
        ValueError: `part` is unknown, or the filter has other columns.
    """

    sources: tuple[Source, ...]
    """Files or tables with the same columns."""
    spec: Spec
    """Description of the columns."""
    filter: Any
    """An expression of `pyarrow.dataset`, or None."""
    split: RowSplit | None
    """A division of the rows, or None."""
    part: str | None
    """The part of the division to read; None without a split."""
    labels: bool
    """True if the tables have labels, sample weights and groups."""

    def __post_init__(self) -> None:
        check_settings(self.spec, self.split, self.filter)
        if self.split is not None or self.part is not None:
            if self.split is None:
                wrong_type(
                    "split",
                    "a Split or TimeSplit of recsys.datasets with part, except for files that "
                    "prepare(..., split=...) wrote",
                    self.split,
                )
            if self.part not in PARTS:
                raise ValueError(
                    "part must be 'train', 'validation' or 'test' with split; received "
                    f"{shown(self.part)}."
                )
        for source in self.sources:
            check_split(self.split, self.spec, source.path, source.schema.names)
            known = {*source.schema.names, *self.spec.optional_names()}
            if missing := [name for name in self.columns if name not in known]:
                raise MissingKeyError(
                    f"{source.path} must have the columns {missing}; it has {source.schema.names}."
                )

    @property
    def has_whole_units(self) -> bool:
        """True if filter and split keep all rows of the units."""
        return self.filter is None and getattr(self.split, "is_of_files", self.split is None)

    @cached_property
    def columns(self) -> list[str]:
        """Columns that spec, split and filter read."""
        wanted = self.spec.column_names(self.labels)
        divided = [] if self.split is None else self.split.columns
        filtered = filter_columns(self.filter, self.sources[0].schema)
        return list(dict.fromkeys([*wanted, *divided, *filtered]))

    def units(self) -> list[Unit]:
        """Return the units of all sources."""
        return [
            Unit(i, number, rows)
            for i, source in enumerate(self.sources)
            for number, rows in source.sizes
        ]

    def read(self, units: Sequence[Unit]) -> list[Rows]:
        """Return the rows of units that filter and split keep.

        Raises:
            ValueError: A file is damaged, or a value does not have the type of its column.
        """
        kept = []
        start = 0
        while start < len(units):  # one opening for units of one file
            source = units[start].source
            stop = start
            while stop < len(units) and units[stop].source == source:
                stop += 1
            by_number = {unit.number: unit for unit in units[start:stop]}
            parts = self.sources[source].read([*by_number], self.columns)
            for number, pairs in itertools.groupby(parts, lambda pair: pair[0]):
                table = pa.concat_tables([table for _, table in pairs])
                kept.append(self._select(table, by_number[number]))
            start = stop
        return [rows for rows in kept if rows.table.num_rows]

    def _select(self, table: Any, unit: Unit) -> Rows:
        is_kept: _Array | None = None
        if self.filter is not None:
            scanner = ds.dataset(table).scanner(columns={"kept": self.filter}, use_threads=False)
            column = scanner.to_table()["kept"].fill_null(False)
            is_kept = column.to_numpy(zero_copy_only=False)
        if self.split is not None:
            source = self.sources[unit.source]
            first = (
                unit.number << 32
                if isinstance(source, TextSource)
                else source.first_row(unit.number)
            )
            rows = np.arange(first, first + table.num_rows)
            with self._located([Rows(table, unit, None)]):
                parts = self.split.parts_of(table, file_name(source.path), rows)
            mine = parts == PARTS.index(str(self.part))
            is_kept = mine if is_kept is None else mine & is_kept
        if is_kept is None or is_kept.all():
            return Rows(table, unit, None)
        kept = np.flatnonzero(is_kept)
        return Rows(table.filter(pa.array(is_kept)), unit, kept)

    def transform(self, rows: Sequence[Rows]) -> Batch:
        """Return a batch of rows.

        Raises:
            TypeError: A column has values of another type.
            ValueError: A value is NaN, infinite or out of its range. The message names the column,
                the value, the file and the row in the file.
        """
        batches = []
        start = 0
        while start < len(rows):
            stop = start
            schema = rows[start].table.schema
            while stop < len(rows) and rows[stop].table.schema.equals(schema):
                stop += 1
            table = pa.concat_tables([part.table for part in rows[start:stop]])
            with self._located(rows[start:stop]):
                batches.append(self.spec.transform(table, labels=self.labels))
            start = stop
        return join_rows(batches)

    def _located(self, rows: Sequence[Rows]) -> AbstractContextManager[None]:
        """Return a context that names the file, and the row in the file, in errors of a window."""

        def place_of(row: int) -> tuple[str, int]:
            for part in rows:
                if row < part.table.num_rows:
                    break
                row -= part.table.num_rows
            source = self.sources[part.unit.source]
            if part.kept is not None:
                row = int(part.kept[row])
            return source.path, row + source.first_row(part.unit.number)

        return located(place_of)


def check_settings(spec: object, split: object, filter: object) -> None:
    """Check the types of settings of a reader.

    Raises:
        TypeError: `spec` is not a spec; `split` not a split and not None; or `filter` not an
            expression of `pyarrow.dataset` and not None.
    """
    if not callable(getattr(spec, "column_kinds", None)):
        wrong_type("spec", "a FeatureSpec of recsys.features", spec)
    if split is not None and not callable(getattr(split, "parts_of", None)):
        wrong_type("split", "a Split or TimeSplit of recsys.datasets", split)
    if filter is not None and not isinstance(filter, ds.Expression):
        wrong_type("filter", "an expression such as pyarrow.dataset.field('age') > 18", filter)


def check_split(split: RowSplit | None, spec: Spec, path: str, names: Sequence[str]) -> None:
    """Check that a file has the raw values that a split needs.

    Args:
        split: The split, or None.
        spec: Description of the columns; a prepared one lists columns without raw values.
        path: The file, for the message.
        names: The columns of the file.

    Raises:
        KeyError: The file does not have a column of the split.
        ValueError: The tables are prepared, and rows would be in other parts than the raw ones.
    """
    if split is None or getattr(split, "is_of_files", False):
        return
    remedy = (
        "Record the parts by prepare(..., split=...) when raw tables are prepared, and read them "
        "by part='train' without split."
    )
    if missing := [name for name in split.columns if name not in names]:
        raise MissingKeyError(
            f"{path} must have the columns of split, {missing}; it has {[*names]}. {remedy}"
        )
    converted: Sequence[str] = getattr(spec, "converted", ())
    gone = [name for name in split.columns if name in converted]
    if gone or (converted and not split.columns):
        received = f"converted values of {gone}" if gone else "rows in other files and places"
        raise ValueError(
            f"split must divide tables as it divides the raw ones; received {split} for the "
            f"prepared {path}, which has {received}. {remedy}"
        )


def filter_columns(filter: Any, schema: Any) -> list[str]:
    """Return the columns of a filter: all columns without which it cannot be computed.

    Args:
        filter: An expression of `pyarrow.dataset`, or None.
        schema: The columns of the table.

    Raises:
        ValueError: The table does not have a column of the filter, or not with this type.
    """
    if filter is None:
        return []
    columns = []
    for i, name in enumerate(schema.names):
        rest = schema.remove(i).empty_table()
        try:
            ds.dataset(rest).scanner(columns={"kept": filter}).to_table()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError):
            columns.append(name)
    try:
        ds.dataset(schema.empty_table()).scanner(columns={"kept": filter}).to_table()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError) as error:
        raise ValueError(
            f"filter must be an expression of the columns {schema.names}; received {filter}: "
            f"{error}"
        ) from error
    return columns


def checksums_of(sources: Sequence[Source]) -> list[int]:
    """Return the checksum of each source; 0 if none of it is read."""
    with ThreadPoolExecutor(16) as pool:
        return [*pool.map(lambda source: source.checksum() if source.sizes else 0, sources)]


def check_contents(sources: Sequence[Source], saved: Sequence[int], now: Sequence[int]) -> None:
    """Check that files have the content that they had when a state was saved.

    Args:
        sources: Files or tables.
        saved: Checksums of a state. Another number of them is an error of the settings.
        now: Checksums of the sources.

    Raises:
        ValueError: A file has another content.
    """
    if len(saved) != len(now):
        return
    changed = [
        s.path for s, before, after in zip(sources, saved, now, strict=True) if before != after
    ]
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise ValueError(
            "The state must be of a reader with the same files; received files that have changed "
            f"since the state was saved: {', '.join(changed[:5])}{more}. Restore their content, or "
            "begin an epoch with set_epoch."
        )

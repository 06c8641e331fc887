"""Counts of the values of a table, from which vocabularies are made and extended."""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.base.arguments import shown
from recsys.features.arrow import Keys
from recsys.features.text_hash import hash_texts
from recsys.features.vocabulary import FIRST, Vocabulary, equal_hashes

__all__ = ["Counts", "TableChange"]

_Array: TypeAlias = np.ndarray[Any, Any]
_PARTITIONS: Final = 64
_PART_ROWS: Final = 500
"""Memory of a part beside its rows, some kilobytes, as a number of rows."""
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_TYPES: Final = {"text": pa.large_string(), "number": pa.int64()}


@final
class TableChange(NamedTuple):
    """Numbers of values of a table in an extension of its vocabulary."""

    new: int
    """Values that were added."""
    kept: int
    """Values that keep their row."""
    absent: int
    """Kept values that the data does not have."""
    retired: int
    """Values that gave their row to new ones."""
    rare: int
    """Unknown values of the data below `min_count`."""
    left_out: int
    """Further unknown values of the data, for which `max_size` had no room."""


@final
class Counts:
    """Counts of the distinct values of a table's columns, in pieces that merge in any order.

    Args:
        limit: Number of distinct values in memory; above it, counts are moved to files.

    Example:
        >>> from recsys.features.arrow import Values, read_keys
        >>> counts = Counts()
        >>> counts.add("city", read_keys(Values("city", pa.array(["Oslo", "Rome", "Rome"]), None)))
        >>> counts.vocabulary(min_count=1, max_size=None).values.to_pylist()
        ['Rome', 'Oslo']
    """

    def __init__(self, limit: int = 50_000_000) -> None:
        self._limit = limit
        self._kind: str | None = None
        self._parts: list[Any] = []
        self._folder: str | None = None
        self._num_files = 0
        self._merged_rows = 0
        self._waiting_rows = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return one table, so that another process can merge it."""
        parts = [self.table()] if self._kind else []
        whole = {"_folder": None, "_num_files": 0, "_merged_rows": 0, "_waiting_rows": 0}
        return {"_limit": self._limit, "_kind": self._kind, "_parts": parts, **whole}

    def add(self, name: str, keys: Keys) -> None:
        """Count values.

        Args:
            name: The column, for messages.
            keys: Its values; missing ones are not counted.

        Raises:
            TypeError: Earlier values were texts and these are numbers, or the reverse.
        """
        numbers = keys.numbers if keys.is_missing is None else keys.numbers[~keys.is_missing]
        if not len(numbers):
            return
        if keys.texts is None:
            distinct, counts = np.unique(numbers, return_counts=True)
            values = pa.array(distinct)
        else:
            counts = np.bincount(numbers, minlength=len(keys.texts))
            values = keys.texts.filter(pa.array(counts > 0))
            counts = counts[counts > 0]
        self._append(name, keys.kind, pa.table({"value": values, "count": pa.array(counts)}))

    def merge(self, name: str, other: Counts) -> None:
        """Add the counts of another part of the data.

        Raises:
            TypeError: One part has texts and the other numbers.
        """
        if other._kind is not None:
            for part in other.partitions():
                self._append(name, other._kind, part)

    def table(self) -> Any:
        """Return an Arrow table of all values and counts, in no order."""
        empty = _counted(self._kind or "number").empty_table()
        return pa.concat_tables([empty, *self.partitions()])

    def checksum(self) -> int:
        """Return a sum over the values and their counts, which does not depend on their order."""
        total = 0
        for part in self.partitions():
            values = part["value"].combine_chunks()
            hashes = hash_texts(values) if self._kind == "text" else values.to_numpy()
            pairs = hashes.view(np.uint64) * _ODD + part["count"].to_numpy().view(np.uint64)
            pairs ^= pairs >> np.uint64(29)
            total += int((pairs * _ODD).sum(dtype=np.uint64))
        return total % 2**64

    def vocabulary(self, min_count: int, max_size: int | None) -> Vocabulary:
        """Return the values, ordered by falling count, then by value.

        A text with the hash of a text before it is left out, with a warning: it is an unknown
        value. Strangers can choose such texts, and must not end a fit by them.

        Args:
            min_count: Least count of a value.
            max_size: Largest number of values; None: no limit.
        """
        best = _Best(_counted(self._kind or "number"), max_size)
        for part in self.partitions():
            best.add(part.filter(pc.greater_equal(part["count"], min_count)))
        values = best.values()
        try:
            return Vocabulary(values)
        except ValueError:
            return Vocabulary(_without_equal_hashes(values, 0))

    def extended(
        self,
        name: str,
        vocabulary: Vocabulary,
        min_count: int,
        max_size: int | None,
        retire_after: int | None,
    ) -> tuple[Vocabulary, TableChange]:
        """Return a vocabulary with further values, in which known values keep their rows.

        New values take the rows of retired ones, the oldest first, then further rows, in the order
        of falling count, then by value. Values retire only if new ones need their rows.

        Args:
            name: The table, for messages.
            vocabulary: The vocabulary.
            min_count: Least count of a new value.
            max_size: Largest number of values; None: no limit.
            retire_after: Number of extensions without a value after which it may give its row to a
                new one; None: never.

        Returns:
            The vocabulary, and what changed.

        Raises:
            TypeError: The vocabulary has texts and the counts are of numbers, or the reverse.
        """
        if self._kind not in (None, vocabulary.kind) and len(vocabulary.values):
            raise TypeError(
                f"Table {name!r} must have {vocabulary.kind}s, as the data of fit; received "
                f"{self._kind}s. Cast the column."
            )
        kind = self._kind or vocabulary.kind
        old = vocabulary.values if len(vocabulary.values) else vocabulary.values.cast(_TYPES[kind])
        is_seen, best = np.zeros(len(old), bool), _Best(_counted(kind), max_size)
        num_rare = num_frequent = 0
        for part in self.partitions():
            values = part["value"].combine_chunks()
            rows = vocabulary.rows_of_values(values)
            is_seen[rows[rows >= FIRST] - FIRST] = True
            new = part.filter(pa.array(rows < FIRST))
            frequent = new.filter(pc.greater_equal(new["count"], min_count))
            num_rare += len(new) - len(frequent)
            num_frequent += len(frequent)
            best.add(frequent)
        ages = np.where(is_seen, 0, vocabulary.ages + 1)
        retired = np.empty(0, np.int64)
        if retire_after is not None:
            oldest = np.argsort(-ages, kind="stable")
            retired = oldest[ages[oldest] >= retire_after]
        values = best.values()
        values = _without_equal_hashes(pa.concat_arrays([old, values]), len(old)).slice(len(old))
        if max_size is not None:
            values = values.slice(0, max(max_size - len(old), 0) + len(retired))
        retired = retired[: len(values)]
        places = np.arange(len(old))
        places[retired] = len(old) + np.arange(len(retired))
        places = np.concatenate(
            [places, np.arange(len(old) + len(retired), len(old) + len(values))]
        )
        ages[retired] = 0
        ages = np.concatenate([ages, np.zeros(len(values) - len(retired), np.int64)])
        extended = Vocabulary(pa.concat_arrays([old, values]).take(pa.array(places)), ages)
        return extended, TableChange(
            new=len(values),
            kept=len(old) - len(retired),
            absent=int((~is_seen).sum()) - len(retired),
            retired=len(retired),
            rare=num_rare,
            left_out=num_frequent - len(values),
        )

    def _append(self, name: str, kind: str, part: Any) -> None:
        if self._kind not in (None, kind):
            raise TypeError(
                f"Column {name!r} must have one kind of value in all data of its table; received "
                f"{kind}s after {self._kind}s. Cast it."
            )
        self._kind = kind
        self._parts.append(part)
        self._waiting_rows += len(part) + _PART_ROWS
        if self._waiting_rows > min(self._limit, max(1_000_000, self._merged_rows)):
            self._merge_parts()
            if self._merged_rows > self._limit:
                self._move_to_files()

    def _merge_parts(self) -> None:
        self._parts = [_merged(self._parts)]
        self._merged_rows, self._waiting_rows = len(self._parts[0]), 0

    def _move_to_files(self) -> None:
        (part,) = self._parts
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="recsys-counts-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        values = part["value"].combine_chunks()
        hashes = hash_texts(values) if self._kind == "text" else values.to_numpy()
        places = pa.array((hashes ^ (hashes >> 32)) % _PARTITIONS)
        for place in range(_PARTITIONS):
            rows = part.filter(pc.equal(places, place))
            path = Path(self._folder, f"{place}-{self._num_files}.arrow")
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
                writer.write_table(rows)
        self._num_files += 1
        self._parts, self._merged_rows = [], 0

    def partitions(self) -> Any:
        """Yield tables of distinct values that have no value in common."""
        if self._folder is None:
            if self._parts:
                self._merge_parts()
                yield self._parts[0]
            return
        if self._parts:
            self._merge_parts()
            self._move_to_files()
        for place in range(_PARTITIONS):
            tables = []
            for number in range(self._num_files):
                path = Path(self._folder, f"{place}-{number}.arrow")
                with pa.OSFile(str(path)) as file:
                    tables.append(pa.ipc.open_file(file).read_all())
            yield _merged(tables)


@final
class _Best:
    """The values with the highest counts, in bounded memory.

    Args:
        schema: Columns "value" and "count".
        max_size: Number of values; None: no limit.
    """

    def __init__(self, schema: Any, max_size: int | None) -> None:
        self._table, self._max_size = schema.empty_table(), max_size

    def add(self, part: Any) -> None:
        """Add a table of values and counts."""
        self._table = pa.concat_tables([self._table, part])
        if self._max_size is not None and len(self._table) > 2 * self._max_size:
            self._table = _ordered(self._table).slice(0, self._max_size)

    def values(self) -> Any:
        """Return the values as one array, by falling count, then by value."""
        return _ordered(self._table).slice(0, self._max_size)["value"].combine_chunks()


def _counted(kind: str) -> Any:
    """Return the columns of counted values."""
    return pa.schema([("value", _TYPES[kind]), ("count", pa.int64())])


def _without_equal_hashes(values: Any, first_new: int) -> Any:
    """Return texts without texts that have the hash of a text before them; warn of them.

    Args:
        values: Texts or numbers; the ones before `first_new` are distinct.
        first_new: Position of the first value that may be left out.
    """
    if values.type == pa.int64() or len(values) == first_new:
        return values
    hashes = hash_texts(values)
    if len(np.unique(hashes)) == len(hashes):
        return values
    first, later = equal_hashes(hashes)
    warnings.warn(
        f"{shown(values[int(later[0])].as_py())} is left out of a vocabulary: it has the 64-bit "
        f"hash of {shown(values[first].as_py())}; so are {len(later) - 1} other texts. Spell a "
        "real value in another way.",
        UserWarning,
        stacklevel=6,
    )
    return values.take(pa.array(np.delete(np.arange(len(values)), later)))


def _merged(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    merged = pa.concat_tables(parts).group_by("value").aggregate([("count", "sum")])
    return merged.select(["value", "count_sum"]).rename_columns(["value", "count"])


def _ordered(table: Any) -> Any:
    return table.sort_by([("count", "descending"), ("value", "ascending")])

"""Vocabularies: the rows of values that were counted in training data."""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.base.arguments import shown
from recsys.features.arrow import Keys
from recsys.features.columns import MISSING
from recsys.features.hash_index import NumberPositions
from recsys.features.text_hash import hash_texts

__all__ = ["Counts", "Vocabulary"]

_Array: TypeAlias = np.ndarray[Any, Any]
_UNKNOWN: Final = 1
"""Row of the values that are not in a vocabulary."""
_FIRST: Final = 2
"""Row of the first value of a vocabulary."""
_PARTITIONS: Final = 64
_PART_ROWS: Final = 500
"""Memory of a part beside its rows, some kilobytes, as a number of rows."""
_TYPES: Final = {"text": pa.large_string(), "number": pa.int64()}


@final
class Vocabulary:
    """Rows of values: missing, unknown, then the values in their order.

    Args:
        values: Distinct values, an Arrow array of `large_string` or `int64`.

    Raises:
        ValueError: Values are not distinct.

    Example:
        >>> from recsys.features.arrow import Values, read_keys
        >>> vocabulary = Vocabulary(pa.array(["Rome", "Oslo"], pa.large_string()))
        >>> column = Values("city", pa.array(["Oslo", None, "Bonn"]), None)
        >>> vocabulary.rows_of(read_keys(column)).tolist()
        [3, 0, 1]
        >>> vocabulary.values_of(np.array([3, 0, 1, 2])).tolist()
        ['Oslo', None, None, 'Rome']
    """

    def __init__(self, values: Any) -> None:
        self.values = values
        self.kind = "number" if values.type == pa.int64() else "text"
        try:
            self._index = NumberPositions(self._hashes())
        except ValueError as error:
            first, later = _equal_hashes(self._hashes())
            raise ValueError(
                "The values of a vocabulary must be distinct, as must be their hashes; received "
                f"{_shown(values, first)} and {_shown(values, later[0])}. Remove one of them."
            ) from error

    @property
    def num_rows(self) -> int:
        """Number of rows of the table."""
        return len(self.values) + _FIRST

    @property
    def num_special_rows(self) -> int:
        """Number of first rows that are not values of the data: missing and unknown."""
        return _FIRST

    def by_hash(self) -> tuple[_Array, _Array]:
        """Return the rising hashes of the values, and their rows; [V] int64 each."""
        hashes = self._hashes()
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order + _FIRST

    def _hashes(self) -> _Array:
        """Return [V] int64; numbers are their own hashes."""
        if self.kind == "text":
            return hash_texts(self.values)
        numbers: _Array = self.values.to_numpy(zero_copy_only=False)
        return numbers

    def rows_of(self, keys: Keys) -> _Array:
        """Return [N] int64, the row of each value.

        Args:
            keys: Values of the kind of the vocabulary, unless it is empty.
        """
        if keys.is_missing is not None and keys.is_missing.all():
            return np.full(len(keys.numbers), MISSING)
        if keys.texts is None:
            places = self._index.find(keys.numbers)
        else:
            places = self._find_texts(keys.texts)[keys.numbers]
        rows = np.where(places < 0, _UNKNOWN, places + _FIRST)
        if keys.is_missing is not None:
            rows[keys.is_missing] = MISSING
        return rows

    def values_of(self, rows: _Array) -> _Array:
        """Return the value of each row, objects of the shape of `rows`; None for special rows.

        Args:
            rows: int64, of any shape; -1 stands for no row.

        Raises:
            ValueError: A row is outside the table.
        """
        if rows.size and not -1 <= int(rows.min()) <= int(rows.max()) < self.num_rows:
            raise ValueError(
                f"rows must be from -1 to {self.num_rows - 1}; received {int(rows.min())} to "
                f"{int(rows.max())}."
            )
        flat = rows.reshape(-1)
        places = pa.array(flat - _FIRST, mask=flat < _FIRST)
        values = np.empty(len(flat), object)
        values[:] = self.values.take(places).to_pylist()
        return values.reshape(rows.shape)

    def _find_texts(self, texts: Any) -> _Array:
        places = self._index.find(hash_texts(texts))
        if not len(self.values) or not len(texts):
            return places
        known = self.values.take(pa.array(np.maximum(places, 0)))
        is_equal = pc.equal(known, texts).to_numpy(zero_copy_only=False)
        return np.where(is_equal, places, -1)


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
            for part in other._partitions():
                self._append(name, other._kind, part)

    def table(self) -> Any:
        """Return an Arrow table of all values and counts, in no order."""
        kind = _TYPES[self._kind or "number"]
        empty = pa.schema([("value", kind), ("count", pa.int64())]).empty_table()
        return pa.concat_tables([empty, *self._partitions()])

    def vocabulary(self, min_count: int, max_size: int | None) -> Vocabulary:
        """Return the values, ordered by falling count, then by value.

        A text with the hash of a text before it is left out, with a warning: it is an unknown
        value. Strangers can choose such texts, and must not end a fit by them.

        Args:
            min_count: Least count of a value.
            max_size: Largest number of values; None: no limit.
        """
        kept = pa.schema([("value", _TYPES[self._kind or "number"]), ("count", pa.int64())])
        best = kept.empty_table()
        for part in self._partitions():
            frequent = part.filter(pc.greater_equal(part["count"], min_count))
            best = pa.concat_tables([best, frequent])
            if max_size is not None and len(best) > 2 * max_size:
                best = _ordered(best).slice(0, max_size)
        best = _ordered(best).slice(0, max_size)
        values = best["value"].combine_chunks()
        try:
            return Vocabulary(values)
        except ValueError:
            first, later = _equal_hashes(hash_texts(values))
            warnings.warn(
                f"{_shown(values, later[0])} is left out of a vocabulary: it has the 64-bit hash "
                f"of {_shown(values, first)}; so are {len(later) - 1} other texts. Spell a real "
                "value in another way.",
                UserWarning,
                stacklevel=5,
            )
        return Vocabulary(values.take(pa.array(np.delete(np.arange(len(values)), later))))

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

    def _partitions(self) -> Any:
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


def _equal_hashes(hashes: _Array) -> tuple[int, _Array]:
    """Return the first value with a hash that a later one has, and all such later ones."""
    order = np.argsort(hashes, kind="stable")
    later = np.sort(order[1:][hashes[order[1:]] == hashes[order[:-1]]])
    return int((hashes == hashes[later[0]]).argmax()), later


def _shown(values: Any, place: int) -> str:
    return shown(values[int(place)].as_py())


def _merged(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    merged = pa.concat_tables(parts).group_by("value").aggregate([("count", "sum")])
    return merged.select(["value", "count_sum"]).rename_columns(["value", "count"])


def _ordered(table: Any) -> Any:
    return table.sort_by([("count", "descending"), ("value", "ascending")])

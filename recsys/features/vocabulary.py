"""Vocabularies: the rows of values."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.base.arguments import shown
from recsys.features.arrow import Keys
from recsys.features.columns import MISSING
from recsys.features.fingerprints import fingerprint_of
from recsys.features.hash_index import NumberPositions
from recsys.features.text_hash import hash_texts, text_buffers
from recsys.modules.tables.fingerprints import remember_values

__all__ = ["FIRST", "Vocabulary", "equal_hashes"]

_Array: TypeAlias = np.ndarray[Any, Any]
_UNKNOWN: Final = 1
"""Row of the values that are not in a vocabulary."""
FIRST: Final = 2
"""Row of the first value of a vocabulary."""


@final
class Vocabulary:
    """Rows of values: missing, unknown, then the values in their order.

    Args:
        values: Distinct values, an Arrow array of `large_string` or `int64`.
        ages: [V] int64, the number of extensions since a value was last in the data; None: all
            values were in the last data.

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

    def __init__(self, values: Any, ages: _Array | None = None) -> None:
        self.values = values
        self.ages = np.zeros(len(values), np.int64) if ages is None else ages
        self.kind = "number" if values.type == pa.int64() else "text"
        try:
            self._index = NumberPositions(self._hashes())
        except ValueError as error:
            first, later = equal_hashes(self._hashes())
            raise ValueError(
                "The values of a vocabulary must be distinct, as must be their hashes; received "
                f"{_shown(values, first)} and {_shown(values, later[0])}. Remove one of them."
            ) from error

    @property
    def num_rows(self) -> int:
        """Number of rows of the table."""
        return len(self.values) + FIRST

    @property
    def num_special_rows(self) -> int:
        """Number of first rows that are not values of the data: missing and unknown."""
        return FIRST

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the values in their order: equal for equal rows."""
        parts = [self._hashes()]
        if self.kind == "text":
            offsets, data = text_buffers(self.values)
            parts = [np.diff(offsets), data[offsets[0] : offsets[-1]]]
        fingerprint = fingerprint_of(self.kind, *parts)
        remember_values(fingerprint, self)
        return fingerprint

    def by_hash(self) -> tuple[_Array, _Array]:
        """Return the rising hashes of the values, and their rows; [V] int64 each."""
        hashes = self._hashes()
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order + FIRST

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
        rows = np.where(places < 0, _UNKNOWN, places + FIRST)
        if keys.is_missing is not None:
            rows[keys.is_missing] = MISSING
        return rows

    def rows_of_values(self, values: Any) -> _Array:
        """Return [N] int64, the row of each value.

        Args:
            values: An Arrow array of `large_string` or `int64` without nulls.
        """
        if values.type == pa.int64():
            return self.rows_of(Keys(values.to_numpy(), None, None))
        return self.rows_of(Keys(np.arange(len(values)), values, None))

    def rows_in(self, other: Vocabulary) -> _Array:
        """Return [num_rows] int64, the row of each value in another vocabulary; -1: it has none.

        Missing and unknown values keep their rows.

        Args:
            other: The other vocabulary.

        Raises:
            TypeError: One has texts and the other numbers.

        Example:
            >>> old = Vocabulary(pa.array(["Rome", "Oslo"], pa.large_string()))
            >>> new = Vocabulary(pa.array(["Oslo", "Bonn"], pa.large_string()))
            >>> new.rows_in(old).tolist()
            [0, 1, 3, -1]
        """
        if self.kind != other.kind and len(self.values) and len(other.values):
            raise TypeError(
                f"The values of a table must have one kind; received {self.kind}s and, before, "
                f"{other.kind}s. Cast the column."
            )
        special = np.arange(FIRST)
        if not len(self.values) or not len(other.values):
            return np.concatenate([special, np.full(len(self.values), -1)])
        rows = other.rows_of_values(self.values)
        return np.concatenate([special, np.where(rows == _UNKNOWN, -1, rows)])

    def without(self, values: Any) -> Vocabulary:
        """Return the vocabulary without some values; the last ones take their rows.

        Args:
            values: An Arrow array of the type of the vocabulary; unknown values are left out.

        Example:
            >>> texts = pa.array(["Rome", "Oslo", "Bonn"], pa.large_string())
            >>> Vocabulary(texts).without(texts[:1]).values.to_pylist()
            ['Bonn', 'Oslo']
        """
        rows = self.rows_of_values(values)
        removed = np.unique(rows[rows >= FIRST]) - FIRST
        size = len(self.values) - len(removed)
        places = np.arange(size)
        tail = np.setdiff1d(np.arange(size, len(self.values)), removed)
        places[removed[removed < size]] = tail
        return Vocabulary(self.values.take(pa.array(places)), self.ages[places])

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
        places = pa.array(flat - FIRST, mask=flat < FIRST)
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


def equal_hashes(hashes: _Array) -> tuple[int, _Array]:
    """Return the first value with a hash that a later one has, and all such later ones."""
    order = np.argsort(hashes, kind="stable")
    later = np.sort(order[1:][hashes[order[1:]] == hashes[order[:-1]]])
    return int((hashes == hashes[later[0]]).argmax()), later


def _shown(values: Any, place: int) -> str:
    return shown(values[int(place)].as_py())

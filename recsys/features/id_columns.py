"""Columns of ids: values with a vocabulary, hashed values and row numbers.

Shapes: `B` rows, `N` ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import pyarrow as pa

from recsys.base.arguments import whole
from recsys.features.arrow import (
    Keys,
    Values,
    key_kind,
    numbers_of,
    read_keys,
    read_numbers,
    read_values,
    to_float32,
)
from recsys.features.columns import Column, Feature
from recsys.features.profiles import Profile, of_counts
from recsys.features.text_hash import hash_rows
from recsys.features.transform import Bags, without_missing

if TYPE_CHECKING:
    from recsys.features.counts import TableChange
    from recsys.features.fit import Fitted, PartialFit

__all__ = ["Categorical", "Hashed", "Ids", "read_id_weights"]

_Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _IdColumn(Column):
    """A column with an id, or a list of ids, per row."""

    is_unsigned = False
    """True if numbers from 2^63 on are legal."""
    has_numbers = False
    """True if the values of lists in texts are whole numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "table", self.table or self.name)
        if self.separator is not None and not (self.separator and self.is_list):
            raise ValueError(
                f"{type(self).__name__} {self.name!r}: separator must be a text that is not empty, "
                f"of a column with is_list=True; received {self.separator!r} and "
                f"is_list={self.is_list}."
            )

    def read(self, table: Any, fitted: Fitted) -> list[Bags]:
        """Read the ids and their weights."""
        values = read_values(table, self.name, self.is_list, separator=self.separator)
        if self.has_numbers and self.separator is not None:
            values = numbers_of(values, pa.int64())
        keys = read_keys(values, unsigned=self.is_unsigned)
        keys.check_kind(self.name, self.value_kind(fitted))
        weights = None
        if self.weights is not None:
            weights = read_id_weights(table, self.weights, values, keys.is_missing, self.separator)
        return [self._bags(values, keys, weights, fitted)]

    def _bags(self, values: Values, keys: Keys, weights: _Array | None, fitted: Fitted) -> Bags:
        """Convert values to ids."""
        raise NotImplementedError

    def describe(self, fitted: Fitted, table: Any, tensors: Mapping[str, str]) -> dict[str, Any]:
        """Return the entry of the column in the manifest of a package."""
        kind = "number" if self.has_numbers else self.value_kind(fitted)
        kind = kind or _type_of(table, self.name, self.is_list, self.separator)
        return {
            "name": self.name,
            "kind": type(self).__name__.lower(),
            "dtype": "text" if kind == "text" else "int64",
            "type": kind,
            "is_list": self.is_list,
            "weights": self.weights,
            "tensor": tensors[self.name],
            "table": self.table,
            "rows": None,
            **({} if self.separator is None else {"separator": self.separator}),
        }


@final
@dataclass(frozen=True)
class Categorical(_IdColumn):
    """Strings or whole numbers with a vocabulary, which `fit` collects.

    Rows of the table: 0 for missing values, 1 for values outside the vocabulary, then the
    vocabulary, ordered by falling count, then by value (numbers by size, texts by UTF-8 bytes). A
    missing list is an empty bag; a missing value in a list reads row 0.

    Raises:
        TypeError: A value has another type.
        ValueError: A number is below 1.

    Example:
        >>> Categorical("city", min_count=5, max_size=10_000).table
        'city'
        >>> from recsys.features import FeatureSpec
        >>> spec = FeatureSpec([Categorical("genres", is_list=True, separator="|")])
        >>> rows = {"genres": ["action|comedy", "", "comedy"]}
        >>> spec.fit(rows).transform(rows).sparse_features["genres"].to_dense()
        [tensor([3, 2]), tensor([], dtype=torch.int64), tensor([2])]
    """

    name: str
    """Name of the column and of the feature."""
    _: KW_ONLY
    min_count: int = 1
    """Least number of occurrences of a value of the vocabulary."""
    max_size: int | None = None
    """Largest number of values of the vocabulary; None: no limit."""
    is_list: bool = False
    """True if the rows are lists."""
    separator: str | None = None
    """Separator of the values of a list in a text, such as "|" in action|comedy, and of their
    weights; None: lists are not texts."""
    weights: str | None = None
    """Name of the column of weights, one number per value."""
    table: str | None = None
    """Name of the table, whose columns share a vocabulary. Default: the name of the column."""
    optional: bool = False
    """True if tables may lack the column: all its values are then missing."""

    needs_fit = True
    has_keys = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(f"Categorical {self.name!r}: min_count", self.min_count)
        if self.max_size is not None:
            whole(f"Categorical {self.name!r}: max_size", self.max_size)

    def features(self, fitted: Fitted) -> list[Feature]:
        """Return the feature, with the size of the vocabulary."""
        vocabulary = fitted.vocabularies[str(self.table)]
        special_rows = vocabulary.num_special_rows
        return [Feature(self.name, str(self.table), vocabulary.num_rows, False, special_rows)]

    def finish_extend(
        self,
        statistics: PartialFit,
        before: Fitted,
        fitted: Fitted,
        retire_after: int | None,
    ) -> TableChange | None:
        """Extend the vocabulary, if no column of the table did."""
        table = str(self.table)
        if table in fitted.vocabularies:
            return None
        fitted.vocabularies[table], change = statistics.counts[table].extended(
            table, before.vocabularies[table], self.min_count, self.max_size, retire_after
        )
        return change

    def profile(self, statistics: PartialFit, bins: list[Any] | None) -> Profile:
        """Return the shares of the most frequent values of the table."""
        missing = statistics.missing_share(self.name)
        return of_counts(statistics.counts[str(self.table)], missing, bins)

    def fingerprints(self, fitted: Fitted) -> dict[str, str]:
        """Return the fingerprint of the vocabulary."""
        return {self.name: fitted.vocabularies[str(self.table)].fingerprint}

    def value_kind(self, fitted: Fitted) -> str | None:
        """Return the kind of the values of the vocabulary."""
        vocabulary = fitted.vocabularies.get(str(self.table))
        return vocabulary.kind if vocabulary is not None and len(vocabulary.values) else None

    def fit(self, statistics: PartialFit, table: Any) -> None:
        """Count the values."""
        keys = read_keys(statistics.values(table, self.name, self.is_list, self.separator))
        statistics.counts[str(self.table)].add(self.name, keys)

    def finish_fit(self, statistics: PartialFit, fitted: Fitted) -> None:
        """Add the vocabulary, if no column of the table did."""
        table = str(self.table)
        if table not in fitted.vocabularies:
            vocabulary = statistics.counts[table].vocabulary(self.min_count, self.max_size)
            fitted.vocabularies[table] = vocabulary

    def _bags(self, values: Values, keys: Keys, weights: _Array | None, fitted: Fitted) -> Bags:
        ids = fitted.vocabularies[str(self.table)].rows_of(keys)
        return Bags(ids, values.lengths, weights)


@final
@dataclass(frozen=True)
class Hashed(_IdColumn):
    """Strings or 64-bit ids that are hashed to rows, without a vocabulary.

    Whole numbers have the rows of `recsys.sparse.hash_ids`; unsigned numbers keep their 64
    bits. A string counts as the number `recsys.features.text_hash.hash_texts` of its UTF-8 bytes.
    A missing value is an empty bag, or is left out of its list.

    Raises:
        TypeError: A value has another type.
        ValueError: The number of rows is below 1.

    Example:
        >>> Hashed("user", rows=100_000)
        Hashed(name='user', rows=100000, growing=False, is_list=False, separator=None, ...)
    """

    name: str
    """Name of the column and of the feature."""
    _: KW_ONLY
    rows: int
    """Number of rows of the table."""
    growing: bool = False
    """True for a table with `ids=HashedIds()`, which gives rows to ids as they come: the feature
    contains the 64-bit ids themselves."""
    is_list: bool = False
    """True if the rows are lists."""
    separator: str | None = None
    """Separator of the values of a list in a text, such as "|" in action|comedy, and of their
    weights; None: lists are not texts."""
    weights: str | None = None
    """Name of the column of weights, one number per value."""
    table: str | None = None
    """Name of the table. Default: the name of the column."""
    optional: bool = False
    """True if tables may lack the column: all its values are then missing."""

    has_keys = True
    is_unsigned = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(f"Hashed {self.name!r}: rows", self.rows)

    def features(self, fitted: Fitted) -> list[Feature]:
        """Return the feature."""
        return [Feature(self.name, str(self.table), self.rows, self.growing)]

    def fit(self, statistics: PartialFit, table: Any) -> None:
        """Add the kind of the values."""
        statistics.add_kind(self, table)

    def _bags(self, values: Values, keys: Keys, weights: _Array | None, fitted: Fitted) -> Bags:
        ids = keys.hashed()
        if not self.growing:
            ids = hash_rows(ids, self.rows)
        return without_missing(Bags(ids, values.lengths, weights), keys.is_missing)

    def describe(self, fitted: Fitted, table: Any, tensors: Mapping[str, str]) -> dict[str, Any]:
        """Return the entry of the column in the manifest of a package."""
        rows = None if self.growing else self.rows
        return {**super().describe(fitted, table, tensors), "rows": rows}


@final
@dataclass(frozen=True)
class Ids(_IdColumn):
    """Row numbers from 0 to `rows` - 1. A missing value is an empty bag.

    Raises:
        TypeError: A value has another type.
        ValueError: The number of rows is below 1, or below the number of special rows.

    Example:
        >>> Ids("film", rows=1682, is_list=True).rows
        1682
    """

    name: str
    """Name of the column and of the feature."""
    _: KW_ONLY
    rows: int
    """Number of rows of the table."""
    is_list: bool = False
    """True if the rows are lists."""
    separator: str | None = None
    """Separator of the values of a list in a text, such as "|" in action|comedy, and of their
    weights; None: lists are not texts."""
    weights: str | None = None
    """Name of the column of weights, one number per value."""
    table: str | None = None
    """Name of the table. Default: the name of the column."""
    special_rows: int = 0
    """Number of first rows that are not values of the data, such as missing and unknown."""
    fingerprint: str | None = None
    """Fingerprint of the values that the rows stand for, in prepared tables; None: not known."""
    optional: bool = False
    """True if tables may lack the column: all its values are then missing."""

    has_numbers = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(f"Ids {self.name!r}: rows", self.rows)
        whole(f"Ids {self.name!r}: special_rows", self.special_rows, 0, self.rows)

    def features(self, fitted: Fitted) -> list[Feature]:
        """Return the feature."""
        return [Feature(self.name, str(self.table), self.rows, False, self.special_rows)]

    def fingerprints(self, fitted: Fitted) -> dict[str, str]:
        """Return the fingerprint of the column, if it is known."""
        return {} if self.fingerprint is None else {self.name: self.fingerprint}

    def _bags(self, values: Values, keys: Keys, weights: _Array | None, fitted: Fitted) -> Bags:
        if keys.texts is not None:
            raise TypeError(
                f"Column {self.name!r} must have row numbers; received texts. Describe it "
                "by Categorical or Hashed."
            )
        bad = keys.numbers.view(np.uint64) >= self.rows  # negative numbers, too
        rule = f"must have row numbers from 0 to {self.rows - 1}"
        values.reject(ValueError, rule, bad, "Set rows to the size of the table.")
        return without_missing(Bags(keys.numbers, values.lengths, weights), keys.is_missing)


def read_id_weights(
    table: Any, name: str, ids: Values, is_missing: _Array | None, separator: str | None = None
) -> _Array:
    """Return [N] float32 weights of ids.

    Args:
        table: An Arrow table.
        name: The column of weights.
        ids: The column of ids.
        is_missing: [N] bool, True for missing ids, which need no weight; None: no id is missing.
        separator: Separator of the weights of a list in a text, or None.

    Raises:
        KeyError: There is no column of weights.
        TypeError: The weights are not numbers.
        ValueError: A row has another number of weights than of ids; or a weight is missing, NaN or
            infinite.
    """
    values = read_values(table, name, ids.lengths is not None, separator=separator)
    if separator is not None:
        values = numbers_of(values, pa.float64())
    lengths, wanted = np.asarray(values.lengths), np.asarray(ids.lengths)
    if ids.lengths is not None and not np.array_equal(lengths, wanted):
        row = int((lengths != wanted).argmax())
        raise ValueError(
            f"Column {name!r} must have one weight for each id of {ids.name!r}; "
            f"received {lengths[row]} weights and {wanted[row]} ids in row {row}."
        )
    numbers, lacks_weight = read_numbers(values)
    if lacks_weight is not None:
        bad = lacks_weight if is_missing is None else lacks_weight & ~is_missing
        values.reject(ValueError, "must have a weight for each id", bad, "Write 1.")
    return to_float32(values, numbers)


def _type_of(table: Any, name: str, is_list: bool, separator: str | None) -> str:
    """Return "text" or "number"."""
    kind = key_kind(read_values(table, name, is_list, separator=separator).array.type)
    if kind is None:
        raise TypeError(
            f"Column {name!r} of the example table must have a value, whose type requests have; "
            "all are missing."
        )
    return kind

"""Counts, sums and quantiles of the columns of a `FeatureSpec`, in pieces that merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from recsys.features.arrow import Values, key_kind, read_keys, read_values
from recsys.features.columns import Categorical, Column, Group, Hashed, Numeric
from recsys.features.scaling import Moments, Quantiles, read_scaled
from recsys.features.vocabulary import Counts, Vocabulary

__all__ = ["Fitted", "PartialFit"]

_Array: TypeAlias = np.ndarray[Any, Any]


@final
class Fitted(NamedTuple):
    """The state that `FeatureSpec.fit` finds in data."""

    num_rows: int
    """Number of rows of the data."""
    vocabularies: dict[str, Vocabulary]
    """Vocabularies, by table."""
    means: dict[str, float]
    """Means of `Numeric` columns, by column."""
    deviations: dict[str, float]
    """Standard deviations of `Numeric` columns, by column."""
    edges: dict[str, _Array]
    """Inner edges of the buckets of `Numeric` columns, by column; [K] float64."""
    kinds: dict[str, str]
    """Kinds of the values of `Hashed` and `Group` columns, "text" or "number", by column. A column
    that the data did not have, or only missing values of, has none."""

    def kind_of(self, column: Column) -> str | None:
        """Return the kind of the values of a column of keys; None: it is not known."""
        if isinstance(column, Categorical):
            vocabulary = self.vocabularies.get(str(column.table))
            return vocabulary.kind if vocabulary is not None and len(vocabulary.values) else None
        return self.kinds.get(column.name)


@final
class PartialFit:
    """The statistics of a part of the training data.

    `FeatureSpec.partial` makes one per part, in any process; `FeatureSpec.fit_parts` joins them.

    Args:
        columns: the columns of the spec.
        limit: number of distinct values of a vocabulary in memory; more are moved to temporary
            files.

    Example:
        >>> import pyarrow as pa
        >>> from recsys.features import Categorical
        >>> part = PartialFit([Categorical("city")])
        >>> part.add(pa.table({"city": ["Oslo", "Rome", "Oslo"]}))
        >>> part.num_rows
        3
    """

    def __init__(self, columns: Sequence[Column], limit: int = 50_000_000) -> None:
        self.columns = list(columns)
        self.limit = limit
        self.num_rows = 0
        self.counts: dict[str, Counts] = {}
        self.moments: dict[str, Moments] = {}
        self.quantiles: dict[str, Quantiles] = {}
        self.kinds: dict[str, str] = {}
        for column in columns:
            if isinstance(column, Categorical):
                self.counts.setdefault(str(column.table), Counts(limit))
            elif isinstance(column, Numeric):
                self.moments[column.name] = Moments.of(np.empty(0))
                if column.buckets is not None and column.spacing == "quantile":
                    self.quantiles[column.name] = Quantiles()

    def add(self, table: Any) -> None:
        """Count the rows of an Arrow table. The types of a table without rows count, too.

        Raises:
            KeyError: the table does not have a column.
            TypeError: a column has values of another type, or texts after numbers.
            ValueError: a value is NaN, infinite or out of its range.
        """
        for column in self.columns:
            if isinstance(column, Categorical):
                keys = read_keys(self._values(table, column.name, column.is_list))
                self.counts[str(column.table)].add(column.name, keys)
            elif isinstance(column, Numeric):
                numbers, is_missing = read_scaled(column, self._values(table, column.name, False))
                if is_missing is not None:
                    numbers = numbers[~is_missing]
                self.moments[column.name] = self.moments[column.name].merged(Moments.of(numbers))
                if column.name in self.quantiles:
                    self.quantiles[column.name].add(numbers)
            elif isinstance(column, Hashed | Group) and column.name in table.column_names:
                is_list = isinstance(column, Hashed) and column.is_list
                array = self._values(table, column.name, is_list).array
                if not table.num_rows or array.null_count < len(array):
                    self._add_kind(column.name, key_kind(array.type))
        self.num_rows += table.num_rows

    def _values(self, table: Any, name: str, is_list: bool) -> Values:
        return read_values(table, name, is_list)._replace(first_row=self.num_rows)

    def _add_kind(self, name: str, kind: str | None) -> None:
        if kind is not None and self.kinds.setdefault(name, kind) != kind:
            raise TypeError(
                f"Column {name!r} must have one kind of value in all data; received {kind}s after "
                f"{self.kinds[name]}s. Cast it."
            )

    def merge(self, other: PartialFit) -> None:
        """Add the statistics of another part.

        Raises:
            ValueError: the other part is of other columns.
            TypeError: a column has texts in one part and numbers in the other.
        """
        if other.columns != self.columns:
            raise ValueError(
                f"Parts must be of one spec; received parts with the columns "
                f"{[column.name for column in self.columns]} and "
                f"{[column.name for column in other.columns]}, or with other settings."
            )
        for name, counts in self.counts.items():
            counts.merge(name, other.counts[name])
        for name, moments in other.moments.items():
            self.moments[name] = self.moments[name].merged(moments)
        for name, quantiles in self.quantiles.items():
            quantiles.merge(other.quantiles[name])
        for name, kind in other.kinds.items():
            self._add_kind(name, kind)
        self.num_rows += other.num_rows

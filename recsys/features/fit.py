"""Counts, sums and quantiles of the columns of a `FeatureSpec`, in pieces that merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from recsys.features.arrow import Values, read_keys, read_values
from recsys.features.columns import Categorical, Column, Numeric
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
    """By table."""
    means: dict[str, float]
    """Means of `Numeric` columns, by column."""
    deviations: dict[str, float]
    """Standard deviations of `Numeric` columns, by column."""
    edges: dict[str, _Array]
    """Inner edges of the buckets of `Numeric` columns, by column; [K] float64."""


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
        for column in columns:
            if isinstance(column, Categorical):
                self.counts.setdefault(str(column.table), Counts(limit))
            elif isinstance(column, Numeric):
                self.moments[column.name] = Moments.of(np.empty(0))
                if column.buckets is not None and column.spacing == "quantile":
                    self.quantiles[column.name] = Quantiles()

    def add(self, table: Any) -> None:
        """Count the rows of an Arrow table.

        Raises:
            KeyError: the table does not have a column.
            TypeError: a column has values of another type.
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
        self.num_rows += table.num_rows

    def _values(self, table: Any, name: str, is_list: bool) -> Values:
        return read_values(table, name, is_list)._replace(first_row=self.num_rows)

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
        self.num_rows += other.num_rows

"""Counts, sums and quantiles of the columns of a `FeatureSpec`, in pieces that merge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from recsys.features.arrow import Values, key_kind, read_values, with_missing
from recsys.features.columns import Column
from recsys.features.counts import Counts
from recsys.features.fingerprints import fingerprint_of
from recsys.features.profiles import Profile
from recsys.features.scaling import Moments, Quantiles
from recsys.features.vocabulary import Vocabulary

__all__ = ["Fitted", "PartialFit"]

_Array: TypeAlias = np.ndarray[Any, Any]


def _zeros() -> list[int]:
    return [0, 0]


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
    profiles: dict[str, Profile] = {}  # noqa: RUF012  # never changed in place
    """Distributions of `Numeric` columns and of the tables of `Categorical` columns, by name."""
    digests: tuple[str, ...] = ()
    """Digests of the data of the last fits and extensions, the newest last; see
    `PartialFit.digest`."""
    converted: tuple[str, ...] = ()
    """Columns of prepared tables that do not have the values of the raw column of this name."""


@final
class PartialFit:
    """The statistics of a part of the training data.

    `FeatureSpec.partial` makes one per part, in any process; `FeatureSpec.fit_parts` joins them.

    Args:
        columns: The columns of the spec.
        limit: Number of distinct values of a vocabulary in memory; more are moved to temporary
            files.

    Attributes:
        num_rows: Number of rows.
        counts: Counts of the values of vocabularies, by table.
        moments: Mean, deviation and limits of numbers, by column.
        quantiles: Quantiles of numbers, by column.
        kinds: Kinds of values, "text" or "number", by column.
        samples: Samples of the numbers of columns, for their profiles.
        missing: Number of missing values, and of all values, by column.

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
        self.counts: defaultdict[str, Counts] = defaultdict(partial(Counts, limit))
        self.moments: defaultdict[str, Moments] = defaultdict(partial(Moments.of, np.empty(0)))
        self.quantiles: defaultdict[str, Quantiles] = defaultdict(Quantiles)
        self.kinds: dict[str, str] = {}
        self.samples: defaultdict[str, Quantiles] = defaultdict(Quantiles)
        self.missing: defaultdict[str, list[int]] = defaultdict(_zeros)

    @classmethod
    def joined(
        cls,
        columns: Sequence[Column],
        parts: Iterable[PartialFit],
        action: str,
        kinds: Mapping[str, str] = MappingProxyType({}),
    ) -> PartialFit:
        """Return the statistics of all parts.

        Args:
            columns: The columns of the spec.
            parts: The parts, of these columns.
            action: What needs rows, for the message.
            kinds: Kinds that the values must have, by column.

        Raises:
            TypeError: As for `merge`.
            ValueError: As for `merge`, or there are not rows.
        """
        whole = None
        for part in parts:
            if whole is None:
                whole = cls(columns, part.limit)
                whole.kinds |= kinds
            whole.merge(part)
        if whole is None or not whole.num_rows:
            raise ValueError(f"{action} needs at least one row; received none.")
        return whole

    def digest(self) -> str:
        """Return a digest of the statistics, which is equal for the same data."""
        parts: list[Any] = [self.num_rows, sorted(self.kinds.items())]
        for name, moments in sorted(self.moments.items()):
            numbers = (f"{moments.mean:.9g}", moments.low, moments.high)
            parts.append((name, moments.count, numbers))
        parts += [(name, counts.checksum()) for name, counts in sorted(self.counts.items())]
        return fingerprint_of(repr(parts))

    def add(self, table: Any) -> None:
        """Count the rows of an Arrow table. The types of a table without rows count, too.

        Raises:
            KeyError: The table does not have a column.
            TypeError: A column has values of another type, or texts after numbers.
            ValueError: A value is NaN, infinite or out of its range.
        """
        for column in self.columns:
            column.fit(self, with_missing(table, column.optional_names()))
        self.num_rows += table.num_rows

    def values(self, table: Any, name: str, is_list: bool, separator: str | None = None) -> Values:
        """Read a column; messages of errors count the rows of all tables.

        Args:
            table: An Arrow table.
            name: The column.
            is_list: True if the rows must be lists.
            separator: Separator of the values of lists in texts, or None.
        """
        values = read_values(table, name, is_list, separator=separator)
        self.missing[name][0] += values.array.null_count
        self.missing[name][1] += len(values.array)
        return values._replace(first_row=self.num_rows)

    def missing_share(self, name: str) -> float:
        """Return the share of the missing values of a column."""
        missing, total = self.missing[name]
        return missing / max(total, 1)

    def add_kind(self, column: Column, table: Any) -> None:
        """Add the kind of the values of a column, which the table may lack.

        Args:
            column: The column.
            table: An Arrow table. Without rows, the type of the column counts.

        Raises:
            TypeError: Earlier values were texts and these are numbers, or the reverse.
        """
        if column.name in table.column_names:
            array = self.values(table, column.name, column.is_list, column.separator).array
            if not table.num_rows or array.null_count < len(array):
                self._check_kind(column.name, key_kind(array.type))

    def _check_kind(self, name: str, kind: str | None) -> None:
        if kind is not None and self.kinds.setdefault(name, kind) != kind:
            raise TypeError(
                f"Column {name!r} must have one kind of value in all data; received {kind}s after "
                f"{self.kinds[name]}s. Cast it."
            )

    def merge(self, other: PartialFit) -> None:
        """Add the statistics of another part.

        Raises:
            ValueError: The other part is of other columns.
            TypeError: A column has texts in one part and numbers in the other.
        """
        if other.columns != self.columns:
            raise ValueError(
                f"Parts must be of one spec; received parts with the columns "
                f"{[column.name for column in self.columns]} and "
                f"{[column.name for column in other.columns]}, or with other settings."
            )
        for name, counts in other.counts.items():
            self.counts[name].merge(name, counts)
        for name, moments in other.moments.items():
            self.moments[name] = self.moments[name].merged(moments)
        for name, quantiles in other.quantiles.items():
            self.quantiles[name].merge(quantiles)
        for name, sample in other.samples.items():
            self.samples[name].merge(sample)
        for name, both in other.missing.items():
            self.missing[name] = [a + b for a, b in zip(self.missing[name], both, strict=True)]
        for name, kind in other.kinds.items():
            self._check_kind(name, kind)
        self.num_rows += other.num_rows

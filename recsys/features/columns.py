"""Columns of a table, and the features, labels and weights that a model gets from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias, final

from recsys.base.arguments import finite, names, repeated, shown, whole
from recsys.base.checked import check_fields

__all__ = [
    "MISSING",
    "PART_SIZES",
    "UNITS",
    "UNKNOWN",
    "Categorical",
    "Column",
    "Group",
    "Hashed",
    "Ids",
    "Label",
    "Numeric",
    "SampleWeight",
    "SparseColumn",
    "Timestamp",
    "check_columns",
]

MISSING = 0
"""Row of missing values in the tables of `Categorical`, `Numeric` with buckets and `Timestamp`."""
UNKNOWN = 1
"""Row of the values that are not in the vocabulary of a `Categorical`."""
PART_SIZES = {"hour": 24, "weekday": 7, "day": 31, "month": 12}
"""Number of values of each part of a time."""
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Units of times that are whole numbers, as parts of a second."""
_SPACINGS = ("quantile", "uniform")


def _one_of(subject: str, value: str, choices: Iterable[str]) -> None:
    listed = ", ".join(map(repr, choices))
    if value not in [*choices]:
        raise ValueError(f"{subject} must be one of {listed}; received {shown(value)}.")


@final
@dataclass(frozen=True)
class Categorical:
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
    weights: str | None = None
    """Name of the column of weights, one number per value."""
    table: str | None = None
    """Name of the table, whose columns share a vocabulary. Default: the name of the column."""

    def __post_init__(self) -> None:
        check_fields(self)
        whole(f"Categorical {self.name!r}: min_count", self.min_count)
        if self.max_size is not None:
            whole(f"Categorical {self.name!r}: max_size", self.max_size)
        object.__setattr__(self, "table", self.table or self.name)


@final
@dataclass(frozen=True)
class Hashed:
    """Strings or 64-bit ids that are hashed to rows, without a vocabulary.

    Whole numbers have the rows of `recsys.sparse.hash_ids`; unsigned numbers keep their 64
    bits. A string counts as the number `recsys.features.text_hash.hash_texts` of its UTF-8 bytes.
    A missing value is an empty bag, or is left out of its list.

    Raises:
        TypeError: A value has another type.
        ValueError: The number of rows is below 1.

    Example:
        >>> Hashed("user", rows=100_000)
        Hashed(name='user', rows=100000, growing=False, is_list=False, weights=None, table='user')
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
    weights: str | None = None
    """Name of the column of weights, one number per value."""
    table: str | None = None
    """Name of the table. Default: the name of the column."""

    def __post_init__(self) -> None:
        check_fields(self)
        whole(f"Hashed {self.name!r}: rows", self.rows)
        object.__setattr__(self, "table", self.table or self.name)


@final
@dataclass(frozen=True)
class Ids:
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
    weights: str | None = None
    """Name of the column of weights, one number per value."""
    table: str | None = None
    """Name of the table. Default: the name of the column."""
    special_rows: int = 0
    """Number of first rows that are not values of the data, such as missing and unknown."""

    def __post_init__(self) -> None:
        check_fields(self)
        whole(f"Ids {self.name!r}: rows", self.rows)
        whole(f"Ids {self.name!r}: special_rows", self.special_rows, 0, self.rows)
        object.__setattr__(self, "table", self.table or self.name)


@final
@dataclass(frozen=True)
class Numeric:
    """Numbers: one dense feature, or with `buckets` a feature with one row per bucket.

    The steps are, in this order: fill missing values, clip, log(1 + x), then standardize or divide
    into buckets. Missing values of a feature with buckets have row 0; buckets start at row 1.

    Raises:
        TypeError: A value has another type.
        ValueError: A number is out of its range, or `standardize` and `buckets` are combined.

    Example:
        >>> Numeric("price", clip=(0, 1e6), log1p=True, standardize=True).missing is None
        True
    """

    name: str
    """Name of the column and of the feature."""
    _: KW_ONLY
    missing: float | None = None
    """Value of missing numbers; None: the fitted mean of the numbers after clip and log."""
    clip: tuple[float, float] | None = None
    """Smallest and largest value."""
    log1p: bool = False
    """Replace x by the natural logarithm of 1 + x; x must be above -1."""
    standardize: bool = False
    """Subtract the mean and divide by the standard deviation (of the population); a constant column
    becomes 0."""
    buckets: int | None = None
    """Number of buckets."""
    spacing: Literal["quantile", "uniform"] = "quantile"
    """Buckets with the same number of values, or of the same width. Equal edges are joined with a
    warning; a value of many rows has a quantile edge above it, too."""

    def __post_init__(self) -> None:
        check_fields(self)
        subject = f"Numeric {self.name!r}"
        if self.missing is not None:
            finite(f"{subject}: missing", self.missing)
        if self.clip is not None:
            low, high = (finite(f"{subject}: clip", value) for value in self.clip)
            if low >= high:
                raise ValueError(
                    f"{subject}: clip must have a lower end below the upper end; received "
                    f"{self.clip}."
                )
            object.__setattr__(self, "clip", (float(low), float(high)))
        _one_of(f"{subject}: spacing", self.spacing, _SPACINGS)
        if self.buckets is not None:
            whole(f"{subject}: buckets", self.buckets, 2)
            if self.standardize:
                raise ValueError(
                    f"{subject}: buckets and standardize exclude each other. Leave one out."
                )


@final
@dataclass(frozen=True)
class Timestamp:
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
    """Name of the column: times or dates, or whole numbers since 1970."""
    _: KW_ONLY
    parts: tuple[str, ...] = ("hour", "weekday")
    """Some of "hour", "weekday", "day" (of the month) and "month"."""
    unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of whole numbers."""

    def __post_init__(self) -> None:
        check_fields(self)
        subject = f"Timestamp {self.name!r}"
        parts = names(f"{subject}: parts", self.parts)
        for part in parts:
            _one_of(f"{subject}: parts", part, PART_SIZES)
        object.__setattr__(self, "parts", tuple(parts))
        _one_of(f"{subject}: unit", self.unit, UNITS)


@final
@dataclass(frozen=True)
class Label:
    """A label: numbers from `low` to `high`. Several labels make a matrix, for several tasks.

    One of several labels may be missing in a row, such as the conversion of a sample without a
    click: the row counts for the other tasks only.

    Raises:
        TypeError: A value has another type.
        ValueError: `low` is above `high`.

    Example:
        >>> Label("rating", high=5).high
        5
    """

    name: str
    """Name of the column."""
    _: KW_ONLY
    low: float = 0.0
    """Smallest value."""
    high: float = 1.0
    """Largest value."""

    def __post_init__(self) -> None:
        check_fields(self)
        subject = f"Label {self.name!r}"
        if finite(f"{subject}: low", self.low) > finite(f"{subject}: high", self.high):
            raise ValueError(
                f"{subject}: low must not be above high; received {self.low} and {self.high}."
            )


@final
@dataclass(frozen=True)
class SampleWeight:
    """Weight of a sample in the loss: a number that is not negative.

    Example:
        >>> SampleWeight("weight").name
        'weight'
    """

    name: str
    """Name of the column."""

    def __post_init__(self) -> None:
        check_fields(self)


@final
@dataclass(frozen=True)
class Group:
    """Key of a group of samples, such as a session or a user: whole numbers or strings.

    Example:
        >>> Group("session").name
        'session'
    """

    name: str
    """Name of the column."""

    def __post_init__(self) -> None:
        check_fields(self)


SparseColumn: TypeAlias = Categorical | Hashed | Ids
"""Columns of ids."""
Column: TypeAlias = SparseColumn | Numeric | Timestamp | Label | SampleWeight | Group
"""Columns of a `FeatureSpec`."""


def check_columns(columns: Sequence[Column]) -> None:
    """Check that the columns of a spec fit together.

    Raises:
        ValueError: two features have one name, or columns with one table differ in its settings.
    """
    names: list[str] = []
    tables: list[str] = []  # of one feature each
    for column in columns:
        if isinstance(column, Timestamp):
            own = [f"{column.name}_{part}" for part in column.parts]
            names += own
            tables += own
        elif isinstance(column, Numeric | Categorical | Hashed | Ids):
            names.append(column.name)
            if isinstance(column, Numeric) and column.buckets is not None:
                tables.append(column.name)
    labels = [column.name for column in columns if isinstance(column, Label)]
    for kind in (SampleWeight, Group):
        if sum(isinstance(column, kind) for column in columns) > 1:
            raise ValueError(f"FeatureSpec.columns must have at most one {kind.__name__}.")
    if twice := repeated(names) or repeated(labels):
        raise ValueError(f"FeatureSpec.columns must have distinct names; received {twice} twice.")
    shared = {str(column.table) for column in columns if isinstance(column, SparseColumn)}
    if twice := repeated([*shared, *tables]):
        raise ValueError(
            f"Columns of buckets and times have tables of their own; received {twice} for further "
            "columns. Set table to another name."
        )
    by_table: dict[str, SparseColumn] = {}
    for column in columns:
        if not isinstance(column, SparseColumn):
            continue
        first = by_table.setdefault(str(column.table), column)
        one, other = _settings(first), _settings(column)
        differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if differing:
            texts = [
                ", ".join(f"{name}={own[name]!r}" for name in differing if name in own)
                for own in (one, other)
            ]
            raise ValueError(
                f"Columns of one table must have the same settings; received {texts[0]} for "
                f"{first.name!r} and {texts[1]} for {column.name!r}."
            )


def _settings(column: SparseColumn) -> dict[str, object]:
    """Return the settings of a column's table, and its kind, by name."""
    if isinstance(column, Categorical):
        return {"kind": "Categorical", "min_count": column.min_count, "max_size": column.max_size}
    if isinstance(column, Hashed):
        return {"kind": "Hashed", "rows": column.rows, "growing": column.growing}
    return {"kind": "Ids", "rows": column.rows, "special_rows": column.special_rows}

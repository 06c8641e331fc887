"""`Column`, the description of a column of a table and of its part of a batch.

The kinds of columns extend it, in `id_columns`, `numeric`, `times`, `vectors` and `samples`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from recsys.base.arguments import repeated, shown
from recsys.base.checked import check_fields

if TYPE_CHECKING:
    from recsys.features.counts import TableChange
    from recsys.features.fit import Fitted, PartialFit
    from recsys.features.profiles import Profile

__all__ = ["INPUTS", "KINDS", "MISSING", "Column", "Feature", "check_columns", "one_of"]

MISSING: Final = 0
"""Row of missing values in the tables of `Categorical`, `Numeric` with buckets and `Timestamp`."""
INPUTS: Final = ("sparse_features", "dense_features")
"""Parts of a batch that a model reads; tables without labels have their columns, too."""
_OWN_SETTINGS: Final = ("name", "is_list", "weights", "table", "separator", "optional")
"""Settings that may differ between columns with one table."""
KINDS: Final[dict[str, type[Column]]] = {}
"""The kinds of columns, by the name of the class."""


@final
class Feature(NamedTuple):
    """A feature with ids, and its table."""

    name: str
    table: str
    rows: int
    growing: bool
    special_rows: int = 0
    """Number of first rows that are not values of the data, such as missing and unknown."""


@dataclass(frozen=True)
class Column:
    """A column of a table, and its part of a batch.

    A kind of column is a frozen dataclass that extends this class. Its fields are texts, numbers,
    flags, None, and tuples of them. Specs, prepared tables and packages ask the column for
    everything that depends on its kind. A saved spec contains the name of the class and the fields:
    a program that loads it imports the module of the class first.

    Attributes:
        needs_fit: True if `read` needs values that `fit` finds.
        has_keys: True if values are texts or whole numbers, and `read` rejects the kind that the
            data of `fit` did not have. Text files are read with this kind.
        is_list: True if the rows are lists of ids.
        optional: True if tables may lack the column, in `fit` as in `read`.

    Raises:
        TypeError: A field has another type.

    Example:
        >>> from recsys.features import Timestamp
        >>> Timestamp("seen", parts=("hour",)).feature_names()
        ['seen_hour']
    """

    name: str
    """Name of the column."""

    needs_fit = False
    has_keys = False
    is_list = False
    optional = False

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def part(self) -> str:
        """Part of a `Batch` that the column fills: a member of `INPUTS`, or a target.

        Targets are "labels", "sample_weights" and "groups".
        """
        return "sparse_features"

    @property
    def table(self) -> str | None:
        """Table of the ids, which columns may share; None: each feature has one of its name."""
        return None

    @property
    def weights(self) -> str | None:
        """Name of the column of id weights, or None."""
        return None

    @property
    def separator(self) -> str | None:
        """Separator of the lists of the column, and of its weights, in texts; None: no texts."""
        return None

    @property
    def is_optional(self) -> bool:
        """True if tables to predict for may lack the column."""
        return self.optional

    def column_names(self) -> list[str]:
        """Return the columns that `fit` and `read` need, without id weights."""
        return [self.name]

    def optional_names(self) -> list[str]:
        """Return the columns that tables may lack, with id weights."""
        if not self.optional:
            return []
        return self.column_names() + ([] if self.weights is None else [self.weights])

    def feature_names(self) -> list[str]:
        """Return the names of the features, before and after `fit`."""
        return [self.name] if self.part in INPUTS else []

    def features(self, fitted: Fitted) -> list[Feature]:
        """Return the features with ids, one for each of `feature_names`.

        Args:
            fitted: The state of the spec.
        """
        return []

    def value_kind(self, fitted: Fitted) -> str | None:
        """Return the kind of the values, "text" or "number"; None: it is not known.

        Args:
            fitted: The state of the spec.
        """
        return fitted.kinds.get(self.name)

    def fit(self, statistics: PartialFit, table: Any) -> None:
        """Add the statistics of rows.

        Args:
            statistics: The statistics.
            table: An Arrow table.

        Raises:
            KeyError: The table does not have the column.
            TypeError: Values have another type.
            ValueError: A value is NaN, infinite or out of its range.
        """

    def finish_fit(self, statistics: PartialFit, fitted: Fitted) -> None:
        """Add the state of the column to the state of the spec.

        Args:
            statistics: The statistics of all rows.
            fitted: The state, of the columns before this one.
        """

    def finish_extend(
        self,
        statistics: PartialFit,
        before: Fitted,
        fitted: Fitted,
        retire_after: int | None,
    ) -> TableChange | None:
        """Add the state of the column to the state of an extended spec.

        Args:
            statistics: The statistics of all new rows.
            before: The state before.
            fitted: The state, of the columns before this one.
            retire_after: As for `FeatureSpec.extend`.

        Returns:
            What changed in the vocabulary of its table; None without one, or if an earlier column
            of the table returned it.
        """
        return None

    def profile(self, statistics: PartialFit, bins: list[Any] | None) -> Profile | None:
        """Return the distribution of the column; None if it is not known.

        Args:
            statistics: The statistics of all rows.
            bins: Bins of an earlier profile; None for new ones.
        """
        return None

    def fingerprints(self, fitted: Fitted) -> dict[str, str]:
        """Return the fingerprint of the fitted values of each feature that depends on them.

        Args:
            fitted: The state of the spec.

        Returns:
            By name of the feature. Other values of `fit` have another fingerprint.
        """
        return {}

    def check_fitted(self, fitted: Fitted) -> None:
        """Check that a state has the values that `read` needs.

        Args:
            fitted: A state that was loaded.

        Raises:
            KeyError: A value is missing.
        """
        self.features(fitted)

    def read(self, table: Any, fitted: Fitted) -> list[Any]:
        """Read the values of the column's part of a batch of B rows.

        Args:
            table: An Arrow table.
            fitted: The state of the spec.

        Returns:
            For "sparse_features", a `transform.Bags` for each feature; for "labels", a
            `samples.LabelValues`; else an array [B] for each feature or target: float32, and int64
            for groups.

        Raises:
            KeyError: The table does not have the column.
            TypeError: Values have another type.
            ValueError: A value is NaN, infinite or out of its range.
        """
        raise NotImplementedError(f"{type(self).__name__} columns must have a method read.")

    def describe(
        self, fitted: Fitted, table: Any, tensors: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Return the entry of the column in the manifest of a package; None for a target.

        Args:
            fitted: The state of the spec.
            table: An Arrow table with example rows, for types of values.
            tensors: Name of the model's tensor of each feature with ids.

        Raises:
            TypeError: Values have a type that requests cannot have, or packages do not have this
                kind of column.
        """
        if self.part not in INPUTS:
            return None
        raise TypeError(
            f"Columns of a package must have a method describe; received the {type(self).__name__} "
            f"column {self.name!r}. Leave it out, or write it to the data as another kind of "
            "column."
        )


def check_columns(columns: Sequence[Column]) -> None:
    """Check that the columns of a spec fit together.

    Raises:
        ValueError: Two features have one name, or columns with one table differ in its settings.
    """
    names = [name for column in columns for name in column.feature_names()]
    labels = [column.name for column in columns if column.part == "labels"]
    for part in ("sample_weights", "groups"):
        kinds = [type(column).__name__ for column in columns if column.part == part]
        if len(kinds) > 1:
            raise ValueError(f"FeatureSpec.columns must have at most one {kinds[0]}.")
    if twice := repeated(names) or repeated(labels):
        raise ValueError(f"FeatureSpec.columns must have distinct names; received {twice} twice.")
    sparse = [column for column in columns if column.part == "sparse_features"]
    shared = {column.table for column in sparse if column.table is not None}
    alone = [name for column in sparse if column.table is None for name in column.feature_names()]
    if twice := repeated([*shared, *alone]):
        raise ValueError(
            f"Columns of buckets and times have tables of their own; received {twice} for further "
            "columns. Set table to another name."
        )
    by_table: dict[str, Column] = {}
    for column in sparse:
        if column.table is None:
            continue
        first = by_table.setdefault(column.table, column)
        left, other = (_table_settings(column) for column in (first, column))
        differing = [name for name in {**left, **other} if left.get(name) != other.get(name)]
        if differing:
            texts = [
                ", ".join(f"{name}={settings[name]!r}" for name in differing if name in settings)
                for settings in (left, other)
            ]
            raise ValueError(
                f"Columns of one table must have the same settings; received {texts[0]} for "
                f"{first.name!r} and {texts[1]} for {column.name!r}."
            )


def _table_settings(column: Column) -> dict[str, object]:
    """Return the settings of a column's table, and its kind, by name."""
    settings = {name: value for name, value in asdict(column).items() if name not in _OWN_SETTINGS}
    return {"kind": type(column).__name__, **settings}


def one_of(subject: str, value: str, choices: Iterable[str]) -> None:
    """Check that a setting is one of several.

    Args:
        subject: The setting, for the message.
        value: Its value.
        choices: The legal values.

    Raises:
        ValueError: It is another value.
    """
    listed = ", ".join(map(repr, choices))
    if value not in [*choices]:
        raise ValueError(f"{subject} must be one of {listed}; received {shown(value)}.")

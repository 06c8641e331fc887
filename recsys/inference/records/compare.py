"""Comparison of a record of requests with the training data."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from recsys.base.arguments import wrong_type
from recsys.features.extend import shifts_of
from recsys.features.fit import PartialFit
from recsys.features.profiles import Shift
from recsys.features.spec import FeatureSpec

__all__ = ["RecordReport", "compare_record"]


@final
class RecordReport(NamedTuple):
    """Differences of a record from the training data; as text, a line per column."""

    num_rows: int
    shifts: dict[str, Shift]
    """Differences of the `Numeric` and `Categorical` columns, by column; only the first column of
    a table has one."""

    def __str__(self) -> str:
        lines = [f"{name}: {shift}" for name, shift in self.shifts.items()]
        return "\n".join([f"{self.num_rows:,} rows", *lines])


def compare_record(record: Any, spec: FeatureSpec) -> RecordReport:
    """Compare a record of requests with the data of a spec, column by column.

    A column of numbers is compared by the deciles of the data of `fit`, a column of values by its
    20 most frequent values. `FeatureSpec.extend` reports the same differences.

    Args:
        record: The files of a `Recording` or of `join_labels`, or other rows with the raw columns:
            as for `FeatureSpec.fit`.
        spec: The fitted spec of the package.

    Raises:
        KeyError: The record does not have a column.
        TypeError: A column has values of another type.
        ValueError: There are not rows, or a value is NaN, infinite or out of its range.

    Example:
        >>> from recsys.features import Categorical, Numeric
        >>> spec = FeatureSpec([Categorical("city"), Numeric("age", standardize=True)])
        >>> days = {"city": ["Oslo", "Rome"] * 50, "age": range(100)}
        >>> print(compare_record({"city": ["Rome"] * 9, "age": range(91, 100)}, spec.fit(days)))
        9 rows
        city: missing 0.0% -> 0.0%, stability index 4.604
        age: missing 0.0% -> 0.0%, stability index 8.097
    """
    if not isinstance(spec, FeatureSpec):
        wrong_type("compare_record.spec", "a FeatureSpec", spec)
    before, part = spec.fitted, spec.partial(record)
    statistics = PartialFit.joined(spec.columns, [part], "compare_record", before.kinds)
    return RecordReport(statistics.num_rows, shifts_of(spec.columns, before, statistics))

"""Columns of numbers.

Shapes: `N` values.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.base.arguments import finite, whole
from recsys.features.arrow import Values, read_numbers, read_values, to_float32
from recsys.features.columns import MISSING, Column, Feature, one_of
from recsys.features.fingerprints import fingerprint_of
from recsys.features.profiles import Profile, of_numbers
from recsys.features.scaling import Moments
from recsys.features.transform import Bags

if TYPE_CHECKING:
    from recsys.features.counts import TableChange
    from recsys.features.fit import Fitted, PartialFit

__all__ = ["Numeric"]

_Array: TypeAlias = np.ndarray[Any, Any]
_SAMPLE = 4096
"""Numbers of a piece of the data that count in a profile, or twice as many."""
_SPACINGS = ("quantile", "uniform")


@final
@dataclass(frozen=True)
class Numeric(Column):
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
    fingerprint: str | None = None
    """Fingerprint of the mean and the deviation that have scaled the numbers of a prepared table;
    None: the numbers are not scaled yet."""
    optional: bool = False
    """True if tables may lack the column: all its values are then missing."""

    needs_fit = True

    def __post_init__(self) -> None:
        super().__post_init__()
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
        one_of(f"{subject}: spacing", self.spacing, _SPACINGS)
        if self.buckets is not None:
            whole(f"{subject}: buckets", self.buckets, 2)
            if self.standardize:
                raise ValueError(
                    f"{subject}: buckets and standardize exclude each other. Leave one out."
                )

    @property
    def part(self) -> str:
        """Part of a batch: with buckets, the features with ids."""
        return "dense_features" if self.buckets is None else "sparse_features"

    @property
    def is_optional(self) -> bool:
        """True if the value of missing numbers is stated, or tables may lack the column."""
        return self.optional or self.missing is not None

    def features(self, fitted: Fitted) -> list[Feature]:
        """Return the sparse feature whose ids are bucket numbers."""
        if self.buckets is None:
            return []
        rows = len(fitted.edges[self.name]) + 2
        return [Feature(self.name, self.name, rows, False, MISSING + 1)]

    def fit(self, statistics: PartialFit, table: Any) -> None:
        """Add the sums of the numbers, and their quantiles for buckets of equal shares."""
        numbers, is_missing = self._scaled(statistics.values(table, self.name, False))
        numbers = numbers if is_missing is None else numbers[~is_missing]
        moments = statistics.moments[self.name].merged(Moments.of(numbers))
        statistics.moments[self.name] = moments
        statistics.samples[self.name].add(numbers[:: max(len(numbers) // _SAMPLE, 1)])
        if self.buckets is not None and self.spacing == "quantile":
            statistics.quantiles[self.name].add(numbers)

    def finish_fit(self, statistics: PartialFit, fitted: Fitted) -> None:
        """Add mean, deviation and edges."""
        moments = statistics.moments[self.name]
        fitted.means[self.name], fitted.deviations[self.name] = moments.mean, moments.deviation
        if self.buckets is not None:
            fitted.edges[self.name] = self._edges(statistics, self.buckets)

    def finish_extend(
        self,
        statistics: PartialFit,
        before: Fitted,
        fitted: Fitted,
        retire_after: int | None,
    ) -> TableChange | None:
        """Keep mean, deviation and edges."""
        fitted.means[self.name] = before.means[self.name]
        fitted.deviations[self.name] = before.deviations[self.name]
        if self.buckets is not None:
            fitted.edges[self.name] = before.edges[self.name]
        return None

    def _edges(self, statistics: PartialFit, buckets: int) -> _Array:
        """Return the inner edges of buckets, [K] float64; warn if edges are equal."""
        moments = statistics.moments[self.name]
        if not moments.count:
            return np.empty(0)
        if self.spacing == "uniform":
            edges = np.unique(np.linspace(moments.low, moments.high, buckets + 1)[1:-1])
        else:
            edges = statistics.quantiles[self.name].edges(buckets)
        if len(edges) < buckets - 1:
            warnings.warn(
                f"Numeric {self.name!r} has {len(edges) + 1} buckets instead of {buckets}: many "
                "values are equal. Pass fewer buckets, or describe a column of few distinct whole "
                "numbers by Categorical.",
                UserWarning,
                stacklevel=5,
            )
        return edges

    def profile(self, statistics: PartialFit, bins: list[Any] | None) -> Profile:
        """Return the shares of bins of the numbers, after clip and log."""
        missing = statistics.missing_share(self.name)
        return of_numbers(statistics.samples[self.name], missing, bins)

    def fingerprints(self, fitted: Fitted) -> dict[str, str]:
        """Return the fingerprint of the edges, or of the mean and the deviation, if they are used.

        A dense feature of a prepared table has the one of the fit that scaled it.
        """
        if self.fingerprint is not None:
            return {self.name: self.fingerprint}
        if self.buckets is not None:
            return {self.name: fingerprint_of("edges", fitted.edges[self.name])}
        mean, deviation = fitted.means[self.name], fitted.deviations[self.name]
        scale = [mean, deviation] if self.standardize else [mean]
        return {self.name: fingerprint_of("scale", np.array(scale))}

    def check_fitted(self, fitted: Fitted) -> None:
        """Check that there are mean, deviation and edges."""
        super().check_fitted(fitted)
        _ = fitted.means[self.name], fitted.deviations[self.name]

    def read(self, table: Any, fitted: Fitted) -> list[Any]:
        """Read the dense feature, or the rows of the buckets."""
        if self.is_optional and self.name not in table.column_names:
            values = Values(self.name, pa.nulls(table.num_rows), None)
        else:
            values = read_values(table, self.name, False)
        numbers, is_missing = self._scaled(values)
        if self.buckets is not None:
            rows = np.searchsorted(fitted.edges[self.name], numbers, "right") + 1
            if is_missing is not None:
                rows[is_missing] = MISSING
            return [Bags(rows, None, None)]
        mean = fitted.means[self.name]
        if is_missing is not None:
            numbers = np.where(is_missing, mean, numbers)
        if self.standardize:
            numbers = (numbers - mean) / fitted.deviations[self.name]
        return [to_float32(values, numbers)]

    def _scaled(self, values: Values) -> tuple[_Array, _Array | None]:
        """Fill, clip and take logarithms of numbers.

        Returns:
            [N] float64, with 0 for numbers that are missing and not filled; and [N] bool, True for
            these numbers, or None.

        Raises:
            TypeError: The values are not numbers.
            ValueError: A number is NaN, infinite or, after clip and log, outside the range of
                float32; or is -1 or less with `log1p`.
        """
        numbers, is_missing = read_numbers(values)
        if is_missing is not None and self.missing is not None:
            numbers = np.where(is_missing, self.missing, numbers)
            is_missing = None
        if self.clip is not None:
            numbers = np.clip(numbers, *self.clip)
        if self.log1p:
            bad = numbers <= -1 if is_missing is None else (numbers <= -1) & ~is_missing
            values.reject(ValueError, "must have numbers above -1 for log1p", bad, "Clip them.")
            safe = numbers if is_missing is None else np.where(is_missing, 0.0, numbers)
            # Arrow calls the C library's log1p, as the C++ core does. NumPy's last bit differs.
            numbers = pc.log1p(pa.array(safe)).to_numpy(zero_copy_only=False)
        to_float32(values, numbers)
        return numbers, is_missing

    def describe(
        self, fitted: Fitted, table: Any, tensors: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Return the entry of the column in the manifest of a package."""
        low, high = self.clip or (None, None)
        is_single = (
            self.name in table.column_names and table.schema.field(self.name).type == pa.float32()
        )
        entry = {
            "name": self.name,
            "kind": "numeric" if self.buckets is None else "buckets",
            "dtype": "float32" if is_single else "float64",
            "missing": self.missing,
            "low": low,
            "high": high,
            "log1p": self.log1p,
            "standardize": self.standardize,
            "mean": fitted.means[self.name],
            "deviation": fitted.deviations[self.name],
        }
        if self.buckets is not None:
            edges = fitted.edges[self.name].tolist()
            entry |= {"tensor": tensors[self.name], "edges": edges}
        return entry

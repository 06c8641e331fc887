"""Profiles of columns: the share of missing values, and how the others are distributed."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.features.counts import Counts
from recsys.features.scaling import Quantiles

__all__ = ["Profile", "Shift", "of_counts", "of_numbers", "stability_index"]

_Array: TypeAlias = np.ndarray[Any, Any]
_NUM_BINS: Final = 10
_NUM_VALUES: Final = 20
_LEAST_SHARE: Final = 1e-4
"""Share of an empty bin, as its logarithm is needed."""


@final
class Profile(NamedTuple):
    """The distribution of a column."""

    missing: float
    """Share of missing values."""
    bins: list[Any]
    """Inner edges of bins of numbers, or the most frequent values."""
    shares: list[float]
    """Share of each bin among the present values; of values, last the share of all others."""


@final
class Shift(NamedTuple):
    """Difference of a column from the data before."""

    missing: tuple[float, float]
    """Share of missing values, before and now."""
    stability_index: float
    """Population stability index: below 0.1 little has changed, above 0.25 much."""

    def __str__(self) -> str:
        before, now = self.missing
        return f"missing {before:.1%} -> {now:.1%}, stability index {self.stability_index:.3f}"


def stability_index(before: _Array, after: _Array) -> float:
    """Return the population stability index of two distributions over the same bins.

    The sum of `(after - before) * log(after / before)` (Siddiqi, "Credit Risk Scorecards", 2006).
    A share below 0.0001 counts as 0.0001.

    Args:
        before: [K] shares.
        after: [K] shares.

    Example:
        >>> round(stability_index(np.array([0.5, 0.5]), np.array([0.25, 0.75])), 3)
        0.275
    """
    old, new = (np.maximum(np.asarray(shares), _LEAST_SHARE) for shares in (before, after))
    return float(((new - old) * np.log(new / old)).sum())


def of_numbers(sample: Quantiles, missing: float, bins: list[float] | None) -> Profile:
    """Return the profile of numbers.

    Args:
        sample: A sample of the present numbers.
        missing: Share of missing values.
        bins: Inner edges; None for the deciles.
    """
    if bins is None:
        bins = np.unique(sample.at(np.arange(1, _NUM_BINS) / _NUM_BINS)).tolist()
    return Profile(missing, bins, sample.shares(np.array(bins)).tolist())


def of_counts(counts: Counts, missing: float, bins: list[Any] | None) -> Profile:
    """Return the profile of values.

    Args:
        counts: Counts of the present values.
        missing: Share of missing values.
        bins: Values; None for the most frequent ones.
    """
    if bins is None:
        bins = counts.vocabulary(1, _NUM_VALUES).values.to_pylist()
    of_bins, total = np.zeros(len(bins) + 1), 0
    for part in counts.partitions():
        total += pc.sum(part["count"]).as_py() or 0
        if bins and isinstance(bins[0], str) != (part["value"].type != pa.int64()):
            continue  # numbers after texts, of values below min_count
        chosen = part.filter(pc.is_in(part["value"], value_set=pa.array(bins, part["value"].type)))
        for value, count in zip(*(chosen[n].to_pylist() for n in ("value", "count")), strict=True):
            of_bins[bins.index(value)] += count
    of_bins[-1] = total - of_bins.sum()
    return Profile(missing, bins, (of_bins / max(total, 1)).tolist())

"""Numbers of the rows of a segment, such as a country, for one or two models.

Shapes: `N` rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch

from recsys.features.profiles import stability_index
from recsys.metrics import auc

__all__ = ["Numbers", "auc_change", "drift_of", "numbers_of", "segments_of", "squared_errors_of"]

_Array: TypeAlias = np.ndarray[Any, Any]
_FOLDS = 20
_BINS = 10


@final
class Numbers(NamedTuple):
    """Numbers of a model on some rows."""

    rows: int
    label_mean: float
    prediction_mean: float
    auc: float
    """Exact area under the ROC curve; NaN if all labels are equal, and for numbers."""
    loss: float
    """Log loss per row, or squared error for numbers."""

    @property
    def calibration(self) -> float:
        """Mean prediction divided by the mean label; 1 if both are 0."""
        if not self.label_mean:
            return float("inf") if self.prediction_mean else 1.0
        return self.prediction_mean / self.label_mean


def numbers_of(predictions: _Array, labels: _Array) -> Numbers:
    """Return the numbers of some rows.

    Args:
        predictions: [N] float64, probabilities.
        labels: [N] float64, 0 or 1.

    Example:
        >>> numbers_of(np.array([0.2, 0.8]), np.array([0.0, 1.0])).auc
        1.0
    """
    if not len(labels):
        return Numbers(0, 0.0, 0.0, float("nan"), float("nan"))
    clipped = np.clip(predictions, 1e-7, 1 - 1e-7)
    loss = -(labels * np.log(clipped) + (1 - labels) * np.log1p(-clipped)).mean()
    area = float(auc(torch.from_numpy(predictions), torch.from_numpy(labels)))
    means = float(labels.mean()), float(predictions.mean())
    return Numbers(len(labels), *means, area, float(loss))


def squared_errors_of(predictions: _Array, labels: _Array) -> Numbers:
    """Return the numbers of some rows with labels that are numbers.

    Args:
        predictions: [N] float64.
        labels: [N] float64.

    Example:
        >>> squared_errors_of(np.array([1.0, 2.0]), np.array([1.0, 4.0])).loss
        2.0
    """
    if not len(labels):
        return Numbers(0, 0.0, 0.0, float("nan"), float("nan"))
    means = float(labels.mean()), float(predictions.mean())
    return Numbers(len(labels), *means, float("nan"), float(((predictions - labels) ** 2).mean()))


def auc_change(after: _Array, before: _Array, labels: _Array) -> tuple[float, float]:
    """Return the difference of the AUC of two models on the same rows, and its standard error.

    The error is the standard error of the mean of up to 20 differences, each of a part of the rows
    (the method of batch means). The rows of each label are dealt to the parts one by one.

    Args:
        after: [N] predictions of the later model.
        before: [N] predictions of the earlier one.
        labels: [N], 0 or 1.

    Returns:
        NaN and infinity if there are fewer than two rows of a label.
    """
    folds = int(min(_FOLDS, labels.sum(), (1 - labels).sum()))
    if folds < 2:
        return float("nan"), float("inf")
    order = np.argsort(labels, kind="stable")
    first = len(labels) - int(labels.sum())
    parts = [np.r_[order[:first][i::folds], order[first:][i::folds]] for i in range(folds)]
    changes = np.array([_area(after[p], labels[p]) - _area(before[p], labels[p]) for p in parts])
    whole = _area(after, labels) - _area(before, labels)
    return whole, float(changes.std(ddof=1) / np.sqrt(folds))


def _area(predictions: _Array, labels: _Array) -> float:
    return float(auc(torch.from_numpy(predictions), torch.from_numpy(labels)))


def drift_of(before: _Array, after: _Array) -> float:
    """Return the population stability index of two samples of a number.

    The bins are the deciles of the first sample.

    Args:
        before: [N] float64.
        after: [M] float64.

    Example:
        >>> numbers = np.arange(1000.0)
        >>> drift_of(numbers, numbers), round(drift_of(numbers, numbers + 500), 1)
        (0.0, 4.3)
    """
    if not len(before) or not len(after):
        return 0.0 if len(before) == len(after) else float("inf")
    edges = np.unique(np.quantile(before, np.arange(1, _BINS) / _BINS))
    shares = [
        np.bincount(np.searchsorted(edges, sample, "right"), minlength=len(edges) + 1) / len(sample)
        for sample in (before, after)
    ]
    return stability_index(*shares)


def segments_of(columns: Mapping[str, _Array], least: int) -> Iterator[tuple[str, _Array]]:
    """Yield the segments of some rows: a name such as "country=no", and [N] bool.

    Args:
        columns: Texts [N], by column.
        least: Number of rows of a segment; smaller ones are left out.
    """
    for name, values in columns.items():
        distinct, codes = np.unique(values, return_inverse=True)
        for code, count in enumerate(np.bincount(codes)):
            if count >= least:
                yield f"{name}={distinct[code]}", codes == code

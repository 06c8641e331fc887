"""Columns of samples: labels, weights and groups.

Shapes: `B` rows, `T` labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from recsys.base.arguments import finite
from recsys.features.arrow import Values, read_keys, read_numbers, read_values, to_float32
from recsys.features.columns import Column

if TYPE_CHECKING:
    from recsys.features.fit import Fitted, PartialFit

__all__ = ["Group", "Label", "LabelValues", "SampleWeight", "join_labels"]

_Array: TypeAlias = np.ndarray[Any, Any]
_REMOVE = "Remove the rows."


@final
class LabelValues(NamedTuple):
    """Values of a label."""

    values: Values
    """The column, for messages."""
    numbers: _Array
    """[B] float32; 0 if missing."""
    is_missing: _Array | None
    """[B] bool; None: nothing is missing."""


@final
@dataclass(frozen=True)
class Label(Column):
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

    part = "labels"

    def __post_init__(self) -> None:
        super().__post_init__()
        subject = f"Label {self.name!r}"
        if finite(f"{subject}: low", self.low) > finite(f"{subject}: high", self.high):
            raise ValueError(
                f"{subject}: low must not be above high; received {self.low} and {self.high}."
            )

    def read(self, table: Any, fitted: Fitted) -> list[LabelValues]:
        """Read the labels. Labels that are missing become 0."""
        values = read_values(table, self.name, False)
        numbers, is_missing = read_numbers(values)
        bad = (numbers < self.low) | (numbers > self.high)
        if is_missing is not None:
            bad &= ~is_missing
        rule = f"must have labels from {self.low:g} to {self.high:g}"
        values.reject(ValueError, rule, bad, "Set low and high of the Label.")
        return [LabelValues(values, to_float32(values, numbers), is_missing)]


@final
@dataclass(frozen=True)
class SampleWeight(Column):
    """Weight of a sample in the loss: a number that is not negative.

    Example:
        >>> SampleWeight("weight").name
        'weight'
    """

    name: str
    """Name of the column."""

    part = "sample_weights"

    def read(self, table: Any, fitted: Fitted) -> list[_Array]:
        """Read the weights."""
        values = read_values(table, self.name, False)
        numbers, is_missing = read_numbers(values)
        if is_missing is not None:
            values.reject(ValueError, "must have no missing value", is_missing, _REMOVE)
        values.reject(ValueError, "must have weights from 0", numbers < 0, _REMOVE)
        return [to_float32(values, numbers)]


@final
@dataclass(frozen=True)
class Group(Column):
    """Key of a group of samples, such as a session or a user: whole numbers or strings.

    Example:
        >>> Group("session").name
        'session'
    """

    name: str
    """Name of the column."""

    has_keys = True
    part = "groups"

    def fit(self, statistics: PartialFit, table: Any) -> None:
        """Add the kind of the keys."""
        statistics.add_kind(self, table)

    def read(self, table: Any, fitted: Fitted) -> list[_Array]:
        """Read the keys: whole numbers, or hashes of texts."""
        values = read_values(table, self.name, False)
        keys = read_keys(values, unsigned=True)
        keys.check_kind(self.name, self.value_kind(fitted))
        if keys.is_missing is not None:
            values.reject(ValueError, "must have no missing key", keys.is_missing, _REMOVE)
        return [np.array(keys.hashed())]  # a copy: Arrow's memory is shared and read-only


def join_labels(labels: Sequence[LabelValues], size: int) -> tuple[Tensor, Tensor | None]:
    """Join the labels of a batch.

    Args:
        labels: T labels.
        size: B, the number of rows.

    Returns:
        [B, T] float32, or [B] of one label or none; and the same shape of bool, False where one of
        several labels is missing, or None.

    Raises:
        ValueError: The only label is missing in a row.
    """
    numbers = [torch.from_numpy(label.numbers) for label in labels]
    if len(labels) < 2:
        for label in labels:
            if label.is_missing is not None:
                rule = "must have no missing value"
                label.values.reject(ValueError, rule, label.is_missing, _REMOVE)
        return (numbers[0] if numbers else torch.zeros(size)), None
    missing = [
        np.zeros(size, bool) if task.is_missing is None else task.is_missing for task in labels
    ]
    mask = torch.from_numpy(~np.stack(missing, 1))
    return torch.stack(numbers, 1), None if mask.all() else mask

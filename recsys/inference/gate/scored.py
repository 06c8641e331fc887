"""Rows that a new version and the served one have scored, with labels and segments.

Shapes: `N` rows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.datasets.sources import parts_of
from recsys.features.arrow import with_missing
from recsys.features.spec import FeatureSpec
from recsys.inference.packages.columns import load_spec
from recsys.inference.score_results import named_outputs
from recsys.inference.scoring import Scorer, open_scorer

__all__ = ["Rows", "Scored", "Task", "predictions_of", "score_both", "texts_of"]

_Array: TypeAlias = np.ndarray[Any, Any]
_BATCH = 1024
_UNKNOWN = 1  # row of unknown values
NEW_VALUES = "new values of"


@final
class Task(NamedTuple):
    """A label with the predictions of both versions, of the rows that have the label."""

    label: str
    is_regression: bool
    """True for a label of numbers, False for 0 and 1."""
    new: _Array
    """[N] float64 probabilities, or numbers."""
    served: _Array | None
    """[N] float64; None without a served version."""
    labels: _Array
    """[N] float64."""
    segments: dict[str, _Array]
    """[N] texts, by column; the segments of new values have the values "known" and "new"."""

    def swapped(self) -> Task:
        """Return the label with the served version as the new one."""
        assert self.served is not None
        return self._replace(new=self.served, served=self.new)


@final
class Scored(NamedTuple):
    """Rows of a data set, scored by both versions."""

    tasks: list[Task]
    seconds: tuple[list[float], list[float]]
    """Seconds of each batch, of the new version and of the served one."""


def score_both(
    new: Path,
    served: Path | None,
    data: Any,
    label: str | None,
    segments: Sequence[str],
    regression: Collection[str],
) -> Scored:
    """Score the rows of a data set by two versions, batch by batch in turn.

    Args:
        new: A version of a package with raw columns.
        served: The served version; None: there is none.
        data: As for `FeatureSpec.fit`.
        label: The label to compare with; None: all labels of the package.
        segments: Columns whose values divide the rows.
        regression: Labels that are numbers.

    Raises:
        KeyError: The data lacks a column.
        ValueError: The package has no such label, its only label is missing or has another value
            than 0 and 1, or a value is out of its range.
    """
    with contextlib.ExitStack() as stack:
        versions = [new] if served is None else [new, served]
        scorers = [open_scorer(version, None, stack) for version in versions]
        specs = [load_spec(version) for version in versions]
        shared = {} if served is None else _fitted_columns(*specs)
        tasks = _tasks(scorers[0], label, regression)
        names = dict.fromkeys(name for s in scorers for name in s.names)
        columns = [*dict.fromkeys([*names, *tasks, *segments])]
        required = {name for s in scorers for name in s.names if name not in s.optional}
        optional = [name for name in columns if name not in {*required, *tasks, *segments}]
        rows_of_tasks = Rows(tasks, regression, len(tasks) > 1)
        seconds: tuple[list[float], list[float]] = ([], [])
        for part in parts_of(data, columns, scorers[0].kinds, optional):
            part = part._replace(table=with_missing(part.table, optional))
            for start in range(0, part.table.num_rows, _BATCH):
                rows = part.slice(start, _BATCH)
                with rows.located():
                    outputs = []
                    for number, scorer in enumerate(scorers):
                        begin = time.perf_counter()
                        outputs.append(scorer.predict(rows.table))
                        seconds[number].append(time.perf_counter() - begin)
                    texts = {name: texts_of(rows.table[name]) for name in segments}
                    for name, fits in shared.items():
                        texts[f"{NEW_VALUES} {name}"] = _is_new(*fits, rows.table)
                    rows_of_tasks.add(
                        rows.table,
                        [
                            {t: predictions_of(of, s.tasks, t, t in regression) for t in tasks}
                            for of, s in zip(outputs, scorers, strict=True)
                        ],
                        texts,
                    )
    return Scored(rows_of_tasks.tasks(served is not None), seconds)


@final
class Rows:
    """Labels, predictions and segments of rows, which come in parts.

    Args:
        labels: The labels.
        regression: Labels that are numbers.
        may_lack: Whether rows may lack a label; they are left out for it.
    """

    def __init__(self, labels: Sequence[str], regression: Collection[str], may_lack: bool) -> None:
        self._labels, self._regression, self._may_lack = labels, regression, may_lack
        self._parts: list[tuple[dict[str, _Array], Sequence[dict[str, _Array]], dict[str, _Array]]]
        self._parts = []

    def add(
        self, table: Any, predictions: Sequence[dict[str, _Array]], texts: dict[str, _Array]
    ) -> None:
        """Add rows.

        Args:
            table: An Arrow table with the labels.
            predictions: [N] by label, of each version.
            texts: [N] by segment.

        Raises:
            ValueError: A label is missing or has a wrong value.
        """
        labels = {
            name: _values(table, name, name in self._regression, self._may_lack)
            for name in self._labels
        }
        self._parts.append((labels, predictions, texts))

    def tasks(self, has_served: bool) -> list[Task]:
        """Return all rows of each label."""
        tasks = []
        for name in self._labels:
            labels = _joined(part[0][name] for part in self._parts)
            present = ~np.isnan(labels)
            versions = [
                _joined(part[1][number][name] for part in self._parts)[present]
                for number in range(1 + has_served)
            ]
            segments = {
                segment: np.concatenate([part[2][segment] for part in self._parts])[present]
                for segment in (self._parts[0][2] if self._parts else ())
            }
            served = versions[1] if has_served else None
            is_number = name in self._regression
            tasks.append(Task(name, is_number, versions[0], served, labels[present], segments))
        return tasks


def _joined(parts: Iterable[_Array]) -> _Array:
    return np.concatenate([np.empty(0), *parts])


def _tasks(scorer: Scorer, label: str | None, regression: Collection[str]) -> list[str]:
    """Return the labels to judge."""
    known = scorer.tasks
    for name in [*([] if label is None else [label]), *regression]:
        if name not in known:
            raise ValueError(
                f"Gate.label and Gate.regression must be labels of the package, {known}; received "
                f"{name!r}."
            )
    if not known:
        raise ValueError("The package of a Gate must have a label in its spec; it has none.")
    return [*known] if label is None else [label]


def predictions_of(
    outputs: Mapping[str, _Array], tasks: Sequence[str], task: str, is_regression: bool
) -> _Array:
    """Return the probabilities or the numbers of a label, [N] float64."""
    named = named_outputs(outputs, tasks, not is_regression)
    wanted = [task] if is_regression else [f"{task}_probability", "probability"]
    found = [name for name in wanted if name in named]
    if not found and is_regression and len(named) == 1:
        found = [*named]
    if not found:
        raise ValueError(
            f"The model must have an output for the label {task!r}; received {sorted(outputs)}."
        )
    return named[found[0]].reshape(-1).astype(np.float64)


def _values(table: Any, name: str, is_regression: bool, may_lack: bool) -> _Array:
    """Return the labels, [N] float64; NaN where a label is missing."""
    column = table[name].cast(pa.float64())
    values: _Array = column.to_numpy(zero_copy_only=False)
    is_right = np.isfinite(values) if is_regression else np.isin(values, (0.0, 1.0))
    if may_lack:
        is_right |= column.is_null().to_numpy(zero_copy_only=False)
    if not is_right.all():
        row = int((~is_right).argmax())
        rule = "finite numbers as labels" if is_regression else "the labels 0 and 1"
        raise ValueError(
            f"Column {name!r} must have {rule}; received {values[row]} in row {row}. Leave out "
            f"rows without a label{'' if is_regression else ', and name numbers in regression'}."
        )
    return values


def texts_of(column: Any) -> _Array:
    """Return [N] texts; "None" for missing values."""
    plain = pc.fill_null(column.cast(pa.large_string()), "None")
    return np.asarray(plain.to_pylist(), object).astype(str)


def _fitted_columns(
    spec: FeatureSpec, served: FeatureSpec
) -> dict[str, tuple[FeatureSpec, FeatureSpec]]:
    """Return, by `Categorical` column of one value that both have, their specs of it alone."""
    both = {}
    for column in spec.columns:
        is_single = column.needs_fit and column.has_keys and not column.is_list
        if is_single and column in served.columns:
            alone = FeatureSpec([column]), FeatureSpec([column])
            for one, fit in zip(alone, (spec, served), strict=True):
                one.fitted = fit.fitted
            both[column.name] = alone
    return both


def _is_new(spec: FeatureSpec, served: FeatureSpec, table: Any) -> _Array:
    """Return "new" for rows whose value only the new version knows, "known" for others."""
    rows, served_rows = (
        one.transform(table, labels=False).sparse_features.values().numpy()
        for one in (spec, served)
    )
    return np.where((rows > _UNKNOWN) & (served_rows == _UNKNOWN), "new", "known")

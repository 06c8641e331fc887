"""`Gate`: the rules that a new version must meet before it is published.

Shapes: `N` rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias, final

import numpy as np

from recsys.base.arguments import finite, path_of, whole
from recsys.base.checked import check_fields
from recsys.inference.gate.recorded import read_recorded, several_versions
from recsys.inference.gate.report import GateReport, Rule, Segment
from recsys.inference.gate.scored import NEW_VALUES, Task, score_both
from recsys.inference.gate.segments import (
    auc_change,
    drift_of,
    numbers_of,
    segments_of,
    squared_errors_of,
)
from recsys.inference.packages.manifest import read_manifest, sha256_of

__all__ = ["Gate"]

_Array: TypeAlias = np.ndarray[Any, Any]
_SIGMAS = 3.0
"""Standard errors by which a difference of random rows may exceed a limit."""
_LEAST_BYTES = 1 << 20
"""A package may grow by as many bytes in any case."""


@final
@dataclass(frozen=True, kw_only=True)
class Gate:
    """Rules for a new version of a package with raw columns and labels.

    `compare` scores the same rows by the new version and the served one, and returns a report. Its
    `passed` is True if the new version can be published. A limit is widened by three standard
    errors, so that ordinary days pass. Each label of a package of several is judged, by its rows.
    `compare_record` compares two predictions that a `Predictor` has recorded.

    Raises:
        TypeError: A setting has another type.
        ValueError: A setting is out of its range.

    Example:
        >>> gate = Gate(segments=("country",), max_drop=0.01)
        >>> report = gate.compare(  # doctest: +SKIP
        ...     "staged/8", "models/clicks/7", {"today": "clicks/2026-11-28/*.parquet"}
        ... )
        >>> print(report)  # doctest: +SKIP
    """

    label: str | None = None
    """The only label to judge; None: all labels of the package."""
    regression: tuple[str, ...] = ()
    """Labels that are numbers, which are judged by the squared error; others are 0 or 1."""
    segments: tuple[str, ...] = ()
    """Columns of the data whose values divide the rows, such as "country". Rows with a value that
    only the new version knows are a segment of their own."""
    min_rows: int = 1000
    """Least number of rows of each data set."""
    min_segment_rows: int = 500
    """Least number of rows of a segment that is judged."""
    max_drop: float = 0.005
    """Largest drop of the AUC against the served version, in a data set and in a segment."""
    max_gain: float = 0.1
    """Largest gain of the AUC of a data set: more of it means that the rows were trained on, or
    that a column contains the label."""
    max_error_growth: float = 0.02
    """Largest growth of the mean squared error of a number, relative to the served version's."""
    max_calibration_error: float = 0.1
    """Largest difference of the mean prediction and the mean label, relative to the mean label; of
    a number, relative to the standard deviation of the label."""
    max_drift: float = 1.0
    """Largest population stability index of the predictions of both versions, on rows whose values
    both know. A model that learns shifts its predictions by up to 0.5 a day, a broken one by
    several."""
    max_slowdown: float = 1.5
    """Largest ratio of the median seconds of a batch to the seconds of the served version."""
    max_growth: float = 1.5
    """Largest ratio of the bytes of the package to the bytes of the served version."""
    min_table_share: float = 0.5
    """Least ratio of the rows of each table to its rows in the served version."""

    def __post_init__(self) -> None:
        check_fields(self)
        whole("Gate.min_rows", self.min_rows)
        whole("Gate.min_segment_rows", self.min_segment_rows)
        limits = [name for name in vars(self) if name.startswith("max_")]
        for name in [*limits, "min_table_share"]:
            if finite(f"Gate.{name}", getattr(self, name)) < 0:
                raise ValueError(f"Gate.{name} must be at least 0; received {getattr(self, name)}.")

    def compare(
        self, new: str | Path, served: str | Path | None, data: Mapping[str, Any]
    ) -> GateReport:
        """Compare two versions on the rows of data sets that neither was trained on.

        Args:
            new: The folder of the new version, which `package(..., spec=spec)` wrote.
            served: The folder of the served version; None for a first version, which is judged
                without the rules that compare.
            data: Data sets by name, such as "today" and "yesterday": each as for
                `FeatureSpec.fit`, with the label and the columns of both versions.

        Raises:
            FileNotFoundError: A folder has no version.
            KeyError: The data lacks a column.
            ValueError: The only label is missing in a row, a label is not 0 or 1 or a number of
                `regression`, a value is out of its range, or a package has no raw columns. Of
                several labels, each may be missing.
        """
        if not data:
            raise ValueError("Gate.compare.data must have a data set or more; received none.")
        new = path_of("Gate.compare.new", new)
        served = None if served is None else path_of("Gate.compare.served", served)
        rules = [] if served is None else [*self._package_rules(new, served)]
        segments: list[Segment] = []
        seconds: tuple[list[float], list[float]] = ([], [])
        for name, rows in data.items():
            scored = score_both(new, served, rows, self.label, self.segments, self.regression)
            for all_seconds, of_data in zip(seconds, scored.seconds, strict=True):
                all_seconds += of_data[1:]  # the first batch of a program is slow
            self._judge(name, scored.tasks, rules, segments)
        if seconds[1]:
            ratio = median(seconds[0]) / max(median(seconds[1]), 1e-9)
            text = f"the median batch takes {ratio:.2f} of the served version's seconds"
            rules.append(Rule("speed", "package", ratio, self.max_slowdown, True, text))
        return GateReport(str(new), sha256_of(new / "manifest.json"), str(served), rules, segments)

    def compare_record(
        self, data: Mapping[str, Any], new: Literal["prediction", "shadow"] = "prediction"
    ) -> GateReport:
        """Compare the predictions of a version and of its shadow on recorded rows with labels.

        Rows without a prediction of the shadow are left out. The rules of packages and of seconds
        are not judged, as recorded rows do not have them.

        Args:
            data: Data sets by name: the files of `join_labels`, or a table of their rows, of a
                `Recording` with a shadow.
            new: Which of the two is judged; the other one is the served version of the report.

        Raises:
            KeyError: The data lacks a column.
            ValueError: `label` is not set, a label is missing or wrong, or rows are of several
                versions or shadows.
        """
        if new not in ("prediction", "shadow"):
            raise ValueError(
                f"Gate.compare_record.new must be 'prediction' or 'shadow'; received {new!r}."
            )
        if not data:
            raise ValueError("Gate.compare_record.data must have a data set; received none.")
        if self.label is None:
            raise ValueError(
                "Gate.compare_record needs Gate.label, the label of the rows; received None."
            )
        rules: list[Rule] = []
        segments: list[Segment] = []
        pairs: set[tuple[str, str]] = set()
        for name, rows in data.items():
            recorded = read_recorded(rows, self.label, self.segments, self.regression)
            pairs |= {recorded.versions} if len(recorded.task.labels) else set()
            if len(pairs) > 1:
                raise several_versions(pairs)
            task = recorded.task if new == "prediction" else recorded.task.swapped()
            self._judge(name, [task], rules, segments)
        [(judged, other)] = pairs or {("", "")}
        if new == "shadow":
            judged, other = other, judged
        manifest = Path(judged, "manifest.json")
        checksum = sha256_of(manifest) if manifest.is_file() else ""
        return GateReport(judged, checksum, other, rules, segments)

    def _judge(
        self, name: str, tasks: Sequence[Task], rules: list[Rule], segments: list[Segment]
    ) -> None:
        """Add the rules and the segments of a data set."""
        for task in tasks:
            of_task = name if len(tasks) == 1 else f"{name}, {task.label}"
            rules += self._data_rules(of_task, task)
            segments += _rows_of_report(of_task, task, self.min_segment_rows)

    def _package_rules(self, new: Path, served: Path) -> Iterator[Rule]:
        sizes = [_bytes_of(version) for version in (new, served)]
        ratio = sizes[0] / max(sizes[1], 1)
        limit = max(self.max_growth, 1 + _LEAST_BYTES / max(sizes[1], 1))
        text = f"{sizes[0]:,} bytes, {ratio:.2f} of the served version's {sizes[1]:,}"
        yield Rule("size", "package", ratio, limit, True, text)
        old = {table["name"]: table["rows"] for table in read_manifest(served)["tables"]}
        rows = {table["name"]: table["rows"] for table in read_manifest(new)["tables"]}
        for name, count in old.items():
            share = rows.get(name, 0) / count
            text = f"table {name!r} has {rows.get(name, 0):,} rows, and {count:,} in the served one"
            yield Rule("rows", name, share, self.min_table_share, False, text)

    def _data_rules(self, name: str, task: Task) -> Iterator[Rule]:
        labels, count = task.labels, len(task.labels)
        text = f"{count:,} rows with a label"
        yield Rule("data", name, count, self.min_rows, False, text)
        num_bad = int((~np.isfinite(task.new)).sum())
        yield Rule("finite", name, num_bad, 0, True, f"{num_bad:,} predictions are NaN or infinite")
        if not count or num_bad:
            return
        parts = [("", np.ones(count, bool))]
        parts += [
            (f", {segment}", rows)
            for segment, rows in segments_of(task.segments, self.min_segment_rows)
            if not segment.startswith(NEW_VALUES) or segment.endswith("=new")
        ]
        calibration = self._calibration_of_numbers if task.is_regression else self._calibration
        change = self._error_change if task.is_regression else self._auc_change
        for part, rows in parts:
            yield calibration(name + part, task.new[rows], labels[rows])
            if task.served is not None:
                yield from change(
                    name + part, bool(part), task.new[rows], task.served[rows], labels[rows]
                )
        if task.served is not None:
            known = np.ones(count, bool)
            for column, values in task.segments.items():
                if column.startswith(NEW_VALUES):
                    known &= values != "new"
            drift = drift_of(task.served[known], task.new[known])
            text = f"the predictions of known values have a stability index of {drift:.3f}"
            yield Rule("drift", name, drift, self.max_drift, True, text)

    def _calibration(self, part: str, predictions: _Array, labels: _Array) -> Rule:
        predicted, seen = float(predictions.mean()), float(labels.mean())
        mean = max(seen, 0.5 / len(labels))
        noise = math.sqrt(max(mean * (1 - mean), 0.0) / len(labels)) / mean
        error = abs(predicted / mean - 1)
        text = f"the mean prediction is {predicted:.4f} and the mean label {seen:.4f}"
        limit = self.max_calibration_error + _SIGMAS * noise
        return Rule("calibration", part, error, limit, True, text)

    def _calibration_of_numbers(self, part: str, predictions: _Array, labels: _Array) -> Rule:
        predicted, seen = float(predictions.mean()), float(labels.mean())
        spread = float(labels.std())
        error = abs(predicted - seen) / spread if spread else float(predicted != seen)
        text = f"the mean prediction is {predicted:.4g} and the mean label {seen:.4g}"
        limit = self.max_calibration_error + _SIGMAS / math.sqrt(len(labels))
        return Rule("calibration", part, error, limit, True, text)

    def _auc_change(
        self, part: str, is_segment: bool, predictions: _Array, served: _Array, labels: _Array
    ) -> Iterator[Rule]:
        change, error = auc_change(predictions, served, labels)
        if not math.isfinite(change) or not math.isfinite(error):
            return  # one kind of label: no order to judge
        text = f"the AUC changes by {change:+.4f} (standard error {error:.4f})"
        limit = self.max_drop + _SIGMAS * error
        yield Rule("auc", part, -change, limit, True, text)
        if not is_segment:
            yield Rule("gain", part, change, self.max_gain + _SIGMAS * error, True, text)

    def _error_change(
        self, part: str, is_segment: bool, predictions: _Array, served: _Array, labels: _Array
    ) -> Iterator[Rule]:
        before = (served - labels) ** 2
        change = (predictions - labels) ** 2 - before
        mean = max(float(before.mean()), 1e-30)
        growth = float(change.mean()) / mean
        error = float(change.std()) / math.sqrt(len(labels)) / mean
        text = f"the mean squared error changes by {growth:+.2%} (standard error {error:.2%})"
        limit = self.max_error_growth + _SIGMAS * error
        yield Rule("error", part, growth, limit, True, text)


def _bytes_of(version: Path) -> int:
    return sum(path.stat().st_size for path in version.rglob("*") if path.is_file())


def _rows_of_report(name: str, task: Task, least: int) -> Iterator[Segment]:
    parts = [("all", np.ones(len(task.labels), bool)), *segments_of(task.segments, least)]
    numbers = squared_errors_of if task.is_regression else numbers_of
    for segment, rows in parts:
        labels = task.labels[rows]
        served = None if task.served is None else numbers(task.served[rows], labels)
        yield Segment(name, segment, numbers(task.new[rows], labels), served)

"""`Gate`: the rules that a new version must meet before it is published.

Shapes: `N` rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, final

import numpy as np

from recsys.base.arguments import finite, whole
from recsys.base.checked import check_fields
from recsys.inference.gate.report import GateReport, Rule, Segment
from recsys.inference.gate.scored import NEW_VALUES, Scored, score_both
from recsys.inference.gate.segments import (
    auc_change,
    drift_of,
    numbers_of,
    segments_of,
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
    """Rules for a new version of a package with raw columns and one label of 0 and 1.

    `compare` scores the same rows by the new version and the served one, and returns a report. Its
    `passed` is True if the new version can be published. A limit is widened by three standard
    errors, so that ordinary days pass.

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
    """The label of a package of several; None: the only one."""
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
    max_calibration_error: float = 0.1
    """Largest relative difference of the mean prediction and the mean label."""
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
            ValueError: A label is missing or is not 0 or 1, a value is out of its range, or a
                package has no raw columns.
        """
        if not data:
            raise ValueError("Gate.compare.data must have a data set or more; received none.")
        new = Path(new)
        served = None if served is None else Path(served)
        rules = [] if served is None else [*self._package_rules(new, served)]
        segments: list[Segment] = []
        seconds: tuple[list[float], list[float]] = ([], [])
        for name, rows in data.items():
            scored = score_both(new, served, rows, self.label, self.segments)
            for all_seconds, of_data in zip(seconds, scored.seconds, strict=True):
                all_seconds += of_data[1:]  # the first batch of a program is slow
            rules += self._data_rules(name, scored)
            segments += _rows_of_report(name, scored, self.min_segment_rows)
        if seconds[1]:
            ratio = median(seconds[0]) / max(median(seconds[1]), 1e-9)
            text = f"the median batch takes {ratio:.2f} of the served version's seconds"
            rules.append(Rule("speed", "package", ratio, self.max_slowdown, True, text))
        return GateReport(str(new), sha256_of(new / "manifest.json"), str(served), rules, segments)

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

    def _data_rules(self, name: str, scored: Scored) -> Iterator[Rule]:
        labels, count = scored.labels, len(scored.labels)
        text = f"{count:,} rows with a label"
        yield Rule("data", name, count, self.min_rows, False, text)
        num_bad = int((~np.isfinite(scored.new)).sum())
        yield Rule("finite", name, num_bad, 0, True, f"{num_bad:,} predictions are NaN or infinite")
        if not count or num_bad:
            return
        parts = [(name, np.ones(count, bool))]
        parts += [
            (f"{name}, {segment}", rows)
            for segment, rows in segments_of(scored.segments, self.min_segment_rows)
            if not segment.startswith(NEW_VALUES) or segment.endswith("=new")
        ]
        for part, rows in parts:
            yield self._calibration(part, scored.new[rows], labels[rows])
            if scored.served is not None:
                yield from self._change(part, scored.new[rows], scored.served[rows], labels[rows])
        if scored.served is not None:
            known = np.ones(count, bool)
            for column, values in scored.segments.items():
                if column.startswith(NEW_VALUES):
                    known &= values != "new"
            drift = drift_of(scored.served[known], scored.new[known])
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

    def _change(
        self, part: str, predictions: _Array, served: _Array, labels: _Array
    ) -> Iterator[Rule]:
        change, error = auc_change(predictions, served, labels)
        if not math.isfinite(change) or not math.isfinite(error):
            return  # one kind of label: no order to judge
        text = f"the AUC changes by {change:+.4f} (standard error {error:.4f})"
        limit = self.max_drop + _SIGMAS * error
        yield Rule("auc", part, -change, limit, True, text)
        if ", " not in part:
            yield Rule("gain", part, change, self.max_gain + _SIGMAS * error, True, text)


def _bytes_of(version: Path) -> int:
    return sum(path.stat().st_size for path in version.rglob("*") if path.is_file())


def _rows_of_report(name: str, scored: Scored, least: int) -> Iterator[Segment]:
    parts = [("all", np.ones(len(scored.labels), bool)), *segments_of(scored.segments, least)]
    for segment, rows in parts:
        served = None if scored.served is None else numbers_of(
            scored.served[rows], scored.labels[rows]
        )  # fmt: skip
        new = numbers_of(scored.new[rows], scored.labels[rows])
        yield Segment(name, segment, new, served)

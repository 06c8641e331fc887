"""Rows that a new version and the served one have scored, with labels and segments.

Shapes: `N` rows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
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

__all__ = ["Scored", "score_both"]

_Array: TypeAlias = np.ndarray[Any, Any]
_BATCH = 1024
_UNKNOWN = 1  # row of unknown values
NEW_VALUES = "new values of"


@final
class Scored(NamedTuple):
    """Rows of a data set with the probabilities of both versions."""

    new: _Array
    """[N] float64."""
    served: _Array | None
    """[N] float64; None without a served version."""
    labels: _Array
    """[N] float64, 0 or 1."""
    segments: dict[str, _Array]
    """[N] texts, by column; the segments of new values have the values "known" and "new"."""
    seconds: tuple[list[float], list[float]]
    """Seconds of each batch, of the new version and of the served one."""


def score_both(
    new: Path, served: Path | None, data: Any, label: str | None, segments: Sequence[str]
) -> Scored:
    """Score the rows of a data set by two versions, batch by batch in turn.

    Args:
        new: A version of a package with raw columns.
        served: The served version; None: there is none.
        data: As for `FeatureSpec.fit`.
        label: The label to compare with; None: the only one.
        segments: Columns whose values divide the rows.

    Raises:
        KeyError: The data lacks a column, or the package has no such label.
        ValueError: The package has several labels and none is chosen, a label is missing or is not
            0 or 1, or a value is out of its range.
    """
    with contextlib.ExitStack() as stack:
        versions = [new] if served is None else [new, served]
        scorers = [open_scorer(version, None, stack) for version in versions]
        specs = [load_spec(version) for version in versions]
        shared = {} if served is None else _fitted_columns(*specs)
        task = _task(scorers[0], label)
        columns = [*dict.fromkeys([*(name for s in scorers for name in s.names), task, *segments])]
        required = {name for s in scorers for name in s.names if name not in s.optional}
        optional = [name for name in columns if name not in {*required, task, *segments}]
        predictions: list[list[_Array]] = [[] for _ in versions]
        seconds: tuple[list[float], list[float]] = ([], [])
        labels: list[_Array] = []
        texts: dict[str, list[_Array]] = {}
        for part in parts_of(data, columns, scorers[0].kinds, optional):
            part = part._replace(table=with_missing(part.table, optional))
            for start in range(0, part.table.num_rows, _BATCH):
                rows = part.slice(start, _BATCH)
                with rows.located():
                    labels.append(_labels(rows.table, task))
                    for number, scorer in enumerate(scorers):
                        begin = time.perf_counter()
                        outputs = scorer.predict(rows.table)
                        seconds[number].append(time.perf_counter() - begin)
                        predictions[number].append(_probabilities(outputs, scorer, task))
                    for name in segments:
                        texts.setdefault(name, []).append(_texts(rows.table[name]))
                    for name, fits in shared.items():
                        is_new = _is_new(*fits, rows.table)
                        texts.setdefault(f"{NEW_VALUES} {name}", []).append(is_new)
    joined = [np.concatenate([np.empty(0), *of_version]) for of_version in predictions]
    return Scored(
        joined[0],
        joined[1] if served is not None else None,
        np.concatenate([np.empty(0), *labels]),
        {name: np.concatenate(values) for name, values in texts.items()},
        seconds,
    )


def _task(scorer: Scorer, label: str | None) -> str:
    tasks = scorer.tasks
    if label is None and len(tasks) == 1:
        return tasks[0]
    if label not in tasks:
        raise ValueError(
            f"Gate.label must be a label of the package, one of {tasks}; received {label!r}."
        )
    return label


def _probabilities(outputs: Any, scorer: Scorer, task: str) -> _Array:
    """Return [N] float64."""
    named = named_outputs(outputs, scorer.tasks, True)
    found = [n for n in (f"{task}_probability", "probability") if n in named]
    name = found[0] if found else next(n for n in named if n.endswith("probability"))
    return named[name].reshape(-1).astype(np.float64)


def _labels(table: Any, name: str) -> _Array:
    """Return [N] float64."""
    values: _Array = table[name].cast(pa.float64()).to_numpy()
    bad = ~np.isin(values, (0.0, 1.0))
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"Column {name!r} must have the labels 0 and 1; received {values[row]} in row {row}. "
            "Leave out rows without a label."
        )
    return values


def _texts(column: Any) -> _Array:
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

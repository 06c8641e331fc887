"""Recorded rows with the predictions of a version and of its shadow, and labels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, final

from recsys.datasets.sources import parts_of
from recsys.datasets.tables import are_paths, files_of
from recsys.inference.gate.scored import Rows, Task, predictions_of, texts_of
from recsys.inference.records.rows import PREDICTION, SHADOW

__all__ = ["Recorded", "read_recorded", "several_versions"]

_VERSIONS = ("record_version", "record_shadow")


@final
class Recorded(NamedTuple):
    """Rows of a data set."""

    task: Task
    """The rows; the shadow is the served version."""
    versions: tuple[str, str]
    """The version and its shadow."""


def several_versions(versions: Iterable[tuple[str, str]]) -> ValueError:
    """Return the error of rows of several versions."""
    return ValueError(
        "Gate.compare_record.data must be of one version and one shadow; received "
        f"{sorted(versions)}. Give a table with the rows of one version."
    )


def read_recorded(
    data: Any, label: str, segments: Sequence[str], regression: Collection[str]
) -> Recorded:
    """Read recorded rows with both predictions.

    Args:
        data: Paths, or a table.
        label: The label.
        segments: Columns whose values divide the rows.
        regression: Labels that are numbers.

    Raises:
        KeyError: The data lacks a column.
        ValueError: A label is missing or wrong, or rows are of several versions.
    """
    rows, versions = Rows([label], regression, False), set[tuple[str, str]]()
    columns = [label, *_VERSIONS, *segments]
    if are_paths(data):
        schema = files_of(data)[0].schema
        columns += [name for name in schema.names if name.startswith((PREDICTION, SHADOW))]
    for part in parts_of(data, columns, {}):
        for start in range(0, part.table.num_rows, 1 << 16):
            window = part.slice(start, 1 << 16)
            with window.located():
                table = window.table
                names = [name for name in table.column_names if name.startswith(SHADOW)]
                names = [name.removeprefix(SHADOW) for name in names]
                for name in names:
                    table = table.filter(table[f"{SHADOW}{name}"].is_valid())
                versions |= set(zip(*(table[n].to_pylist() for n in _VERSIONS), strict=True))
                predictions = []
                for prefix in (PREDICTION, SHADOW):
                    outputs = {name: table[f"{prefix}{name}"].to_numpy() for name in names}
                    of_label = predictions_of(outputs, [label], label, label in regression)
                    predictions.append({label: of_label})
                rows.add(table, predictions, {name: texts_of(table[name]) for name in segments})
    if len(versions) > 1:
        raise several_versions(versions)
    [task] = rows.tasks(True)
    [pair] = versions or {("", "")}
    return Recorded(task, pair)

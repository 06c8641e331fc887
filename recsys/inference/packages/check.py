"""Verification and description of serving packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recsys.base.checked import checked
from recsys.inference.packages.manifest import read_manifest
from recsys.inference.packages.predictor import Predictor

__all__ = ["inspect", "verify"]


@checked
def verify(version: str | Path) -> None:
    """Verify a version of a package: all files, all deltas, and the sample by each program.

    Args:
        version: The folder of the version, such as "models/movies/1".

    Raises:
        FileNotFoundError: The folder is not a version of a package, or a file is missing.
        ValueError: A file is damaged, this machine cannot run a program, or a program returns
            another response to the sample.

    Example:
        >>> verify("models/movies/1")  # doctest: +SKIP
    """
    version = Path(version)
    for program in read_manifest(version)["programs"]:
        Predictor(version, program=program["kind"]).close()


@checked
def inspect(version: str | Path) -> str:
    """Return a description of a version of a package: inputs or raw columns, outputs, and tables.

    Args:
        version: The folder of the version.

    Raises:
        FileNotFoundError: The folder is not a version of a package.
        ValueError: The manifest is damaged.

    Example:
        >>> print(inspect("models/movies/1"))  # doctest: +SKIP
    """
    version = Path(version)
    manifest = read_manifest(version)
    total = sum(file["bytes"] for file in manifest["files"].values())
    lines = [
        f"{version}: {total:,} bytes, torch {manifest['torch']}, fbgemm_gpu {manifest['fbgemm']}",
        f"machine: {manifest['machine']} {manifest['instruction_set']}".rstrip(),
        f"rows of a batch: at most {manifest['limits']['max_rows']}",
        *(f"program: {p['kind']} on {p['device']} ({p['file']})" for p in manifest["programs"]),
    ]
    lines += [_column_line(column) for column in manifest["columns"]]
    if not manifest["columns"]:
        lines += [line for entry in manifest["inputs"] for line in _input_lines(entry)]
    for entry in manifest["outputs"]:
        kind = "jagged " if entry["kind"] == "jagged" else ""
        lines.append(f"output {entry['name'] or 'values'}: {kind}{entry['dtype']} {entry['shape']}")
    for table in manifest["tables"]:
        lines.append(
            f"table {table['name']}: {table['rows']:,} rows of {table['dim']} {table['dtype']}, "
            f"{table['rows'] * table['row_bytes']:,} bytes, read by {', '.join(table['features'])}"
        )
    deltas = len(list((version / "deltas").glob("*.delta")))
    return "\n".join([*lines, f"deltas: {deltas}"])


def _column_line(column: Mapping[str, Any]) -> str:
    lists = "lists of " if column.get("is_list") else ""
    weights = f", weights in {column['weights']}" if column.get("weights") else ""
    return f"column {column['name']}: {lists}{column['dtype']}, {column['kind']}{weights}"


def _input_lines(entry: Mapping[str, Any]) -> list[str]:
    if entry["kind"] == "dense":
        default = "required" if entry["default"] is None else f"default {entry['default']}"
        return [f"input {entry['name']}: {entry['dtype']} {entry['shape']}, {default}"]
    weights = ", with weights" if entry["weighted"] else ""
    return [
        f"input {feature['tensor']}: ids"
        + ("" if feature["rows"] is None else f" from 0 to {feature['rows'] - 1}")
        + weights
        for feature in entry["features"]
    ]

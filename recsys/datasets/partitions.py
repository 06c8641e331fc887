"""Partition columns: values in the folders of a path, such as `dt=2026-11-28/country=no`.

Spark, Hive and pandas write tables this way. The folders that directly contain a file count, up to
the first folder without `=`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import pyarrow as pa

from recsys.base.arguments import shown

__all__ = ["Partition", "check_same_columns", "constant", "file_name", "partition_of", "types_of"]

Partition: TypeAlias = Mapping[str, str | None]
"""The decoded value of each partition column; None if it is missing."""
_MISSING: Final = "__HIVE_DEFAULT_PARTITION__"
_WHOLE: Final = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)


def _folders(path: str) -> list[str]:
    """Return the folders of a path that have values, from the outermost one."""
    folders: list[str] = []
    for folder in reversed(PurePosixPath(path.replace("\\", "/")).parts[:-1]):
        if folder.find("=") < 1:
            break
        folders.insert(0, folder)
    return folders


def file_name(path: str) -> str:
    """Return the name of a file with its partition folders, which splits by row hash.

    Example:
        >>> file_name("/data/clicks/dt=2026-11-28/part-0.parquet")
        'dt=2026-11-28/part-0.parquet'
    """
    return "/".join([*_folders(path), path.replace("\\", "/").rpartition("/")[2]])


def partition_of(path: str) -> dict[str, str | None]:
    """Return the values in the folders of a file.

    Args:
        path: Path or URL of the file.

    Raises:
        ValueError: A folder is not encoded in UTF-8, or two folders have values of one column.

    Example:
        >>> partition_of("clicks/dt=2026-11-28/city=a%2Fb/x.parquet")
        {'dt': '2026-11-28', 'city': 'a/b'}
    """
    values: dict[str, str | None] = {}
    for folder in _folders(path):
        try:
            name, value = (unquote(part, errors="strict") for part in folder.split("=", 1))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: folders of partitions must be encoded in UTF-8; received {folder!r}. "
                "Rename the folder."
            ) from error
        if name in values:
            raise ValueError(
                f"{path} must have one folder for each partition column; received two for "
                f"{name!r}. Rename one of them."
            )
        values[name] = None if value == _MISSING else value
    return values


def check_same_columns(paths: Sequence[str], partitions: Sequence[Partition]) -> None:
    """Check that files have the same partition columns.

    Args:
        paths: Paths or URLs, for messages.
        partitions: The partition of each file.

    Raises:
        ValueError: Two files have other columns.
    """
    for path, partition in zip(paths, partitions, strict=True):
        if {*partition} != {*partitions[0]}:
            first, other = (sorted(values) or "none" for values in (partitions[0], partition))
            raise ValueError(
                f"Files of one table must have the same partition columns in their folders; "
                f"received {first} for {paths[0]} and {other} for {path}. Move the files, or "
                "read them apart."
            )


def types_of(partitions: Sequence[Partition]) -> dict[str, Any]:
    """Return the Arrow type of each partition column.

    Args:
        partitions: The partition of each file, with the same columns.

    Returns:
        int64 for columns whose values are all whole numbers as Python writes them, such as 7; texts
        for other columns, such as 07 and 2026-11-28; null for columns without a value.

    Example:
        >>> types_of([{"hour": "7", "day": "07"}, {"hour": None, "day": "11"}])
        {'hour': DataType(int64), 'day': DataType(string)}
    """
    types = {}
    for name in partitions[0] if partitions else ():
        values = {partition[name] for partition in partitions} - {None}
        is_whole = all(
            _WHOLE.fullmatch(str(value)) and -(2**63) <= int(str(value)) < 2**63 for value in values
        )
        types[name] = pa.null() if not values else pa.int64() if is_whole else pa.string()
    return types


def constant(name: str, value: str | None, kind: Any, num_rows: int) -> Any:
    """Return a column with the value of a partition in each row.

    Args:
        name: The column, for the message.
        value: The value; None if it is missing.
        kind: The Arrow type of the column.
        num_rows: Number of rows.

    Raises:
        ValueError: The type does not have the value.

    Example:
        >>> constant("hour", "7", pa.int64(), 2).to_pylist()
        [7, 7]
    """
    if value is None:
        return pa.nulls(num_rows, kind)
    try:
        return pa.repeat(pa.scalar(value, pa.string()).cast(kind), num_rows)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(
            f"Partition column {name!r} must have values of the type {kind}, as in other files; "
            f"received {shown(value)}. Rename the folder."
        ) from error

"""Join of a record of requests with late labels, in bounded memory.

Both sides are divided by the hash of the key into temporary files, and each pair of these is joined
in memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.base.arguments import names, path_of, wrong_type
from recsys.datasets.files import File
from recsys.datasets.sources import read_parts
from recsys.datasets.tables import Paths, files_of, unify_types
from recsys.features.arrow import key_kind
from recsys.features.text_hash import hash_texts
from recsys.inference.records.rows import RECORD

__all__ = ["JoinReport", "join_labels"]

_Array: TypeAlias = np.ndarray[Any, Any]
_KEY: Final = f"{RECORD}key"
_PART_BYTES: Final = 64 << 20
"""Bytes of the files of the record for each part."""
_MOST_PARTS: Final = 256  # of open files
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


@final
class JoinReport(NamedTuple):
    """Numbers of rows of a join."""

    joined: int
    """Rows with a label, which were written."""
    without_label: int
    """Rows of the record without a label, or with a missing one; they are left out."""
    without_request: int
    """Labels of a key that the record does not have, such as of requests outside its sample."""
    without_key: int
    """Rows of the record and labels without a key; they are left out."""
    repeated_requests: int
    """Rows of the record with the key of an earlier row; they are left out."""
    repeated_labels: int
    """Labels with the key of an earlier label; they are left out."""
    conflicting_labels: int
    """Repeated labels that differ from the first one of their key."""

    def __str__(self) -> str:
        return "\n".join(f"{name}: {count:,}" for name, count in self._asdict().items())


def join_labels(
    record: Paths,
    labels: Paths,
    output: str | Path,
    *,
    key: str,
    columns: Sequence[str],
) -> JoinReport:
    r"""Join the rows of a record with late labels into rows of a next day.

    A key of several rows counts once on both sides: the first row in the order of the files is
    taken. Memory is bounded for any number of rows, unless most rows have one key.

    Args:
        record: Files of a `Recording` with a key: paths, globs, folders or URLs.
        labels: Files of labels, Parquet or CSV.
        output: A new or empty folder for Parquet files, which appear together.
        key: The column of the labels with the keys, of the kind of the keys of the record.
        columns: The columns of the labels to add, such as `("click",)`.

    Returns:
        The report.

    Raises:
        FileExistsError: `output` is not empty.
        FileNotFoundError: A path has no file.
        KeyError: A file does not have a column.
        TypeError: The keys are texts on one side and numbers on the other.
        ValueError: A file is damaged, or the record has a column of the labels.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> rows = pa.table({"city": ["Oslo", "Rome"], "record_key": ["a", "b"]})
        >>> pq.write_table(rows, folder / "record.parquet")
        >>> _ = (folder / "labels.csv").write_text("id,click\na,1\na,1\nz,0\n")
        >>> report = join_labels(
        ...     folder / "record.parquet", folder / "labels.csv", folder / "day",
        ...     key="id", columns=["click"],
        ... )
        >>> pq.read_table(folder / "day").to_pylist()
        [{'city': 'Oslo', 'record_key': 'a', 'click': 1}]
        >>> report.without_label, report.without_request, report.repeated_labels
        (1, 1, 1)
    """
    if not isinstance(key, str):
        wrong_type("join_labels.key", "the name of a column", key)
    added = list(names("join_labels.columns", columns))
    output = path_of("join_labels.output", output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"join_labels.output must be a new or empty folder; {output} is not.")
    record_files = unify_types(files_of(record), [_KEY], {})
    kind = _kind(record_files, _KEY)
    label_files = unify_types(files_of(labels), [key, *added], {key: kind})
    other = _kind(label_files, key)
    if None not in (kind, other) and kind != other:
        raise TypeError(
            f"join_labels.key must be a column of {kind}s, as the keys of the record; received "
            f"{other}s in column {key!r} of the labels. Convert it."
        )
    schema = _schema(record_files)
    if taken := sorted(set(added) & set(schema.names)):
        raise ValueError(
            f"join_labels.columns must not be columns of the record; received {taken}. Rename them."
        )
    size = sum(file.version[0] for file in [*record_files, *label_files])
    num_parts = min(1 + size // _PART_BYTES, _MOST_PARTS)
    output.parent.mkdir(parents=True, exist_ok=True)
    counts = np.zeros(len(JoinReport._fields), np.int64)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=output.parent) as name:
        folder = Path(name)
        (folder / "rows").mkdir()
        lost = _divide(record_files, schema, _KEY, folder, "record", num_parts)
        wanted = pa.schema([_schema(label_files).field(name) for name in (key, *added)])
        lost += _divide(label_files, wanted, key, folder, "labels", num_parts)
        for number in range(num_parts):
            rows, of_part = _joined(folder, number, key, added)
            counts += of_part
            if len(rows):
                pq.write_table(rows, folder / "rows" / f"part-{number:05}.parquet")
        if output.exists():
            output.rmdir()
        os.rename(folder / "rows", output)
    return JoinReport(*counts.tolist())._replace(without_key=lost)


def _kind(files: Sequence[File], name: str) -> str | None:
    """Return the kind of the keys; None if all are missing."""
    for file in files:
        found = file.schema.field(name).type
        if pa.types.is_null(found):
            continue
        kind = key_kind(found)
        if kind is None or pa.types.is_floating(found):
            raise TypeError(
                f"Column {name!r} of {file.path} must have texts or whole numbers as keys; "
                f"received {found}."
            )
        return kind
    return None


def _schema(files: Sequence[File]) -> Any:
    """Return the columns of all files, each of the widest type, without dictionaries."""
    schemas = [
        pa.schema([field.with_type(_decoded(field.type)) for field in file.schema])
        for file in files
    ]
    return pa.unify_schemas(schemas, promote_options="permissive")


def _decoded(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _divide(
    files: Sequence[File], schema: Any, key: str, folder: Path, side: str, num_parts: int
) -> int:
    """Write the rows of each part to a file of its own; return the number of rows without a key."""
    lost = 0
    with ExitStack() as stack:
        writers = [
            stack.enter_context(pa.ipc.new_file(str(folder / f"{side}-{number}"), schema))
            for number in range(num_parts)
        ]
        for file in files:
            present = [name for name in schema.names if name in file.schema.names]
            for part in read_parts(file, present):
                table = _cast(part.table, schema)
                is_missing = pc.is_null(table[key])
                lost += pc.sum(is_missing).as_py() or 0
                table = table.filter(pc.invert(is_missing))
                numbers = _parts_of(table[key], num_parts)
                for number in np.unique(numbers).tolist():
                    writers[number].write_table(table.filter(pa.array(numbers == number)))
    return lost


def _cast(table: Any, schema: Any) -> Any:
    columns = []
    for field in schema:
        if field.name in table.column_names:
            column = table[field.name]
            columns.append(column.cast(_decoded(column.type)).cast(field.type))
        else:
            columns.append(pa.nulls(len(table), field.type))
    return pa.table(columns, schema=schema)


def _plain(keys: Any) -> Any:
    array = keys.combine_chunks()
    if array.type == pa.uint64():
        return array.view(pa.int64())
    return array.cast(pa.large_string() if key_kind(array.type) == "text" else pa.int64())


def _parts_of(keys: Any, num_parts: int) -> _Array:
    """Return the part of each key, [N]."""
    array = _plain(keys)
    hashes = hash_texts(array) if array.type != pa.int64() else array.to_numpy()
    mixed = hashes.view(np.uint64) * _ODD
    parts: _Array = ((mixed >> np.uint64(32)) % np.uint64(num_parts)).astype(np.int64)
    return parts


def _joined(folder: Path, number: int, key: str, added: Iterable[str]) -> tuple[Any, _Array]:
    """Join one part; return its rows, and numbers as the fields of `JoinReport`."""
    record, labels = (_read(folder / f"{side}-{number}") for side in ("record", "labels"))
    firsts, _ = _first_of_key(record[_KEY])
    first_labels, of_key = _first_of_key(labels[key])
    repeated = np.setdiff1d(np.arange(len(labels)), first_labels)
    conflicts = np.zeros(len(repeated), bool)
    for name in added:
        column = labels[name].combine_chunks()
        left, right = column.take(pa.array(repeated)), column.take(pa.array(of_key[repeated]))
        same = pc.fill_null(pc.equal(left, right), False).to_numpy(zero_copy_only=False)
        both_missing = pc.and_(pc.is_null(left), pc.is_null(right)).to_numpy(zero_copy_only=False)
        conflicts |= ~(same | both_missing)
    kept, chosen = record.take(pa.array(firsts)), labels.take(pa.array(first_labels))
    places = pc.index_in(_plain(kept[_KEY]), value_set=_plain(chosen[key]))
    found = pc.is_valid(places).to_numpy(zero_copy_only=False)
    num_found = int(found.sum())
    rows = kept.filter(pa.array(found))
    matched = chosen.take(places.filter(pa.array(found)))
    has_label = np.ones(len(rows), bool)
    for name in added:
        rows = rows.append_column(name, matched[name])
        has_label &= pc.is_valid(matched[name]).to_numpy()
    rows = rows.filter(pa.array(has_label))
    counts = JoinReport(
        joined=len(rows),
        without_label=len(kept) - len(rows),
        without_request=len(chosen) - num_found,
        without_key=0,
        repeated_requests=len(record) - len(kept),
        repeated_labels=len(repeated),
        conflicting_labels=int(conflicts.sum()),
    )
    return rows, np.array(counts, np.int64)


def _first_of_key(keys: Any) -> tuple[_Array, _Array]:
    """Return the first row of each key, ascending, and the first row of the key of each row."""
    if not len(keys):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    codes = _plain(keys).dictionary_encode().indices.to_numpy()
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    return np.sort(first), first[inverse]


def _read(path: Path) -> Any:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()

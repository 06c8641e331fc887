"""Tables in files, as Arrow tables.

Parquet, CSV and TSV files are read by pyarrow: local paths, globs, folders, and URLs of any file
system that fsspec knows.

The types of a text file are inferred from its first, middle and last mebibyte: whole numbers, else
numbers, else times, else texts. An empty field is a missing value, of texts as well; other words
for missing values, such as NA, are texts. Digits with leading zeros are whole numbers: 007 is 7.
Columns of keys that were fitted as texts are read as texts.

Folders such as `dt=2026-11-28` are partition columns of the files in them: whole numbers if all
folders have whole numbers without leading zeros, else texts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import PurePath
from typing import Any, Final, TypeAlias

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import csv, fs

from recsys.base.arguments import MissingKeyError, wrong_type
from recsys.base.logs import logger
from recsys.datasets.files import READ_ERRORS, File, described, is_text, version_of
from recsys.datasets.lake import (
    LakeFile,
    TableVersion,
    check_no_lake,
    lake_at,
    lake_files,
    values_outside,
)
from recsys.datasets.partitions import Partition, check_same_columns, partition_of, types_of

__all__ = [
    "COMPRESSED",
    "Paths",
    "are_paths",
    "files_of",
    "is_utf8",
    "kind_of",
    "located",
    "names_of_files",
    "open_files",
    "unify_types",
    "with_versions",
]

Paths: TypeAlias = str | PurePath | TableVersion | Sequence[str | PurePath | TableVersion]
"""A path, glob, folder or URL, a version of a table of Delta Lake or Iceberg, or a list of them."""
_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "tsv", ".txt": "tsv"}
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
"""Suffixes of compressed text files."""
_SAMPLE_BYTES: Final = 1 << 20


def is_utf8(encoding: str) -> bool:
    """Return whether an encoding is UTF-8, by one of its names."""
    return encoding.lower() in ("utf8", "utf-8")


def kind_of(kind: Any) -> str | None:
    """Return the kind of the values of an Arrow type, in words; None if all values are missing."""
    types = pa.types
    if types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if types.is_null(kind):
        return None
    if types.is_nested(kind) and not (types.is_struct(kind) or types.is_map(kind)):
        return f"lists of {kind_of(kind.value_type) or 'nothing'}"
    if (types.is_primitive(kind) and not types.is_temporal(kind)) or types.is_decimal(kind):
        return "numbers"
    if types.is_temporal(kind):
        return "times"
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    more = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return "texts" if any(test(kind) for test in texts + more) else str(kind)


@contextlib.contextmanager
def located(place_of: Callable[[int], tuple[str, int]]) -> Iterator[None]:
    """Name the file, and the row in the file, in errors of some rows.

    Args:
        place_of: Function from the N of "in row N", in the message of an error, to the path and to
            the row in the file. Errors of an empty path are left as they are.

    Raises:
        KeyError: A column is missing.
        TypeError: A column has values of another type.
        ValueError: A value is out of its range.

    Example:
        >>> with located(lambda row: ("day.csv", row + 100)):
        ...     raise ValueError("Column 'age' must be finite; received nan in row 2.")
        Traceback (most recent call last):
        ValueError: Column 'age' must be finite; received nan in row 102 of day.csv.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        path, _ = place_of(0)
        if not path:
            raise
        kinds = {KeyError: MissingKeyError, TypeError: TypeError, Exception: ValueError}
        kind = next(kinds[k] for k in kinds if isinstance(error, k))
        text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        # the last one: the received value may have these words, too
        match = re.search(r"in row (\d+)(?!.*in row \d)", text, re.DOTALL)
        if match is None:
            raise kind(f"{path}: {text}") from error
        path, row = place_of(int(match[1]))
        text = f"{text[: match.start()]}in row {row} of {path}{text[match.end() :]}"
        raise kind(text) from error


def unify_types(
    files: Sequence[File],
    columns: Iterable[str],
    kinds: Mapping[str, str | None],
    optional: Collection[str] = (),
) -> list[File]:
    """Check that columns have one kind of values in all files.

    Args:
        files: At least one file.
        columns: The columns that files must have.
        kinds: Further columns, of keys, which files may lack. "text": text files are read with
            texts; None: the kind is not known.
        optional: The part of `columns` that files may lack. Their values are then missing, and the
            logger `recsys` names the column and the first file.

    Returns:
        The files. Text files have the types of all text files: whole numbers in one file and
        decimals in another become decimals, dates and times become times. A column without values
        has the type of the other files. A column of keys of no known kind is read as texts if a
        file has texts in it. Partition columns have types as columns of text files.

    Raises:
        KeyError: A file does not have a column.
        TypeError: A column has values of another kind, such as numbers and texts.
    """
    types: dict[str, Any] = {}  # of text files
    required = list(columns)
    files = _with_optional(files, [name for name in required if name in optional])
    for file in files:
        file.check_columns(required)
    files = _with_texts(files, kinds)
    for name in dict.fromkeys([*required, *kinds]):
        first: tuple[File, Any] | None = None
        widest = pa.null()
        for file in files:
            if name not in file.schema.names:
                continue
            file_type = file.schema.field(name).type
            kind = kind_of(file_type)
            if kind is None or kind.endswith("of nothing"):
                continue
            first = first or (file, file_type)
            if kind != (expected := kind_of(first[1])):
                raise TypeError(
                    f"Column {name!r} must have one kind of values in all files; received "
                    f"{expected} in {first[0].path} and {kind} in {file.path}. Convert one of them."
                )
            widest = _wider(widest, file_type) if _is_inferred(file, name) else widest
        if first is not None and kind_of(widest) in (None, kind_of(first[1])):
            types[name] = first[1] if pa.types.is_null(widest) else widest
    return [_with_types(file, types) for file in files]


def _with_optional(files: Sequence[File], optional: Sequence[str]) -> list[File]:
    """Return files that have optional columns, with missing values where they lack them."""
    lacking = {name: [f.path for f in files if name not in f.schema.names] for name in optional}
    for name, paths in lacking.items():
        if paths:
            logger.warning(
                "Column %r is missing in %s of %s files, such as %s. It is optional, so its values "
                "are missing there.", name, len(paths), len(files), paths[0],
            )  # fmt: skip
    completed = []
    for file in files:
        absent = [name for name in optional if name not in file.schema.names]
        schema = pa.schema([*file.schema, *(pa.field(name, pa.null()) for name in absent)])
        partition = {**file.partition, **dict.fromkeys(absent)}
        completed.append(replace(file, schema=schema, partition=partition) if absent else file)
    return completed


def _is_inferred(file: File, name: str) -> bool:
    """Return whether the type of a column was inferred from values, so that it can be changed."""
    return is_text(file) or (name in file.partition and not file.has_types)


def _with_texts(files: Sequence[File], kinds: Mapping[str, str | None]) -> list[File]:
    """Return files whose keys are texts, in text files, where they are known to be texts."""
    wanted: dict[str, Any] = {}
    for name, kind in kinds.items():
        having = [file for file in files if name in file.schema.names]
        types = [file.schema.field(name).type for file in having]
        pairs = zip(having, types, strict=True)
        of_text = [kind for file, kind in pairs if _is_inferred(file, name)]
        # texts that look like times: a key is never a time
        has_texts = kind_of(reduce(_wider, of_text, pa.null())) in ("texts", "times")
        has_texts = has_texts or "texts" in map(kind_of, types)
        if kind == "text" or (kind is None and has_texts):
            wanted[name] = pa.string()
    return [_with_types(file, wanted) for file in files]


def _with_types(file: File, types: Mapping[str, Any]) -> File:
    """Return a file whose inferred columns have other types."""
    if not any(_is_inferred(file, name) for name in file.schema.names):
        return file
    fields = [
        field.with_type(types[field.name])
        if field.name in types and _is_inferred(file, field.name)
        else field
        for field in file.schema
    ]
    return replace(file, schema=pa.schema(fields))


def files_of(paths: Paths, format: str | None = None, **csv_options: Any) -> list[File]:
    """Find the files of paths, globs, folders and URLs, in the order of their names.

    Args:
        paths: One or several. A folder of Delta Lake or Iceberg is read at its latest version.
        format: "parquet", "csv" or "tsv"; None: by the suffix of each file.
        csv_options: For text files: `read_options`, `parse_options` and `convert_options` of
            `pyarrow.csv`.

    Returns:
        The files.

    Raises:
        TypeError: `paths` are not paths.
        FileNotFoundError: A path or glob has no file, or there is no path.
        ValueError: The format of a file is unknown, the file is damaged or empty, or it is a part
            of a table of Delta Lake or Iceberg.
    """
    return open_files(with_versions(paths), format, **csv_options)


def open_files(
    listed: Sequence[str | TableVersion], format: str | None, **csv_options: Any
) -> list[File]:
    """Open the files of paths whose tables have a version; as `files_of`.

    Args:
        listed: Result of `with_versions`.
        format: As for `files_of`.
        csv_options: As for `files_of`.
    """
    files: list[File | None] = []
    found = []
    for address in listed:
        if isinstance(address, TableVersion):
            files += [_open_in_lake(file, address, format) for file in lake_files(address)]
        else:
            places = _found(address)
            found += places
            files += [None] * len(places)
    names = [shown for _, _, shown in found]
    partitions = [*map(partition_of, names)]
    check_same_columns(names, partitions)
    types = types_of(partitions)
    plain = (
        _with_columns(_open(system, path, shown, format, csv_options), partition, types)
        for (system, path, shown), partition in zip(found, partitions, strict=True)
    )
    return [next(plain) if file is None else file for file in files]


def names_of_files(paths: Paths) -> list[str]:
    """Return the full names of the files of paths, in their order, without opening them.

    Raises:
        TypeError: `paths` are not paths.
        FileNotFoundError: A path or glob has no file, or there is no path.
        ValueError: A path is a table of Delta Lake or Iceberg, or a part of one.
    """
    names = []
    for address in with_versions(paths):
        if isinstance(address, TableVersion):
            raise ValueError(
                f"A table of Delta Lake or Iceberg has versions instead of new files; received "
                f"{address}. Read each version by parquet."
            )
        names += [shown for _, _, shown in _found(address)]
    return names


def with_versions(paths: Paths) -> list[str | TableVersion]:
    """Return paths as a list, in which tables of Delta Lake and Iceberg have a version.

    Args:
        paths: One or several. A folder of such a table gets the latest version.

    Raises:
        TypeError: `paths` are not paths.
        FileNotFoundError: There is no path.
        ValueError: A table does not have a version.
    """
    if isinstance(paths, Sequence) and not is_path(paths) and not len(paths):
        raise FileNotFoundError("paths must have at least one path; received none.")
    if not are_paths(paths):
        wrong_type("paths", "a path or a list of paths", paths)
    listed = [paths] if isinstance(paths, str | PurePath | TableVersion) else list(paths)
    return [
        one if isinstance(one, TableVersion) else lake_at(os.fspath(one)) or os.fspath(one)
        for one in listed
    ]


def _open_in_lake(one: LakeFile, table: TableVersion, format: str | None) -> File:
    """Return a file with the columns that its table has."""
    if format not in (None, "parquet"):
        raise ValueError(f"{table} must be read as Parquet; received the format {format!r}.")
    [(system, path, shown)] = _places(one.path, [fsspec.core.url_to_fs(one.path)[1]])
    try:
        file = _open(system, path, shown, "parquet", {})
    except ValueError as error:
        raise ValueError(
            f"{error} It is a file of {table}; VACUUM and expired snapshots remove the files of "
            "old versions. Pass a version that still has its files."
        ) from error
    added = values_outside(one, file.schema)
    schema = [
        field if field.name in added else file.schema.field(field.name) for field in one.schema
    ]
    return replace(file, schema=pa.schema(schema), partition=added, has_types=True)


def _with_columns(file: File, partition: Partition, types: Mapping[str, Any]) -> File:
    """Return a file with the columns of its folders."""
    added = {name: value for name, value in partition.items() if name not in file.schema.names}
    repeated = {name: value for name, value in partition.items() if name not in added}
    schema = pa.schema([*file.schema, *(pa.field(name, types[name]) for name in added)])
    return replace(file, schema=schema, partition=added, repeated=repeated) if partition else file


def is_path(data: object) -> bool:
    """Return whether an argument is a path or a URL."""
    return isinstance(data, str | PurePath | TableVersion)


def are_paths(data: object) -> bool:
    """Return whether an argument is a path, or a list of one or more paths."""
    return is_path(data) or (
        isinstance(data, Sequence) and len(data) > 0 and all(map(is_path, data))
    )


def _found(one: str) -> list[tuple[Any, str, str]]:
    system, path = fsspec.core.url_to_fs(one)
    if system.isdir(path):
        paths = _files_in(system, path)
    elif any(mark in path for mark in "*?["):
        matches = system.glob(path)
        paths = [name for name in matches if system.isfile(name)]
        # a glob of folders only, such as dt=2026-11-*
        paths = paths or [*{name for folder in matches for name in _files_in(system, folder)}]
    else:
        paths = [path] if system.exists(path) else []
    if not paths:
        raise FileNotFoundError(f"{one} must be a file, or a folder or glob with files.")
    places = _places(one, sorted(paths))
    check_no_lake(system, sorted(paths), places[0][2].removesuffix(places[0][1]))
    return places


def _places(one: str, paths: Sequence[str]) -> list[tuple[Any, str, str]]:
    """Return the file system, the path in it and the full name of each path beside a path."""
    system, _ = fsspec.core.url_to_fs(one)
    is_local = "file" in (system.protocol if isinstance(system.protocol, tuple) else [])
    place = fs.LocalFileSystem() if is_local else fs.PyFileSystem(fs.FSSpecHandler(system))
    prefix = "" if is_local else one.partition("://")[0] + "://"
    return [(place, path, prefix + path) for path in paths]


def _files_in(system: Any, folder: str) -> list[str]:
    """Return the tables in a folder and its folders."""
    return [
        name
        for name in system.find(folder)
        if _format_of(name) and not _is_hidden(name.removeprefix(folder))
    ]


def _is_hidden(path: str) -> bool:
    """Return whether a part of a path marks a hidden file, by the rule of Spark."""
    *folders, name = PurePath(path.lstrip("/")).parts
    return name.startswith((".", "_")) or any(
        folder.startswith(".") or (folder.startswith("_") and "=" not in folder)
        for folder in folders
    )


def _format_of(path: str) -> str | None:
    name = PurePath(path)
    suffixes = [end for end in name.suffixes if end not in COMPRESSED]
    return _SUFFIXES.get(suffixes[-1].lower()) if suffixes else None


def _open(
    system: Any, path: str, shown: str, format: str | None, options: Mapping[str, Any]
) -> File:
    kind = format or _format_of(path)
    if kind not in ("parquet", "csv", "tsv"):
        raise ValueError(
            f"{shown} must end in .parquet, .csv or .tsv; received the format {kind!r}. Pass "
            "format='parquet', 'csv' or 'tsv'."
        )
    encoding = "utf8"
    version = version_of(system, path)
    try:
        if kind == "parquet":
            made: Any = ds.ParquetFileFormat()
        else:
            settings = dict(options)
            if kind == "tsv" and "parse_options" not in settings:
                settings["parse_options"] = csv.ParseOptions(delimiter="\t")
            if "convert_options" not in settings:
                settings["convert_options"] = csv.ConvertOptions(
                    null_values=[""], strings_can_be_null=True
                )
            made = ds.CsvFileFormat(**settings)
            if settings.get("read_options") is not None:
                encoding = settings["read_options"].encoding
        fragment = made.make_fragment(path, filesystem=system)
        schema = fragment.physical_schema
        if kind != "parquet" and is_utf8(encoding):
            schema = _sampled_schema(fragment, settings)
    except READ_ERRORS as error:
        text = described(str(error))
        raise ValueError(f"{shown} cannot be read as {kind}: {text}") from error
    return File(shown, fragment, schema, encoding, version)


def _sampled_schema(fragment: Any, options: Mapping[str, Any]) -> Any:
    """Return the columns of a text file, with types that also fit its middle and its end."""
    schema = fragment.physical_schema
    size = fragment.filesystem.get_file_info(fragment.path).size
    parsing = options.get("parse_options", csv.ParseOptions())
    is_compressed = fragment.path.endswith(COMPRESSED)
    if size <= _SAMPLE_BYTES or is_compressed or parsing.newlines_in_values:
        return schema
    with fragment.filesystem.open_input_file(fragment.path) as opened:
        for start in (size // 2, max(_SAMPLE_BYTES, size - _SAMPLE_BYTES)):
            opened.seek(start)
            lines = opened.read(_SAMPLE_BYTES).partition(b"\n")[2]
            if start + _SAMPLE_BYTES < size:
                lines = lines[: lines.rfind(b"\n") + 1]
            if not lines.strip():
                continue
            table = csv.read_csv(
                pa.BufferReader(lines),
                csv.ReadOptions(column_names=schema.names, block_size=len(lines)),
                parsing,
                options["convert_options"],
            )
            types = map(_wider, schema.types, table.schema.types)
            schema = pa.schema(list(zip(schema.names, types, strict=True)))
    return schema


def _wider(first: Any, second: Any) -> Any:
    """Return the type of a column with values of both types."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    times = [kind for kind in (first, second) if _time_rank(kind)]
    if len(times) == 2:
        return max(times, key=_time_rank)
    is_number = [
        pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (first, second)
    ]
    return pa.float64() if all(is_number) else pa.string()


def _time_rank(kind: Any) -> int:
    """Return the rank of a type of times, larger for a type with more values; 0 for others."""
    if pa.types.is_timestamp(kind):
        return 2 + ["s", "ms", "us", "ns"].index(kind.unit)
    return int(pa.types.is_date(kind))

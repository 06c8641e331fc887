"""Batches from tables of raw or prepared columns: Parquet, CSV and tables in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from recsys.datasets.files import File
from recsys.datasets.lake import TableVersion, VersionedTables
from recsys.datasets.partitions import file_name
from recsys.datasets.selection import (
    PART_COLUMN,
    PARTS,
    RecordedSplit,
    RowSplit,
    Spec,
    check_settings,
    check_split,
    filter_columns,
)
from recsys.datasets.sources import Source, TableSource, source_of
from recsys.datasets.table_reader import TableReader
from recsys.datasets.tables import Paths, located, open_files, unify_types, with_versions

__all__ = ["csv", "parquet", "read_files", "table"]


def read_files(
    paths: Paths,
    format: str | None,
    spec: Spec,
    batch_size: int,
    options: dict[str, Any],
    **text_options: Any,
) -> TableReader:
    """Read files, as `parquet` and `csv` do.

    Args:
        paths: As for `parquet`.
        format: "parquet", "csv" or "tsv"; None: by the suffix of each file.
        spec: As for `parquet`.
        batch_size: As for `parquet`.
        options: Keyword arguments of `TableReader`.
        text_options: Options of `pyarrow.csv`, as for `csv`.
    """
    split, filter = options.get("split"), options.get("filter")
    check_settings(spec, split, filter)
    listed = with_versions(paths)
    versions = [one.version or 0 for one in listed if isinstance(one, TableVersion)]

    open_at = partial(_open_at, listed, format, text_options, spec, options)
    tables = VersionedTables(versions, open_at) if versions else None
    return TableReader(open_at(versions), spec, batch_size, tables=tables, **options)


def _open_at(
    listed: Sequence[str | TableVersion],
    format: str | None,
    text_options: dict[str, Any],
    spec: Spec,
    options: dict[str, Any],
    versions: Sequence[int],
) -> list[Source]:
    """Return the sources of paths, with tables at other versions."""
    left = iter(versions)
    paths = [
        replace(one, version=next(left)) if isinstance(one, TableVersion) else one for one in listed
    ]
    return _open(open_files(paths, format, **text_options), spec, options)


def _open(files: list[File], spec: Spec, options: dict[str, Any]) -> list[Source]:
    """Return the sources of files; `options` gets the split that the files record."""
    split, filter = options.get("split"), options.get("filter")
    has_parts = all(PART_COLUMN in file.partition for file in files)
    if split is None and options.get("part") in PARTS and has_parts:
        split = options["split"] = RecordedSplit()
    for file in files:
        check_split(split, spec, file.path, file.schema.names)
    names = [*spec.column_names(options.get("labels", True)), *(split.columns if split else ())]
    kinds = {name: kind for name, kind in spec.column_kinds().items() if name in names}
    files = unify_types(files, names, kinds, spec.optional_names())
    files = unify_types(files, filter_columns(filter, files[0].schema), kinds)
    sources: list[Source] = []
    for file in files:
        rows, is_excluded = filter, False
        if split is not None and options.get("part") in PARTS:
            wanted = split.filter_of(options["part"], file.schema)
            rows = wanted if rows is None else rows if wanted is None else rows & wanted
            is_excluded = not _may_have_part(file, split, options["part"])
        sources.append(source_of(file, rows, is_excluded=is_excluded))
    return sources


def _may_have_part(file: File, split: RowSplit, part: str) -> bool:
    """Return whether a file may have rows of a part; its partition may put all rows in one part."""
    if not split.columns or not {*split.columns} <= {*file.partition}:
        return True
    with located(lambda row: (file.path, row)):
        [number] = split.parts_of(file.partition_row(), file_name(file.path), np.zeros(1, np.int64))
    return bool(number == PARTS.index(part))


def parquet(paths: Paths, spec: Spec, batch_size: int, **options: Any) -> TableReader:
    """Read Parquet files.

    Args:
        paths: A file, folder, glob or URL, a `TableVersion` of Delta Lake or Iceberg, or a list of
            them. A folder of such a table is read at its latest version.
        spec: A fitted `recsys.features.FeatureSpec`. Only its columns are read.
        batch_size: Rows of a batch of one rank.
        options: Keyword arguments of `TableReader`.

    Returns:
        The batches.

    Raises:
        FileNotFoundError: A path has no file.
        KeyError: A file does not have a column.
        TypeError: As for `TableReader`.
        ValueError: A file is damaged, or as for `TableReader`.

    Example:
        >>> import tempfile
        >>> import pyarrow.parquet
        >>> from recsys.features import FeatureSpec, Ids, Label
        >>> path = f"{tempfile.mkdtemp()}/clicks.parquet"
        >>> pyarrow.parquet.write_table(pyarrow.table({"film": [4, 5], "liked": [1, 0]}), path)
        >>> spec = FeatureSpec([Ids("film", rows=9), Label("liked")])
        >>> [batch.labels.tolist() for batch in parquet(path, spec, batch_size=8)]
        [[1.0, 0.0]]
    """
    return read_files(paths, "parquet", spec, batch_size, options)


def csv(
    paths: Paths,
    spec: Spec,
    batch_size: int,
    *,
    format: Literal["csv", "tsv"] | None = None,
    read_options: Any = None,
    parse_options: Any = None,
    convert_options: Any = None,
    **options: Any,
) -> TableReader:
    r"""Read CSV and TSV files, by lines: blocks of 4 MiB take the place of row groups.

    An empty field is a missing value. Types are inferred as `recsys.datasets.tables` describes;
    files must have the same kind of values in a column. A compressed file is one block, which must
    fit into memory: convert large ones by `python -m recsys prepare`.

    Args:
        paths: A file, folder, glob or URL, or a list of them.
        spec: A fitted `recsys.features.FeatureSpec`. Only its columns are read.
        batch_size: Rows of a batch of one rank.
        format: "csv" or "tsv"; None: by the suffix of each file.
        read_options: `pyarrow.csv.ReadOptions`, such as `column_names` of files without a header.
        parse_options: `pyarrow.csv.ParseOptions`, such as the delimiter.
        convert_options: `pyarrow.csv.ConvertOptions`, such as `column_types` or `null_values`.
        options: Keyword arguments of `TableReader`.

    Returns:
        The batches.

    Raises:
        FileNotFoundError: A path has no file.
        KeyError: A file does not have a column.
        TypeError: As for `TableReader`.
        ValueError: A file is empty or damaged, a value does not have the type of its column, or as
            for `TableReader`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from recsys.features import FeatureSpec, Ids, Label
        >>> path = Path(tempfile.mkdtemp(), "clicks.csv")
        >>> _ = path.write_text("film,liked\n4,1\n,0\n")
        >>> spec = FeatureSpec([Ids("film", rows=9), Label("liked")])
        >>> [batch.sparse_features.lengths().tolist() for batch in csv(path, spec, batch_size=8)]
        [[1, 0]]
    """
    csv_options = {
        "read_options": read_options,
        "parse_options": parse_options,
        "convert_options": convert_options,
    }
    csv_options = {name: value for name, value in csv_options.items() if value is not None}
    return read_files(paths, format, spec, batch_size, options, **csv_options)


def table(data: Any, spec: Spec, batch_size: int, **options: Any) -> TableReader:
    """Read a table in memory.

    Args:
        data: A table of Arrow, pandas or polars, a `Dataset` of Hugging Face, which stays on disk,
            or a dict of columns.
        spec: A fitted `recsys.features.FeatureSpec`.
        batch_size: Rows of a batch of one rank.
        options: Keyword arguments of `TableReader`. Slices of the table take the place of row
            groups.

    Returns:
        The batches.

    Raises:
        KeyError: The table does not have a column.
        TypeError: `data` is not a table, or as for `TableReader`.
        ValueError: As for `TableReader`.

    Example:
        >>> from recsys.features import FeatureSpec, Ids, Label
        >>> spec = FeatureSpec([Ids("film", rows=9), Label("liked")])
        >>> reader = table({"film": [4, 5], "liked": [1, 0]}, spec, batch_size=1)
        >>> [batch.labels.tolist() for batch in reader]
        [[1.0], [0.0]]
    """
    return TableReader([TableSource(data)], spec, batch_size, **options)

"""`python -m recsys prepare`: convert raw tables of any size to Parquet that is ready for training.

Vocabularies are counted in a first pass, unless the spec is fitted. A second pass writes row
numbers and scaled numbers. Both hold some row groups in memory, beside the vocabularies.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from recsys.base.arguments import path_of, whole
from recsys.datasets.ahead import map_ahead
from recsys.datasets.files import File
from recsys.datasets.partitions import file_name
from recsys.datasets.selection import PART_COLUMN, PARTS, RowSplit, check_settings
from recsys.datasets.sources import Part, read_parts
from recsys.datasets.tables import Paths, files_of, unify_types
from recsys.features import FeatureSpec
from recsys.features.prepared import check_prepared_names, prepared_spec, prepared_table
from recsys.features.splits import Split, TimeSplit

__all__ = ["add_arguments", "main", "prepare"]

_DONE, _WRONG_INPUT = 0, 2
_PART = ".unfinished"
"""Folder in the output; its files get their names when all are complete."""
_NUMBERS = "recsys.part"
"""Column of raw rows with the number of their part."""
_EPILOG = """\
output: part-00000.parquet and so on; features/, the fitted spec for raw columns, as in serving; and
prepared/, the spec of the files for recsys.datasets.parquet. With --split or --time-split, files
are in the folders part=train, part=validation and part=test, and readers take part="train".

exit codes: 0 the files are written, 2 something is wrong with the input

examples:
  python -m recsys prepare --spec spec.py --input 'clicks/*.csv' --output prepared
  python -m recsys prepare --spec prepared/features --input day2.parquet --output prepared2
  python -m recsys prepare --spec spec.py --input clicks --output ready --split user
"""


@final
class _Progress:
    """One line: on a terminal rewritten twice a second, else written every ten seconds."""

    def __init__(self, title: str, num_files: int) -> None:
        self._title, self._num_files = title, num_files
        self._is_terminal = sys.stderr.isatty()
        self._start = self._last = time.monotonic()
        self._width = 0

    def show(self, file: int, rows: int, *, is_last: bool = False) -> None:
        now = time.monotonic()
        if not is_last and now - self._last < (0.5 if self._is_terminal else 10):
            return
        self._last = now
        rate = rows / max(now - self._start, 1e-9)
        line = f"{self._title}: file {file} of {self._num_files}, {rows:,} rows, {rate:,.0f} rows/s"
        if self._is_terminal:
            sys.stderr.write("\r" + line.ljust(self._width) + ("\n" if is_last else ""))
        else:
            sys.stderr.write(line + "\n")
        self._width = len(line)
        sys.stderr.flush()


def prepare(
    spec: FeatureSpec,
    paths: Paths,
    output: str | Path,
    *,
    format: str | None = None,
    labels: bool = True,
    row_group_rows: int = 1 << 16,
    file_rows: int = 1 << 22,
    compression: str = "snappy",
    num_workers: int = 1,
    limit: int = 300_000,
    split: RowSplit | None = None,
    **csv_options: Any,
) -> int:
    r"""Convert raw tables to Parquet files of row numbers, scaled numbers and labels.

    Args:
        spec: The columns; fitted on the data if it is not fitted yet.
        paths: Files, folders, globs or URLs of raw tables, or a list of them.
        output: A new or empty folder for the files, the fitted spec (`features`) and the spec of
            the files (`prepared`).
        format: "parquet", "csv" or "tsv"; None: by the suffix of each file.
        labels: False for tables without labels, sample weights and groups.
        row_group_rows: Rows of a row group, the unit that ranks divide and shuffle.
        file_rows: Rows of a file, at least.
        compression: Of the files, as `pyarrow.parquet.ParquetWriter` names it.
        num_workers: Threads that transform rows while others are read and written.
        limit: Number of distinct values of a vocabulary in memory; more are counted in files.
        split: A `recsys.datasets.Split` or `TimeSplit` of the raw tables. The rows of each part are
            written to a folder of their own, `part=train`, `part=validation` and `part=test`, and
            readers take `part="train"`. A spec that is not fitted is fitted on the training part.
        csv_options: `read_options`, `parse_options` and `convert_options` of `pyarrow.csv`.

    Returns:
        The number of rows.

    Raises:
        FileExistsError: `output` is not empty.
        FileNotFoundError: A path has no file.
        KeyError: A file does not have a column.
        TypeError: A column has values of another type.
        ValueError: A file is damaged, or a value is NaN, infinite or out of its range. The message
            names the column, the value, the file and the row in the file.

    Example:
        >>> import tempfile
        >>> from recsys import datasets
        >>> from recsys.features import Categorical, Label
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "clicks.csv").write_text("city,ok\nOslo,1\nRome,0\nOslo,0\n")
        >>> spec = FeatureSpec([Categorical("city"), Label("ok")])
        >>> prepare(spec, folder / "clicks.csv", folder / "ready")
        3
        >>> ready = FeatureSpec.load(folder / "ready/prepared")
        >>> reader = datasets.parquet(folder / "ready/*.parquet", ready, batch_size=2)
        >>> [batch.sparse_features.values().tolist() for batch in reader]
        [[2, 3], [2]]

        With parts:

        >>> split = datasets.Split("city", shares=(0.5, 0.0, 0.5))
        >>> prepare(spec, folder / "clicks.csv", folder / "parts", split=split)
        3
        >>> reader = datasets.parquet(folder / "parts", ready, batch_size=2, part="train")
        >>> [batch.sparse_features.values().tolist() for batch in reader]
        [[3]]
    """
    group, most = whole("row_group_rows", row_group_rows), whole("file_rows", file_rows)
    folder = path_of("prepare.output", output)
    if folder.exists() and any(folder.iterdir()):
        stopped = f" of a stopped job in {_PART}. Delete it" if (folder / _PART).exists() else ""
        raise FileExistsError(f"output must be a new or empty folder; {folder} has files{stopped}.")
    check_settings(spec, split, None)
    check_prepared_names(spec.columns)
    if split is not None and PART_COLUMN in {column.name for column in spec.columns}:
        raise ValueError(
            f"spec must have no column {PART_COLUMN!r} with split, as folders of parts have this "
            "name. Rename the column of the data."
        )
    names = [*dict.fromkeys([*spec.column_names(labels), *(split.columns if split else ())])]
    kinds = {name: kind for name, kind in spec.column_kinds().items() if name in names}
    files = files_of(paths, format, **csv_options)
    files = unify_types(files, names, kinds, spec.optional_names())
    if not spec.is_fitted:
        progress = _Progress("fit", len(files))
        empty = [Part(file.schema.empty_table().select(names), file.path, 0) for file in files]
        fitted_on = [*dict.fromkeys([*spec.fit_column_names(), *(split.columns if split else ())])]
        parts = _parts(files, fitted_on, progress, 0, split)
        if split is not None:
            parts = map(_training_rows, parts)
        spec.fit(chain(empty, parts), limit=limit)
    progress = _Progress("write", len(files))

    def converted(rows: Part) -> tuple[Any, Any]:
        numbers = rows.table.column(_NUMBERS) if split is not None else None
        with rows.located():
            return prepared_table(spec, rows.table, labels=labels), numbers

    part = folder / _PART
    part.mkdir(parents=True)
    folders = [part] if split is None else [part / f"{PART_COLUMN}={name}" for name in PARTS]
    writers = [_Writer(path, group, most, compression) for path in folders]
    try:
        for table, numbers in map_ahead(
            converted, _parts(files, names, progress, group, split), num_workers
        ):
            for number, writer in enumerate(writers):
                writer.write(table if numbers is None else table.filter(pc.equal(numbers, number)))
        for writer in writers:
            writer.finish()
        spec.save(part / "features")
        prepared_spec(spec).save(part / "prepared")
    except BaseException:
        for writer in writers:
            writer.abandon()
        shutil.rmtree(part, ignore_errors=True)
        raise
    for path in sorted(part.iterdir()):  # the spec of the files comes last
        os.rename(path, folder / path.name)
    part.rmdir()
    return sum(writer.num_rows for writer in writers)


@final
class _Writer:
    """The files of a folder, in row groups of one size; the last one may have fewer rows."""

    def __init__(self, folder: Path, group: int, most: int, compression: str) -> None:
        self.num_rows = 0
        self._folder, self._group, self._most = folder, group, most
        self._compression = compression
        self._waiting: list[Any] = []
        self._num_waiting = self._num_files = self._num_written = 0
        self._writer: Any = None

    def write(self, table: Any) -> None:
        """Add rows. A row group is written when it is full."""
        self._waiting.append(table)
        self._num_waiting += table.num_rows
        while self._num_waiting >= self._group:
            rows = pa.concat_tables(self._waiting)
            self._write_group(rows.slice(0, self._group))
            self._waiting = [rows.slice(self._group)]
            self._num_waiting -= self._group

    def _write_group(self, table: Any) -> None:
        if self._writer is None:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"part-{self._num_files:05}.parquet"
            self._num_files, self._num_written = self._num_files + 1, 0
            self._writer = pq.ParquetWriter(path, table.schema, compression=self._compression)
        self._writer.write_table(table, row_group_size=self._group)
        self.num_rows += table.num_rows
        self._num_written += table.num_rows
        if self._num_written >= self._most:
            self._writer.close()
            self._writer = None

    def finish(self) -> None:
        """Write the last rows."""
        if self._num_waiting:
            self._write_group(pa.concat_tables(self._waiting))
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        """Close the file after an error."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()


def _training_rows(part: Part) -> Part:
    """Return the rows of the training part."""
    rows = np.flatnonzero(part.table.column(_NUMBERS).to_numpy() == PARTS.index("train"))
    return part._replace(table=part.table.take(pa.array(rows)), rows=rows + part.first)


def _with_numbers(part: Part, split: RowSplit) -> Any:
    """Return the table of consecutive rows with the number of each row's part."""
    places = np.arange(part.place, part.place + part.table.num_rows)
    with part.located():
        numbers = split.parts_of(part.table, file_name(part.path), places)
    return part.table.append_column(_NUMBERS, pa.array(numbers, pa.int8()))


def _parts(
    files: Sequence[File],
    names: Sequence[str],
    progress: _Progress,
    rows: int,
    split: RowSplit | None,
) -> Iterator[Part]:
    """Yield the rows of files, in parts of about `rows` rows; 0: in the parts of each file."""
    total = 0
    for number, file in enumerate(files, 1):
        first = 0
        parts = read_parts(file, names, in_blocks=split is not None and not split.columns)
        tables = (part.table if split is None else _with_numbers(part, split) for part in parts)
        for table in _regrouped(tables, rows) if rows else tables:
            yield Part(table, file.path, first)
            first += table.num_rows
            total += table.num_rows
            progress.show(number, total)
    progress.show(len(files), total, is_last=True)


def _regrouped(tables: Iterator[Any], rows: int) -> Iterator[Any]:
    """Yield tables of `rows` rows; the last one may have fewer."""
    waiting: list[Any] = []
    count = 0
    for table in tables:
        waiting.append(table)
        count += table.num_rows
        while count >= rows:
            whole_table = pa.concat_tables(waiting)
            yield whole_table.slice(0, rows)
            waiting = [whole_table.slice(rows)]
            count -= rows
    if count:
        yield pa.concat_tables(waiting)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--spec",
        required=True,
        metavar="FILE.py[:NAME] | FOLDER",
        help="the folder of a saved spec, or a Python file with the spec, named `spec` by default, "
        "and, for text files, options of pyarrow.csv in a dict `csv_options`",
    )
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files, folders, globs or URLs of Parquet, CSV or TSV",
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument(
        "--format", choices=["parquet", "csv", "tsv"], help="default: by the suffix of each file"
    )
    parser.add_argument(
        "--names", metavar="A,B,C", help="names of the columns of text files without a header"
    )
    parser.add_argument(
        "--no-labels", action="store_true", help="tables have no labels, weights and groups"
    )
    parser.add_argument("--row-group-rows", type=int, default=1 << 16, metavar="N")
    parser.add_argument("--file-rows", type=int, default=1 << 22, metavar="N")
    parser.add_argument(
        "--compression", default="snappy", help="of the Parquet files (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="threads that transform rows"
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=300_000,
        metavar="N",
        help="distinct values of a vocabulary in memory; more are counted in temporary files "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--split",
        nargs="?",
        const="",
        metavar="COLUMN",
        help="divide rows by the hash of a column such as user; without COLUMN, single rows",
    )
    parser.add_argument(
        "--shares",
        default="0.8,0.1,0.1",
        metavar="A,B,C",
        help="shares of training, validation and test data of --split (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of --split")
    parser.add_argument(
        "--time-split",
        nargs=3,
        metavar=("COLUMN", "VALIDATION", "TEST"),
        help="divide rows by the first times, such as 2026-11-28, of validation and test data",
    )


def _split_of(options: argparse.Namespace) -> RowSplit | None:
    """Return the split of the options; limits of a time are numbers if both are."""
    if options.time_split is not None:
        if options.split is not None:
            raise ValueError("--split and --time-split exclude each other. Leave one out.")
        column, *limits = options.time_split
        with contextlib.suppress(ValueError):
            numbers = [float(limit) for limit in limits]
            limits = [int(number) if number.is_integer() else number for number in numbers]
            limits = limits if type(limits[0]) is type(limits[1]) else numbers
        return TimeSplit(column, validation=limits[0], test=limits[1])
    if options.split is None:
        return None
    try:
        first, second, third = (float(share) for share in options.shares.split(","))
    except ValueError as error:
        raise ValueError(
            f"--shares must be three numbers such as 0.8,0.1,0.1; received {options.shares!r}."
        ) from error
    return Split(options.split or None, shares=(first, second, third), seed=options.seed)


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    text_options: dict[str, Any] = {}
    if options.names is not None:
        text_options["read_options"] = csv.ReadOptions(column_names=options.names.split(","))
    try:
        spec, file_options = _read_spec(options.spec)
        rows = prepare(
            spec,
            options.input,
            options.output,
            format=options.format,
            labels=not options.no_labels,
            row_group_rows=options.row_group_rows,
            file_rows=options.file_rows,
            compression=options.compression,
            num_workers=options.workers,
            limit=options.limit,
            split=_split_of(options),
            **{**file_options, **text_options},
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _WRONG_INPUT
    print(f"{rows:,} rows in {options.output}")
    return _DONE


def _read_spec(given: str) -> tuple[FeatureSpec, dict[str, Any]]:
    """Return the spec, and options of text files."""
    if os.path.isdir(given):
        return FeatureSpec.load(given), {}
    path, _, name = given.partition(":")
    if not path.endswith(".py"):
        raise ValueError(f"--spec must be FILE.py, FILE.py:NAME or a folder; received {given!r}.")
    module = runpy.run_path(path)
    spec = module.get(name or "spec")
    if not isinstance(spec, FeatureSpec):
        raise ValueError(
            f"--spec: {path} must have a FeatureSpec named {name or 'spec'!r}; received {spec!r}."
        )
    return spec, module.get("csv_options", {})

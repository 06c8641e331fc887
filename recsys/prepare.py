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

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from recsys.base.arguments import whole
from recsys.datasets.ahead import map_ahead
from recsys.datasets.files import File
from recsys.datasets.sources import Part, read_parts
from recsys.datasets.tables import Paths, files_of, unify_types
from recsys.features import FeatureSpec
from recsys.features.prepared import check_prepared_names, prepared_spec, prepared_table

__all__ = ["add_arguments", "main", "prepare"]

_DONE, _WRONG_INPUT = 0, 2
_PART = ".unfinished"
"""Folder in the output; its files get their names when all are complete."""
_EPILOG = """\
output: part-00000.parquet and so on; features/, the fitted spec for raw columns, as in serving; and
prepared/, the spec of the files for recsys.datasets.parquet.

exit codes: 0 the files are written, 2 something is wrong with the input

examples:
  python -m recsys prepare --spec spec.py --input 'clicks/*.csv' --output prepared
  python -m recsys prepare --spec prepared/features --input day2.parquet --output prepared2
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
    """
    group, most = whole("row_group_rows", row_group_rows), whole("file_rows", file_rows)
    folder = Path(output)
    if folder.exists() and any(folder.iterdir()):
        stopped = f" of a stopped job in {_PART}. Delete it" if (folder / _PART).exists() else ""
        raise FileExistsError(f"output must be a new or empty folder; {folder} has files{stopped}.")
    check_prepared_names(spec.columns)
    names = spec.column_names(labels)
    kinds = {name: kind for name, kind in spec.column_kinds().items() if name in names}
    files = unify_types(files_of(paths, format, **csv_options), names, kinds)
    if not spec.is_fitted:
        progress = _Progress("fit", len(files))
        empty = [Part(file.schema.empty_table().select(names), file.path, 0) for file in files]
        parts = _parts(files, spec.fit_column_names(), progress, 0)
        spec.fit(chain(empty, parts), limit=limit)
    progress = _Progress("write", len(files))

    def converted(rows: Part) -> Any:
        with rows.located():
            return prepared_table(spec, rows.table, labels=labels)

    parts = _parts(files, names, progress, group)
    num_rows = num_files = num_written = 0
    writer: Any = None
    part = folder / _PART
    part.mkdir(parents=True)
    try:
        for table in _regrouped(map_ahead(converted, parts, num_workers), group):
            if writer is None:
                path = part / f"part-{num_files:05}.parquet"
                num_files, num_written = num_files + 1, 0
                writer = pq.ParquetWriter(path, table.schema, compression=compression)
            writer.write_table(table, row_group_size=group)
            num_rows += table.num_rows
            num_written += table.num_rows
            if num_written >= most:
                writer.close()
                writer = None
        if writer is not None:
            writer.close()
        spec.save(part / "features")
        prepared_spec(spec).save(part / "prepared")
    except BaseException:
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()
        shutil.rmtree(part, ignore_errors=True)
        raise
    for path in sorted(part.iterdir()):  # the spec of the files comes last
        os.rename(path, folder / path.name)
    part.rmdir()
    return num_rows


def _parts(
    files: Sequence[File], names: Sequence[str], progress: _Progress, rows: int
) -> Iterator[Part]:
    """Yield the rows of files, in parts of about `rows` rows; 0: in the parts of each file."""
    total = 0
    for number, file in enumerate(files, 1):
        first = 0
        tables = (part.table for part in read_parts(file, names))
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

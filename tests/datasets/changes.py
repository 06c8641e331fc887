"""Files that change at random moments while they are read.

A reader yields the rows of one version, or raises an error that names the file; never rows of two.

    python -m tests.datasets.changes --cases 200 --seed 0

prints how many cases had each property and each pair of properties, and how each outcome was. The
resumed reader continues from a saved state, with files that change before, between or after.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import csv

from recsys import datasets
from recsys.datasets import files, sources, tables
from recsys.datasets.utils import Batch
from recsys.features import FeatureSpec, Ids
from recsys.prepare import prepare

FORMATS = ["parquet", "csv", "csv.gz", "csv with newlines"]
CHANGES = ["replaced", "rewritten", "rewritten longer", "appended", "truncated", "removed", "none"]
READERS = [
    "reader", "shuffled reader", "reader of threads", "filtered reader", "resumed reader", "tables",
    "prepare",
]  # fmt: skip
_ROWS, _GROUP, _BLOCK = 400, 50, 700
SPEC = FeatureSpec([Ids("row", rows=1 << 20), Ids("version", rows=9)])


class Case(NamedTuple):
    """One search."""

    format: str
    change: str
    reader: str
    files: str
    moment: str
    """Moment of the change."""
    outcome: str
    """The rows of one version, or a named error."""


def _table(number: int, version: int, rows: int = _ROWS) -> pa.Table:
    first = number * _ROWS
    numbers = range(first, first + rows)
    return pa.table({"row": numbers, "version": [version] * rows, "note": ["x"] * rows})


def _write(path: Path, kind: str, table: pa.Table) -> None:
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=_GROUP, compression="none")
        return
    note = '"a\nb"' if kind == "csv with newlines" else "ab"
    lines = [
        f"{row:06},{version},{note}\n"
        for row, version, _ in zip(*table.to_pydict().values(), strict=True)
    ]
    data = "".join(["row,version,note\n", *lines]).encode()
    path.write_bytes(gzip.compress(data) if kind == "csv.gz" else data)


class _Files:
    """Files of one version. One of them changes at a moment."""

    def __init__(self, seed: int, folder: Path, kind: str, change: str) -> None:
        self._kind, self._change, self._draw = kind, change, random.Random(seed)
        suffix = kind.partition(" ")[0]
        count = self._draw.choice([1, 1, 3])
        self.paths = [folder / f"{i}.{suffix}" for i in range(count)]
        for number, path in enumerate(self.paths):
            _write(path, kind, _table(number, 0))
            os.utime(path, ns=(10**18, 10**18))
        self.changed = self._draw.choice(self.paths)
        self.change_at: int | None = None
        self.num_moments = 0
        self.between = range(0)
        """Moments between the save of a state and the start of a new reader."""
        self.is_resuming = False
        self._lock = threading.Lock()

    def moment(self) -> None:
        """Change a file if its moment has come."""
        with self._lock:
            if self.num_moments == self.change_at:
                self._apply(self.changed)
            self.num_moments += 1

    def _apply(self, path: Path) -> None:
        number = self.paths.index(path)
        new = _table(number, 1)
        if self._change == "replaced":
            other = path.with_name(".new")
            _write(other, self._kind, new)
            os.replace(other, path)
        elif self._change == "rewritten":
            _write(path, self._kind, new)
        elif self._change == "rewritten longer":
            _write(path, self._kind, _table(number, 1, _ROWS + _GROUP))
        elif self._change == "appended":
            with path.open("ab") as file:
                file.write(b"000001,1,ab\n")
        elif self._change == "truncated":
            os.truncate(path, self._draw.randrange(path.stat().st_size))
        elif self._change == "removed":
            path.unlink()


@contextlib.contextmanager
def _moments(moment: Callable[[], None]) -> Iterator[None]:
    """Call a function before and after each part of reading."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            moment()
            found = function(*args, **options)
            moment()
            return found

        return call

    class Parquet(pq.ParquetFile):  # type: ignore[misc]
        def iter_batches(self, *args: Any, **options: Any) -> Iterator[Any]:
            moment()
            for batch in super().iter_batches(*args, **options):
                moment()
                yield batch

    with (
        mock.patch.object(files, "version_of", around(files.version_of)),
        mock.patch.object(sources, "_lines", around(sources._lines)),
        mock.patch.object(sources, "_BLOCK_BYTES", _BLOCK),
        mock.patch.object(csv, "open_csv", around(csv.open_csv)),
        mock.patch.object(pq, "ParquetFile", Parquet),
    ):
        yield


def _read(reader: str, found: _Files, kind: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Yield number and version of each row."""
    paths = [str(path) for path in found.paths]
    options: dict[str, Any] = {}
    if kind == "csv with newlines":
        options["parse_options"] = csv.ParseOptions(newlines_in_values=True)
    if reader == "prepare":
        prepare(SPEC, paths, folder / "out", row_group_rows=64, labels=False, **options)
        table = pq.read_table(sorted((folder / "out").glob("part*")))
        yield from zip(table["row"].to_pylist(), table["version"].to_pylist(), strict=True)
        return
    if reader == "tables":
        for file in tables.files_of(paths, **options):
            for part in sources.read_parts(file, ["row", "version"]):
                columns = part.table.to_pydict()
                yield from zip(columns["row"], columns["version"], strict=True)
                found.moment()
        return
    options["labels"] = False
    options["window_rows"] = 60
    if reader == "shuffled reader":
        options["shuffle"] = True
    elif reader == "reader of threads":
        options["num_workers"] = 2
    elif reader == "filtered reader":
        options["filter"] = ds.field("row") >= 0
    read = datasets.parquet if kind == "parquet" else datasets.csv
    batches = read(paths, SPEC, 16, **options)
    found.moment()
    num_before = 10 if reader == "resumed reader" else None
    for batch in itertools.islice(batches, num_before):
        yield from _rows(batch)
        found.moment()
    if num_before is None:
        return
    state = json.dumps(batches.state_dict())
    first, found.is_resuming = found.num_moments, True
    for _ in range(100):  # likelier than all other moments together
        found.moment()
    found.between = range(first, found.num_moments)
    batches = read(paths, SPEC, 16, **options)
    batches.load_state_dict(json.loads(state))
    found.is_resuming = False
    for batch in batches:
        yield from _rows(batch)
        found.moment()


def _rows(batch: Batch) -> Iterator[tuple[int, int]]:
    ids = batch.sparse_features
    yield from zip(ids["row"].values().tolist(), ids["version"].values().tolist(), strict=True)


def run(seed: int) -> Case:
    """Run a case and check its rows."""
    draw = random.Random(seed)
    kind, change, reader = draw.choice(FORMATS), draw.choice(CHANGES), draw.choice(READERS)
    rows: list[tuple[int, int]] = []
    moment = "changed at another moment"
    with tempfile.TemporaryDirectory() as name:
        moments = 0
        for attempt in (Path(name, "count"), Path(name, "change")):
            attempt.mkdir()
            found = _Files(seed, attempt, kind, change)
            if moments:
                found.change_at = draw.randrange(moments)
            wanted = [(row, 0) for row in range(len(found.paths) * _ROWS)]
            rows.clear()
            failed: Exception | None = None
            try:
                with _moments(found.moment):
                    for row in _read(reader, found, kind, attempt):
                        rows.append(row)
            except (ValueError, FileNotFoundError) as error:
                failed = error
            subject = f"seed {seed}, {failed!r}"
            assert {*rows} <= {*wanted}, f"{subject}: rows of two versions"
            if failed is None:
                assert len(rows) == len(wanted), f"{subject}: not the rows of one version"
                outcome = "rows"
            else:
                assert moments, f"{subject}: nothing has changed"
                assert change != "none", f"{subject}: nothing has changed"
                assert str(found.changed) in str(failed), f"{subject}: no file is named"
                left = [*(attempt / "out").iterdir()] if (attempt / "out").exists() else []
                assert not left, f"{subject}: files of a failed conversion"
                causes = ["must not change"]
                if found.is_resuming:
                    causes += ["changed since the state", "cannot be read", "must be a file"]
                assert any(cause in str(failed) for cause in causes), (
                    f"{subject}: the cause is not named"
                )
                outcome = "error"
            moments = found.num_moments
            if found.change_at in found.between:
                moment = "changed between save and resume"
    return Case(kind, change, reader, f"{len(found.paths)} files", moment, outcome)


def counts(cases: list[Case]) -> str:
    """Return how many cases had each property and each pair of properties."""
    single, pairs = Counter(itertools.chain(*cases)), Counter[tuple[str, str]]()
    for case in cases:
        pairs.update(itertools.combinations(case, 2))
    lines = [f"{count:4} {name}" for name, count in sorted(single.items())]
    return "\n".join(lines + [f"{count:4} {a} + {b}" for (a, b), count in sorted(pairs.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.cases)
    print(counts([run(seed) for seed in seeds]))


if __name__ == "__main__":
    main()

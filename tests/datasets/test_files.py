"""Files of tables: changes while they are read and before a resume, and remedies in errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import datasets
from recsys.datasets import sources
from recsys.datasets.files import described
from recsys.datasets.sources import read_parts
from recsys.datasets.tables import files_of
from recsys.features import FeatureSpec, Ids
from tests.datasets import changes

SPEC = FeatureSpec([Ids("row", rows=1000)])


def _write(path: Path, first: int) -> None:
    table = pa.table({"row": range(first, first + 100)})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=10)
    else:
        path.write_text("row\n" + "".join(f"{row:03}\n" for row in table["row"].to_pylist()))


def _replace(path: Path) -> None:
    """With a file of the same size and time."""
    before = path.stat()
    _write(path.with_name(f".new{path.suffix}"), 500)
    os.replace(path.with_name(f".new{path.suffix}"), path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    if path.suffix == ".csv":
        assert path.stat().st_size == before.st_size


def _rewrite(path: Path) -> None:
    inode = path.stat().st_ino
    _write(path, 500)
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("change", [_replace, _rewrite, Path.unlink])
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize("moment", ["before an epoch", "during an epoch", "between epochs"])
def test_a_changed_file_is_an_error(
    tmp_path: Path, suffix: str, moment: str, change: Callable[[Path], None]
) -> None:
    path = tmp_path / f"a.{suffix}"
    _write(path, 0)
    os.utime(path, ns=(10**18, 10**18))
    with mock.patch.object(sources, "_BLOCK_BYTES", 64):
        read = datasets.parquet if suffix == "parquet" else datasets.csv
        reader = read(path, SPEC, 5, window_rows=10, labels=False)
        batches = iter(reader)
        if moment != "before an epoch":
            assert next(batches).sparse_features.values().tolist() == [0, 1, 2, 3, 4]
        if moment == "between epochs":
            assert len(list(batches)) == 19
            batches = iter(reader)
        change(path)
        rows: list[int] = []
        with pytest.raises(ValueError, match=rf"a\.{suffix} must not change while it"):
            rows.extend(row for b in batches for row in b.sparse_features.values().tolist())
        assert max(rows, default=0) < 100


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize("num_changed", [0, 1, 7])
def test_files_that_changed_since_a_save_are_named(
    tmp_path: Path, suffix: str, num_changed: int
) -> None:
    read = datasets.parquet if suffix == "parquet" else datasets.csv

    def write(folder: Path, first: int, count: int) -> None:
        folder.mkdir(exist_ok=True)
        for number in range(count):
            _write(folder / f"{number}.{suffix}", first)

    write(tmp_path / "a", 200, 8)
    saved = read(tmp_path / "a", SPEC, 8, labels=False)
    next(iter(saved))
    write(tmp_path / "b", 200, 8)  # a copy, with other times and inodes
    write(tmp_path / "b", 500, num_changed)
    sizes = [{f.name: f.stat().st_size for f in (tmp_path / n).iterdir()} for n in "ab"]
    assert sizes[0] == sizes[1] or suffix == "parquet"
    state = json.loads(json.dumps(saved.state_dict()))
    resumed = read(tmp_path / "b", SPEC, 8, labels=False)
    if num_changed == 0:
        resumed.load_state_dict(state)
        assert next(iter(resumed)).sparse_features.values().tolist() == [*range(208, 216)]
        return
    names = ", ".join(f"{tmp_path}/b/{n}.{suffix}" for n in range(min(5, num_changed)))
    more = " and 2 more" if num_changed == 7 else ""
    with pytest.raises(ValueError, match="changed since the state was saved") as error:
        resumed.load_state_dict(state)
    assert f"saved: {names}{more}. Restore their content" in str(error.value)
    resumed.set_epoch(0)  # the remedy
    assert next(iter(resumed)).sparse_features.values().tolist() == [*range(500, 508)]


def test_a_file_of_another_system(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    try:
        for rows in (100, 50):
            pq.write_table(pa.table({"row": range(rows)}), tmp_path / "a.parquet")
            system.pipe("/changes/a.parquet", (tmp_path / "a.parquet").read_bytes())
            if rows == 100:
                (file,) = files_of("memory://changes/a.parquet")
                assert sum(part.table.num_rows for part in read_parts(file, ["row"])) == 100
                assert file.checksum() == files_of(tmp_path / "a.parquet")[0].checksum()
        with pytest.raises(ValueError, match=r"memory:/+changes/a\.parquet must not change"):
            list(read_parts(file, ["row"]))
    finally:
        system.rm("/changes", recursive=True)


def test_files_that_change_at_random_moments() -> None:
    """`python -m tests.datasets.changes` runs more of them."""
    cases = [changes.run(seed) for seed in [*range(40), 61, 121]]
    assert {case.outcome for case in cases} == {"rows", "error"}
    assert {case.reader for case in cases} == {*changes.READERS}
    assert {case.change for case in cases} == {*changes.CHANGES}
    assert "changed between save and resume" in {case.moment for case in cases}


@pytest.mark.parametrize("rows", [3, 9000])
def test_newlines_in_values_have_a_remedy(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "a.csv"
    lines = (f'{i % 100},"{"x" * 500}\n{"y" * 400}"\n' for i in range(rows))
    path.write_text("row,note\n" + "".join(lines))
    with mock.patch.object(sources, "_BLOCK_BYTES", 700):
        calls = [
            lambda: list(datasets.csv(path, SPEC, 8, labels=False)),
            lambda: FeatureSpec([Ids("row", rows=100)]).fit(path),
        ]
        for call in calls if rows == 9000 else calls[:1]:
            with pytest.raises(ValueError, match=r"a\.csv cannot be read.*newlines_in_values=True"):
                call()


def test_types_are_the_remedy_of_conversions_alone() -> None:
    assert "column_types" in described("CSV conversion error to int64: invalid value 'x'")
    assert "column_types" not in described("Expected 3 columns, got 2: 1,2")
    assert described("No such file") == "No such file"

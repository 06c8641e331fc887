"""`python -m recsys prepare`: the files have the rows of the raw tables, in little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import datasets
from recsys.__main__ import main
from recsys.features import FeatureSpec, Group, Hashed, Ids, Label, Numeric
from recsys.prepare import prepare
from tests.datasets.test_windows import _samples
from tests.features.test_prepared import raw_spec, raw_table

_SPEC = """
from recsys.features import Categorical, FeatureSpec, Label, Numeric
age = Numeric("age", standardize=True)
spec = FeatureSpec([Categorical("city", min_count=2), age, Label("ok")])
other = 3
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_raw_files(tmp_path: Path, num_workers: int) -> None:
    tables = [raw_table(count, seed) for seed, count in enumerate((300, 1, 450))]
    (tmp_path / "raw").mkdir()
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"raw/{number}.parquet", row_group_size=70)
    whole = pa.concat_tables(tables)
    spec = raw_spec()
    rows = prepare(
        spec,
        tmp_path / "raw",
        tmp_path / "ready",
        row_group_rows=100,
        file_rows=250,
        num_workers=num_workers,
    )
    assert rows == 751
    alone = raw_spec().fit(whole)
    assert spec.fitted.means == pytest.approx(alone.fitted.means)
    ready = FeatureSpec.load(tmp_path / "ready/prepared")
    reader = datasets.parquet(tmp_path / "ready/*.parquet", ready, 64)
    found = [sample for batch in reader for sample in _samples(batch)]
    assert found == _samples(FeatureSpec.load(tmp_path / "ready/features").transform(whole))
    parts = sorted((tmp_path / "ready").glob("*.parquet"))
    assert [pq.read_metadata(part).num_rows for part in parts] == [300, 300, 151]
    groups = [
        pq.read_metadata(part).row_group(i).num_rows
        for part in parts
        for i in range(pq.read_metadata(part).num_row_groups)
    ]
    assert groups == [100] * 7 + [51]


def _run(*arguments: str) -> int:
    return main(["prepare", *arguments])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec.py").write_text(_SPEC)
    for day in range(2):
        lines = [f"{['Oslo', '', 'Bonn'][i % 3]},{i},{i % 2}" for i in range(day, 50)]
        (tmp_path / f"{day}.csv").write_text("\n".join(["city,age,ok", *lines]))
    command = ["--spec", str(tmp_path / "spec.py"), "--input", str(tmp_path / "*.csv")]
    assert _run(*command, "--output", str(tmp_path / "ready")) == 0
    out, err = capsys.readouterr()
    assert out == f"99 rows in {tmp_path / 'ready'}\n"
    assert "fit: file 2 of 2, 99 rows" in err
    assert "write: file 2 of 2, 99 rows" in err
    assert _run(*command, "--output", str(tmp_path / "ready")) == 2
    assert "output must be a new or empty folder" in capsys.readouterr().err
    # later data, by the saved spec
    (tmp_path / "later.txt").write_text("Rome\t7\nOslo\t8\n")
    saved = ["--spec", str(tmp_path / "ready/features"), "--input", str(tmp_path / "later.txt")]
    names = ["--names", "city,age", "--no-labels", "--output", str(tmp_path / "later")]
    assert _run(*saved, *names) == 0
    assert "fit" not in capsys.readouterr().err
    table = pq.read_table(tmp_path / "later/part-00000.parquet")
    assert table["city"].to_pylist() == [1, 2]


def test_options_of_text_files_in_the_file_of_the_spec(tmp_path: Path) -> None:
    options = """
import pyarrow as pa
from pyarrow import csv
csv_options = {
    "read_options": csv.ReadOptions(column_names=["city", "age", "ok"]),
    "convert_options": csv.ConvertOptions(column_types={"city": pa.string()}),
}
"""
    (tmp_path / "spec.py").write_text(_SPEC + options)
    (tmp_path / "day_0").write_text("12\t3\t1\n12\t4\t0\n1e2\t5\t0\n1e2\t5\t0\n")
    command = ["--spec", str(tmp_path / "spec.py"), "--input", str(tmp_path / "day_0")]
    assert _run(*command, "--format", "tsv", "--output", str(tmp_path / "ready")) == 0
    spec = FeatureSpec.load(tmp_path / "ready/features")
    assert spec.fitted.vocabularies["city"].values.to_pylist() == ["12", "1e2"]
    later = ["--output", str(tmp_path / "later"), "--names", "age,city,ok"]  # replaces the names
    assert _run(*command, "--format", "tsv", *later) == 0
    table = pq.read_table(tmp_path / "later/part-00000.parquet")
    assert table["city"].to_pylist() == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--spec": "spec.py:other"}, "must have a FeatureSpec named 'other'; received 3"),
        ({"--spec": "spec.txt"}, "--spec must be FILE.py, FILE.py:NAME or a folder"),
        ({"--spec": "no.py"}, "No such file"),
        ({"--input": "no.csv"}, "no.csv must be a file"),
        (
            {"--input": "bad.csv"},
            "Column 'ok' must have labels from 0 to 1; received 7 in row 31 of",
        ),
        (  # while the spec is fitted
            {"--input": "inf.csv"},
            "Column 'age' must have finite numbers; received inf in row 12 of",
        ),
        ({"--input": "short.csv"}, "short.csv must have the columns ['ok']"),
    ],
)
def test_wrong_input(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.py").write_text(_SPEC)
    lines = [f"Oslo,{i},{7 if i == 31 else 1}" for i in range(50)]
    Path("bad.csv").write_text("\n".join(["city,age,ok", *lines]))
    lines = [f"Oslo,{'inf' if i == 12 else i + 0.5},1" for i in range(50)]
    Path("inf.csv").write_text("\n".join(["city,age,ok", *lines]))
    Path("short.csv").write_text("city,age\nOslo,3\n")
    given = {"--spec": "spec.py", "--input": "bad.csv", "--output": "ready", **change}
    assert _run(*[word for pair in given.items() for word in pair]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert " of" not in message or f"/{change['--input']}. " in error
    assert not Path("ready/features").exists()


_MEMORY = """
import resource, sys
from recsys.features import Categorical, FeatureSpec, Label, Numeric
from recsys.prepare import prepare
columns = [*(Categorical(f"c{i}", max_size=1000) for i in range(10)), Numeric("n"), Label("ok")]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(FeatureSpec(columns), sys.argv[1], sys.argv[2], row_group_rows=1 << 14)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    names = [*(f"c{i}" for i in range(10)), "n", "ok"]
    sizes = {}
    block = "".join(
        ",".join([*(f"value {(i * k) % 3000}" for k in range(10)), str(i), str(i % 2)]) + "\n"
        for i in range(10_000)
    )
    for count in (2, 40):
        path = tmp_path / f"{count}.csv"
        path.write_text(",".join(names) + "\n" + block * count)
        command = [sys.executable, "-c", _MEMORY, str(path), str(tmp_path / f"ready{count}")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd())
        sizes[count] = int(done.stdout)
        bytes_of = path.stat().st_size
    assert bytes_of > 40 << 20
    assert sizes[40] < sizes[2] + 100


def test_specs_without_fit(tmp_path: Path) -> None:
    spec = FeatureSpec([Numeric("x"), Label("ok")]).fit({"x": [1.0]})
    data: dict[str, Any] = {"x": [1.0, 2.0], "ok": [0, 1]}
    pq.write_table(pa.table(data), tmp_path / "a.parquet")
    assert prepare(spec, tmp_path / "a.parquet", tmp_path / "ready") == 2
    assert spec.fitted.means == {"x": 1.0}


@pytest.mark.parametrize("bad_row", [0, 150])
def test_a_failed_job_leaves_no_file(tmp_path: Path, bad_row: int) -> None:
    ok = [2 if row == bad_row else 0 for row in range(200)]
    pq.write_table(pa.table({"x": [1.0] * 200, "ok": ok}), tmp_path / "a.parquet")
    spec = FeatureSpec([Numeric("x"), Label("ok")])
    options: dict[str, Any] = {"row_group_rows": 10, "file_rows": 20}
    with pytest.raises(ValueError, match=r"'ok' must .*0 to 1; .*2"):
        prepare(spec, tmp_path / "a.parquet", tmp_path / "ready", **options)
    assert [*(tmp_path / "ready").iterdir()] == []
    ok[bad_row] = 1
    pq.write_table(pa.table({"x": [1.0] * 200, "ok": ok}), tmp_path / "a.parquet")
    assert prepare(spec, tmp_path / "a.parquet", tmp_path / "ready", **options) == 200


_KILLED = """
import os, signal, sys
from recsys import prepare
from recsys.features import FeatureSpec, Ids
count, convert = 0, prepare.prepared_table
def killed(*arguments, **options):
    global count
    count += 1
    if count == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    return convert(*arguments, **options)
prepare.prepared_table = killed
spec = FeatureSpec([Ids("x", rows=1000)])
prepare.prepare(spec, sys.argv[1], sys.argv[2], row_group_rows=10, file_rows=20, num_workers=0)
"""


def test_a_killed_job_leaves_no_data(tmp_path: Path) -> None:
    """Readers of the folder find nothing, and the next job names the unfinished files."""
    pq.write_table(pa.table({"x": range(200)}), tmp_path / "a.parquet")
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "a.parquet"), str(tmp_path / "ready")]
    done = subprocess.run(command, capture_output=True, check=False, cwd=Path.cwd())
    assert done.returncode == -9, done.stderr
    ready = tmp_path / "ready"
    assert len([*ready.rglob("*.parquet")]) >= 6
    for paths in (ready, ready / "*.parquet"):
        with pytest.raises(FileNotFoundError):
            datasets.parquet(paths, FeatureSpec([Ids("x", rows=1000)]), 8)
    with pytest.raises(FileExistsError, match=r"stopped job in \.unfinished"):
        prepare(FeatureSpec([Ids("x", rows=1000)]), tmp_path / "a.parquet", ready)


def test_names_are_checked_before_the_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"stars": [3.0, 9.0]}), tmp_path / "a.parquet")
    monkeypatch.setattr(FeatureSpec, "fit", lambda *_, **__: pytest.fail("fitted"))
    spec = FeatureSpec([Numeric("stars"), Label("stars", high=9)])
    with pytest.raises(ValueError, match=r"prepared tables must have .*stars.* twice"):
        prepare(spec, tmp_path / "a.parquet", tmp_path / "ready")


def test_a_column_in_two_roles(tmp_path: Path) -> None:
    data = {"user": ["ann", "bob", "ann"], "ok": [0, 1, 1]}
    pq.write_table(pa.table(data), tmp_path / "a.parquet")
    spec = FeatureSpec([Hashed("user", rows=50), Label("ok"), Group("user")])
    prepare(spec, tmp_path / "a.parquet", tmp_path / "ready")
    ready = FeatureSpec.load(tmp_path / "ready/prepared")
    (batch,) = datasets.parquet(tmp_path / "ready", ready, 8)
    (raw,) = datasets.parquet(tmp_path / "a.parquet", spec, 8)
    assert _samples(batch) == _samples(raw)

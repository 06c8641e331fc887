"""A record joined with labels equals a plain dict, for any number of parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.inference.records import JoinReport, join, join_labels


def _write(folder: Path, name: str, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(3):
        part = pa.Table.from_pylist(rows[number::3], schema)
        pq.write_table(part, folder / f"{name}-{number}.parquet")


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("part_bytes", [64 << 20, 100])
def test_a_join_equals_a_dict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_text: bool, part_bytes: int
) -> None:
    monkeypatch.setattr(join, "_PART_BYTES", part_bytes)
    random = np.random.default_rng(int(is_text))

    def key() -> Any:
        number = int(random.integers(300))
        return None if number < 10 else f"k{number}" if is_text else (number - 150) * 2**55

    kind = pa.string() if is_text else pa.int64()
    rows = [{"tags": ["a"] * (i % 3), "record_key": key(), "n": i} for i in range(400)]
    labels = [
        {"id": key(), "click": [None, 0, 1][int(random.integers(3))], "n2": i} for i in range(300)
    ]
    _write(tmp_path / "r", "r", rows, pa.schema(
        [("tags", pa.list_(pa.string())), ("record_key", kind), ("n", pa.int64())]
    ))  # fmt: skip
    _write(tmp_path / "l", "l", labels, pa.schema(
        [("id", kind), ("click", pa.int32()), ("n2", pa.int64())]
    ))  # fmt: skip
    rows = [row for number in range(3) for row in rows[number::3]]  # in the order of the files
    labels = [row for number in range(3) for row in labels[number::3]]
    first: dict[Any, Any] = {}
    seen: dict[Any, Any] = {}
    conflicts = 0
    for row in labels:
        if row["id"] is not None:
            conflicts += first.setdefault(row["id"], row["click"]) != row["click"]
    for row in rows:
        if row["record_key"] is not None:
            seen.setdefault(row["record_key"], row)
    wanted = [{**row, "click": first[k]} for k, row in seen.items() if first.get(k) is not None]
    with_key = [row for row in rows if row["record_key"] is not None]
    labelled = [row for row in labels if row["id"] is not None]
    report = join_labels(
        str(tmp_path / "r/*.parquet"), tmp_path / "l", tmp_path / "out", key="id",
        columns=["click"],
    )  # fmt: skip
    assert report == JoinReport(
        joined=len(wanted),
        without_label=len(seen) - len(wanted),
        without_request=len(first.keys() - seen.keys()),
        without_key=len(rows) - len(with_key) + len(labels) - len(labelled),
        repeated_requests=len(with_key) - len(seen),
        repeated_labels=len(labelled) - len(first),
        conflicting_labels=conflicts,
    )
    files = sorted((tmp_path / "out").iterdir())
    assert (len(files) > 5) == (part_bytes == 100)
    found = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert sorted(found, key=lambda row: row["n"]) == sorted(wanted, key=lambda row: row["n"])
    assert {path.name for path in tmp_path.iterdir()} == {"r", "l", "out"}
    assert str(report).startswith(f"joined: {len(wanted)}\n")


def test_files_may_differ_in_types_and_columns(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    pq.write_table(pa.table({"a": pa.nulls(1), "record_key": ["x"]}), tmp_path / "r/1.parquet")
    more = {"a": ["v"], "b": [1], "record_key": pa.array(["y"]).dictionary_encode()}
    pq.write_table(pa.table(more), tmp_path / "r/2.parquet")
    (tmp_path / "l.csv").write_text("id,ok\ny,1\nx,0\n")
    keys = pa.array([2**64 - 1, 2**63], pa.uint64())
    pq.write_table(pa.table({"record_key": keys, "a": [1, 2]}), tmp_path / "high.parquet")
    pq.write_table(pa.table({"id": keys[1:], "ok": [1]}), tmp_path / "high-labels.parquet")
    paths = tmp_path / "high.parquet", tmp_path / "high-labels.parquet", tmp_path / "high"
    join_labels(*paths, key="id", columns=["ok"])
    assert pq.read_table(paths[2]).to_pylist() == [{"record_key": 2**63, "a": 2, "ok": 1}]
    join_labels(tmp_path / "r", tmp_path / "l.csv", tmp_path / "o", key="id", columns=("ok",))
    assert pq.read_table(tmp_path / "o").to_pylist() == [
        {"a": None, "b": None, "record_key": "x", "ok": 0},
        {"a": "v", "b": 1, "record_key": "y", "ok": 1},
    ]


def test_bad_input_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "record_key": ["x"]}), tmp_path / "r.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "plain.parquet")
    pq.write_table(pa.table({"id": [1], "ok": [1], "a": [2], "f": [0.5]}), tmp_path / "l.parquet")
    paths = tmp_path / "r.parquet", tmp_path / "l.parquet", tmp_path / "o"
    with pytest.raises(TypeError, match="must be a column of texts"):
        join_labels(*paths, key="id", columns=["ok"])
    with pytest.raises(TypeError, match="texts or whole numbers"):
        join_labels(*paths, key="f", columns=["ok"])
    with pytest.raises(KeyError, match="record_key"):
        join_labels(tmp_path / "plain.parquet", *paths[1:], key="id", columns=["ok"])
    with pytest.raises(KeyError, match="no"):
        join_labels(*paths, key="id", columns=["no"])
    pq.write_table(pa.table({"id": ["x"], "a": [2]}), tmp_path / "l.parquet")
    with pytest.raises(ValueError, match=r"received \['a'\]"):
        join_labels(*paths, key="id", columns=["a"])
    with pytest.raises(FileExistsError, match="new or empty"):
        join_labels(*paths[:2], tmp_path, key="id", columns=["a"])
    assert not paths[2].exists()

"""Readers of files and tables: filters, splits, formats and errors, compared with pyarrow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from recsys.datasets import readers, sources
from recsys.datasets.selection import PARTS
from recsys.features import FeatureSpec, Hashed, Ids, Label, Numeric
from recsys.features.splits import Split, TimeSplit
from tests.datasets.clicks import SPEC, clicks, plain_samples, samples_of, write_clicks


@pytest.mark.parametrize(
    ("filter", "is_kept"),
    [
        (ds.field("user") == "user 3", lambda row: row["user"] == "user 3"),
        (ds.field("user").isin(["user 3", "user 4"]), lambda row: row["user"][5:] in "34"),
        (
            (ds.field("unread") > 3) & ~(ds.field("age") < 50),
            lambda row: row["unread"] > 3 and row["age"] >= 50,
        ),
        (ds.field("user").is_valid(), lambda row: True),
    ],
    ids=["equal", "one of", "and not", "valid"],
)
def test_filters(tmp_path: Path, filter: Any, is_kept: Callable[[Any], bool]) -> None:
    table = write_clicks(tmp_path)
    wanted = [row["row"] for row in table.to_pylist() if is_kept(row)]
    found = [
        row
        for batch in readers.parquet(tmp_path, SPEC, 8, filter=filter)
        for row in batch.sparse_features["row"].values().tolist()
    ]
    assert found == wanted
    memory = readers.table(table, SPEC, 8, filter=filter)
    assert sum(len(batch.labels) for batch in memory) == len(wanted)


def _splits() -> list[Any]:
    return [
        Split("user", shares=(0.4, 0.3, 0.3)),
        Split(shares=(0.5, 0.25, 0.25)),
        TimeSplit("age", validation=40, test=60),
    ]


@pytest.mark.parametrize("split", _splits())
@pytest.mark.parametrize("world_size", [1, 2])
def test_parts_are_disjoint_complete_and_stable(
    tmp_path: Path, split: Any, world_size: int
) -> None:
    write_clicks(tmp_path, [(40, 50), (60, 70)])

    def rows_of(part: str, **options: Any) -> list[int]:
        found = []
        for rank in range(world_size):
            reader = readers.parquet(
                tmp_path,
                SPEC,
                8,
                split=split,
                part=part,
                rank=rank,
                world_size=world_size,
                **options,
            )
            for batch in reader:
                found += batch.sparse_features["row"].values().tolist()
        return found

    parts = {part: rows_of(part) for part in PARTS}
    assert sorted(itertools.chain(*parts.values())) == list(range(220))
    assert all(parts.values())
    filtered = rows_of("train", filter=ds.field("age") > 30, shuffle=True, divide="batches")
    ages = pa.concat_tables([clicks(0, 90), clicks(90, 130)])["age"].to_pylist()
    assert sorted(filtered) == sorted(row for row in parts["train"] if ages[row] > 30)
    # more files do not move rows
    pq.write_table(clicks(220, 50), tmp_path / "2.parquet")
    assert {part: {*rows_of(part)} & {*range(220)} for part in PARTS} == {
        part: {*rows} for part, rows in parts.items()
    }


def test_rows_that_are_appended_to_text_move_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 100)
    spec, path = FeatureSpec([Ids("row", rows=999)]), tmp_path / "a.csv"

    def parts_of(split: Split, **options: Any) -> dict[int, str]:
        options = {"split": split, "shuffle": True, **options}
        return {
            row: part
            for part in PARTS
            for batch in readers.csv(path, spec, 7, part=part, labels=False, **options)
            for row in batch.sparse_features["row"].values().tolist()
        }

    single, by_user = Split(shares=(0.5, 0.25, 0.25)), Split("user", shares=(0.5, 0.25, 0.25))
    path.write_text("row,user\n" + "".join(f"{row},{row % 40:03}\n" for row in range(200)))
    found, of_users = parts_of(single), parts_of(by_user)
    assert len(found) == len(of_users) == 200
    with path.open("a") as file:
        file.writelines(f"{row},{row % 40:03}\n" for row in range(200, 300))
    for split, before in ((single, found), (by_user, of_users)):
        after = parts_of(split, divide="batches", window_rows=1)
        assert len(after) == 300
        assert {row: after[row] for row in before} == before
    assert len({*of_users.values()}) == 3
    assert all(of_users[row] == of_users[row % 40] for row in of_users)
    # numbers by the inferred kind, and texts by the kind of the fitted spec
    known = FeatureSpec([*spec.columns, Hashed("user", rows=9)]).fit({"row": [0], "user": ["a"]})
    texts = pa.table({"user": [f"{row % 40:03}" for row in range(200)]})
    wanted = by_user.parts_of(texts, "", np.arange(200))
    spec = known
    found = parts_of(by_user)
    assert [found[row] for row in range(200)] == [PARTS[part] for part in wanted]
    assert found != of_users


def test_urls(tmp_path: Path) -> None:
    import fsspec

    table = write_clicks(tmp_path)
    system = fsspec.filesystem("memory")
    for path in tmp_path.iterdir():
        system.pipe(f"/clicks/{path.name}", path.read_bytes())
    try:
        for paths in ("memory://clicks/*.parquet", "memory://clicks"):
            reader = readers.parquet(paths, SPEC, 8, num_workers=2)
            assert [row for batch in reader for row in samples_of(batch)] == plain_samples(table)
    finally:
        system.rm("/clicks", recursive=True)


def _same(table: pa.Table) -> Any:
    return table


def _huggingface(table: pa.Table) -> Any:
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets are not installed.")
    return datasets.Dataset(table, fingerprint="clicks")


@pytest.mark.parametrize(
    "convert",
    [
        _same,
        pa.Table.to_pandas,
        lambda table: pytest.importorskip("polars").from_arrow(table),
        pa.Table.to_pydict,
        _huggingface,
    ],
    ids=["arrow", "pandas", "polars", "dict", "huggingface"],
)
def test_tables_in_memory(convert: Callable[[pa.Table], Any]) -> None:
    table = clicks(0, 100)
    data = convert(table)
    reader = readers.table(data, SPEC, 7, num_workers=1)
    assert [row for batch in reader for row in samples_of(batch)] == plain_samples(table)
    ranks = [
        readers.table(data, SPEC, 7, rank=rank, world_size=3, shuffle=True) for rank in range(3)
    ]
    rows = [row for reader in ranks for batch in reader for row in samples_of(batch)]
    assert Counter(rows) == Counter(plain_samples(table))


def test_a_slice_of_a_table() -> None:
    table = clicks(0, 100)
    reader = readers.table(table.slice(30, 20), SPEC, 7)
    assert [row for batch in reader for row in samples_of(batch)] == plain_samples(
        table.slice(30, 20)
    )


def test_errors_of_values_name_file_and_row(tmp_path: Path) -> None:
    write_clicks(tmp_path)
    table = pq.read_table(tmp_path / "2.parquet")
    ages = table["age"].to_pylist()
    ages[13] = float("inf")
    names = table.column_names
    bad = table.set_column(names.index("age"), "age", pa.array(ages))
    pq.write_table(bad, tmp_path / "2.parquet", row_group_size=5)
    some = (ds.field("row") > 40) & (ds.field("row") != 52)
    for options in ({}, {"filter": some}, {"shuffle": True, "num_workers": 2}):
        with pytest.raises(ValueError, match=r"'age' must have finite.*row 13.*2\.parquet"):
            list(readers.parquet(tmp_path, SPEC, 4, **options))  # type: ignore[arg-type]
    users = table["user"].to_pylist()
    users[7] = None
    bad = table.set_column(names.index("user"), "user", pa.array(users))
    pq.write_table(bad, tmp_path / "2.parquet", row_group_size=5)
    with pytest.raises(ValueError, match=r"'user' must have no missing.*7.*2\.parquet"):
        list(readers.parquet(tmp_path, SPEC, 4, split=Split("user"), part="test"))


def test_errors_of_files(tmp_path: Path) -> None:
    write_clicks(tmp_path)
    path = tmp_path / "1.parquet"
    whole = path.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"1\.parquet cannot be read as parquet"):
            readers.parquet(tmp_path, SPEC, 4)
    path.write_bytes(whole[:4] + b"\xff" * 300 + whole[304:])
    with pytest.raises(ValueError, match=r"1\.parquet cannot be read: "):
        list(readers.parquet(tmp_path, SPEC, 4, num_workers=2))
    table = pq.read_table(tmp_path / "0.parquet")
    pq.write_table(table.drop_columns(["age"]), path)
    with pytest.raises(KeyError, match=r"1\.parquet must have the columns \['age'\]"):
        readers.parquet(tmp_path, SPEC, 4)
    texts = table.set_column(
        table.column_names.index("user"), "user", pa.array(range(table.num_rows))
    )
    pq.write_table(texts, path)
    rule = r"'user' must have one kind .* texts in .*0\.parquet and numbers in .*1\.parquet"
    with pytest.raises(TypeError, match=rule):
        readers.parquet(tmp_path, SPEC, 4)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="must be a file"):
        readers.parquet(path, SPEC, 4)
    pq.write_table(table.slice(0, 0), path)
    assert list(readers.parquet(path, SPEC, 4)) == []


def test_types_of_one_kind_may_differ(tmp_path: Path) -> None:
    first, second = clicks(0, 30), clicks(30, 30)
    pq.write_table(first, tmp_path / "0.parquet")
    for name, kind in (
        ("row", pa.int32()),
        ("user", pa.dictionary(pa.int32(), pa.string())),
        ("tags", pa.large_list(pa.int16())),
        ("age", pa.float32()),
    ):
        column = second[name].combine_chunks()
        column = column.dictionary_encode() if name == "user" else column.cast(kind)
        second = second.set_column(second.column_names.index(name), name, column)
    pq.write_table(second, tmp_path / "1.parquet")
    wanted = plain_samples(pa.concat_tables([first, clicks(30, 30)]))
    for options in ({}, {"num_workers": 2, "window_rows": 1}):
        reader = readers.parquet(tmp_path, SPEC, 8, **options)  # type: ignore[arg-type]
        assert [row for batch in reader for row in samples_of(batch)] == wanted


def test_tables_without_labels(tmp_path: Path) -> None:
    table = write_clicks(tmp_path).drop_columns(["liked", "weight", "session"])
    reader = readers.table(table, SPEC, 8, labels=False)
    assert sum(len(batch.labels) for batch in reader) == table.num_rows
    with pytest.raises(KeyError, match=r"must have .*\['liked', 'weight', 'session'\]"):
        readers.table(table, SPEC, 8)


def test_dense_features_alone() -> None:
    spec = FeatureSpec([Numeric("age"), Label("liked")]).fit({"age": [1.0]})
    data = {"age": np.arange(20.0), "liked": np.zeros(20)}
    for options in ({}, {"shuffle": True}):
        reader = readers.table(data, spec, 6, **options)  # type: ignore[arg-type]
        rows = [row for batch in reader for row in batch.dense_features.flatten().tolist()]
        assert sorted(rows) == data["age"].tolist()

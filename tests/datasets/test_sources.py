"""Blocks of text files, compared with the csv module of Python; slices of tables."""

from __future__ import annotations

import csv as python_csv
import gzip
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from recsys import datasets
from recsys.datasets import sources
from recsys.datasets.sources import TableSource, read_parts, source_of
from recsys.datasets.tables import files_of
from recsys.datasets.utils import Batch
from recsys.features import Categorical, FeatureSpec, Hashed, Ids, Label, Numeric, Timestamp


def _write(path: Path, count: int, seed: int, *, newline: str = "\n", end: bool = True) -> None:
    draw = random.Random(seed)
    lines = ["row,name,age,liked"]
    for row in range(count):
        name = draw.choice(["", "Åsa", "NA", '"a, b"', "x" * draw.randrange(60)])
        age = draw.choice(["", "3", "71", "8.5"])
        lines.append(f"{row},{name},{age},{row % 2}")
    path.write_bytes((newline.join(lines) + newline * end).encode())


def _read(path: Path) -> list[tuple[Any, ...]]:
    with open(path, newline="", encoding="utf-8") as file:
        return [
            (int(row), name or None, float(age) if age else None)
            for row, name, age, _ in list(python_csv.reader(file))[1:]
        ]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("block", [7, 31, 64, 1000, 1 << 22])
def test_blocks_have_each_line_once(tmp_path: Path, block: int, newline: str) -> None:
    for seed in range(6):
        path = tmp_path / f"{seed}.csv"
        _write(
            path, random.Random(seed).choice([1, 2, 30]), seed, newline=newline, end=seed % 2 > 0
        )
        (file,) = files_of(path)
        with mock.patch.object(sources, "_BLOCK_BYTES", block):
            source = source_of(file)
            pairs = list(source.read([n for n, _ in source.sizes], ["row", "name", "age"]))
            rows = [tuple(row.values()) for _, table in pairs for row in table.to_pylist()]
            assert rows == _read(path)
            starts = [sum(t.num_rows for m, t in pairs if m < n) for n, _ in source.sizes]
            assert [source.first_row(n) for n, _ in source.sizes] == starts
        assert len(source.sizes) == max(1, -(-path.stat().st_size // block))


def _rows(reader: Any) -> list[int]:
    return [row for batch in reader for row in batch.sparse_features["row"].values().tolist()]


SPEC = FeatureSpec([Ids("row", rows=10**6), Numeric("age"), Label("liked")]).fit({"age": [1.0]})


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "tsv"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_text_files(tmp_path: Path, suffix: str, shuffle: bool) -> None:
    first = 0
    for number in range(3):
        lines = [f"{first + row},{row % 50},{row % 2}" for row in range(100)]
        text = "\n".join(["row,age,liked", *lines])
        text = text.replace(",", "\t") if suffix == "tsv" else text
        data = text.encode()
        path = tmp_path / f"{number}.{suffix}"
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
        first += 100
    with mock.patch.object(sources, "_BLOCK_BYTES", 200):
        for world_size in (1, 2, 3):
            found = []
            for rank in range(world_size):
                found += _rows(
                    datasets.csv(
                        tmp_path,
                        SPEC,
                        8,
                        rank=rank,
                        world_size=world_size,
                        shuffle=shuffle,
                        num_workers=2,
                        window_rows=40,
                    )
                )
            assert sorted(found) == list(range(300))
            if world_size == 1:
                assert (found == sorted(found)) == (not shuffle)
        reader = datasets.csv(tmp_path, SPEC, 8, shuffle=True, window_rows=40)
        whole = _rows(reader)
        reader.set_epoch(0)
        batches = iter(reader)
        for _ in range(11):
            next(batches)
        again = datasets.csv(tmp_path, SPEC, 8, shuffle=True, window_rows=40)
        again.load_state_dict(reader.state_dict())
        assert _rows(again) == whole[88:]


def test_files_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("".join(f"{row}\t{row}\t1\n" for row in range(50)))
    options = csv.ReadOptions(column_names=["row", "age", "liked"])
    with mock.patch.object(sources, "_BLOCK_BYTES", 30):
        reader = datasets.csv(path, SPEC, 8, format="tsv", read_options=options)
        assert _rows(reader) == list(range(50))


def test_skipped_rows_are_of_the_first_block(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"{row},{row},1" for row in range(50)]
    path.write_text("\n".join(["a,comment,line", "row,age,liked", "1,2,3", *lines]))
    options = csv.ReadOptions(skip_rows=1, skip_rows_after_names=1)
    with mock.patch.object(sources, "_BLOCK_BYTES", 50):
        assert _rows(datasets.csv(path, SPEC, 8, read_options=options)) == list(range(50))
        (file,) = files_of(path, read_options=options)
        assert [len(part.table) for part in read_parts(file, ["row"])] == [50]


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_lines_longer_than_a_part(tmp_path: Path, suffix: str) -> None:
    """A unit is parsed at once. `pyarrow.csv` streams blocks of a mebibyte, and refuses them."""
    path = tmp_path / f"rows.{suffix}"
    data = "\n".join(["row,age,liked,note", *(f'{i},1,0,"{"x" * (i << 20)}"' for i in range(3))])
    path.write_bytes(gzip.compress(data.encode(), 1) if suffix == "csv.gz" else data.encode())
    assert _rows(datasets.csv(path, SPEC, 8)) == [0, 1, 2]


def test_values_with_newlines(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("row,age,liked,note\n" + "".join(f'{i},1,0,"a\nb"\n' for i in range(50)))
    with mock.patch.object(sources, "_BLOCK_BYTES", 30):
        parsing = csv.ParseOptions(newlines_in_values=True)
        assert _rows(datasets.csv(path, SPEC, 8, parse_options=parsing)) == list(range(50))


def test_an_empty_field_is_a_missing_value(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('city,age,liked\n,,1\n"",3,0\nNA,5,1\nRome,5,1\n')
    spec = FeatureSpec([Categorical("city"), Numeric("age", missing=-1.0), Label("liked")])
    batch: Batch = next(iter(datasets.csv(path, spec.fit(path), 8)))
    assert batch.sparse_features["city"].values().tolist() == [0, 0, 2, 3]
    assert batch.dense_features.flatten().tolist() == [-1, 3, 5, 5]
    conversion = csv.ConvertOptions(null_values=["NA"], strings_can_be_null=True)
    options = {"convert_options": conversion, "parse_options": csv.ParseOptions()}
    batch = next(iter(datasets.csv(path, spec, 8, filter=pa.compute.field("age") > 3)))
    assert batch.sparse_features["city"].values().tolist() == [2, 3]
    with pytest.raises(TypeError, match="'age' must have numbers; received string"):
        list(datasets.csv(path, spec, 8, **options))  # type: ignore[arg-type]


def test_types_of_text_files(tmp_path: Path) -> None:
    spec = FeatureSpec([Hashed("user", rows=99), Numeric("age"), Label("liked")])
    spec.fit({"age": [1.0]})
    (tmp_path / "0.csv").write_text("user,age,liked\nann,,1\nbob,,0\n")
    (tmp_path / "1.csv").write_text("user,age,liked\n,3,1\n,4,0\n")  # no user
    (tmp_path / "2.csv").write_text("user,age,liked\ncem,3.5,1\n")
    batches = list(datasets.csv(tmp_path, spec, 8))
    assert [len(batch.labels) for batch in batches] == [5]
    (tmp_path / "3.csv").write_text("user,age,liked\n7,3.5,1\n")
    (batch,) = datasets.csv(tmp_path, spec, 8)
    seven = spec.transform({"user": ["7"], "age": [0], "liked": [0]}).sparse_features.values()
    assert batch.sparse_features["user"].values().tolist()[-1:] == seven.tolist()
    (tmp_path / "4.csv").write_text("user,age,liked\n7,young,1\n")
    rule = r"'age' must have one kind .* numbers in .*1\.csv and texts in .*4\.csv"
    with pytest.raises(TypeError, match=rule):
        datasets.csv(tmp_path, spec, 8)
    (tmp_path / "4.csv").unlink()
    conversion = csv.ConvertOptions(
        column_types={"user": pa.string()}, null_values=[""], strings_can_be_null=True
    )
    assert len(list(datasets.csv(tmp_path, spec, 8, convert_options=conversion))) == 1


def test_types_of_the_middle_and_the_end_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    middle = [f"{i},{i},1" for i in range(300_000)]
    path.write_text("\n".join(["row,age,liked", *middle, "7,0.5,1"]))
    (file,) = files_of(path)
    assert file.schema.field("age").type == pa.float64()
    assert file.schema.field("row").type == pa.int64()
    assert len(_rows(datasets.csv(path, SPEC, 4096))) == 300_001
    spec = FeatureSpec([Numeric("age", standardize=True)]).fit(path)
    assert spec.fitted.num_rows == 300_001


def test_errors_of_text_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("")
    with pytest.raises(ValueError, match=r"rows\.csv .*read as csv: .*[Ee]mpty"):
        datasets.csv(path, SPEC, 8)
    path.write_text("row,age,liked\n")
    assert list(datasets.csv(path, SPEC, 8)) == []
    path.write_text("row,age\n1,2\n")
    with pytest.raises(KeyError, match=r"rows\.csv must have the columns \['liked'\]"):
        datasets.csv(path, SPEC, 8)
    path.write_text("row,age,liked\n1,2,0\n1,2\n")
    with pytest.raises(ValueError, match=r"rows\.csv .*read as csv: .*3 columns"):
        datasets.csv(path, SPEC, 8)
    lines = [f"{i},{'x' if i == 150_000 else i},1" for i in range(500_000)]
    path.write_text("\n".join(["row,age,liked", *lines]))
    rule = r"rows\.csv cannot be read: .*column #1: line 150002: .*invalid value 'x'.*column_types"
    for block, num_workers in ((1 << 22, 0), (1 << 20, 2)):
        with (
            mock.patch.object(sources, "_BLOCK_BYTES", block),
            pytest.raises(ValueError, match=rule),
        ):
            list(datasets.csv(path, SPEC, 4096, num_workers=num_workers))
    lines = [f"{i},{'inf' if i in (9, 150_000) else i + 0.5},1" for i in range(200_000)]
    path.write_text("\n".join(["row,age,liked", *lines]))
    with (
        mock.patch.object(sources, "_BLOCK_BYTES", 1 << 18),
        pytest.raises(ValueError, match=r"'age' must .*inf in row 150000.*rows"),
    ):
        list(datasets.csv(path, SPEC, 4096, filter=pa.compute.field("row") > 100))


def test_row_groups_that_a_filter_excludes_are_not_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"row": range(100)}), tmp_path / "a.parquet", row_group_size=10)
    (file,) = files_of(tmp_path / "a.parquet")
    source = source_of(file, pa.compute.field("row") >= 75)
    assert source.sizes == [(7, 10), (8, 10), (9, 10)]
    assert [source.first_row(n) for n, _ in source.sizes] == [70, 80, 90]
    assert [(n, t.num_rows) for n, t in source.read([7, 9], ["row"])] == [(7, 10), (9, 10)]


def test_large_row_groups_are_read_in_parts(tmp_path: Path) -> None:
    table = pa.table({"row": range(150_000), "name": [str(i % 70_000) for i in range(150_000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=140_000)
    (file,) = files_of(tmp_path / "a.parquet")
    parts = list(source_of(file, in_parts=True).read([0, 1], ["name", "row"]))
    assert [(n, t.num_rows) for n, t in parts] == [(0, 65536), (0, 65536), (0, 8928), (1, 10_000)]
    for in_parts in (True, False):
        tables = [t for _, t in source_of(file, in_parts=in_parts).read([0, 1], ["row", "name"])]
        found = pa.concat_tables([t.cast(table.schema) for t in tables])
        assert found.equals(table.select(["row", "name"]))
        kinds = {pa.types.is_dictionary(t.schema.field("name").type) for t in tables}
        assert kinds == {not in_parts}
    assert [part.first for part in read_parts(file, ["row"])] == [0, 65536, 131_072, 140_000]


KINDS = ["parquet", "csv", "csv.gz", "newlines", "latin1", "no header"]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_rows_of_the_units(tmp_path: Path, kind: str) -> None:
    """Files are larger than a part. Errors name the line of the file."""
    rows = [(i, f"Malmö {i % 900}" + ("\n" if kind == "newlines" else "")) for i in range(150_000)]

    def write(name: str, rows: list[tuple[Any, str]]) -> Any:
        path, options = tmp_path / name, {}
        if kind == "parquet":
            ids, names = zip(*rows, strict=True)
            pq.write_table(pa.table({"row": ids, "name": names}), path.with_suffix(".parquet"))
            return files_of(path.with_suffix(".parquet"))[0]
        lines = ["row,name"] if kind != "no header" else []
        data = "\n".join([*lines, *(f'{row},"{text}"' for row, text in rows)])
        data_bytes = data.encode("latin1" if kind == "latin1" else "utf8")
        path = path.with_suffix(".csv.gz" if kind == "csv.gz" else ".csv")
        path.write_bytes(gzip.compress(data_bytes, 1) if kind == "csv.gz" else data_bytes)
        if kind == "newlines":
            options["parse_options"] = csv.ParseOptions(newlines_in_values=True)
        elif kind == "latin1":
            options["read_options"] = csv.ReadOptions(encoding="latin1")
        elif kind == "no header":
            options["read_options"] = csv.ReadOptions(column_names=["row", "name"])
        return files_of(path, **options)[0]

    file = write("a", rows)
    parts = [part.table for part in read_parts(file, ["row", "name"])]
    assert len(parts) > 1
    assert max(map(len, parts)) < 70_000
    with mock.patch.object(sources, "_BLOCK_BYTES", 1 << 19):
        source = source_of(file)
        units = [table for _, table in source.read([n for n, _ in source.sizes], ["row", "name"])]
    for tables in (parts, units):
        found = pa.concat_tables([table.cast(parts[0].schema) for table in tables])
        assert list(zip(*found.to_pydict().values(), strict=True)) == rows
    if kind == "parquet":
        return
    bad = write("b", [*rows[:130_000], ("x", "a"), *rows[130_001:]])
    bad = replace(bad, schema=file.schema)
    source = source_of(bad)
    line = "130001" if kind == "no header" else "130002"
    for read in (
        lambda: list(read_parts(bad, ["row", "name"])),
        lambda: list(source.read([n for n, _ in source.sizes], ["row", "name"])),
    ):
        with pytest.raises(ValueError, match=r"b\.csv.* cannot be read: .*'x'") as caught:
            read()
        assert f"line {line}:" in str(caught.value)


def test_slices_of_a_table() -> None:
    source = TableSource({"row": list(range(1000))})
    rows = [row for n, _ in source.sizes for _, t in source.read([n], ["row"]) for row in t["row"]]
    assert [row.as_py() for row in rows] == list(range(1000))
    assert sum(count for _, count in source.sizes) == 1000
    assert TableSource({"row": []}).sizes == []
    assert [source.first_row(n) for n in (0, 1)] == [0, source.sizes[0][1]]


@pytest.mark.parametrize("encoding", ["latin1", "utf-16", "UTF-8"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    names = ["Zürich", "Malmö", "Århus"] * 20_000  # beyond a mebibyte in UTF-16
    text = "name,x\n" + "".join(f"{name},{i}\n" for i, name in enumerate(names))
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    spec = FeatureSpec([Hashed("name", rows=2**40, growing=True), Ids("x", rows=99_999)])
    options = csv.ReadOptions(encoding=encoding)
    (batch,) = datasets.csv(tmp_path, spec, 99_999, labels=False, read_options=options)
    table = pa.table({"name": names, "x": range(len(names))})
    expected = spec.transform(table, labels=False).sparse_features
    assert batch.sparse_features.values().equal(expected.values())


def test_dates_in_one_file_and_times_in_another(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("seen\n2024-01-01\n")
    (tmp_path / "b.csv").write_text("seen\n2024-01-01 10:30:00\n")
    (tmp_path / "c.csv").write_text("seen\n2024-01-01 10:30:00.25\n")
    spec = FeatureSpec([Timestamp("seen", parts=("hour",))])
    for order in itertools.permutations(["a", "b", "c"]):
        paths = [tmp_path / f"{name}.csv" for name in order]
        (batch,) = datasets.csv(paths, spec, 9, labels=False)
        found = dict(zip(order, batch.sparse_features.values().tolist(), strict=True))
        assert found == {"a": 1, "b": 11, "c": 11}

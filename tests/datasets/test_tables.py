"""Files of paths, kinds of types, and tables of other libraries."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv, fs

from recsys.datasets.files import File, is_text
from recsys.datasets.memory import table_of
from recsys.datasets.sources import parts_of, read_parts
from recsys.datasets.tables import files_of, kind_of, located, unify_types

COLUMNS = {"x": [1, 2, 3], "name": ["a", None, "c"]}


def _rows(data: Any, columns: Any = ("x", "name")) -> list[Any]:
    return [row for part in parts_of(data, list(columns), {}) for row in part.table.to_pylist()]


def test_paths_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet"):
        pq.write_table(pa.table({"x": [name]}), tmp_path / name)
    (tmp_path / "day1").mkdir()
    (tmp_path / "day1/c.csv").write_text("x\nc.csv\n")
    (tmp_path / "readme.md").write_text("x")
    for given in (tmp_path, str(tmp_path), [tmp_path]):
        assert [row["x"] for row in _rows(given, ["x"])] == ["a.parquet", "b.parquet", "c.csv"]
    assert [row["x"] for row in _rows(str(tmp_path / "[ab].*"), ["x"])] == [
        "a.parquet",
        "b.parquet",
    ]
    chosen = [tmp_path / "b.parquet", tmp_path / "a.parquet"]
    assert [row["x"] for row in _rows(chosen, ["x"])] == ["b.parquet", "a.parquet"]
    assert [is_text(file) for file in files_of(tmp_path)] == [False, False, True]
    with pytest.raises(FileNotFoundError, match=r"\*\.pq must be a file"):
        files_of(tmp_path / "*.pq")
    with pytest.raises(ValueError, match=r"readme\.md must end in \.parquet"):
        files_of(tmp_path / "readme.md")


def test_urls() -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/tables/a.csv", b"x,name\n1,a\n")
    try:
        assert _rows("memory://tables/*.csv") == [{"x": 1, "name": "a"}]
        (file,) = files_of("memory://tables")
        assert file.path == "memory:///tables/a.csv"
    finally:
        system.rm("/tables", recursive=True)


@pytest.mark.parametrize(
    "data",
    [
        pa.table(COLUMNS),
        pa.table(COLUMNS).to_batches()[0],
        pa.table(COLUMNS).to_pandas(),
        pl.DataFrame(COLUMNS),
        {"x": torch.tensor([1, 2, 3]), "name": COLUMNS["name"]},
        {"x": np.array([1, 2, 3]), "name": pd.Series(COLUMNS["name"])},
        [pa.table(COLUMNS).slice(0, 1), pa.table(COLUMNS).slice(1)],
        (pa.table(COLUMNS).slice(i, 1) for i in range(3)),
        ds.dataset(pa.table(COLUMNS)),
    ],
    ids=lambda data: type(data).__name__,
)
def test_tables(data: Any) -> None:
    assert _rows(data) == pa.table(COLUMNS).to_pylist()


def test_other_values_are_rejected() -> None:
    for data in (3, [3], None):
        with pytest.raises(TypeError, match="data must be a table of"):
            _rows(data)
    with pytest.raises(TypeError, match=r"'x' must have values of .*'a'"):
        table_of({"x": [1, "a"]})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (pa.int8(), "numbers"),
        (pa.float64(), "numbers"),
        (pa.bool_(), "numbers"),
        (pa.decimal128(5), "numbers"),
        (pa.string(), "texts"),
        (pa.large_string(), "texts"),
        (pa.binary(), "texts"),
        (pa.dictionary(pa.int8(), pa.string()), "texts"),
        (pa.timestamp("ms", "UTC"), "times"),
        (pa.date32(), "times"),
        (pa.null(), None),
        (pa.list_(pa.int8()), "lists of numbers"),
        (pa.large_list(pa.string()), "lists of texts"),
        (pa.list_(pa.null()), "lists of nothing"),
        (pa.list_(pa.int8(), 3), "lists of numbers"),
        (pa.struct([("a", pa.int8())]), "struct<a: int8>"),
    ],
)
def test_kinds(kind: pa.DataType, words: str | None) -> None:
    assert kind_of(kind) == words


def _file(name: str, **types: pa.DataType) -> File:
    fragment = ds.CsvFileFormat().make_fragment(name, filesystem=fs.LocalFileSystem())
    return File(name, fragment, pa.schema(list(types.items())), "utf8", ())


def test_types_of_several_files() -> None:
    files = [
        _file("a", x=pa.int64(), y=pa.null(), z=pa.string()),
        _file("b", x=pa.float64(), y=pa.string(), z=pa.null()),
    ]
    for found in (unify_types(files, "xyz", {}), unify_types(files[::-1], "xyz", {})):
        for file in found:
            assert file.schema.types == [pa.float64(), pa.string(), pa.string()]
    assert unify_types(files, "z", {})[0].schema.field("x").type == pa.int64()
    other = _file("c", x=pa.string())
    with pytest.raises(TypeError, match=r"'x' must.*numbers in a.*texts in c"):
        unify_types([*files, other], "x", {})
    with pytest.raises(KeyError, match=r"c must have the columns \['y'\]"):
        unify_types([*files, other], "y", {})


@pytest.mark.parametrize(
    ("types", "found"),
    [
        ((pa.date32(), pa.timestamp("s")), pa.timestamp("s")),
        ((pa.timestamp("ns"), pa.date32(), pa.timestamp("s")), pa.timestamp("ns")),
        ((pa.int64(), pa.null(), pa.float64()), pa.float64()),
        ((pa.bool_(), pa.int64()), None),  # each as it is
    ],
)
def test_types_of_text_files_in_any_order(types: Any, found: Any) -> None:
    for order in itertools.permutations(types):
        files = [_file(str(i), x=kind) for i, kind in enumerate(order)]
        got = [file.schema.field("x").type for file in unify_types(files, "x", {})]
        assert got == (list(order) if found is None else [found] * len(order))
    fragment = ds.ParquetFileFormat().make_fragment("p", filesystem=fs.LocalFileSystem())
    other = File("p", fragment, pa.schema([("x", pa.float32())]), "utf8", ())
    for order in itertools.permutations(
        [other, _file("t", x=pa.float64()), _file("n", x=pa.null())]
    ):
        for file in unify_types(order, "x", {}):
            assert file.schema.field("x").type == (pa.float32() if file is other else pa.float64())
    (file, _) = unify_types([_file("n", x=pa.null()), other], "x", {})
    assert file.schema.field("x").type == pa.float32()


def test_keys_are_texts_in_text_files_where_texts_are_known() -> None:
    files = [_file("a", x=pa.int64(), y=pa.date32()), _file("b", x=pa.string(), y=pa.null())]

    def types(chosen: list[File], kind: str | None) -> list[Any]:
        found = unify_types(chosen, "y", {"x": kind, "y": kind})
        return [file.schema.types for file in found]

    texts = [pa.string(), pa.string()]
    assert types(files, "text") == types(files, None) == [texts, texts]
    assert types(files[:1], "text") == [texts]
    assert types(files[:1], None) == [[pa.int64(), pa.string()]]  # no key is a date
    mixed = [_file("a", x=pa.int64(), y=pa.bool_()), _file("b", x=pa.float64(), y=pa.int64())]
    assert types(mixed, None) == [[pa.float64(), pa.string()]] * 2  # as within a file
    with pytest.raises(TypeError, match=r"'x' must.*numbers in a.*texts in b"):
        types(files, "number")
    fragment = ds.ParquetFileFormat().make_fragment("c", filesystem=fs.LocalFileSystem())
    other = File("c", fragment, pa.schema([("y", pa.string())]), "utf8", ())
    assert types([files[0], other], None)[0] == [pa.int64(), pa.string()]
    schema = pa.schema([("x", pa.int64()), ("y", pa.string())])
    fixed = File("d", fragment, schema, "utf8", ())
    with pytest.raises(TypeError, match=r"'x' must.*texts in b.*numbers in d"):
        types([files[1], fixed], None)


def _located(error: Exception, path: str) -> Exception:
    with pytest.raises(type(error)) as caught, located(lambda row: (path, row + 100)):
        raise error
    return caught.value


def test_errors_are_located() -> None:
    found = _located(ValueError("Column 'x' is 3 in row 12. Fix it."), "a")
    assert str(found) == "Column 'x' is 3 in row 112 of a. Fix it."
    received = "Column 'x' must be short; received 'found in row 3 of a' in row 12. Cut it."
    found = _located(ValueError(received), "b")
    assert str(found) == received.replace("row 12", "row 112 of b")
    found = _located(KeyError("no column"), "a")
    assert found.args == ("a: no column",)
    for error in (RuntimeError("x in row 3"), ValueError("x in row 3")):  # no path: no file
        assert _located(error, "") is error
    error = RuntimeError("not of the data")
    assert _located(error, "a") is error


def test_paths_and_columns_that_are_wrong(tmp_path: Path) -> None:
    for paths in (None, 3, [tmp_path, 3], {"a.csv"}):
        with pytest.raises(TypeError, match="paths must be a path or"):
            files_of(paths)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="at least one path; received none"):
        files_of([])
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.table([[1], [2], [3]], names=["x", "x", "y"]), path)
    assert _rows(path, ["y"]) == [{"y": 3}]
    with pytest.raises(ValueError, match=r"twice\.parquet must have one .*several \['x'\]"):
        _rows(path, ["y", "x"])
    with pytest.raises(ValueError, match=r"twice\.parquet must have one .*several \['x'\]"):
        unify_types(files_of(path), ["x"], {})


def test_damaged_files_and_missing_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x\n" + "1\n" * 700_000 + "a\n" + "1\n" * 3_000_000)
    with pytest.raises(ValueError, match=r"a\.csv cannot be read: .*'a'"):
        _rows(path, ["x"])
    with pytest.raises(KeyError, match=r"a\.csv must have.*\['y'\]; .*\['x'\]"):
        _rows(path, columns=["y"])


def test_python_objects_of_polars_are_refused() -> None:
    frame = pl.DataFrame({"city": pl.Series([object(), object()], dtype=pl.Object)})
    with pytest.raises(TypeError, match=r"'city' must .*one type.*Python objects"):
        table_of(frame)


def test_hidden_files_of_a_folder_are_no_data(tmp_path: Path) -> None:
    for name in ("a.csv", "_temporary.csv", ".checkpoints/a.csv", "day/b.csv", "_x/c.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n1\n")
    found = [Path(file.path).relative_to(tmp_path).as_posix() for file in files_of(tmp_path)]
    assert found == ["a.csv", "day/b.csv"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_slow_consumer_holds_some_rows(tmp_path: Path, kind: str) -> None:
    """However fast the file is read, only some rows are in memory."""
    table = pa.table({"a": np.arange(5_000_000), "b": np.arange(5_000_000) * 7})
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        csv.write_csv(table, path)
    else:
        pq.write_table(table, path, row_group_size=1 << 16)
    (file,) = files_of(path)
    pool, rows, most = pa.default_memory_pool(), 0, 0
    before, size = pool.bytes_allocated(), table.nbytes
    for number, part in enumerate(read_parts(file, ["b", "a"])):
        assert part.table.column_names == ["b", "a"]
        assert part.first == rows
        rows += part.table.num_rows
        if number < 10:
            time.sleep(0.04)
        most = max(most, pool.bytes_allocated() - before)
    assert rows == table.num_rows
    assert most < 0.6 * size

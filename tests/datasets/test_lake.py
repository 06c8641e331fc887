"""Tables of Delta Lake and Iceberg at a version, compared with plain dicts of their rows."""

from __future__ import annotations

import json
import random
import re
import struct
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from recsys import datasets
from recsys.datasets import TableVersion, TimeSplit
from recsys.datasets.sources import parts_of, read_parts
from recsys.datasets.tables import files_of
from recsys.features import Categorical, FeatureSpec, Label, Numeric
from recsys.inference import score
from recsys.prepare import prepare

REASON = "needs Delta Lake and Iceberg: make test SLOW=1 installs them"
pytestmark = pytest.mark.lake
Rows = dict[int, dict[str, Any]]


def _rows(paths: Any, columns: list[str]) -> list[dict[str, Any]]:
    tables = [part.table for file in files_of(paths) for part in read_parts(file, columns)]
    return sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["n"])


def _wanted(rows: Rows, columns: list[str]) -> list[dict[str, Any]]:
    return [{name: rows[n].get(name) for name in columns} for n in sorted(rows)]


class _Delta:
    """A Delta table in a folder."""

    def __init__(self, folder: Path) -> None:
        self.library = pytest.importorskip("deltalake", reason=REASON)
        self.path = str(folder / "clicks")

    def append(self, table: Any) -> None:
        options = {"schema_mode": "merge", "mode": "append", "partition_by": ["dt"]}
        self.library.write_deltalake(self.path, table, **options)

    def delete(self, day: str, at_most: int) -> None:
        self.library.DeltaTable(self.path).delete(f"dt = '{day}' AND n <= {at_most}")

    def version(self) -> int:
        return int(self.library.DeltaTable(self.path).version())


class _Iceberg:
    """An Iceberg table in a catalog, and its newest metadata file."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("pyiceberg", reason=REASON)
        catalog = pytest.importorskip("pyiceberg.catalog.memory", reason=REASON)
        self.catalog = catalog.InMemoryCatalog("test", warehouse=folder.as_uri())
        self.catalog.create_namespace("db")
        self.table: Any = None

    @property
    def path(self) -> str:
        return str(self.catalog.load_table("db.clicks").metadata_location)

    def append(self, table: Any) -> None:
        if self.table is None:
            self.table = self.catalog.create_table("db.clicks", table.schema)
            with self.table.update_spec() as spec:
                spec.add_identity("dt")
        with self.table.update_schema() as schema:
            schema.union_by_name(table.schema)
        self.table.append(table)

    def delete(self, day: str, at_most: int) -> None:
        from pyiceberg.expressions import And, EqualTo, LessThanOrEqual

        self.table.delete(And(EqualTo("dt", day), LessThanOrEqual("n", at_most)))

    def version(self) -> int:
        return int(self.table.current_snapshot().snapshot_id)


KINDS: Any = pytest.mark.parametrize("kind", [_Delta, _Iceberg])


def _table(rows: Rows) -> Any:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    types = {"n": pa.int64(), "user": pa.string(), "dt": pa.string(), "price": pa.float64()}
    return pa.table({name: pa.array([r.get(name) for r in rows.values()], types[name])
                     for name in names})  # fmt: skip


def _life(table: Any, seed: int) -> list[tuple[int, Rows]]:
    """Append and delete at random, and return the rows of each version."""
    draw, rows, versions = random.Random(seed), Rows(), []
    for step in range(5):
        if step < 2 or draw.random() < 0.6:
            added = {
                n: {"n": n, "user": f"user {draw.randrange(9)}", "dt": f"2026-11-2{n % 3}"}
                for n in range(10 * step, 10 * step + draw.randint(1, 9))
            }
            if step:  # the first files lack the column
                for row in added.values():
                    row["price"] = draw.choice([None, 1.5, 7.0])
            table.append(_table(added))
            rows = {**rows, **added}
        else:
            day, most = f"2026-11-2{draw.randrange(3)}", draw.randrange(10 * step)
            before = rows
            rows = {n: r for n, r in rows.items() if r["dt"] != day or n > most}
            if rows == before:
                continue
            table.delete(day, most)
        versions.append((table.version(), rows))
    return versions


@KINDS
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_each_version(kind: Any, seed: int, tmp_path: Path) -> None:
    table = kind(tmp_path)
    versions = [(version, rows) for version, rows in _life(table, seed) if rows]
    for number, (version, rows) in enumerate(versions):
        columns = ["n", "user", "dt", *(["price"] if number else [])]
        assert _rows(TableVersion(table.path, version), columns) == _wanted(rows, columns)
    assert _rows(table.path, columns) == _wanted(rows, columns)  # the latest one
    assert TableVersion(table.path).version == version


@KINDS
def test_every_function_reads_the_version(kind: Any, tmp_path: Path) -> None:
    table = kind(tmp_path / "table")
    versions = _life(table, 0)
    (first, before), (_, after) = versions[1], versions[-1]
    old = TableVersion(table.path, first)
    spec = FeatureSpec(
        [Categorical("user"), Categorical("dt"), Numeric("price"), Label("n", high=99)]
    )
    spec.fit(old)
    assert spec.fitted.num_rows == len(before)
    assert spec.fitted.vocabularies["dt"].values.to_pylist() != []
    extended, _ = spec.extend(table.path, allow_repeated=True)
    assert extended.fitted.num_rows == len(before) + len(after)
    labels = [label for batch in datasets.parquet(old, spec, 4) for label in batch.labels.tolist()]
    assert sorted(labels) == sorted(before)
    assert prepare(spec, old, tmp_path / "ready") == len(before)
    model = torch.nn.Module()
    model.forward = lambda dense, ids: dense.sum(1)  # type: ignore[method-assign]
    results = score(model, old, tmp_path / "scores", spec=spec, keys=["n"], progress=False)
    found = [n for path in results for n in pq.read_table(path)["n"].to_pylist()]
    assert sorted(found) == sorted(before)
    assert sum(part.table.num_rows for part in parts_of([old, old], ["n"], {})) == 2 * len(before)
    day = datasets.parquet(old, spec, 4, filter=pa.compute.field("dt") == "2026-11-21")
    found = [label for batch in day for label in batch.labels.tolist()]
    assert sorted(found) == sorted(n for n, row in before.items() if row["dt"] == "2026-11-21")
    split = TimeSplit("dt", validation="2026-11-21", test="2026-11-22")
    part = datasets.parquet(old, spec, 4, split=split, part="test")
    found = [label for batch in part for label in batch.labels.tolist()]
    assert sorted(found) == sorted(n for n, row in before.items() if row["dt"] >= "2026-11-22")


@KINDS
def test_a_resumed_reader_reads_its_version(kind: Any, tmp_path: Path) -> None:
    table = kind(tmp_path)
    table.append(_table({n: {"n": n, "user": "a", "dt": "2026-11-28"} for n in range(9)}))
    spec = FeatureSpec([Categorical("user"), Label("n", high=99)]).fit(table.path)

    def reader() -> Any:
        return datasets.parquet(table.path, spec, 2, shuffle=True)

    first = reader()
    batches = [batch.labels.tolist() for batch in first]
    first.set_epoch(0)
    iterator = iter(first)
    assert [next(iterator).labels.tolist() for _ in range(2)] == batches[:2]
    state = json.loads(json.dumps(first.state_dict()))
    table.delete("2026-11-28", 4)
    table.append(_table({n: {"n": n, "user": "b", "dt": "2026-11-29"} for n in range(20, 25)}))
    again = reader()
    assert sorted(n for batch in reader() for n in batch.labels.tolist()) == [
        *range(5, 9),
        *range(20, 25),
    ]
    again.load_state_dict(state)
    assert [batch.labels.tolist() for batch in again] == batches[2:]
    assert again.state_dict()["versions"] == state["versions"]
    assert sorted(n for batch in again for n in batch.labels.tolist()) == [*range(9)]
    with pytest.raises(ValueError, match="same files"):  # the state of another table
        reader().load_state_dict({**state, "versions": []})


def test_partition_values_of_every_type(tmp_path: Path) -> None:
    """Values come from the log, and the names of folders are encoded."""
    library = pytest.importorskip("deltalake", reason=REASON)
    moment = datetime(2026, 11, 28, 1, 2, 3, 456000, UTC)
    values: dict[str, list[Any]] = {
        "text": ["a/b c%=é", "7", None],
        "day": [date(2026, 1, 1), None, date(1960, 1, 1)],
        "small": [7, None, -3],
        "flag": [True, False, None],
        "size": [1.5, -0.1, None],
        "time": [moment, moment, None],
    }
    types = {"small": pa.int16(), "time": pa.timestamp("us", "UTC"), "day": pa.date32()}
    columns = {name: pa.array(list_, types.get(name)) for name, list_ in values.items()}
    path = str(tmp_path / "a b")
    library.write_deltalake(path, pa.table({"n": [0, 1, 2], **columns}), partition_by=[*values])
    wanted = [{"n": n, **{name: v[n] for name, v in values.items()}} for n in range(3)]
    assert _rows(path, ["n", *values]) == wanted
    assert _rows(path, ["n", "day"]) == [{"n": n, "day": values["day"][n]} for n in range(3)]
    # declared types are not inferred again: 7 stays the text "7", in a spec of texts or numbers
    spec = FeatureSpec([Categorical("text"), Categorical("small")]).fit(path)
    assert spec.fitted.vocabularies["text"].kind == "text"
    assert spec.fitted.vocabularies["small"].kind == "number"
    [part] = [p for p in parts_of(path, ["small"], {"small": "text"}) if p.table.num_rows][:1]
    assert part.table["small"].type == pa.int16()


def test_partition_values_that_iceberg_files_lack(tmp_path: Path) -> None:
    """Files of a table that was a folder of Hive have these columns in the metadata alone."""
    table = _Iceberg(tmp_path)
    days = {"day": pa.array([date(2026, 11, 29)]), "size": [7], "dt": ["2026-11-29"]}
    rows = pa.table({"n": [1], **days})
    table.append(rows.slice(0, 0))
    with table.table.update_spec() as spec:
        spec.add_identity("day")
        spec.add_identity("size")
    pq.write_table(rows, tmp_path / "part-0.parquet")
    table.table.add_files([str(tmp_path / "part-0.parquet")])
    pq.write_table(pa.table({"n": [1]}), tmp_path / "part-0.parquet")
    [row] = _rows(table.path, ["n", *days])
    assert row == {"n": 1, "day": date(2026, 11, 29), "size": 7, "dt": "2026-11-29"}


@KINDS
def test_files_of_a_table_need_its_log(kind: Any, tmp_path: Path) -> None:
    """No path gives rows that the table does not have: not a glob, a partition, or a file."""
    table = kind(tmp_path / "x")
    table.append(_table({n: {"n": n, "user": "a", "dt": "2026-11-28"} for n in range(3)}))
    table.delete("2026-11-28", 1)
    [*files] = (tmp_path / "x").rglob("*.parquet")
    for path in [*files, files[0].parent, f"{files[0].parent}/*.parquet", tmp_path / "x"]:
        if kind is _Delta and path == tmp_path / "x":
            continue
        with pytest.raises(ValueError, match=r"must be read by the log of its table|version-hint"):
            files_of(path)


def test_a_folder_of_delta_tables_is_not_a_table(tmp_path: Path) -> None:
    table = _Delta(tmp_path / "x")
    table.append(_table({0: {"n": 0, "user": "a", "dt": "2026-11-28"}}))
    with pytest.raises(ValueError, match="by the log of its table"):
        files_of(tmp_path / "x")


def _write_log(path: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the actions of the first version."""
    file = Path(path, "_delta_log", f"{0:020}.json")
    actions = [json.loads(line) for line in file.read_text().splitlines()]
    for action in actions:
        change(action)
    file.write_text("\n".join(map(json.dumps, actions)))


def _z85(data: bytes) -> str:
    letters = (
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    )
    data += b"\0" * (-len(data) % 4)
    text = ""
    for (number,) in struct.iter_unpack(">I", data):
        digits = [number // 85**i % 85 for i in range(4, -1, -1)]
        text += "".join(letters[digit] for digit in digits)
    return text


def test_deletion_vectors_are_an_error(tmp_path: Path) -> None:
    bitmaps = pytest.importorskip("pyroaring", reason=REASON)
    table = _Delta(tmp_path)
    rows = {n: {"n": n, "user": "a", "dt": "2026-11-28"} for n in range(3)}
    table.append(_table(rows))

    def features(action: dict[str, Any]) -> None:
        if "protocol" in action:
            action["protocol"] = {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": ["deletionVectors"],
                "writerFeatures": ["deletionVectors"],
            }

    _write_log(table.path, features)
    assert len(_rows(table.path, ["n"])) == 3  # none has one yet
    bitmap = bitmaps.BitMap([0, 2]).serialize()
    data = struct.pack("<iqi", 1681511377, 1, 0) + bitmap

    def delete(action: dict[str, Any]) -> None:
        if "add" in action:
            action["add"]["deletionVector"] = {
                "storageType": "i",
                "pathOrInlineDv": _z85(data),
                "sizeInBytes": len(data),
                "cardinality": 2,
            }

    _write_log(table.path, delete)
    with pytest.raises(ValueError, match=r"at version 0 must be .*has deletion vectors.*REORG"):
        files_of(table.path)


@pytest.mark.parametrize(
    ("configuration", "feature", "words"),
    [
        ({"delta.columnMapping.mode": "name"}, "columnMapping", r"column mapping \(name\)"),
        ({}, "fromTheFuture", "fromTheFuture"),
    ],
)
def test_features_that_files_do_not_have_are_errors(
    configuration: dict[str, str], feature: str, words: str, tmp_path: Path
) -> None:
    table = _Delta(tmp_path)
    table.append(_table({0: {"n": 0, "user": "a", "dt": "2026-11-28"}}))

    def change(action: dict[str, Any]) -> None:
        if "metaData" in action:
            action["metaData"]["configuration"] = configuration
            schema = json.loads(action["metaData"]["schemaString"])
            for number, field in enumerate(schema["fields"]):
                names = {"id": number, "physicalName": field["name"]}
                field["metadata"] = {f"delta.columnMapping.{k}": v for k, v in names.items()}
            action["metaData"]["schemaString"] = json.dumps(schema)
        if "protocol" in action:
            action["protocol"] = {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": [feature],
                "writerFeatures": [feature],
            }

    _write_log(table.path, change)
    with pytest.raises(ValueError, match=words):
        files_of(table.path)


def test_iceberg_columns_that_change_their_name(tmp_path: Path) -> None:
    table = _Iceberg(tmp_path)
    table.append(_table({0: {"n": 0, "user": "a", "dt": "2026-11-28", "price": 7.0}}))
    with table.table.update_schema() as schema:
        schema.delete_column("price")
    with table.table.update_schema() as schema:
        from pyiceberg.types import DoubleType

        schema.add_column("price", DoubleType())  # the values of the old column do not return
    table.append(_table({1: {"n": 1, "user": "b", "dt": "2026-11-28", "price": 1.5}}))
    assert _rows(table.path, ["n", "price"]) == [{"n": 0, "price": None}, {"n": 1, "price": 1.5}]
    with table.table.update_schema() as schema:
        schema.rename_column("price", "cost")
    table.append(pa.table({"n": [2], "user": ["c"], "dt": ["2026-11-29"], "cost": [2.5]}))
    with pytest.raises(ValueError, match=r"column 'cost' under this name; it has 'price'"):
        files_of(table.path)


def test_iceberg_delete_files_are_an_error(tmp_path: Path) -> None:
    table = _Iceberg(tmp_path)
    table.append(_table({0: {"n": 0, "user": "a", "dt": "2026-11-28"}}))
    from pyiceberg.table import DataScan

    plan = DataScan.plan_files

    def with_deletes(self: Any) -> Any:
        for task in plan(self):
            task.delete_files.add("a file")
            yield task

    with (
        mock.patch.object(DataScan, "plan_files", with_deletes),
        pytest.raises(ValueError, match=r"has delete files. Run rewrite_data_files"),
    ):
        files_of(table.path)


def test_iceberg_folders_with_a_hint(tmp_path: Path) -> None:
    """A folder states its newest metadata only by version-hint.text."""
    table = _Iceberg(tmp_path)
    table.append(_table({0: {"n": 0, "user": "a", "dt": "2026-11-28"}}))
    metadata = Path(table.path.removeprefix("file://"))
    with pytest.raises(ValueError, match=r"version-hint.text.*metadata_location"):
        files_of(metadata.parent.parent)
    (metadata.parent / "version-hint.text").write_text(metadata.name.removesuffix(".metadata.json"))
    assert _rows(metadata.parent.parent, ["n"]) == [{"n": 0}]


def test_wrong_tables(tmp_path: Path) -> None:
    table, iceberg = _Delta(tmp_path / "d"), _Iceberg(tmp_path / "i")
    with pytest.raises(FileNotFoundError, match="must be a table of Delta Lake or Iceberg"):
        TableVersion(tmp_path)
    for wrong in (7, None):
        with pytest.raises(TypeError, match="path must be a path"):
            TableVersion(wrong)  # type: ignore[arg-type]
    table.library.DeltaTable.create(table.path, pa.schema([("n", pa.int64())]))
    with pytest.raises(ValueError, match=r"must have rows; .* at version 0 has none"):
        files_of(table.path)
    iceberg.table = iceberg.catalog.create_table("db.clicks", pa.schema([("n", pa.int64())]))
    with pytest.raises(ValueError, match="has no snapshot"):
        files_of(iceberg.path)
    iceberg.table.append(pa.table({"n": [1]}))
    with pytest.raises(ValueError, match=r"version must be the id of a snapshot .* received 5"):
        files_of(TableVersion(iceberg.path, 5))
    table.library.write_deltalake(table.path, pa.table({"n": [1]}), mode="append")
    with pytest.raises(ValueError, match="must have a log that states the table at version 9"):
        files_of(TableVersion(table.path, 9))
    with pytest.raises(ValueError, match="must not be negative"):
        TableVersion(table.path, -1)
    with pytest.raises(ValueError, match=r"must be read as Parquet; received the format 'csv'"):
        files_of(table.path, "csv")
    [file] = files_of(table.path)
    Path(file.path).unlink()
    with pytest.raises(ValueError, match=r"It is a file of .*VACUUM .*Pass a version"):
        files_of(table.path)
    (log,) = [*Path(table.path, "_delta_log").glob("*1.json")]
    log.write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read|must have a log"):
        files_of(table.path)


@pytest.mark.parametrize(
    ("folder", "library"), [("_delta_log", "deltalake"), ("metadata", "pyiceberg")]
)
def test_tables_without_their_library(folder: str, library: str, tmp_path: Path) -> None:
    """Without the extra a table is an error too, and not read by the names of its files."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "00001-x.metadata.json").write_text("{}")
    pq.write_table(pa.table({"n": [1]}), tmp_path / "part-0.parquet")
    submodules = {name: None for name in sys.modules if name.split(".")[0] == library}
    with (
        mock.patch.dict(sys.modules, {**submodules, library: None}),
        pytest.raises(ImportError, match=re.escape("pip install 'recsys-torch[lake]'")),
    ):
        files_of(tmp_path)
    with pytest.raises(ValueError, match="by the log of its table"):
        files_of(tmp_path / "*.parquet")


def test_several_ranks_state_the_version(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_world_size", return_value=2),
        pytest.raises(ValueError, match="must be read at a stated version"),
    ):
        files_of(tmp_path)

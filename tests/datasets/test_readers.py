"""Readers, compared with plain lists of rows that pyarrow reads."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from recsys.datasets import readers
from recsys.datasets.readers import TableReader
from recsys.datasets.utils import Batch
from recsys.features import FeatureSpec, Group, Hashed, Ids, Label, Numeric, SampleWeight
from recsys.features.splits import PARTS, Split, TimeSplit

SIZES = ((13, 1, 7), (20,), (5, 5, 5, 4))
"""Rows of the row groups of each file."""
SPEC = FeatureSpec(
    [
        Ids("row", rows=1000),
        Ids("tags", rows=50, is_list=True, weights="strengths"),
        Hashed("user", rows=30),
        Numeric("age"),
        Label("liked"),
        SampleWeight("weight"),
        Group("session"),
    ]
).fit({name: [0.0] for name in ("age",)})


def _table(first: int, count: int, seed: int = 0) -> pa.Table:
    draw = np.random.default_rng([seed, first])
    tags: list[list[int] | None] = []
    for size in draw.integers(-1, 4, count):
        tags.append(None if size < 0 else draw.integers(0, 50, size).tolist())
    strengths = [None if bag is None else draw.random(len(bag)).round(3).tolist() for bag in tags]
    return pa.table(
        {
            "unread": pa.array(range(count)),
            "row": pa.array(range(first, first + count)),
            "tags": pa.array(tags, pa.list_(pa.int64())),
            "strengths": pa.array(strengths, pa.list_(pa.float64())),
            "user": pa.array([f"user {i}" for i in draw.integers(0, 12, count)]),
            "age": pa.array(draw.integers(18, 80, count).astype(float)),
            "liked": pa.array(draw.integers(0, 2, count)),
            "weight": pa.array(draw.integers(0, 9, count)),
            "session": pa.array(draw.integers(-9, 9, count)),
        }
    )


def _write(folder: Path, sizes: Any = SIZES) -> pa.Table:
    """Write files, and return all rows."""
    first, tables = 0, []
    for number, groups in enumerate(sizes):
        table = _table(first, sum(groups))
        first += sum(groups)
        tables.append(table)
        with pq.ParquetWriter(folder / f"{number}.parquet", table.schema) as writer:
            start = 0
            for size in groups:
                writer.write_table(table.slice(start, size))
                start += size
    return pa.concat_tables(tables)


def _rows_of(batch: Batch) -> list[Any]:
    """Return the samples of a batch, one by one."""
    ids = batch.sparse_features.to_dict()
    bags = {key: jagged.to_dense() for key, jagged in ids.items()}
    weights = {key: jagged.to_dense_weights() or [] for key, jagged in ids.items()}
    assert batch.sample_weights is not None
    assert batch.groups is not None
    return [
        (
            *(tuple(bags[key][i].tolist()) for key in bags),
            *(tuple(weights[key][i].tolist()) for key in weights),
            tuple(batch.dense_features[i].tolist()),
            batch.labels[i].item(),
            batch.sample_weights[i].item(),
            batch.groups[i].item(),
        )
        for i in range(len(batch.labels))
    ]


def _plain(table: pa.Table) -> list[Any]:
    """Return the samples of a table, each transformed alone."""
    return [_rows_of(SPEC.transform(table.slice(i, 1)))[0] for i in range(table.num_rows)]


def _equal(first: Batch, second: Batch) -> bool:
    return pickle.dumps(_rows_of(first)) == pickle.dumps(_rows_of(second))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("divide", ["row_groups", "batches"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_row_comes_once(
    tmp_path: Path, num_workers: int, world_size: int, divide: Any, shuffle: bool
) -> None:
    table = _write(tmp_path)
    whole = _plain(table)
    old = ds.field("age") > 40
    filters = [(None, whole), (old, _plain(table.filter(old)))]
    for (filter, wanted), window_rows in itertools.product(filters, (1, 15, 1000)):
        made = [
            readers.parquet(
                str(tmp_path / "*.parquet"),
                SPEC,
                4,
                rank=rank,
                world_size=world_size,
                divide=divide,
                shuffle=shuffle,
                num_workers=num_workers,
                filter=filter,
                window_rows=window_rows,
            )
            for rank in range(world_size)
        ]
        orders = []
        for _ in range(2):
            batches = [list(reader) for reader in made]
            for one in batches:
                assert all(len(batch.labels) == 4 for batch in one[:-1])
            if divide == "batches":
                steps = list(itertools.zip_longest(*batches))
                rows = [row for step in steps for batch in step for row in _rows_of(batch)]
            else:
                rows = [row for one in batches for batch in one for row in _rows_of(batch)]
            assert Counter(rows) == Counter(wanted)
            if not shuffle and (world_size == 1 or divide == "batches"):
                assert rows == wanted
            orders.append(rows)
        assert (orders[0] != orders[1]) == shuffle


def test_batches_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    _write(tmp_path)
    steps: dict[int, list[list[Any]]] = {}
    for world_size in (1, 2, 3):
        each = [
            readers.parquet(
                tmp_path,
                SPEC,
                12 // world_size,
                rank=rank,
                world_size=world_size,
                divide="batches",
                shuffle=True,
                window_rows=10,
            )
            for rank in range(world_size)
        ]
        steps[world_size] = [
            [row for batch in step for row in _rows_of(batch)] for step in zip(*each, strict=True)
        ]
    assert steps[1] == steps[2] == steps[3]
    state = readers.parquet(
        tmp_path, SPEC, 6, world_size=2, rank=1, divide="batches", window_rows=10, shuffle=True
    )
    next(iter(state))
    alone = readers.parquet(tmp_path, SPEC, 12, divide="batches", window_rows=10, shuffle=True)
    alone.load_state_dicts([state.state_dict()] * 2)
    assert [_rows_of(batch) for batch in alone] == steps[1][1:]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_reader_continues_at_any_batch(tmp_path: Path, seed: int, num_workers: int) -> None:
    _write(tmp_path)
    draw = random.Random(seed)
    for _ in range(20):
        world_size = draw.choice([1, 2, 3])
        options: dict[str, Any] = {
            "rank": draw.randrange(world_size),
            "world_size": world_size,
            "divide": draw.choice(["row_groups", "batches"]),
            "shuffle": draw.random() < 0.7,
            "window_rows": draw.choice([1, 8, 30, 1000]),
            "num_workers": num_workers,
            "drop_last": draw.random() < 0.3,
            "filter": draw.choice([None, ds.field("age") < 60]),
        }
        if draw.random() < 0.3:
            options |= {"split": Split("user", shares=(0.6, 0.2, 0.2)), "part": "train"}

        def build(options: dict[str, Any] = options, size: int = draw.choice([1, 3, 7])) -> Any:
            return readers.parquet(tmp_path, SPEC, size, **options)

        unbroken = build()
        whole, states = [], [unbroken.state_dict()]
        for _ in range(2):  # epochs
            for batch in unbroken:
                whole.append(batch)
                states.append(unbroken.state_dict())
        at = draw.randrange(len(whole) + 1)
        continued = build()
        continued.load_state_dict(json.loads(json.dumps(states[at])))
        found = [*continued, *continued]
        assert len(found) >= len(whole) - at
        assert all(map(_equal, found, whole[at:]))
        behind = draw.randrange(min(at, 3) + 1)
        first = len(list(build()))
        if behind and (at <= first or at - behind > first):
            again = build()
            again.set_epoch(0 if at <= first else 1)
            batches = iter(again)
            for _ in range(at if at <= first else at - first):
                next(batches)
            assert again.state_dict(pending=behind) == states[at - behind]


def test_the_last_batches_of_an_epoch_may_be_pending(tmp_path: Path) -> None:
    _write(tmp_path)
    reader = readers.parquet(tmp_path, SPEC, 4)
    states = [reader.state_dict()]
    for _ in reader:
        states.append(reader.state_dict())
    assert reader.epoch == 1
    assert reader.state_dict()["epoch"] == 1
    assert [reader.state_dict(pending=n) for n in (1, 2)] == [states[-2], states[-3]]
    with pytest.raises(ValueError, match=r"pending must be at most 15, the number of batches"):
        reader.state_dict(pending=16)


_JOB = """
import json, os, sys
from recsys.datasets import readers
from tests.datasets.test_readers import SPEC
folder, state, log, options = sys.argv[1:]
reader = readers.parquet(folder, SPEC, 3, **json.loads(options))
if os.path.exists(state):
    reader.load_state_dict(json.load(open(state))["reader"])
for batch in reader:
    rows = batch.sparse_features["row"].values().tolist()
    seen = json.load(open(state))["rows"] if os.path.exists(state) else []
    with open(state + ".new", "w") as file:  # one step: rows and position
        json.dump({"rows": seen + rows, "reader": reader.state_dict()}, file)
    os.replace(state + ".new", state)
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_jobs_read_each_row_once(tmp_path: Path, num_workers: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    table = _write(folder, [(40, 60, 30)] * 3)
    options = json.dumps({"shuffle": True, "window_rows": 70, "num_workers": num_workers})
    state = tmp_path / "state"
    command = [sys.executable, "-c", _JOB, str(folder), str(state), "", options]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    draw = random.Random(num_workers)
    num_kills = 0
    for _ in range(10):
        seen = state.stat().st_mtime_ns if state.exists() else 0
        job = subprocess.Popen(command, env=environment)
        if num_kills < 3:
            deadline = time.monotonic() + 60
            while job.poll() is None and time.monotonic() < deadline:
                if state.exists() and state.stat().st_mtime_ns != seen:
                    break
                time.sleep(0.002)
            time.sleep(draw.random() * 0.01)
            job.send_signal(signal.SIGKILL)
            num_kills += job.wait() == -signal.SIGKILL
        elif job.wait() == 0:
            break
    rows = json.loads(state.read_text())["rows"]
    assert sorted(rows) == table["row"].to_pylist()
    assert rows != sorted(rows)
    assert num_kills


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5}, "number of rows of a step"),
        ({"seed": 1}, "the same seed; received seed=0 in the state and 1"),
        ({"world_size": 2}, "number of ranks and DataLoader workers"),
        ({"shuffle": True}, "the same shuffle"),
        ({"window_rows": 2}, "the same window_rows"),
        ({"drop_last": True}, "the same drop_last"),
        ({"filter": ds.field("age") > 99}, "the same (files|split)"),
        ({"split": Split(), "part": "train"}, "the same split"),
        ({"paths": "0.parquet"}, r"the same files \(names and sizes\)"),
    ],
)
def test_states_of_other_readers_are_rejected(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    _write(tmp_path)
    state = readers.parquet(tmp_path, SPEC, 4).state_dict()
    options = {"batch_size": 4, **change}
    path = tmp_path / options.pop("paths", "")
    with pytest.raises(ValueError, match=message):
        readers.parquet(path, SPEC, **options).load_state_dict(state)
    with pytest.raises(KeyError, match="state must have the keys"):
        readers.parquet(tmp_path, SPEC, 4).load_state_dict({"epoch": 1})
    assert all(type(value) is int for value in state.values())


def test_files_may_move(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    _write(tmp_path / "a")
    reader = readers.parquet(tmp_path / "a", SPEC, 4)
    next(iter(reader))
    (tmp_path / "a").rename(tmp_path / "b")
    moved = readers.parquet(tmp_path / "b", SPEC, 4)
    moved.load_state_dict(reader.state_dict())
    assert next(iter(moved)).sparse_features["row"].values().tolist() == [4, 5, 6, 7]


def test_epochs(tmp_path: Path) -> None:
    _write(tmp_path)
    reader = readers.parquet(tmp_path, SPEC, 4, shuffle=True)
    epochs = [[_rows_of(batch) for batch in reader] for _ in range(3)]
    assert reader.epoch == 3
    reader.set_epoch(1)
    for _ in range(2):  # an iterator that is left early
        assert _rows_of(next(iter(reader))) == epochs[1][0]
    assert [_rows_of(batch) for batch in reader] == epochs[1]
    other = readers.parquet(tmp_path, SPEC, 4, shuffle=True, seed=1)
    assert [_rows_of(batch) for batch in other] != epochs[0]
    with pytest.raises(ValueError, match="epoch must not be negative"):
        reader.set_epoch(-1)


def test_threads_end_with_their_iterator(tmp_path: Path) -> None:
    import threading

    _write(tmp_path)
    before = threading.active_count()
    for _ in range(3):
        batches = iter(readers.parquet(tmp_path, SPEC, 2, num_workers=2, window_rows=1))
        next(batches)
        assert threading.active_count() > before
        del batches
        assert threading.active_count() == before


@pytest.mark.parametrize("divide", ["row_groups", "batches"])
def test_workers_of_a_data_loader(tmp_path: Path, divide: Any) -> None:
    wanted = Counter(_plain(_write(tmp_path)))
    for world_size in (1, 2):
        rows = []
        for rank in range(world_size):
            reader = readers.parquet(
                tmp_path, SPEC, 4, rank=rank, world_size=world_size, divide="row_groups"
            )
            loader = DataLoader(reader, batch_size=None, num_workers=2)
            rows += [row for batch in loader for row in _rows_of(batch)]
        assert Counter(rows) == wanted


@pytest.mark.filterwarnings("ignore")  # of torchdata
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_data_loader_continues(tmp_path: Path, num_workers: int) -> None:
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed."
    )
    _write(tmp_path)

    def build() -> Any:
        reader = readers.parquet(tmp_path, SPEC, 4, shuffle=True, window_rows=8)
        return loaders.StatefulDataLoader(reader, batch_size=None, num_workers=num_workers)

    loader = build()
    found, states = [], [loader.state_dict()]
    for batch in loader:
        found.append(_rows_of(batch))
        states.append(loader.state_dict())
    for at in (1, 4, 9):
        again = build()
        again.load_state_dict(states[at])
        assert [_rows_of(batch) for batch in again] == found[at:]


def test_a_reader_can_be_pickled(tmp_path: Path) -> None:
    _write(tmp_path)
    reader = readers.parquet(tmp_path, SPEC, 4, shuffle=True)
    copy = pickle.loads(pickle.dumps(reader))
    assert all(map(_equal, reader, copy))


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
    ids=str,
)
def test_filters(tmp_path: Path, filter: Any, is_kept: Callable[[Any], bool]) -> None:
    table = _write(tmp_path)
    wanted = [row["row"] for row in table.to_pylist() if is_kept(row)]
    found = [
        row
        for batch in readers.parquet(tmp_path, SPEC, 8, filter=filter)
        for row in batch.sparse_features["row"].values().tolist()
    ]
    assert found == wanted
    memory = readers.table(table, SPEC, 8, filter=filter)
    assert sum(len(batch.labels) for batch in memory) == len(wanted)


def test_uneven_ranks(tmp_path: Path) -> None:
    _write(tmp_path, [(30, 1, 1)])
    counts = [
        len(list(readers.parquet(tmp_path, SPEC, 5, rank=rank, world_size=3))) for rank in range(3)
    ]
    assert counts == [6, 1, 1]
    with pytest.raises(ValueError, match=r"received 3 row groups and 4 ranks\. Pass divide="):
        readers.parquet(tmp_path, SPEC, 5, world_size=4)
    steps = [
        len(list(readers.parquet(tmp_path, SPEC, 5, rank=i, world_size=4, divide="batches")))
        for i in range(4)
    ]
    assert steps == [2] * 4


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
    _write(tmp_path, [(40, 50), (60, 70)])

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
    ages = pa.concat_tables([_table(0, 90), _table(90, 130)])["age"].to_pylist()
    assert sorted(filtered) == sorted(row for row in parts["train"] if ages[row] > 30)
    # more files do not move rows
    pq.write_table(_table(220, 50), tmp_path / "2.parquet")
    assert {part: {*rows_of(part)} & {*range(220)} for part in PARTS} == {
        part: {*rows} for part, rows in parts.items()
    }


def test_urls(tmp_path: Path) -> None:
    import fsspec

    table = _write(tmp_path)
    system = fsspec.filesystem("memory")
    for path in tmp_path.iterdir():
        system.pipe(f"/clicks/{path.name}", path.read_bytes())
    try:
        for paths in ("memory://clicks/*.parquet", "memory://clicks"):
            reader = readers.parquet(paths, SPEC, 8, num_workers=2)
            assert [row for batch in reader for row in _rows_of(batch)] == _plain(table)
    finally:
        system.rm("/clicks", recursive=True)


def _same(table: pa.Table) -> Any:
    return table


def _huggingface(table: pa.Table) -> Any:
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets are not installed.")
    return datasets.Dataset(table)


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
    table = _table(0, 100)
    data = convert(table)
    reader = readers.table(data, SPEC, 7, num_workers=1)
    assert [row for batch in reader for row in _rows_of(batch)] == _plain(table)
    ranks = [
        readers.table(data, SPEC, 7, rank=rank, world_size=3, shuffle=True) for rank in range(3)
    ]
    rows = [row for reader in ranks for batch in reader for row in _rows_of(batch)]
    assert Counter(rows) == Counter(_plain(table))


def test_a_slice_of_a_table() -> None:
    table = _table(0, 100)
    reader = readers.table(table.slice(30, 20), SPEC, 7)
    assert [row for batch in reader for row in _rows_of(batch)] == _plain(table.slice(30, 20))


def test_errors_of_values_name_file_and_row(tmp_path: Path) -> None:
    _write(tmp_path)
    table = pq.read_table(tmp_path / "2.parquet")
    ages = table["age"].to_pylist()
    ages[13] = float("inf")
    names = table.column_names
    bad = table.set_column(names.index("age"), "age", pa.array(ages))
    pq.write_table(bad, tmp_path / "2.parquet", row_group_size=5)
    for options in ({}, {"filter": ds.field("row") > 40}, {"shuffle": True, "num_workers": 2}):
        with pytest.raises(ValueError, match=r"'age' must have finite.* in row 13 of .*2\.parquet"):
            list(readers.parquet(tmp_path, SPEC, 4, **options))  # type: ignore[arg-type]
    users = table["user"].to_pylist()
    users[7] = None
    bad = table.set_column(names.index("user"), "user", pa.array(users))
    pq.write_table(bad, tmp_path / "2.parquet", row_group_size=5)
    with pytest.raises(ValueError, match=r"'user' must have no missing.* in row 7 of .*2\.parquet"):
        list(readers.parquet(tmp_path, SPEC, 4, split=Split("user"), part="test"))


def test_errors_of_files(tmp_path: Path) -> None:
    _write(tmp_path)
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
    first, second = _table(0, 30), _table(30, 30)
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
    wanted = _plain(pa.concat_tables([first, _table(30, 30)]))
    for options in ({}, {"num_workers": 2, "window_rows": 1}):
        reader = readers.parquet(tmp_path, SPEC, 8, **options)  # type: ignore[arg-type]
        assert [row for batch in reader for row in _rows_of(batch)] == wanted


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"divide": "rows"}, ValueError, "divide must be 'row_groups' or 'batches'"),
        ({"part": "train"}, TypeError, "split must be a Split or TimeSplit"),
        ({"split": Split(), "part": "dev"}, ValueError, "part must be 'train', 'validation'"),
        ({"filter": "age > 3"}, TypeError, "filter must be an expression such as"),
        ({"filter": ds.field("no") > 3}, ValueError, "filter must be an expression of the columns"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be in"),
        ({"num_workers": -1}, ValueError, "num_workers must not be negative"),
        ({"batch_size": 0}, ValueError, "batch_size must be positive"),
        ({"shuffle": 2}, TypeError, "shuffle must be"),
    ],
)
def test_wrong_arguments(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    _write(tmp_path)
    with pytest.raises(error, match=message):
        readers.parquet(tmp_path, SPEC, **{"batch_size": 4, **options})


def test_pinned_batches_need_a_gpu(tmp_path: Path) -> None:
    _write(tmp_path)
    if torch.cuda.is_available():
        batches = list(readers.parquet(tmp_path, SPEC, 4, pin_memory=True, num_workers=1))
        assert all(batch.sparse_features.values().is_pinned() for batch in batches)
    else:
        with pytest.raises(ValueError, match="pin_memory needs a GPU"):
            readers.parquet(tmp_path, SPEC, 4, pin_memory=True)


def test_tables_without_labels(tmp_path: Path) -> None:
    table = _write(tmp_path).drop_columns(["liked", "weight", "session"])
    reader: TableReader = readers.table(table, SPEC, 8, labels=False)
    assert sum(len(batch.labels) for batch in reader) == table.num_rows
    with pytest.raises(KeyError, match=r"must have the columns \['liked', 'weight', 'session'\]"):
        readers.table(table, SPEC, 8)


def test_dense_features_alone() -> None:
    spec = FeatureSpec([Numeric("age"), Label("liked")]).fit({"age": [1.0]})
    data = {"age": np.arange(20.0), "liked": np.zeros(20)}
    for options in ({}, {"shuffle": True}):
        reader = readers.table(data, spec, 6, **options)  # type: ignore[arg-type]
        rows = [row for batch in reader for row in batch.dense_features.flatten().tolist()]
        assert sorted(rows) == data["age"].tolist()

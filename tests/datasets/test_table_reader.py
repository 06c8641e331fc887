"""Order, ranks, epochs and resumption of readers, compared with plain lists of samples."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from recsys.datasets import readers
from recsys.datasets.table_reader import TableReader
from recsys.features import FeatureSpec, Ids
from recsys.features.splits import Split
from tests.datasets.clicks import SPEC, clicks, is_equal, plain_samples, samples_of, write_clicks


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_reader_continues_at_any_batch(tmp_path: Path, seed: int, num_workers: int) -> None:
    write_clicks(tmp_path)
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
        assert all(map(is_equal, found, whole[at:]))
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
    write_clicks(tmp_path)
    reader = readers.parquet(tmp_path, SPEC, 4)
    states = [reader.state_dict()]
    for _ in reader:
        states.append(reader.state_dict())
    assert reader.epoch == 1
    assert reader.state_dict()["epoch"] == 1
    assert [reader.state_dict(pending=n) for n in (1, 2)] == [states[-2], states[-3]]
    with pytest.raises(ValueError, match="pending must be at most 15"):
        reader.state_dict(pending=16)


_JOB = """
import json, os, sys
from recsys.datasets import readers
from tests.datasets.clicks import SPEC
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


_NUM_KILLS = int(os.environ.get("RECSYS_TEST_KILLS", "3"))
"""Kills of each rank."""


def _run_and_kill(folder: Path, state: Path, options: dict[str, Any], draw: random.Random) -> int:
    """Run a job until it ends, kill it at random moments before, and return the number of kills."""
    command = [sys.executable, "-c", _JOB, str(folder), str(state), "", json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    num_kills = 0
    for _ in range(2 * _NUM_KILLS + 2):
        seen = state.stat().st_mtime_ns if state.exists() else 0
        job = subprocess.Popen(command, env=environment)
        if num_kills < _NUM_KILLS:
            deadline = time.monotonic() + 60
            while job.poll() is None and time.monotonic() < deadline:
                if state.exists() and state.stat().st_mtime_ns != seen:
                    break
                time.sleep(0.002)
            time.sleep(draw.random() * 0.01)
            job.send_signal(signal.SIGKILL)
            num_kills += job.wait() == -signal.SIGKILL
        elif job.wait() == 0:
            return num_kills
    return num_kills


@pytest.mark.parametrize(("num_workers", "world_size"), [(0, 1), (2, 1), (0, 3), (2, 2)])
def test_killed_jobs_read_each_row_once(tmp_path: Path, num_workers: int, world_size: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    table = write_clicks(folder, [(40, 60, 30)] * (_NUM_KILLS * world_size))
    draw = random.Random(num_workers)
    rows = []
    for rank in range(world_size):
        options = {"shuffle": True, "window_rows": 70, "num_workers": num_workers}
        state = tmp_path / f"state{rank}"
        options |= {"rank": rank, "world_size": world_size}
        assert _run_and_kill(folder, state, options, draw)
        rows += json.loads(state.read_text())["rows"]
    assert sorted(rows) == table["row"].to_pylist()
    assert rows != sorted(rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5}, "number of rows of a step"),
        ({"seed": 1}, "the same .*received seed=0 in"),
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
    write_clicks(tmp_path)
    state = readers.parquet(tmp_path, SPEC, 4).state_dict()
    options = {"batch_size": 4, **change}
    path = tmp_path / options.pop("paths", "")
    with pytest.raises(ValueError, match=message):
        readers.parquet(path, SPEC, **options).load_state_dict(state)
    with pytest.raises(KeyError, match="state must have the keys"):
        readers.parquet(tmp_path, SPEC, 4).load_state_dict({"epoch": 1})
    checksums = state.pop("checksums")
    assert all(type(value) is int for value in [*state.values(), *checksums])
    readers.parquet(tmp_path, SPEC, 4).load_state_dict(state)  # older states have no checksums


def test_files_may_move(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_clicks(tmp_path / "a")
    reader = readers.parquet(tmp_path / "a", SPEC, 4)
    next(iter(reader))
    (tmp_path / "a").rename(tmp_path / "b")
    moved = readers.parquet(tmp_path / "b", SPEC, 4)
    moved.load_state_dict(reader.state_dict())
    assert next(iter(moved)).sparse_features["row"].values().tolist() == [4, 5, 6, 7]


def test_epochs(tmp_path: Path) -> None:
    write_clicks(tmp_path)
    reader = readers.parquet(tmp_path, SPEC, 4, shuffle=True)
    epochs = [[samples_of(batch) for batch in reader] for _ in range(3)]
    assert reader.epoch == 3
    reader.set_epoch(1)
    for _ in range(2):  # an iterator that is left early
        assert samples_of(next(iter(reader))) == epochs[1][0]
    assert [samples_of(batch) for batch in reader] == epochs[1]
    other = readers.parquet(tmp_path, SPEC, 4, shuffle=True, seed=1)
    assert [samples_of(batch) for batch in other] != epochs[0]
    with pytest.raises(ValueError, match="epoch must not be negative"):
        reader.set_epoch(-1)


def test_the_number_of_batches_of_an_epoch(tmp_path: Path) -> None:
    write_clicks(tmp_path)
    for rank, size, drop_last in itertools.product(range(3), (1, 4, 7), (True, False)):
        for divide in ("row_groups", "batches"):
            reader = readers.parquet(
                tmp_path, SPEC, size, rank=rank, world_size=3, divide=divide, shuffle=True,
                drop_last=drop_last,
            )  # fmt: skip
            for _ in range(2):
                expected = reader.num_batches
                assert expected == len(list(reader))
    assert readers.parquet(tmp_path, SPEC, 4, filter=ds.field("age") < 60).num_batches is None
    split = Split("user", shares=(0.6, 0.2, 0.2))
    assert readers.parquet(tmp_path, SPEC, 4, split=split, part="train").num_batches is None
    (tmp_path / "a.csv").write_text("row\n1\n")
    spec = FeatureSpec([Ids("row", rows=3)])
    assert readers.csv(tmp_path / "a.csv", spec, 4).num_batches is None


def test_each_window_has_an_order_of_its_own(tmp_path: Path) -> None:
    pq.write_table(clicks(0, 90), tmp_path / "a.parquet", row_group_size=30)

    def orders(seed: int) -> list[list[int]]:
        reader = readers.parquet(tmp_path, SPEC, 30, shuffle=True, seed=seed, window_rows=1)
        batches = [batch for _ in range(3) for batch in reader]
        return [batch.sparse_features["row"].values().tolist() for batch in batches]

    found = orders(0) + orders(1)
    within = {tuple(row % 30 for row in batch) for batch in found}
    assert len(within) == len(found) == 18
    assert all(len({row // 30 for row in batch}) == 1 for batch in found)


def test_threads_end_with_their_iterator(tmp_path: Path) -> None:
    write_clicks(tmp_path)
    before = threading.active_count()
    for _ in range(3):
        batches = iter(readers.parquet(tmp_path, SPEC, 2, num_workers=2, window_rows=1))
        next(batches)
        assert threading.active_count() > before
        del batches
        assert threading.active_count() == before


@pytest.mark.parametrize("divide", ["row_groups", "batches"])
def test_workers_of_a_data_loader(tmp_path: Path, divide: Any) -> None:
    wanted = Counter(plain_samples(write_clicks(tmp_path)))
    for world_size in (1, 2):
        rows = []
        for rank in range(world_size):
            reader = readers.parquet(
                tmp_path, SPEC, 4, rank=rank, world_size=world_size, divide=divide, shuffle=True
            )
            loader = DataLoader(reader, batch_size=None, num_workers=2)
            rows += [row for batch in loader for row in samples_of(batch)]
        assert Counter(rows) == wanted


@pytest.mark.filterwarnings("ignore")  # of torchdata
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_data_loader_continues(tmp_path: Path, num_workers: int) -> None:
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed."
    )
    write_clicks(tmp_path)

    def build() -> Any:
        reader = readers.parquet(tmp_path, SPEC, 4, shuffle=True, window_rows=8)
        return loaders.StatefulDataLoader(reader, batch_size=None, num_workers=num_workers)

    loader = build()
    found, states = [], [loader.state_dict()]
    for batch in loader:
        found.append(samples_of(batch))
        states.append(loader.state_dict())
    for at in (1, 4, 9):
        again = build()
        again.load_state_dict(states[at])
        assert [samples_of(batch) for batch in again] == found[at:]


def test_a_reader_can_be_pickled(tmp_path: Path) -> None:
    write_clicks(tmp_path)
    reader = readers.parquet(tmp_path, SPEC, 4, shuffle=True)
    copy = pickle.loads(pickle.dumps(reader))
    assert all(map(is_equal, reader, copy))


def test_batches_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    write_clicks(tmp_path)
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
            [row for batch in step for row in samples_of(batch)] for step in zip(*each, strict=True)
        ]
    assert steps[1] == steps[2] == steps[3]
    state = readers.parquet(
        tmp_path, SPEC, 6, world_size=2, rank=1, divide="batches", window_rows=10, shuffle=True
    )
    next(iter(state))
    alone = readers.parquet(tmp_path, SPEC, 12, divide="batches", window_rows=10, shuffle=True)
    alone.load_state_dicts([state.state_dict()] * 2)
    assert [samples_of(batch) for batch in alone] == steps[1][1:]


@pytest.mark.parametrize("seed", range(4))
def test_each_row_comes_once_on_changing_numbers_of_ranks(tmp_path: Path, seed: int) -> None:
    """A job that stops at random batches, each time on another number of ranks."""
    draw = random.Random(seed)
    wanted = Counter(plain_samples(write_clicks(tmp_path, [(7, 1, 13), (2, 26), (5, 5)])))
    for _ in range(8):
        options: dict[str, Any] = {
            "divide": draw.choice(["row_groups", "row_groups", "batches"]),
            "shuffle": draw.random() < 0.7,
            "window_rows": draw.choice([1, 8, 30]),
            "num_workers": draw.choice([0, 2]),
        }
        rows: list[Any] = []
        states: list[Any] = []
        for stop in [draw.randrange(5) for _ in range(draw.randrange(1, 5))] + [None]:
            place = {**options, "world_size": draw.choice([1, 2, 3, 5])}
            size = draw.choice([1, 3, 4])
            ranks = [readers.parquet(tmp_path, SPEC, size, rank=rank, **place)
                     for rank in range(place["world_size"])]  # fmt: skip
            for reader in ranks:
                if len(states) == len(ranks):
                    for state in states:
                        state["batch_size"] = reader.state_dict()["batch_size"]
                if states:
                    reader.load_state_dicts(json.loads(json.dumps(states)))
                is_divided = place["divide"] == "row_groups" and len(states) not in (0, len(ranks))
                if reader.epoch == 1:  # this rank has read all, and waits for the others
                    continue
                left = reader.num_batches
                batches = [*itertools.islice(reader, stop)]
                assert stop is not None or not is_divided or left == len(batches)
                rows += [row for batch in batches for row in samples_of(batch)]
            states = [reader.state_dict() for reader in ranks]
            if all(state["epoch"] == 1 for state in states):
                break
        assert Counter(rows) == wanted
        for reader in ranks:
            reader.set_epoch(2)
        assert Counter(row for reader in ranks for b in reader for row in samples_of(b)) == wanted


def test_states_of_some_ranks_or_of_several_runs(tmp_path: Path) -> None:
    write_clicks(tmp_path)

    def reader(rank: int, world_size: int, **options: Any) -> TableReader:
        return readers.parquet(tmp_path, SPEC, 6, rank=rank, world_size=world_size, **options)

    states = [reader(rank, 3).state_dict() for rank in range(3)]
    reader(0, 2).load_state_dicts(states)
    later = {**states[0], "epoch": 2}
    other = {**states[0], "batch_size": 7}
    for wrong in (
        states[:1], [states[0], states[1], states[1]], [later, *states[1:]], [other, *states[1:]],
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"all ranks of one run.* received \d states of \[\("):
            reader(0, 2).load_state_dicts(wrong)
    with pytest.raises(ValueError, match="the same seed"):
        reader(0, 2, seed=1).load_state_dicts(states)
    with pytest.raises(ValueError, match="the same split"):
        reader(0, 2, divide="batches").load_state_dicts(states)


def test_uneven_ranks(tmp_path: Path) -> None:
    write_clicks(tmp_path, [(30, 1, 1)])
    counts = [
        len(list(readers.parquet(tmp_path, SPEC, 5, rank=rank, world_size=3))) for rank in range(3)
    ]
    assert counts == [6, 1, 1]
    with pytest.raises(ValueError, match=r"received 3 row groups.*4 ranks\."):
        readers.parquet(tmp_path, SPEC, 5, world_size=4)
    steps = [
        len(list(readers.parquet(tmp_path, SPEC, 5, rank=i, world_size=4, divide="batches")))
        for i in range(4)
    ]
    assert steps == [2] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("divide", ["row_groups", "batches"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_row_comes_once(
    tmp_path: Path, num_workers: int, world_size: int, divide: Any, shuffle: bool
) -> None:
    table = write_clicks(tmp_path)
    whole = plain_samples(table)
    old = ds.field("age") > 40
    filters = [(None, whole), (old, plain_samples(table.filter(old)))]
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
                rows = [row for step in steps for batch in step for row in samples_of(batch)]
            else:
                rows = [row for one in batches for batch in one for row in samples_of(batch)]
            assert Counter(rows) == Counter(wanted)
            if not shuffle and (world_size == 1 or divide == "batches"):
                assert rows == wanted
            orders.append(rows)
        assert (orders[0] != orders[1]) == shuffle


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"divide": "rows"}, ValueError, "divide must be 'row_groups' or 'batches'"),
        ({"part": "train"}, TypeError, "split must be .*Split or TimeSplit"),
        ({"split": "user", "part": "train"}, TypeError, "split must be .*Split or TimeSplit"),
        ({"spec": None}, TypeError, "spec must .*received None"),
        ({"spec": SPEC.columns}, TypeError, "spec must be .*FeatureSpec of recsys.features"),
        ({"filter": ds.field("user") > 3}, ValueError, "filter must be .*of the col"),
        ({"split": Split(), "part": "dev"}, ValueError, "part must be 'train', 'validation'"),
        ({"filter": "age > 3"}, TypeError, "filter must be .*expression such as"),
        ({"filter": ds.field("no") > 3}, ValueError, "filter must be .*of the columns"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be in"),
        ({"num_workers": -1}, ValueError, "num_workers must not be negative"),
        ({"batch_size": 0}, ValueError, "batch_size must be positive"),
        ({"shuffle": 2}, TypeError, "shuffle must be"),
    ],
)
def test_wrong_arguments(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_clicks(tmp_path)
    with pytest.raises(error, match=message):
        readers.parquet(tmp_path, **{"spec": SPEC, "batch_size": 4, **options})
    table = clicks(0, 3)
    with pytest.raises(error, match=message):
        readers.table(table, **{"spec": SPEC, "batch_size": 4, **options})


def test_pinned_batches_need_a_gpu(tmp_path: Path) -> None:
    write_clicks(tmp_path)
    if torch.cuda.is_available():
        batches = list(readers.parquet(tmp_path, SPEC, 4, pin_memory=True, num_workers=1))
        assert all(batch.sparse_features.values().is_pinned() for batch in batches)
    else:
        with pytest.raises(ValueError, match="pin_memory needs a GPU"):
            readers.parquet(tmp_path, SPEC, 4, pin_memory=True)


def test_a_state_is_of_one_filter(tmp_path: Path) -> None:
    """The text of an expression leaves out values of a long list."""
    write_clicks(tmp_path)

    def reader(left_out: int | None) -> Any:
        kept = [i for i in range(100) if i != left_out]
        return readers.parquet(tmp_path, SPEC, 4, filter=ds.field("row").isin(kept))

    state = reader(50).state_dict()
    reader(50).load_state_dict(state)
    for other in (51, None):
        with pytest.raises(ValueError, match="the same split, part or filter"):
            reader(other).load_state_dict(state)

"""Files that appear while they are read, compared with the list of rows that were written."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from recsys import datasets
from recsys.base.loaders import spec_of
from recsys.datasets import following
from recsys.features import FeatureSpec, Ids
from tests.ranks import RankPool

SPEC = FeatureSpec([Ids("row", rows=1 << 20)])


def _write(folder: Path, name: str, rows: range) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"row": rows}), path, row_group_size=3)


def _rows(batch: Any) -> list[int]:
    return list(batch.sparse_features.values().tolist())


def _follow(folder: Path, **options: Any) -> Any:
    return datasets.follow(folder, SPEC, 4, **{"shuffle": True, "window_rows": 5, **options})


def _saved(follower: Any, pending: int = 0) -> Any:
    return json.loads(json.dumps(follower.state_dict(pending)))


def test_rounds_of_partitions(tmp_path: Path) -> None:
    """Partitions come in their order, as numbers, and each file once."""
    for day in (10, 9, 11):
        for part in range(2):
            first = 100 * day + 10 * part
            _write(tmp_path, f"day={day}/{part}.parquet", range(first, first + 5))
    follower = _follow(tmp_path, drop_last=False)
    rows = [row for batch in follower for row in _rows(batch)]
    assert [day for day, _ in itertools.groupby(row // 100 for row in rows)] == [9, 10, 11]
    parts = itertools.product((9, 10, 11), range(2), range(5))
    assert sorted(rows) == [100 * day + 10 * part + i for day, part, i in parts]
    assert list(follower) == []
    assert spec_of(follower) is SPEC
    assert _saved(follower)["reader"] is None


@pytest.mark.parametrize("seed", range(6))
def test_each_row_once_under_kill_and_resume(seed: int, tmp_path: Path) -> None:
    """Random files, late files, kills and numbers of pending batches."""
    draw = random.Random(seed)
    written: set[int] = set()
    trained: list[int] = []
    days = ["2026-11-28", "2026-11-29", "2026-11-30"]
    counter = itertools.count()

    def write() -> None:
        number = next(counter)
        rows = range(100 * number, 100 * number + draw.randint(0, 12))
        day = draw.choice(days[: 1 + number // 4])
        _write(tmp_path, f"dt={day}/{number:03}.parquet", rows)
        written.update(rows)

    write()
    state: Any = None
    while next(counter) < 25:
        follower = _follow(tmp_path)
        if state is not None:
            follower.load_state_dict(state)
        batches: list[list[int]] = []
        for batch in follower:
            batches.append(_rows(batch))
            if draw.random() < 0.3:
                write()
            if draw.random() < 0.2:
                break  # killed, with some batches read ahead
        pending = draw.randint(0, min(3, len(batches)))
        state = _saved(follower, pending)
        trained += [row for rows in batches[: len(batches) - pending] for row in rows]
        write()
    last = _follow(tmp_path)
    last.load_state_dict(state)
    trained += [row for batch in last for row in _rows(batch)]
    assert sorted(trained) == sorted(written)
    assert sorted(_saved(last)["read"]) == sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.parquet")
    )


def test_an_iterator_that_is_left_continues(tmp_path: Path) -> None:
    _write(tmp_path, "a.parquet", range(10))
    follower = _follow(tmp_path)
    first = _rows(next(iter(follower)))
    assert sorted([*first, *(row for batch in follower for row in _rows(batch))]) == [*range(10)]


def test_late_files_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path, "dt=2026-11-28/a.parquet", range(3))
    _write(tmp_path, "dt=2026-11-29/a.parquet", range(3, 6))
    follower = _follow(tmp_path)
    assert sum(len(_rows(batch)) for batch in follower) == 6
    assert follower.late_files == []
    _write(tmp_path, "dt=2026-11-28/b.parquet", range(6, 9))
    _write(tmp_path, "dt=2026-11-30/a.parquet", range(9, 12))
    logger = logging.getLogger("recsys")
    logger.addHandler(caplog.handler)
    try:
        rows = [row for batch in follower for row in sorted(_rows(batch))]
    finally:
        logger.removeHandler(caplog.handler)
    assert rows == [*range(6, 12)]
    assert follower.late_files == ["dt=2026-11-28/b.parquet"]
    assert "1 late files" in caplog.text


def test_waiting_ends_by_time_or_partition(tmp_path: Path) -> None:
    now = [0.0]
    arrivals = {3.0: ("dt=2/a.parquet", range(4)), 5.0: ("dt=10/a.parquet", range(4, 6)),
                6.0: ("dt=11/a.parquet", range(6, 8))}  # fmt: skip

    def sleep(seconds: float) -> None:
        now[0] += seconds
        for time in [time for time in arrivals if time <= now[0]]:
            _write(tmp_path, *arrivals.pop(time))

    clock: Any = mock.Mock(monotonic=lambda: now[0], sleep=sleep)
    with mock.patch.object(following, "time", clock):
        follower = _follow(tmp_path, until=10, wait=4, poll=1)
        rows = sorted(row for batch in follower for row in _rows(batch))
        assert (rows, now) == ([*range(6)], [5.0])  # 10 was read
        with pytest.raises(StopIteration):
            next(iter(follower))
        follower = _follow(tmp_path, wait=4, poll=1)
        assert len([row for batch in follower for row in _rows(batch)]) == 8
        assert now[0] == pytest.approx(10)  # 4 s after the file at 6 s
        with pytest.raises(FileNotFoundError, match="must have a file to follow"):
            list(_follow(tmp_path / "none", wait=2.5))
        assert now[0] == pytest.approx(12.5)


def test_files_of_the_round_must_be_the_same(tmp_path: Path) -> None:
    _write(tmp_path, "a.parquet", range(20))
    follower = _follow(tmp_path)
    next(iter(follower))
    state = _saved(follower)
    _write(tmp_path, "a.parquet", range(1, 21))
    with pytest.raises(ValueError, match="files that have changed since the state was saved"):
        _follow(tmp_path).load_state_dict(state)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="current round must be there"):
        _follow(tmp_path).load_state_dict(state)
    with pytest.raises(KeyError, match="must have the keys"):
        _follow(tmp_path).load_state_dict({})
    for pending in (-1, 2):
        with pytest.raises(ValueError, match="pending must be from 0 to 1"):
            follower.state_dict(pending)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda folder: list(_follow(folder, until="x")),
            ValueError,
            "whole numbers; received 'x'",
        ),
        (lambda folder: list(_follow(folder / "plain", until="x")), ValueError, "needs files in"),
        (
            lambda folder: list(_follow([folder / "plain", folder / "other"])),
            ValueError,
            "distinct",
        ),
        (lambda folder: list(_follow(folder / "lake")), ValueError, "by the log of its table"),
        (lambda folder: _follow(folder, wait=-1), ValueError, "wait must not be negative"),
        (lambda folder: _follow(folder, poll=0), ValueError, "poll must be positive"),
        (lambda folder: _follow(folder, divide="row_groups"), ValueError, "follow takes ranks"),
        (lambda folder: _follow(folder, until=1.5), TypeError, "until must be"),
        (lambda folder: list(_follow(7)), TypeError, "paths must be"),
    ],
)
def test_wrong_arguments(
    make: Callable[[Path], Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    _write(tmp_path, "day=7/a.parquet", range(3))
    _write(tmp_path, "plain/a.parquet", range(3))
    _write(tmp_path, "other/a.parquet", range(3))
    _write(tmp_path, "lake/a/b.parquet", range(3))
    (tmp_path / "lake/a/_delta_log").mkdir()
    folder = tmp_path
    if "'x'" in words:
        folder = tmp_path / "day=7"
    with pytest.raises(error, match=words):
        make(folder)


def _read_on_ranks(folder: Path, steps: int, state: Any) -> tuple[list[list[int]], Any]:
    follower = datasets.follow(folder, SPEC, 12 // dist.get_world_size(), shuffle=True)
    if state is not None:
        follower.load_state_dicts([state] * dist.get_world_size())
    batches = []
    for batch in follower:
        batches.append(_rows(batch))
        if dist.get_rank() == 0:  # the other ranks do not see the files in the same moment
            number = len(list(folder.rglob("*.parquet")))
            if number < 9:
                _write(folder, f"dt={number % 3}/{number}.parquet",
                       range(100 * number, 100 * number + 7))  # fmt: skip
        if len(batches) == steps:
            break
    return batches, _saved(follower)


@pytest.mark.parametrize("counts", [(1, 2, 3), (2, 2, 1)])
def test_ranks_read_the_same_rounds(
    ranks: RankPool, counts: tuple[int, ...], tmp_path: Path
) -> None:
    _write(tmp_path, "dt=0/0.parquet", range(7))
    state, rows = None, []
    for steps, world_size in zip((2, 3, 10**6), counts, strict=True):
        results = ranks(world_size, _read_on_ranks, tmp_path, steps, state)
        assert len({len(batches) for batches, _ in results}) == 1
        assert all(saved == results[0][1] for _, saved in results)
        rows += [row for batches, _ in results for batch in batches for row in batch]
        state = results[0][1]
    assert sorted(rows) == [100 * number + i for number in range(9) for i in range(7)]


def _fail_on_ranks(folder: Path) -> str:
    try:
        list(datasets.follow(folder, SPEC, 4))
    except FileNotFoundError as error:
        return str(error)
    return "no error"


def test_an_error_reaches_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert all("must have a file to follow" in text for text in ranks(2, _fail_on_ranks, tmp_path))

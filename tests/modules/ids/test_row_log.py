"""The log of lost rows against a plain dict, its files, and the errors of a full disk."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys.modules.ids import row_log
from recsys.modules.ids.row_log import RecordField, RowLog

BYTES, SEGMENT = 12, 40 * 20  # 40 records of a file


def log_in(folder: Path, segment_bytes: int = SEGMENT) -> RowLog:
    return RowLog(folder, "t/é", [RecordField("weight", torch.uint8, BYTES)], segment_bytes)


def as_ids(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def records_of(draw: random.Random, count: int) -> Tensor:
    data = bytearray(draw.randbytes(count * BYTES + 1))
    return torch.frombuffer(data, dtype=torch.uint8)[:-1].view(count, BYTES)


def files_of(log: RowLog) -> list[Path]:
    return sorted(log.folder.iterdir())


def check_saved(log: RowLog, folder: Path, expected: dict[int, bytes]) -> None:
    """A save has the valid records, and each once."""
    folder.mkdir()
    found = dict[int, bytes]()
    for saved in log.save(folder, "x"):
        data = (folder / saved.name).read_bytes()
        assert len(data) == saved.records * (8 + BYTES)
        assert crc32(data) == saved.crc
        for i in np.flatnonzero(saved.is_live).tolist():
            record = data[i * (8 + BYTES) :][: 8 + BYTES]
            id_ = int.from_bytes(record[:8], sys.byteorder, signed=True)
            assert id_ not in found
            found[id_] = record[8:]
    assert found == expected


def test_removed_records_leave_the_files(tmp_path: Path) -> None:
    log = RowLog(tmp_path, "t", [RecordField("weight", torch.uint8, 8)], segment_bytes=160)
    ids = torch.arange(95) * 2**33 + 7
    records = torch.arange(95 * 8).to(torch.uint8).view(95, 8)
    log.append(ids, records)
    is_removed = torch.zeros(95, dtype=torch.bool)
    is_removed[::4] = is_removed[90:] = True
    unknown = torch.tensor([-1])
    assert log.remove(torch.cat([ids[is_removed], unknown])) == int(is_removed.sum())
    assert len(log) == int((~is_removed).sum())
    assert torch.equal(log.read(ids[~is_removed]), records[~is_removed])
    content = b"".join(file.read_bytes() for file in log.folder.glob("*.rows"))
    for number, gone in zip(ids.tolist(), is_removed.tolist(), strict=True):
        assert (number.to_bytes(8, "little") in content) == (not gone)
    log.append(ids[:9], records[:9])
    assert torch.equal(log.read(ids[:9]), records[:9])
    log.close()


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_a_dict(tmp_path: Path, seed: int) -> None:
    draw, log, expected = random.Random(seed), log_in(tmp_path / "o"), dict[int, bytes]()
    universe = [draw.randrange(-(2**63), 2**63) for _ in range(700)]
    saves = 0
    for step in range(150):
        ids = draw.sample(universe, draw.choice([0, 1, 7, 60, 250]))
        match draw.choice(["append", "append", "take", "take", "read", "save"]):
            case "append":
                records = records_of(draw, len(ids))
                log.append(as_ids(ids), records)
                expected.update(zip(ids, (bytes(r.tolist()) for r in records), strict=True))
            case "take":
                is_known, found = log.take(as_ids(ids))
                assert is_known.tolist() == [one in expected for one in ids]
                known = [one for one in ids if one in expected]
                assert [bytes(r.tolist()) for r in found] == [expected.pop(one) for one in known]
            case "read":
                known = [one for one in ids if one in expected]
                read = log.read(as_ids(known))
                assert [bytes(r.tolist()) for r in read] == [expected[one] for one in known]
            case _ if step % 3 == 0:
                saves += 1
                check_saved(log, tmp_path / f"c{saves}", expected)
        assert len(log) == len(expected)
        assert log.has(as_ids(universe)).tolist() == [one in expected for one in universe]
        live = len(expected) * (8 + BYTES)
        size = sum(file.stat().st_size for file in files_of(log))
        assert size == log.num_bytes <= 2 * live + 2 * SEGMENT
    assert saves
    everything = list(expected)
    read = log.read(as_ids(everything))
    assert [bytes(r.tolist()) for r in read] == [expected[one] for one in everything]
    log.clear()
    assert (len(log), log.num_bytes, files_of(log)) == (0, 0, [])
    log.append(as_ids([5]), records_of(draw, 1))
    assert log.has(as_ids([5, 6])).tolist() == [True, False]


def test_saved_files_stay_when_the_log_goes_on(tmp_path: Path) -> None:
    draw, log = random.Random(0), log_in(tmp_path / "o")
    ids, records = as_ids(list(range(100))), records_of(draw, 100)
    log.append(ids, records)
    (tmp_path / "c").mkdir()
    saved = log.save(tmp_path / "c", "x")
    assert [one.records for one in saved] == [40, 40, 20]
    links = [os.stat(tmp_path / "c" / one.name).st_nlink for one in saved]
    assert links == [2, 2, 1]  # the last file is a copy
    log.append(ids, records_of(draw, 100))
    log.take(ids)
    log.close()
    assert list((tmp_path / "o").iterdir()) == []
    data = b"".join((tmp_path / "c" / one.name).read_bytes() for one in saved)
    assert len(data) == 100 * (8 + BYTES)
    assert data[8 : 8 + BYTES] == bytes(records[0].tolist())


def test_files_are_copied_where_links_are_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "other file system")

    monkeypatch.setattr(os, "link", refuse)
    log, records = log_in(tmp_path / "o"), records_of(random.Random(0), 90)
    log.append(torch.arange(90), records)
    expected = {i: bytes(record.tolist()) for i, record in enumerate(records)}
    check_saved(log, tmp_path / "c", expected)
    assert {file.stat().st_nlink for file in (tmp_path / "c").iterdir()} == {1}


def test_many_records_are_read_by_threads(tmp_path: Path) -> None:
    draw, log = random.Random(0), log_in(tmp_path)
    records = records_of(draw, 3000)
    log.append(torch.arange(3000), records)
    ids = torch.tensor(draw.sample(range(3000), 2000))
    assert torch.equal(log.read(ids), records[ids])


# -- errors ----------------------------------------------------------------------------------------


@contextmanager
def limit_of_files(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_until_the_log_is_cleared(tmp_path: Path) -> None:
    log, draw = log_in(tmp_path), random.Random(0)
    log.append(torch.arange(10), records_of(draw, 10))
    with (
        limit_of_files(300),
        pytest.raises(OSError, match=r"has its overflow in '.*', and") as info,
    ):
        log.append(torch.arange(10, 20), records_of(draw, 10))
    assert info.value.errno == errno.EFBIG
    assert str(tmp_path) in str(info.value)
    assert "cannot write a row to it" in str(info.value)
    for call in (
        lambda: log.append(torch.arange(30, 31), records_of(draw, 1)),
        lambda: log.read(torch.arange(1)),
        lambda: log.save(tmp_path, "x"),
    ):
        with pytest.raises(OSError, match="cannot use it: File too large"):
            call()
    log.clear()
    log.append(torch.arange(30, 31), records_of(draw, 1))


@pytest.mark.parametrize("change", ["short", "other", "missing"])
def test_files_that_others_change_are_named(tmp_path: Path, change: str) -> None:
    log = log_in(tmp_path)
    log.append(torch.arange(50), records_of(random.Random(0), 50))
    [first, _] = files_of(log)
    if change == "missing":
        first.unlink()
    else:
        data = first.read_bytes()
        first.write_bytes(data[:-1] if change == "short" else data[20:] + data[:20])
    with pytest.raises(OSError, match="cannot read it") as info:
        log.read(torch.tensor([3, 39]))
    assert str(tmp_path) in str(info.value)


@pytest.mark.parametrize("use", ["read", "take", "compact"])
def test_a_bit_that_flips_is_named_with_its_id(tmp_path: Path, use: str) -> None:
    log = log_in(tmp_path)
    log.append(torch.arange(50), records_of(random.Random(0), 50))
    [first, _] = files_of(log)
    data = bytearray(first.read_bytes())
    size = len(data) // 40  # a full file has 40 records
    data[size * 3 + 9] ^= 16  # in the weight of id 3
    first.write_bytes(data)
    log.read(torch.tensor([2, 4]))  # other records are not affected
    ids = torch.arange(10, 40) if use == "compact" else torch.tensor([2, 3])
    with pytest.raises(OSError, match="record of id 3 was changed"):
        (log.read if use == "read" else log.take)(ids)  # compacts a file if less than half is valid


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Table 't/é' .*/file'.* cannot create its"):
        log_in(tmp_path / "file")


def test_it_is_not_copied(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="cannot be copied or pickled"):
            copies(log)


# -- folders ---------------------------------------------------------------------------------------

JOB = """
import os, signal, sys, torch
from recsys.modules.ids.row_log import RowLog, RecordField
log = RowLog(sys.argv[1], "t", [RecordField("weight", torch.float32, 1)])
log.append(torch.arange(3), torch.zeros(3, 4, dtype=torch.uint8))
if os.fork() == 0:
    del log
    sys.exit(0)
os.wait()
assert log.folder.is_dir()
print(log.folder, flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


def start(folder: Path, end: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", JOB, str(folder), end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_folders_go_with_their_process_or_with_the_next_log(tmp_path: Path) -> None:
    ended, killed, running = (start(tmp_path, end) for end in ("end", "wait", "wait"))
    try:
        folders = []
        for process in (ended, killed, running):
            assert process.stdout is not None
            folders.append(Path(process.stdout.readline().strip()))
        assert ended.wait(60) == 0
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
        assert [folder.is_dir() for folder in folders] == [False, True, True]
        other = tmp_path / folders[1].name.replace(folders[1].name.split(".")[1], "elsewhere")
        shutil.copytree(folders[1], other)  # of another machine
        other.with_name(f"{other.name}.lock").touch()
        log = log_in(tmp_path)
        assert [folder.is_dir() for folder in (*folders, other)] == [False, False, True, True]
        own = {log.folder, folders[2], other}
        locks = {folder.with_name(f"{folder.name}.lock") for folder in own}
        assert set(tmp_path.iterdir()) == own | locks
        del log
        assert len(list(tmp_path.iterdir())) == 4
    finally:
        for process in (ended, killed, running):
            process.communicate("", timeout=60)
    assert set(tmp_path.iterdir()) == {other, other.with_name(f"{other.name}.lock")}


def test_names_of_any_letters_make_a_folder(tmp_path: Path) -> None:
    """A file system limits the bytes of a name, and a letter may have several."""
    folder, lock = row_log._new_folder(tmp_path, "größe" * 40)
    os.close(lock)
    assert folder.is_dir()
    assert folder.name.isascii()

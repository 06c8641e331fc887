"""A version is there whole or not at all, and saving one never costs another."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from recsys.distributed.checkpoint import CheckpointError, versions
from recsys.distributed.checkpoint.versions import (
    MANIFEST,
    complete_versions,
    find_version,
    keep_newest,
    new_version,
    read_manifest,
    remove_versions,
    write_manifest,
)


def _save(path: Path, step: int | None = None, keep: int | None = None) -> Path:
    with new_version(path, step) as folder:
        (folder / "data").write_text("whole")
        write_manifest(folder, {"files": {}, "optimizer": []})
    if keep is not None:
        keep_newest(path, keep, folder)
    return folder


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def _die_while_saving(path: Path, step: int | None = None) -> Path:
    """Leave the remains of a killed process: its files, and a lock file without an owner."""
    with new_version(path, step) as folder:
        names = {name: (folder / name).read_bytes() for name in _names(folder)}
    folder.mkdir()
    for name, data in {**names, "data": b"ha"}.items():
        (folder / name).write_bytes(data)
    return folder


def test_numbers_go_on_and_the_newest_is_found(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "c"
    assert [_save(path).name for _ in range(3)] == ["step-1", "step-2", "step-3"]
    assert _save(path, step=100).name == "step-100"
    assert _save(path).name == "step-101"
    assert find_version(path) == path / "step-101"
    assert find_version(path / "step-2") == path / "step-2"
    assert _names(path / "step-2") == ["data", MANIFEST]  # no lock stays


def test_folders_that_links_lead_to_are_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    best, unfinished, path = _save(elsewhere), elsewhere / "unfinished", tmp_path / "c"
    unfinished.mkdir()
    (unfinished / "notes").write_text("mine")
    (unfinished / "saving.lock").touch()
    path.mkdir()
    (path / "step-1").symlink_to(best)
    (path / "step-2").symlink_to(unfinished)
    assert find_version(path) == path / "step-1"
    for _ in range(3):
        _save(path, keep=1)
    assert _names(path) == ["step-1", "step-2", "step-5"]
    assert _names(best) == ["data", MANIFEST]
    assert _names(unfinished) == ["notes", "saving.lock"]


@pytest.mark.parametrize("name", [MANIFEST, ".metadata"])
def test_a_pipe_is_no_manifest(tmp_path: Path, name: str) -> None:
    """Reading one would wait for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} must be a regular file"):
        find_version(tmp_path)
    folder = _save(tmp_path / "c")
    os.mkfifo(tmp_path / "c" / "step-2")
    assert find_version(tmp_path / "c") == folder


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for _ in range(4):
        _save(tmp_path, keep=2)
    assert _names(tmp_path) == ["step-3", "step-4"]
    _save(tmp_path, keep=1)
    assert _names(tmp_path) == ["step-5"]
    _save(tmp_path, keep=None)
    assert _names(tmp_path) == ["step-5", "step-6"]


@pytest.mark.parametrize("step", [0, 4, 5])
def test_a_step_must_be_after_the_newest(tmp_path: Path, step: int) -> None:
    _save(tmp_path, step=5)
    with pytest.raises(CheckpointError, match=f"newest version, .*/step-5, .*; received {step}"):
        _save(tmp_path, step=step)
    assert _names(tmp_path) == ["step-5"]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    _save(tmp_path)

    def fail() -> None:
        with new_version(tmp_path, None) as folder:
            (folder / "data").write_text("ha")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert _names(tmp_path) == ["step-1"]


def test_what_died_is_not_loaded_and_is_removed_by_the_next_save(tmp_path: Path) -> None:
    _save(tmp_path)
    died = _die_while_saving(tmp_path)
    assert find_version(tmp_path) == tmp_path / "step-1"
    with pytest.raises(CheckpointError, match="step-2 was never finished"):
        find_version(died)
    _save(tmp_path)
    assert not (tmp_path / "step-2" / "data").exists() or read_manifest(tmp_path / "step-2")
    assert find_version(_die_while_saving(tmp_path, step=7).parent) != tmp_path / "step-7"
    assert _save(tmp_path, step=7) == tmp_path / "step-7"
    assert (tmp_path / "step-7" / "data").read_text() == "whole"


def test_only_versions_that_died(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint: step-1 was never"):
        find_version(_die_while_saving(tmp_path).parent)


def test_a_version_that_someone_is_saving_stays(tmp_path: Path) -> None:
    _save(tmp_path)
    with new_version(tmp_path, None) as mine:
        (mine / "data").write_text("half")
        theirs = _save(tmp_path, keep=1)
        assert (mine / "data").read_text() == "half"
        assert mine != theirs
        with pytest.raises(CheckpointError, match="someone else is saving there"):
            _save(tmp_path, step=99) and _save_inside(tmp_path)
        write_manifest(mine, {"files": {}, "optimizer": []})
    assert find_version(tmp_path) == tmp_path / "step-99"


def _save_inside(path: Path) -> None:
    with new_version(path, 100), new_version(path, 100):
        pass


def test_folders_of_others_stay(tmp_path: Path) -> None:
    for name in ("step-1", "step-x", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    _save(tmp_path)
    assert _names(tmp_path) == ["logs", "step-1", "step-2", "step-x"]
    assert (tmp_path / "step-1" / "notes.txt").exists()
    assert find_version(tmp_path) == tmp_path / "step-2"


def test_a_removal_that_died_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path)
    unlink, removed = Path.unlink, []

    def die_after_one(file: Path, missing_ok: bool = False) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(file.name)
        unlink(file, missing_ok)

    second = _save(tmp_path)
    monkeypatch.setattr(Path, "unlink", die_after_one)
    with pytest.raises(KeyboardInterrupt):
        keep_newest(tmp_path, 1, second)
    monkeypatch.undo()
    assert removed == [MANIFEST]
    assert find_version(tmp_path) == second
    _save(tmp_path, keep=2)
    assert _names(tmp_path) == ["step-2", "step-3"]


def test_a_filesystem_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    _save(tmp_path)
    died = _die_while_saving(tmp_path)
    _save(tmp_path)
    assert _names(tmp_path) == ["step-1", died.name, "step-3"]  # it may still be written


def test_an_old_checkpoint_is_found_until_a_version_is_complete(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_text("old")
    _die_while_saving(tmp_path)
    assert find_version(tmp_path) == tmp_path
    assert find_version(_save(tmp_path).parent) != tmp_path


def test_a_later_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions._FORMATS, "full", 3)
    folder = _save(tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"json is of format 3; .*2"):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "1" * 9999, "{}", '{"content": 3}', "\xff"])
def test_what_is_no_manifest_is_named(tmp_path: Path, text: str) -> None:
    folder = _save(tmp_path)
    (folder / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"/step-1/manifest.json is damaged"):
        read_manifest(folder)


def test_every_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    folder = _save(tmp_path)
    data = (folder / MANIFEST).read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / MANIFEST).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
            read_manifest(folder)


def test_the_manifest_comes_after_everything_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        calls.append(f"-> {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    _save(tmp_path)
    assert calls == [
        "manifest.json.tmp",
        "step-1",
        tmp_path.name,
        "-> manifest.json",
        "step-1",
    ]


def test_the_folder_of_a_job_leads_to_its_checkpoints(tmp_path: Path) -> None:
    job = tmp_path / "job"
    for name in ("last", "best"):
        _save(job / name)
    text = rf"{job} is not a checkpoint but the folder of a job\. Pass {job}/best or {job}/last,"
    with pytest.raises(CheckpointError, match=text):
        find_version(job)
    assert find_version(job / "best") == job / "best" / "step-1"


def test_versions_are_listed_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "c"
    assert complete_versions(path) == []
    remove_versions(path)
    for step in (2, 9, 10):
        _save(path, step=step)
    _die_while_saving(path, step=12)
    (path / "step-11").symlink_to(path / "step-2")
    (path / "notes").mkdir()
    assert [one.name for one in complete_versions(path)] == [
        "step-11",
        "step-10",
        "step-9",
        "step-2",
    ]
    remove_versions(path, least=10)
    assert _names(path) == ["notes", "step-11", "step-2", "step-9"]
    remove_versions(path)
    assert _names(path) == ["notes", "step-11"]

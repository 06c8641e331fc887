"""The versions of a checkpoint: folders `step-N`, complete once their manifest is in place.

While a version is written its folder has a lock file, held by the process that writes. A version
is complete when its manifest has been moved into place, by one atomic rename, after everything else
is on the disk. So whatever dies on the way, the versions before are untouched, and what it leaves
is told apart from a version that someone is writing right now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.kernels.checked import checked

MANIFEST = "manifest.json"
_LOCK = "saving.lock"
_FORMAT = 1
_TRIES = 100


@checked
def newest_version(path: str | Path) -> Path | None:
    """Return the newest complete version that `save_checkpoint` made in a folder, None if none.

    Args:
        path: what was given to `save_checkpoint`; it need not exist.

    Example:
        >>> newest_version("/runs/of/nobody") is None
        True
    """
    complete = _complete(Path(path))
    return _folder(Path(path), complete[-1]) if complete else None


def find_version(path: Path) -> Path:
    """Return the folder to load: the newest complete version, or the path itself.

    Args:
        path: what was given to `save_checkpoint`, or one of the versions in it, or a folder that
            `torch.distributed.checkpoint` wrote.

    Raises:
        CheckpointError: if there is none.
    """
    if regular_file(path / MANIFEST).exists():
        return path
    complete = _complete(path)
    if complete:
        return _folder(path, complete[-1])
    is_unfinished = (path / _LOCK).exists()
    if regular_file(path / ".metadata").exists() and not is_unfinished:
        return path
    unfinished = [path.name] if is_unfinished else [f"step-{n}" for n in _steps(path)]
    if unfinished:
        raise CheckpointError(
            f"{path} holds no complete checkpoint: {', '.join(unfinished)} was never finished. "
            "Load another one."
        )
    raise CheckpointError(
        f"{path} is not a readable checkpoint: "
        f"{'it holds no version step-N' if path.is_dir() else 'there is no such folder'}. Give the "
        "folder that save_checkpoint wrote."
    )


@contextlib.contextmanager
def new_version(path: Path, step: int | None) -> Iterator[Path]:
    """Make the folder of a new version, which is removed again unless it becomes complete.

    Args:
        path: the checkpoint's folder, which is created.
        step: the version's number; None for the next one.

    Yields:
        The folder. Call `write_manifest` on it last.

    Raises:
        CheckpointError: if the step is not after the newest complete one, or someone else is saving
            it right now.
    """
    path.mkdir(parents=True, exist_ok=True)
    for unfinished in set(_steps(path)) - set(_complete(path)):
        folder = _folder(path, unfinished)
        if not folder.is_symlink():
            _remove_unless_in_use(folder)
    folder, lock = _claim(path, step)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # what cannot be removed now is removed by a later save
            if (folder / MANIFEST).exists():
                (folder / _LOCK).unlink()
            else:
                _remove(folder)
        os.close(lock)


def _claim(path: Path, step: int | None) -> tuple[Path, int]:
    """Make a folder that this process alone has the lock of; return both."""
    newest = max(_complete(path), default=-1)
    if step is not None and step <= newest:
        raise CheckpointError(
            f"step must be after the newest version, {_folder(path, newest)}, which a load takes; "
            f"received {step}. Give a larger one, or remove the versions that are not wanted."
        )
    for _ in range(_TRIES):
        folder = _folder(path, step if step is not None else max(_steps(path), default=0) + 1)
        try:
            folder.mkdir()
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except (FileExistsError, FileNotFoundError):  # someone else claims it, or tidies up
            continue
        with contextlib.suppress(BlockingIOError):
            _take(lock)
            if os.fstat(lock).st_nlink:
                return folder, lock
        os.close(lock)
    raise CheckpointError(
        f"{folder} cannot be written: someone else is saving there, or left files of another kind "
        "in it. Save under another step or path, or remove the folder."
    )


def _take(lock: int) -> None:
    """Take a lock file, until it is closed or the process ends.

    Raises:
        BlockingIOError: if someone else has it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a filesystem without locks: what is left unfinished there stays
        pass


def _remove_unless_in_use(folder: Path) -> None:
    """Remove what a save that died has left; nothing that is not a version of ours."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()  # empty: it died before it had a lock
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (folder / MANIFEST).exists():  # it may have become complete just now
            _remove(folder)
    except OSError:  # in use, or on a filesystem without locks
        pass
    finally:
        os.close(lock)


def keep_newest(path: Path, keep: int | None, current: Path) -> None:
    """Remove all complete versions but the newest; all but `current` may go. Links stay.

    Args:
        path: the checkpoint's folder.
        keep: how many stay; None for all.
        current: the version just saved.
    """
    if keep is None:
        return
    # a link is not a version that a save has made: what it leads to belongs to somebody else
    own = [n for n in _complete(path) if not _folder(path, n).is_symlink()]
    for number in own[:-keep]:
        folder = _folder(path, number)
        if folder != current:
            try:
                (folder / _LOCK).touch()  # should this die half-way, a later save removes the rest
                _remove(folder)
            except OSError as error:
                warnings.warn(f"{folder} is no longer needed and stays: {error}", stacklevel=3)


def _remove(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)  # first: from here on it is not complete
    for file in folder.iterdir():
        if file.name != _LOCK:
            file.unlink(missing_ok=True)
    (folder / _LOCK).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


def _folder(path: Path, number: int) -> Path:
    return path / f"step-{number}"


def _steps(path: Path) -> list[int]:
    """Return the numbers of all versions, complete or not, in ascending order."""
    if not path.is_dir():
        return []
    found = (re.fullmatch(r"step-(0|[1-9]\d{0,17})", entry.name) for entry in path.iterdir())
    return sorted(int(match[1]) for match in found if match)


def _complete(path: Path) -> list[int]:
    return [number for number in _steps(path) if (_folder(path, number) / MANIFEST).is_file()]


# -- the manifest ----------------------------------------------------------------------------------


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Make a version complete. Everything else in it must be on the disk.

    Args:
        folder: of the version.
        content: what JSON can say.
    """
    temporary = folder / f"{MANIFEST}.tmp"
    with temporary.open("wb") as file:
        file.write(_encode({"format": _FORMAT, **content}))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    sync_folder(folder.parent)
    os.replace(temporary, folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what a version's manifest says.

    Raises:
        CheckpointError: if it is damaged, or of a later format.
    """
    file = regular_file(folder / MANIFEST)
    data = file.read_bytes()
    try:
        content = json.loads(data)["content"]
        is_whole = _encode(content) == data
        found: int = content["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CheckpointError(f"{file} is damaged: its CRC is not that of its text.")
    if found != _FORMAT:
        raise CheckpointError(
            f"{file} is of format {found}; this version of recsys reads format {_FORMAT}. Load it "
            "by the version that wrote it, or a later one."
        )
    return dict(content)


def _encode(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, sort_keys=True)
    return json.dumps({"content": content, "crc32": crc32(text.encode())}, sort_keys=True).encode()


def regular_file(file: Path) -> Path:
    """Return the path of a file to read.

    Raises:
        CheckpointError: if it is a folder, a pipe or the like: reading a pipe would wait for ever.
    """
    if file.exists() and not file.is_file():
        raise CheckpointError(
            f"{file} must be a regular file; received a folder, a pipe or a device. Load another "
            "version, or copy this one anew."
        )
    return file


def sync_folder(folder: Path) -> None:
    """Have the disk know a folder's entries."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

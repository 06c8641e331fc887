"""Versions of a checkpoint: folders `step-N`, complete once their manifest is in place.

The process that writes a version holds a lock file in its folder. A version is complete when its
manifest has been moved into place by one atomic rename, after everything else is on the disk. A
process that dies leaves earlier versions untouched, and an unfinished folder without a held lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from recsys.base.checked import checked
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.manifest_rules import check_manifest

MANIFEST = "manifest.json"
_LOCK = "saving.lock"
_FORMATS = {"full": 1, "delta": 2}  # of a manifest, by the kind of its version
_TRIES = 100

Manifest = Mapping[str, Any]
"""Content of a manifest: `files` with their blocks, and `optimizer` settings.

A delta's manifest also has `kind` "delta", its own `step`, `previous` and `base` (each a `step` and
the `sha256` of its manifest), and `rows`: by table, the number of saved rows and the values that
have them."""


@checked
def newest_version(path: str | Path) -> Path | None:
    """Return the newest complete version of `save_checkpoint` in a folder, or None.

    Args:
        path: The folder passed to `save_checkpoint`; it need not exist.

    Example:
        >>> newest_version("/runs/of/nobody") is None
        True
    """
    complete = _complete(Path(path))
    return _folder(Path(path), complete[-1]) if complete else None


def complete_versions(path: Path) -> list[Path]:
    """Return the complete versions in a folder, the newest first."""
    return [_folder(path, number) for number in reversed(_complete(path))]


def remove_versions(path: Path, least: int = 0) -> None:
    """Remove versions, complete or not, the oldest first. Links are kept.

    Args:
        path: The checkpoint's folder; it need not exist.
        least: Number of the first version to remove.
    """
    for number in _steps(path):
        folder = _folder(path, number)
        if number >= least and not folder.is_symlink():
            _remove(folder)


def find_version(path: Path) -> Path:
    """Return the folder to load: the newest complete version, or the path itself.

    Args:
        path: The folder passed to `save_checkpoint`, or one of its versions, or a folder written by
            `torch.distributed.checkpoint`.

    Raises:
        CheckpointError: There is no checkpoint.
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
    parts = [path / name for name in ("best", "last") if _complete(path / name)]
    if parts:
        raise CheckpointError(
            f"{path} is not a checkpoint but the folder of a job. Pass "
            f"{' or '.join(map(str, parts))}, which the job has saved."
        )
    raise CheckpointError(
        f"{path} is not a readable checkpoint: "
        f"{'it holds no version step-N' if path.is_dir() else 'there is no such folder'}. Pass the "
        "folder that save_checkpoint wrote."
    )


def open_version(path: Path) -> tuple[Path, Manifest | None]:
    """Return the folder of `find_version`, and its manifest; None for a folder without one.

    Raises:
        CheckpointError: There is no checkpoint, or its manifest is damaged.
    """
    folder = find_version(path)
    return folder, read_manifest(folder) if (folder / MANIFEST).exists() else None


@contextlib.contextmanager
def new_version(path: Path, step: int | None) -> Iterator[Path]:
    """Create the folder of a new version, and remove it again unless the version becomes complete.

    Args:
        path: The checkpoint's folder, created if missing.
        step: Number of the version; None for the next one.

    Yields:
        The folder. Call `write_manifest` on it last.

    Raises:
        CheckpointError: The step is not after the newest complete version, or another process is
            saving it.
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
        with contextlib.suppress(OSError):  # a later save removes the rest
            if (folder / MANIFEST).exists():
                (folder / _LOCK).unlink()
            else:
                _remove(folder)
        os.close(lock)


def _claim(path: Path, step: int | None) -> tuple[Path, int]:
    """Create a folder and take its lock; return both."""
    newest = max(_complete(path), default=-1)
    if step is not None and step <= newest:
        raise CheckpointError(
            f"step must be after the newest version, {_folder(path, newest)}, which a load takes; "
            f"received {step}. Pass a larger step, or remove unwanted versions."
        )
    for _ in range(_TRIES):
        folder = _folder(path, step if step is not None else max(_steps(path), default=0) + 1)
        try:
            folder.mkdir()
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except (FileExistsError, FileNotFoundError):  # another process claims or removes it
            continue
        with contextlib.suppress(BlockingIOError):
            _lock_file(lock)
            if os.fstat(lock).st_nlink:
                return folder, lock
        os.close(lock)
    raise CheckpointError(
        f"{folder} cannot be written: someone else is saving there, or it contains other "
        "files. Save under another step or path, or remove the folder."
    )


def _lock_file(lock: int) -> None:
    """Lock a file until it is closed or the process ends.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a filesystem without locks: unfinished versions are not removed there
        pass


def _remove_unless_in_use(folder: Path) -> None:
    """Remove an unfinished version of a dead process, and nothing else."""
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


def keep_newest(path: Path, keep: int, current: Path) -> None:
    """Remove all complete versions except the newest and `current`, and what their deltas need.

    Links are kept.

    Args:
        path: The checkpoint's folder.
        keep: Number of versions to keep.
        current: The version just saved.
    """
    # a link is not made by a save: its target belongs to someone else
    numbers = [n for n in _complete(path) if not _folder(path, n).is_symlink()]
    kept = {_folder(path, n) for n in numbers[-keep:]} | {current}
    try:
        bases = {n: _base_of(folder) for folder in kept if (n := step_of(folder)) is not None}
    except CheckpointError as error:
        warnings.warn(f"No version in {path} is removed: {error}", stacklevel=3)
        return
    for number in reversed(numbers):  # deltas before their base
        folder = _folder(path, number)
        if folder not in kept and not any(b <= number < n for n, b in bases.items()):
            try:
                (folder / _LOCK).touch()  # if this process dies here, a later save removes the rest
                _remove(folder)
            except OSError as error:
                warnings.warn(f"{folder} is unused but could not be removed: {error}", stacklevel=3)


def _base_of(folder: Path) -> int:
    """Return the number of the first version that a load of a version reads."""
    manifest = read_manifest(folder)
    is_delta = manifest.get("kind") == "delta"
    return manifest["base"]["step"] if is_delta else int(folder.name.removeprefix("step-"))


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


def step_of(folder: Path) -> int | None:
    """Return the number of a version, or None for a folder of another name."""
    match = re.fullmatch(r"step-(0|[1-9]\d{0,17})", folder.name)
    return int(match[1]) if match else None


def _steps(path: Path) -> list[int]:
    """Return the numbers of all versions, complete or not, in ascending order."""
    if not path.is_dir():
        return []
    return sorted(step for entry in path.iterdir() if (step := step_of(entry)) is not None)


def _complete(path: Path) -> list[int]:
    return [number for number in _steps(path) if (_folder(path, number) / MANIFEST).is_file()]


# -- the manifest ----------------------------------------------------------------------------------


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Make a version complete. Everything else in it must be on the disk.

    Args:
        folder: Folder of the version.
        content: Content of the manifest, as JSON values.
    """
    temporary = folder / f"{MANIFEST}.tmp"
    with temporary.open("wb") as file:
        format_number = _FORMATS[content.get("kind", "full")]
        file.write(_encode({"format": format_number, **content}))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    sync_folder(folder.parent)
    os.replace(temporary, folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of a version's manifest.

    Raises:
        CheckpointError: It is damaged, or has a later format.
    """
    file = regular_file(folder / MANIFEST)
    data = file.read_bytes()
    try:
        content = json.loads(data)["content"]
        is_whole = isinstance(content, dict) and _encode(content) == data
        format_number = content["format"]
        kind = content.get("kind", "full")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CheckpointError(f"{file} is damaged: its CRC does not match its text.")
    if isinstance(kind, str) and format_number != _FORMATS.get(kind, format_number):
        raise CheckpointError(
            f"{file} is of format {format_number}; this version of recsys reads formats up to "
            f"{max(_FORMATS.values())}. Load it with the version that wrote it, or a later one."
        )
    try:
        check_manifest(content)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged: {error} Load an earlier version, or copy this one again."
        ) from error
    return dict(content)


def _encode(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, sort_keys=True)
    return json.dumps({"content": content, "crc32": crc32(text.encode())}, sort_keys=True).encode()


def identity_of(folder: Path) -> dict[str, Any]:
    """Return the number of a complete version, and the SHA-256 of its manifest."""
    digest = hashlib.sha256(regular_file(folder / MANIFEST).read_bytes()).hexdigest()
    return {"step": step_of(folder), "sha256": digest}


def chain_of(folder: Path, manifest: Manifest) -> list[tuple[Path, Manifest]]:
    """Return the versions to read for a version, base first: itself alone unless it is a delta.

    Raises:
        CheckpointError: A version that a delta needs is missing or is another one, or the delta was
            copied or renamed.
    """
    chain = [(folder, manifest)]
    while manifest.get("kind") == "delta":
        current, step = folder.resolve(), manifest["step"]
        if step_of(current) != step:
            raise CheckpointError(
                f"{folder} must be the delta of its number; received a copy of step-{step}, or a "
                "version that was renamed. Load another version."
            )
        wanted = manifest["previous"]
        folder = _folder(current.parent, wanted["step"])
        if not (folder / MANIFEST).is_file():
            raise CheckpointError(
                f"{current} is a delta and needs {folder}, which is missing or was never finished. "
                "Load an earlier version, or copy the whole checkpoint again."
            )
        if wanted["step"] >= step or identity_of(folder) != wanted:
            raise CheckpointError(
                f"{current} is a delta on another version than {folder}: the SHA-256 of the "
                "manifest differs. Load an earlier version, or copy the whole checkpoint again."
            )
        manifest = read_manifest(folder)
        chain.append((folder, manifest))
    return chain[::-1]


def regular_file(file: Path) -> Path:
    """Return the path of a file to read.

    Raises:
        CheckpointError: It is a folder, a pipe or another special file: reading a pipe would block
            forever.
    """
    if file.exists() and not file.is_file():
        raise CheckpointError(
            f"{file} must be a regular file; received a folder, a pipe or a device. Load another "
            "version, or copy this one again."
        )
    return file


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

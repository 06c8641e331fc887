"""Copies of a version at an address of fsspec: upload by a trainer, and download by a server.

Legend of addresses: any that fsspec opens, such as "s3://models/movies/1" or a folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from recsys.base.checked import checked
from recsys.inference.packages.deltas import DELTA_NAME, read_delta_named
from recsys.inference.packages.manifest import read_manifest, verify_files

__all__ = ["follow", "upload"]

_PART = ".part-"


def upload(version: Path, url: str) -> None:
    """Copy the files of a version that an address lacks; each appears whole or not at all.

    Deltas come in their order, and the manifest is the last of the other files. One process at a
    time uploads to an address.

    Args:
        version: The folder of the version.
        url: The address of the copy.

    Raises:
        OSError: A file cannot be written.
        ValueError: The address has another version.
    """
    files, root = fsspec.url_to_fs(url)
    known = set(_names(files, root))
    is_other = (
        "manifest.json" in known
        and files.cat_file(f"{root}/manifest.json") != (version / "manifest.json").read_bytes()
    )
    if is_other:
        raise ValueError(
            f"{url} must be a copy of {version}, or empty; received a version with another "
            "manifest. Use another address, or remove the copy."
        )
    for part in _names(files, root, parts=True):  # of a trainer that was killed
        files.rm_file(f"{root}/{part}")
    local = [str(path.relative_to(version)) for path in version.rglob("*") if path.is_file()]
    names = [n for n in local if n not in known and not _is_part(n)]
    for name in sorted(names, key=_place):
        part = f"{root}/{PurePosixPath(name).parent}/{_PART}{secrets.token_hex(8)}"
        files.makedirs(str(PurePosixPath(part).parent), exist_ok=True)
        files.put_file(str(version / name), part)
        files.mv(part, f"{root}/{name}")


@checked
def follow(
    url: str,
    version: str | Path,
    *,
    every: float = 1.0,
    stop: threading.Event | None = None,
) -> int:
    """Copy a version and its deltas from an address into a folder, which servers follow.

    A file appears in the folder whole or not at all. Files are verified before. Only deltas and
    files that the manifest lists are copied, and links must stay inside the address.

    Args:
        url: The address of a version, such as "s3://models/movies/1"; see `Publisher`.
        version: The folder, such as "models/movies/1". If it exists, only new deltas are copied.
        every: Seconds between two looks for new deltas.
        stop: Ends the copying; None: it ends after one look. One process at a time follows into a
            folder.

    Returns:
        The number of deltas that were copied.

    Raises:
        FileNotFoundError: The address has no version.
        OSError: A file cannot be read or written.
        ValueError: A file is damaged or belongs to another version, or a delta is missing.

    Example:
        >>> follow("s3://models/movies/1", "models/movies/1")  # doctest: +SKIP
        3
    """
    if every <= 0:
        raise ValueError(f"follow.every must be positive; received {every}.")
    version = Path(version)
    files, root = fsspec.url_to_fs(url)
    if not version.exists():
        _download_version(files, root, version)
    count = _download_deltas(files, root, version)
    while stop is not None and not stop.wait(every):
        count += _download_deltas(files, root, version)
    return count


def _place(name: str) -> tuple[int, str]:
    """Return the place of a file in an upload."""
    is_delta = name.startswith("deltas/")
    return (2 if is_delta else int(name == "manifest.json")), name


def _names(files: Any, root: str, *, parts: bool = False) -> list[str]:
    """Return the complete files below an address, relative to it; or the unfinished ones."""
    files.invalidate_cache()
    try:
        paths = files.find(root)
    except FileNotFoundError:
        return []
    names = [str(PurePosixPath(path).relative_to(PurePosixPath(root))) for path in paths]
    return [name for name in names if _is_part(name) == parts]


def _is_part(name: str) -> bool:
    return PurePosixPath(name).name.startswith(_PART)


def _sync(path: Path) -> None:
    """Write a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _download(files: Any, root: str, name: str, target: Path) -> None:
    """Copy a file of an address; a link there must stay inside the address."""
    path = f"{root}/{name}"
    if isinstance(files, LocalFileSystem) and not Path(path).resolve().is_relative_to(
        Path(root).resolve()
    ):
        raise ValueError(
            f"{path} must be in the version; it is a link to {Path(path).resolve()}. Copy the file "
            "to the address."
        )
    files.get_file(path, str(target))


def _download_version(files: Any, root: str, version: Path) -> None:
    if "manifest.json" not in _names(files, root):
        raise FileNotFoundError(
            f"{root} must be a version of a package, such as movies/1; it has no manifest.json."
        )
    version.parent.mkdir(parents=True, exist_ok=True)
    part = version.parent / f"{_PART}{version.name}"  # also of a follower that was killed
    shutil.rmtree(part, ignore_errors=True)
    (part / "deltas").mkdir(parents=True)
    try:
        _download(files, root, "manifest.json", part / "manifest.json")
        for name in read_manifest(part)["files"]:  # whose paths are inside the version
            target = part / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _download(files, root, name, target)
        verify_files(part, read_manifest(part), tables=True)
        for path in [*part.rglob("*"), part]:
            _sync(path)
        part.rename(version)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _download_deltas(files: Any, root: str, version: Path) -> int:
    """Copy new deltas in their order."""
    folder = version / "deltas"
    folder.mkdir(exist_ok=True)
    for part in folder.glob(f"{_PART}*"):  # of a follower that was killed
        part.unlink()
    known = {path.name for path in folder.iterdir()}
    names = [PurePosixPath(name).name for name in _names(files, f"{root}/deltas")]
    new = sorted(name for name in names if DELTA_NAME.fullmatch(name) and name not in known)
    for name in new:
        sequence = int(name.removesuffix(".delta"))
        if sequence > 1 and not (folder / f"{sequence - 1:012}.delta").exists():
            raise ValueError(
                f"{root}/deltas must have {sequence - 1:012}.delta before {name}; it is missing."
            )
        part = folder / f"{_PART}{secrets.token_hex(8)}"
        try:
            _download(files, root, f"deltas/{name}", part)
            read_delta_named(part, name)
            _sync(part)
            part.rename(folder / name)
            _sync(folder)
        finally:
            part.unlink(missing_ok=True)
    return len(new)

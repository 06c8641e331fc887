"""Checksums of exported files, in the format of `sha256sum`.

The checksum of `model.pt` is in `model.pt.sha256` beside it: one line with the SHA-256 of the file
and its name. `sha256sum -c model.pt.sha256` also verifies it. A checksum detects damage. It does
not prove who wrote a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from recsys.base.checked import checked

__all__ = ["checksum_file", "new_file", "verify_checksum", "verify_if_present"]

# GNU's form: a line with a backslash in front has escapes in the name, `*` means binary
_LINE = re.compile(rb"\\?([0-9a-fA-F]{64}) [ *][^\n]+\n?")


def checksum_file(path: str | Path) -> Path:
    """Return the name of the file that has a file's checksum.

    Example:
        >>> checksum_file("runs/model.pt").name
        'model.pt.sha256'
    """
    path = Path(path)
    return path.with_name(f"{path.name}.sha256")


@checked
def verify_checksum(path: str | Path) -> None:
    r"""Raise an error unless a file is what its export wrote.

    `export_torchscript`, `export_aoti`, `export_safetensors` and `save_checkpoint` with
    `consolidated=True` write the SHA-256 of `model.pt` to `model.pt.sha256`. So does
    `sha256sum model.pt > model.pt.sha256`.

    Args:
        path: The exported file. Its checksum is read from the same folder.

    Raises:
        TypeError: `path` is neither text nor a Path.
        FileNotFoundError: There is no such file, or it has no checksum.
        ValueError: The file or its checksum is damaged.

    Example:
        >>> import tempfile
        >>> from recsys.inference import verify_checksum
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "hello.txt")
        ...     _ = file.write_text("hello\n")
        ...     _ = Path(folder, "hello.txt.sha256").write_text(f"{'0' * 64}  hello.txt\n")
        ...     try:
        ...         verify_checksum(file)
        ...     except ValueError as error:
        ...         print(str(error).partition(" does not match ")[2])
        its checksum in hello.txt.sha256. Copy or export the file again.
    """
    path, sums = Path(path), checksum_file(path)
    before = b""
    while True:
        if not path.is_file():
            raise FileNotFoundError(f"{path} must be an exported file; there is no such file.")
        if not sums.is_file():
            raise FileNotFoundError(
                f"{path} has no checksum: there is no file {sums.name} beside it. Copy both files. "
                f"If {path.name} is known to be good, make its checksum: {_command(path)}"
            )
        match = _LINE.fullmatch(text := sums.read_bytes())
        if match is None:
            raise ValueError(
                f"{sums} must have one line of sha256sum. It is damaged. Copy both files again, or "
                f"export {path.name} again."
            )
        if _sha256(path) == match[1].decode().lower():
            return
        if text == before:  # unchanged: no export is replacing it
            raise ValueError(
                f"{path} is damaged: it does not match its checksum in {sums.name}. Copy or export "
                "the file again."
            )
        before = text


def verify_if_present(path: str | Path) -> None:
    """Verify a file's checksum, and warn if it has none.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file or its checksum is damaged.
    """
    try:
        verify_checksum(path)
    except FileNotFoundError as error:
        if not Path(path).is_file():
            raise
        warnings.warn(f"{error} It is loaded unverified.", UserWarning, stacklevel=3)


@contextlib.contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Write a file whole or not at all, with its checksum.

    The names of temporary files are always the same: a process that is killed leaves files that the
    next export of `path` overwrites. Exports of one path, by threads or processes, take turns.
    A reader finds the old file with its checksum, or the new file with its checksum, or for a
    moment a file without checksum.

    Args:
        path: The file. Its folder is created.

    Yields:
        The path to write to, which ends like `path`.
    """
    path, sums = Path(path), checksum_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.part{path.suffix}")
    temporary_sums = sums.with_name(f"{sums.name}.part")
    with _locked(temporary_sums) as lock:
        try:
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            lock.write(_line(_sha256(temporary), path.name))
            lock.flush()
            os.fsync(lock.fileno())
            sums.unlink(missing_ok=True)  # a checksum must never be beside another file
            os.replace(temporary, path)
            os.replace(temporary_sums, sums)  # the next export may start
        except BaseException:
            temporary.unlink(missing_ok=True)
            temporary_sums.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Create a file, empty and locked until it is closed; wait while another process has it."""
    while True:
        with path.open("ab") as file:
            with contextlib.suppress(OSError):  # a filesystem without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            # another process may have moved or removed the file
            if _is_at(path, file):
                file.truncate(0)
                yield file
                return


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line(digest: str, name: str) -> bytes:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n")
    mark = "" if escaped == name else "\\"
    return os.fsencode(f"{mark}{digest}  {escaped}\n")


def _command(path: Path) -> str:
    name = shlex.quote(path.name)
    sums = shlex.quote(checksum_file(path).name)
    return f"cd {shlex.quote(str(path.parent))} && sha256sum {name} > {sums}"

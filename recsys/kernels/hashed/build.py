"""Build of the C files of hashed ids: compiled at first use, kept in a cache folder.

The folder is `$RECSYS_CACHE`, else `recsys` in `$XDG_CACHE_HOME` or `~/.cache`. The first of these
serves: the library in the cache folder; one that a compiler builds, for this CPU; the one of the
wheel, for any x86-64 CPU (hatch_build.py); the twin in PyTorch, which `RECSYS_HASH=torch` forces.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

NAME = "hash_index"
FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / f"{name}.c" for name in (NAME, "new_rows", "records", "regions"))
HEADER = FOLDER / "mix64.h"
PREBUILT = FOLDER / f"{NAME}.so"
"""The library of a wheel for Linux on x86-64; not in other wheels."""
# no contraction to fused multiply-adds, whose bits would differ from PyTorch's
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-shared", "-fPIC")
CPU_FLAGS = (("-march=native",), ())
"""Flags of the CPU, the preferred first; not every compiler has them."""


@final
class Loaded(NamedTuple):
    """The library of the C files, or the reason for which the twin serves."""

    library: ctypes.CDLL | None
    text: str
    """Path of the library, or the reason."""


def library() -> ctypes.CDLL | None:
    """Return the library of the C files; None if the twin serves.

    Warns:
        RuntimeWarning: At the first call, if the C files cannot be built.
    """
    return _loaded().library


def describe() -> str:
    """Return the implementation that maps ids on a CPU, and the library's path or the reason."""
    loaded = _loaded()
    return f"{'torch' if loaded.library is None else 'C'}: {loaded.text}"


@functools.cache
def _loaded() -> Loaded:
    if os.environ.get("RECSYS_HASH") == "torch":
        return Loaded(None, "RECSYS_HASH=torch")
    try:
        loaded = load()
    except (OSError, subprocess.SubprocessError) as error:
        reason = _reason(error)
        warnings.warn(
            f"Hashed ids are mapped by PyTorch, over 20 times slower: {reason}. Install a C "
            "compiler, or set CC to its command.",
            RuntimeWarning,
            stacklevel=2,
        )
        return Loaded(None, reason)
    # ctypes reads results as C's `int` otherwise
    for name in ("recsys_map_ids", "recsys_read_parts"):
        getattr(loaded.library, name).restype = ctypes.c_int64
    for name in ("recsys_init_rows", "recsys_region_rows"):
        getattr(loaded.library, name).restype = None
    return loaded


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines() or ["no message"]
        return f"{shlex.join(error.cmd[:1])} failed ({lines[-1]})"
    return str(error)


def load() -> Loaded:
    """Load the library from the cache folder, and build it there if necessary.

    Processes that build at the same time do not disturb each other. If the cache folder cannot be
    used, or other users can write to it, the library is built in a temporary folder that only this
    process uses. If it cannot be built, the wheel's library is loaded.

    Warns:
        RuntimeWarning: Other users can replace the library in the cache folder.

    Raises:
        OSError: There is no compiler, or no folder to build in; and no library in the wheel.
        subprocess.SubprocessError: The compiler fails, or runs for more than two minutes; and there
            is no library in the wheel.
    """
    cached = cache_path()
    if cached is not None and (reason := _danger(cached)):
        warnings.warn(
            f"The compiled library {cached} is not used: {reason}. Set RECSYS_CACHE to a folder "
            "that only you can write to.",
            RuntimeWarning,
            stacklevel=4,
        )
        cached = None
    if cached is not None:
        try:
            return Loaded(ctypes.CDLL(str(cached)), str(cached))
        except OSError:  # not built yet, or damaged
            pass
    try:
        return _built(cached)
    except (OSError, subprocess.SubprocessError) as error:
        try:
            return Loaded(ctypes.CDLL(str(PREBUILT)), f"{PREBUILT}, prebuilt: {_reason(error)}")
        except OSError:  # not in this wheel, or for other machines
            raise error from None


def _built(cached: Path | None) -> Loaded:
    """Build the library, and move it into the cache folder if possible."""
    with tempfile.TemporaryDirectory(prefix="recsys-") as folder:
        built = Path(folder, f"{NAME}.so")
        compile_library(built, CPU_FLAGS)
        if cached is not None:
            try:
                _move(built, cached)
                return Loaded(ctypes.CDLL(str(cached)), str(cached))
            except OSError:
                pass
        # a loaded library stays mapped when the folder is deleted
        return Loaded(ctypes.CDLL(str(built)), "in memory, as the cache folder cannot be written")


def cache_path() -> Path | None:
    """Return the library's path in the cache folder; None if there is no home folder.

    The name contains a hash of the sources, the flags, the compiler and the CPU: machines with one
    home folder, and versions of this package, each have their own library.
    """
    folder = os.environ.get("RECSYS_CACHE")
    if not folder:
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            folder = str(Path(base) if base else Path.home() / ".cache") + "/recsys"
        except RuntimeError:
            return None
    parts = [
        *(source.read_text() for source in (*SOURCES, HEADER)),
        repr((FLAGS, CPU_FLAGS)),
        os.environ.get("CC", ""),
    ]
    parts += [platform.system(), platform.machine(), _cpu_features()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Path(folder, f"{NAME}-{digest[:32]}.so")


def _danger(path: Path) -> str:
    """Return the reason why a file is unsafe, or "" if no other user can replace it.

    As for a private key, the file and its folders must belong to this user or root, and only their
    owner may write to them. Folders such as /tmp, where users cannot replace the files of others,
    are allowed.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return ""
    path = path.resolve()
    for place in (path, *path.parents):
        try:
            status = place.stat()
        except OSError:  # not built yet
            continue
        if status.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to another user"
        is_shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_shared:
            return f"other users can write to {place} (mode {stat.filemode(status.st_mode)})"
    return ""


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise FileNotFoundError(f"there is no C compiler ({shlex.join(chosen) or 'cc, gcc or clang'})")


def compile_library(path: Path, cpu_flags: Sequence[Sequence[str]]) -> None:
    """Compile the C files.

    Args:
        path: Path of the library.
        cpu_flags: Flags of the CPU; the first that the compiler has are used.

    Raises:
        OSError: There is no compiler.
        subprocess.SubprocessError: The compiler fails, or runs for more than two minutes.
    """
    compiler = _compiler()
    for flags in cpu_flags:
        command = [*compiler, *FLAGS, *flags, "-o", str(path), *map(str, SOURCES)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=120, check=False
        )
        if done.returncode == 0:
            return
    done.check_returncode()


def _move(source: Path, target: Path) -> None:
    """Move a file into the cache folder, under its name only once it is complete."""
    for folder in reversed(target.parents):
        folder.mkdir(mode=0o755, exist_ok=True)  # without the umask only the owner may write
    # in the same folder: `os.replace` is atomic within one file system only
    handle, temporary = tempfile.mkstemp(prefix=target.name, dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(source.read_bytes())
        # `mkstemp` lets only the owner read, but a library of root serves other users, too
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise

"""Memory of tables: files that are mapped into one buffer."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "MappedFile", "map_files"]

ALIGNMENT = 65536
"""Offsets of tables in their buffer are multiples of it: of the pages of any machine."""

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # on Linux


@final
class MappedFile(NamedTuple):
    """A file, and its place in a buffer."""

    path: Path
    offset: int
    """Bytes from the buffer's start, a multiple of `ALIGNMENT`."""
    size: int
    """Bytes of the file."""


def map_files(num_bytes: int, files: Sequence[MappedFile]) -> Tensor:
    """Return a buffer over files, uint8 `[num_bytes]`.

    On Linux the files are mapped: their pages are read at first use, and shared with other
    processes until they are written. On other systems the files are read. Writes to the buffer do
    not change the files.

    Raises:
        OSError: A file cannot be read, or memory is not available.
        ValueError: The place of a file is not in the buffer, or the file is shorter than its place.
    """
    for file in files:
        size = file.path.stat().st_size
        is_inside = 0 <= file.offset <= num_bytes - file.size and file.offset % ALIGNMENT == 0
        if not is_inside or not 0 <= file.size <= size:
            raise ValueError(
                f"{file.path} must fill a place in a buffer of {num_bytes} bytes, from a multiple "
                f"of {ALIGNMENT}; received {file.size} bytes from byte {file.offset} for a file of "
                f"{size}. Copy the package again."
            )
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    if not sys.platform.startswith("linux"):
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        for file in files:
            contents = torch.frombuffer(bytearray(file.path.read_bytes()), dtype=torch.uint8)
            buffer[file.offset : file.offset + file.size] = contents
        return buffer
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    access = mmap.PROT_READ | mmap.PROT_WRITE

    def mapped(address: int | None, size: int, flags: int, descriptor: int, name: object) -> int:
        flags |= mmap.MAP_PRIVATE | _MAP_NORESERVE
        start: int = libc.mmap(address, size, access, flags, descriptor, 0)
        if start == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(name))
        return start

    start = mapped(None, num_bytes, mmap.MAP_ANONYMOUS, -1, "memory of tables")
    memory = (ctypes.c_uint8 * num_bytes).from_address(start)
    weakref.finalize(memory, libc.munmap, start, num_bytes)  # the tensor keeps `memory`
    for file in files:
        if file.size:
            with file.path.open("rb") as opened:
                mapped(start + file.offset, file.size, _MAP_FIXED, opened.fileno(), file.path)
    return torch.frombuffer(memory, dtype=torch.uint8)

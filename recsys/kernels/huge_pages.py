"""Memory of large arrays that are read at random.

Linux divides memory into pages of 4 KiB, whose addresses a CPU looks up for each access. It keeps
few thousand of them at hand, and a lookup of a row in a table of a gigabyte rarely finds its page
among them. Pages of 2 MiB are 512 times fewer. Linux gives them on request (`madvise`,
transparent_hugepage(7)), if they are enabled, to memory that has not been written.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["new_array"]

_PAGE = 2 << 20
_LEAST = 4 * _PAGE
"""Bytes of an array that has several huge pages."""
_MADV_HUGEPAGE = 14


def new_array(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized array `[size]`, on a CPU in huge pages if it is large.

    Example:
        >>> new_array(3, torch.int32, torch.device("cpu")).shape
        torch.Size([3])
    """
    array = torch.empty(size, dtype=dtype, device=device)
    num_bytes = size * array.element_size()
    is_large = num_bytes >= _LEAST and device.type == "cpu" and type(array) is Tensor
    advise = _advise() if is_large else None
    # the array must not be written yet; docs/decisions/hashed_ids.md, "Huge pages"
    if advise is not None:
        start = -(-array.data_ptr() // _PAGE) * _PAGE  # whole pages inside the array
        end = (array.data_ptr() + num_bytes) // _PAGE * _PAGE
        advise(start, end - start, _MADV_HUGEPAGE)  # an error changes nothing
    return array


@functools.cache
def _advise() -> Callable[[int, int, int], Any] | None:
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise

"""Large arrays are in huge pages where Linux gives them, and hold any values."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from recsys.kernels.huge_pages import new_array

CPU = torch.device("cpu")
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("size", [0, 1, 1000, 2**21 - 1, 2**21, 3 * 2**21 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_arrays_hold_values(size: int, dtype: torch.dtype) -> None:
    array = new_array(size, dtype, CPU)
    assert (array.shape, array.dtype) == ((size,), dtype)
    array.fill_(7)
    assert int((array == 7).sum()) == size
    assert new_array(size, dtype, torch.device("meta")).is_meta


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="huge pages of Linux")
@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(),
    reason="this machine does not give huge pages",
)
def test_large_arrays_are_in_huge_pages() -> None:
    for _ in range(5):  # Linux gives them if it has 2 MiB in one piece
        array = new_array(1 << 24, torch.float32, CPU).zero_()
        if huge_kib(array.data_ptr(), 4 * array.numel()) > 0:
            return
    with mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.write(bytes(64 << 20))
        view = np.frombuffer(memory, np.uint8)
        has_pages = huge_kib(view.ctypes.data, len(view)) > 0
        del view
    if not has_pages:
        pytest.skip("this machine has no free huge page at the moment")
    raise AssertionError("an array has no huge page, and memory of madvise alone has")


def huge_kib(first: int, num_bytes: int) -> int:
    """Return the KiB of huge pages around memory of this process."""
    pages, is_here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found is not None:
            start, end = (int(group, 16) for group in found.groups())
            is_here = start < first + num_bytes and first < end
        elif is_here and line.startswith("AnonHugePages"):
            pages += int(line.split()[1])
    return pages

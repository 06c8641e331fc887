"""Large arrays are in huge pages where Linux gives them, and hold any values."""

from __future__ import annotations

import re
import sys
from pathlib import Path

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
    array = new_array(1 << 24, torch.float32, CPU).zero_()
    first = array.data_ptr()
    pages, is_here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found is not None:
            start, end = (int(group, 16) for group in found.groups())
            is_here = start < first + 4 * array.numel() and first < end
        elif is_here and line.startswith("AnonHugePages"):
            pages += int(line.split()[1])
    assert pages > 0

"""Large arrays ask for huge pages, and hold any values."""

from __future__ import annotations

import re
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


@pytest.mark.skipif(not ENABLED.exists(), reason="huge pages of Linux")
def test_huge_pages_are_asked_for() -> None:
    """All whole pages of a large array; whether Linux has them free is another question."""
    array, mib = new_array(1 << 24, torch.float32, CPU), 1 << 20
    assert advised(array.data_ptr(), 64 * mib) in (62 * mib, 64 * mib)


def advised(first: int, num_bytes: int) -> int:
    """Return how many bytes of some memory are to be in huge pages, by Linux' list of it."""
    found, common = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        area = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if area is not None:
            start, end = (int(group, 16) for group in area.groups())
            common = max(min(end, first + num_bytes) - max(start, first), 0)
        elif line.startswith("VmFlags:") and "hg" in line.split():
            found += common
    return found

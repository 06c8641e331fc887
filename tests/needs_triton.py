"""Tests of Triton's kernels: skipped without Triton, and selected by a marker."""

from __future__ import annotations

import pytest

from recsys.kernels.ops import HAS_TRITON

__all__ = ["HAS_TRITON", "NEEDS_TRITON", "mark_triton", "needs_triton"]

NEEDS_TRITON = "needs Triton: make test SLOW=1 installs it"
needs_triton = pytest.mark.triton


def mark_triton(item: pytest.Item) -> None:
    """Mark cases of the modules `test_*_triton.py`, and skip marked cases without Triton."""
    if item.path.name.endswith("_triton.py"):
        item.add_marker(needs_triton)
    if item.get_closest_marker("triton") and not HAS_TRITON:
        item.add_marker(pytest.mark.skip(reason=NEEDS_TRITON))

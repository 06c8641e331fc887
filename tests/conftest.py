"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's own switch, read where it is imported first

from tests.ranks import RankPool
from tests.slow import is_slow


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of the slow tier."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on several ranks: ``ranks(world_size, fn, *args)``."""
    pool = RankPool()
    yield pool
    pool.close()

"""Fixtures shared by all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest

if sys.dont_write_bytecode:
    # As containers often have it. Tests start hundreds of processes, and each would compile torch
    # and all else that it imports: 3 s each. They share a folder that goes with the session.
    sys.dont_write_bytecode, sys.pycache_prefix = False, tempfile.mkdtemp(prefix="recsys-bytecode-")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    atexit.register(shutil.rmtree, sys.pycache_prefix, ignore_errors=True)

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's own switch, read where it is imported first

from tests.needs_triton import mark_triton
from tests.ranks import RankPool
from tests.rest import is_long, is_rest
from tests.slow import is_slow


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the long and slow cases, the rest, and the cases that need Triton."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker("long")
            item.add_marker("slow")
        elif is_slow(item.nodeid):
            item.add_marker("slow")
        elif is_rest(item.nodeid):
            item.add_marker("rest")
        mark_triton(item)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on several ranks: ``ranks(world_size, fn, *args)``."""
    pool = RankPool()
    yield pool
    pool.close()

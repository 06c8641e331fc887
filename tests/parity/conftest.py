"""Parity needs TorchRec: the extra ``peers``, installed as the Makefile does."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.parity.peer import PeerPool

collect_ignore_glob = [] if find_spec("torchrec") else ["test_*.py"]


@pytest.fixture(scope="session")
def peer_ranks() -> Iterator[PeerPool]:
    """Runs a function on several ranks: ``peer_ranks(world_size, fn, *args)``."""
    pool = PeerPool()
    yield pool
    pool.close()

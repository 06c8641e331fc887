"""Runs a script of this folder under TorchRec's names here, or under TorchRec itself."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.compat import printed as scripts

PEER_IS_HERE = find_spec("torchrec") is not None
needs_peer = pytest.mark.skipif(not PEER_IS_HERE, reason="needs TorchRec: make peers")


@functools.cache
def printed(script: str, *, by_peer: bool = False) -> dict[str, Any]:
    """Return the last output of a script of this folder, from JSON."""
    return scripts.printed(Path(__file__).with_name(script), by_peer=by_peer)

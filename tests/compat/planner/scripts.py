"""Runs a script of this folder under TorchRec's names here, or under TorchRec itself."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PEER_IS_HERE = find_spec("torchrec") is not None
needs_peer = pytest.mark.skipif(not PEER_IS_HERE, reason="needs TorchRec: make peers")


@functools.cache
def printed(script: str, *, by_peer: bool = False) -> dict[str, Any]:
    """What a script prints last, as JSON."""
    how = [] if by_peer else ["-m", "recsys.compat"]
    command = [sys.executable, "-W", "ignore", *how, str(Path(__file__).with_name(script))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found

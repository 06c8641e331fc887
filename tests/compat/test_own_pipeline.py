"""A TorchRec script with a pipeline of its own runs unchanged in two processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.compat.printed import ABORTED

SCRIPT = Path(__file__).with_name("own_pipeline.py")
ROOT = Path(__file__).parents[2]


@functools.cache
def losses(*, by_peer: bool) -> list[dict[str, list[float]]]:
    """Return the loss of each rank's steps, plainly and pipelined."""
    how = [] if by_peer else ["-m", "recsys.compat"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, *launcher, *how, str(SCRIPT)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
            | {"PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    found: list[dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_trains_as_without_the_pipeline() -> None:
    for found in losses(by_peer=False):
        assert len(found["plain"]) == 20
        assert found["pipelined"] == found["plain"]
        assert sum(found["plain"][-5:]) < sum(found["plain"][:5])


@pytest.mark.skipif(find_spec("torchrec") is None, reason="needs TorchRec: make peers")
def test_it_trains_as_in_torchrec() -> None:
    for ours, theirs in zip(losses(by_peer=False), losses(by_peer=True), strict=True):
        assert ours["pipelined"] == pytest.approx(theirs["pipelined"], rel=1e-4)

"""Workers end with what started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recsys.distributed.watchdog import end_with_launcher
from tests.examples.kills import lives

ROOT = Path(__file__).parents[2]
WORKER = """
import sys, time
from recsys.distributed.watchdog import end_with_launcher
print(end_with_launcher(), flush=True)
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(worker.pid, worker.stdout.readline().strip(), flush=True)
worker.wait()
"""


@pytest.mark.parametrize("started_by_torchrun", [True, False])
def test_a_worker_ends_when_its_launcher_is_killed(started_by_torchrun: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TORCHELASTIC_RUN_ID", None)
    if started_by_torchrun:
        environment["TORCHELASTIC_RUN_ID"] = "a job"
    launcher = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LAUNCHER, WORKER],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert launcher.stdout is not None
    worker, said = launcher.stdout.readline().split()
    assert said == str(started_by_torchrun)
    assert lives(int(worker))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    end = time.monotonic() + (10 if started_by_torchrun else 0.5)
    while lives(int(worker)) and time.monotonic() < end:
        time.sleep(0.01)
    assert lives(int(worker)) is not started_by_torchrun
    if not started_by_torchrun:
        os.kill(int(worker), 9)


def test_it_does_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not end_with_launcher()

"""Workers end with what started them; late ranks are named; nothing is left of a watchdog."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import recsys
from recsys.base import contact, step_stages
from recsys.base.step_stages import Stage
from recsys.distributed.monitoring.watchdog import Watchdog, _is_of_library, end_with_launcher
from tests.distributed.train_pipeline.test_pipelines import build, plain, samples
from tests.examples.kills import lives
from tests.ranks import RankPool

ROOT = Path(__file__).parents[3]
WORKER = """
import sys, time
from recsys.distributed.monitoring.watchdog import end_with_launcher
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


def _hooks() -> tuple[object, ...]:
    optimizer = sys.modules["torch.optim.optimizer"]
    return (
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        contact.ask_watchdog,
        signal.getsignal(signal.SIGTERM),
        sys.excepthook,
    )


def _trains_beside_a_late_rank(declares: bool) -> list[str]:
    """Return the watchdogs' output while rank 1 sleeps between two steps."""
    model, optimizer = build("mixed")
    batch = samples(dist.get_rank(), 0)
    plain(model, optimizer, [batch])
    said: list[str] = []
    before = _hooks()
    with (
        mock.patch.object(Watchdog, "_log", lambda _, text: said.append(text)),
        Watchdog(warn_after=1.5) as watchdog,
    ):
        assert (
            watchdog._abort_after
            == dist.group.WORLD._get_backend(  # type: ignore[union-attr]
                torch.device("cpu")
            ).options._timeout.total_seconds()
        )
        for step in range(3):
            plain(model, optimizer, [batch])
            if step == 1 and dist.get_rank() == 1:
                if declares:
                    with watchdog.pause("evaluation"):
                        time.sleep(4)
                else:
                    time.sleep(4)
        dist.barrier()
    assert _hooks() == before
    return said


def test_a_late_rank_is_named_by_one_that_waits(ranks: RankPool) -> None:
    waiting, late = ranks(2, _trains_beside_a_late_rank, False)
    said = (
        r"rank 1 has been in the loop between two steps \(data, logs\) for \d s; "
        r"rank 0 waits in input_dist of \w+ to exchange id counts"
    )
    assert any(re.fullmatch(said, text) for text in waiting), waiting
    assert len(waiting) <= 2  # again only after twice the time
    assert not any(" been in " in text for text in late), late


def test_nobody_warns_of_a_declared_section(ranks: RankPool) -> None:
    assert ranks(2, _trains_beside_a_late_rank, True) == [[], []]


def _raise_in(stage: Stage, module: str, error: Exception) -> None:
    with Watchdog(), step_stages.running((stage, module)):
        raise error


def _raises_alike_and_alone() -> tuple[list[str], list[str]]:
    """Return the ranks' output for an error of both, and for an error after another rank's."""
    both: list[str] = []
    one: list[str] = []
    with mock.patch.object(Watchdog, "_log", lambda _, text: both.append(text)):
        with pytest.raises(ValueError, match="no such label"):
            _raise_in(Stage.LOOKUP, "ebc", ValueError("no such label"))
        dist.barrier()
    lost = contact.LostContactError("a connection was closed")
    error = ValueError("no such table") if dist.get_rank() == 1 else lost
    with (
        mock.patch.object(Watchdog, "_log", lambda _, text: one.append(text)),
        mock.patch.object(Watchdog, "_end"),
    ):
        with pytest.raises(type(error)):
            _raise_in(Stage.GRADIENT_DIST, "", error)
        dist.barrier()
    return both, one


def test_an_error_is_shown_once(ranks: RankPool) -> None:
    (both_0, one_0), (both_1, one_1) = ranks(2, _raises_alike_and_alone)
    shown, told = sorted([*both_0, *both_1], key=lambda text: "see its traceback" in text)
    assert re.fullmatch(r"rank \d raised this in lookup of ebc:", shown)
    assert re.match(
        r"rank \d raised ValueError: no such label, in lookup of ebc: see its traceback\.", told
    )
    assert one_1 == ["rank 1 raised this in backward:"]
    assert one_0 == [
        "rank 1 raised ValueError: no such table, in backward: see its traceback. "
        "This rank was in backward, and ends."
    ]


def test_frames_of_the_user_are_shown() -> None:
    root = Path(recsys.__file__).parent
    python = Path(os.__file__).parent
    for file in (root / "optim" / "keyed.py", python / "json" / "decoder.py", torch.__file__):
        assert _is_of_library(str(file))
    for file in (root.parent / "recsys_train.py", python / "site-packages" / "mine" / "train.py"):
        assert not _is_of_library(str(file))


def test_alone_there_is_nobody_to_wait_for() -> None:
    before = _hooks()
    with Watchdog() as watchdog, watchdog.pause("evaluation"):
        pass
    with pytest.raises(KeyError):
        _raise_in(Stage.LOOKUP, "ebc", KeyError("x"))
    assert _hooks() == before
    for wrong in ({"warn_after": 0}, {"abort_after": -1}):
        with pytest.raises(ValueError, match=r"Watchdog\.\w+_after must be positive; received"):
            Watchdog(**wrong)


FORKS = """
import os, signal, sys, torch.distributed as dist
from recsys.distributed.monitoring.watchdog import Watchdog
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
watchdog = Watchdog()
dist.get_world_size = lambda: 2
with watchdog:
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        os.write(tell, b"ready")
        signal.pause()
    os.read(told, 5)
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    watchdog._thread.join(1)
    assert watchdog._thread.is_alive()
print("went on", flush=True)
os._exit(0)
"""


def test_a_child_that_is_ended_does_not_end_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "went on\n", done.stderr


@pytest.mark.parametrize(("faults", "ranks"), [(("hang", "bad id"), 2), (("kill",), 3)])
def test_the_others_end_and_name_the_rank(faults: tuple[str, ...], ranks: int) -> None:
    """A short form of what ``python -m tests.distributed.faults`` does at length."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "tests.distributed.faults"),
            *("--ranks", str(ranks), "--only", *faults),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(faults)} faults, 0 lacking something" in done.stdout

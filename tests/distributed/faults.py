"""Lets one rank of a job fail in every way, and looks at how the others end.

    python -m tests.distributed.faults [--only hang kill] [--ranks 2 3] [--off]

A job under torchrun trains a sharded model inside a `Watchdog(abort_after=8)`. After some steps
rank 1 raises, hangs, exits, is stopped or killed, gets a bad batch, or runs out of disk in a save.
The other ranks must have ended 12 s later, with a message that names rank 1 and the stage it was
in, and no process may be left when torchrun has ended. With `--off` there is no watchdog: then
every fault must be found to lack something.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.checkpoint import save_checkpoint
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.monitoring.watchdog import Watchdog
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor
from tests.examples.kills import lives

ROOT = Path(__file__).parents[2]
LIMIT_S = 8
STEP = 400  # late enough for some heartbeats
FEATURES = [f"f{i}" for i in range(3)]
ROWS = 5000


def _raise() -> None:
    raise ValueError("no such label")


def _hang_in_c() -> None:
    """Waits for a lock that this thread has, without giving Python's own away."""
    mutex, libc = ctypes.create_string_buffer(128), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _limit_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


LOOP, DENSE = r"the loop between two steps", "the forward pass after output_dist of ebc"
# by name: the point of a step, the fault at that point, and the message about rank 1
FAULTS: dict[str, tuple[str, Callable[[], Any], str]] = {
    "raise": ("dense", _raise, f"raised ValueError: no such label, in {DENSE}"),
    "hang": ("data", lambda: time.sleep(600), rf"has been in {LOOP} \(data, logs\) for \d+ s"),
    "hang in C": ("dense", _hang_in_c, "has sent no heartbeat for .* s, last seen in .*"),
    "exit 0": ("data", lambda: sys.exit(0), f"has ended its training; .* in {LOOP}"),
    "exit 1": ("data", lambda: sys.exit(1), rf"exited by SystemExit\(1\), in {LOOP}"),
    "_exit 0": ("data", lambda: os._exit(0), "is gone, its process has ended; .* seen in .*"),
    "stop": (
        "backward",
        lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "has sent no heartbeat for .* s, last seen in .*",
    ),
    "stop in pause": (
        "pause",
        lambda: (time.sleep(2), os.kill(os.getpid(), signal.SIGSTOP)),  # after a heartbeat
        "has sent no heartbeat for .* s, last seen in evaluation",
    ),
    "kill": (
        "backward",
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "is gone, its process has ended; .* seen in .*",
    ),
    "bad id": ("ids", lambda: None, "raised IndexError: On rank 1: Id 5000 .*, in input_dist"),
    "disk": ("save", _limit_disk, r"raised CheckpointError: (?s:.*), in save_checkpoint"),
}
CHAINED = {"disk": 3}  # an error, its cause, and the report of another rank's error
STACKS = {
    "hang",
    "hang in C",
    "stop",
    "stop in pause",
}  # faults after which each rank shows its stack


class Model(nn.Module):
    def __init__(self, at: Callable[[str], bool]) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(ROWS, 8, f"t{f}", feature_names=[f]) for f in FEATURES]
        self.ebc = EmbeddingBagCollection(tables=tables)
        self.over = nn.Linear(24, 1)
        self.at = at

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out = self.ebc(features).values()
        self.at("dense")
        out.register_hook(self._in_backward)
        loss: Tensor = self.over(out).square().mean()
        return loss

    def _in_backward(self, _: Tensor) -> None:
        self.at("backward")


def train(fault: str, out: Path, *, watched: bool) -> None:
    """Train on one rank until the fault."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    rank, step = dist.get_rank(), 0
    where, happens, _ = FAULTS[fault]

    def at(point: str) -> bool:
        now = (rank, step, point) == (1, STEP, where)
        if now:
            (out / "fault").write_text(str(time.time()))
            happens()
        return now

    model = DistributedModelParallel(Model(at), device=torch.device("cpu"))
    dense = [p for name, p in model.named_parameters() if "over" in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    watchdog = Watchdog(warn_after=4, abort_after=LIMIT_S)
    with watchdog if watched else contextlib.nullcontext():
        for step in range(100_000):
            at("data")
            ids = torch.randint(ROWS, (3 * 8,))
            if at("ids"):
                ids[5] = ROWS
            loss = model(KeyedJaggedTensor(FEATURES, ids, lengths=torch.ones(24).int()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == STEP and where == "pause":
                with watchdog.pause("evaluation"):
                    at("pause")
            if step == STEP and where == "save":
                at("save")
                save_checkpoint(out / "saved", model)


def workers_of(agent: int) -> dict[int, int]:
    """Process ids of the ranks that torchrun has started, by rank."""
    found = {}
    for child in map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{child}/environ").read_bytes()
            rank = re.search(rb"\0RANK=(\d+)\0", environment)
            if rank:
                found[int(rank[1])] = child
    return found


def play(fault: str, ranks: int, out: Path, *, watched: bool = True) -> dict[str, Any]:
    """Run a job to its end; return its observed results, with the failed checks under "lacks"."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", "-m", "tests.distributed.faults"),
        *("--job", fault, "--out", str(out), *([] if watched else ["--off"])),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with (out / "log").open("wb") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    workers: dict[int, int] = {}
    try:
        until = time.monotonic() + 240
        while not (out / "fault").exists() or not (out / "fault").read_text():
            assert time.monotonic() < until, (out / "log").read_text()
            assert job.poll() is None, (out / "log").read_text()
            workers = workers_of(job.pid) if len(workers) < ranks else workers
            time.sleep(0.02)
        others = [process for rank, process in workers.items() if rank != 1]
        assert len(others) == ranks - 1
        began = float((out / "fault").read_text())
        while any(map(lives, others)) and time.time() < began + 20:
            time.sleep(0.02)
        ended = time.time() - began
        lacks = [] if ended < 12 else ["the others end within 12 s"]
        job.wait(timeout=90)
        if any(map(lives, workers.values())):
            lacks.append("no process is left")
    finally:
        for process in (job.pid, *workers.values()):  # ends every process, also after an error
            if lives(process):
                os.kill(process, signal.SIGKILL)
        job.wait()
    said = (out / "log").read_text()
    message = re.search(rf"Watchdog: .*rank 1 {FAULTS[fault][2]}", said)
    if message is None:
        lacks.append("a message names rank 1 and its stage")
    tracebacks = len(re.findall(r"^Traceback", said.split("failed (exitcode")[0], re.M))
    if tracebacks > CHAINED.get(fault, 1):
        lacks.append("one traceback")
    if fault in STACKS and "Thread 0x" not in said:
        lacks.append("stacks of all threads")
    return {
        "fault": fault,
        "ranks": ranks,
        "others ended after": round(ended, 1),
        "said": "" if message is None else message[0].splitlines()[0][:200],
        "lacks": lacks,
    }


def main() -> None:
    """Prints a table, and the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=[*FAULTS])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2])
    parser.add_argument("--off", action="store_true", help="without a watchdog")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        train(arguments.job, arguments.out, watched=not arguments.off)
        return
    found = []
    for ranks in arguments.ranks:
        for fault in arguments.only:
            with tempfile.TemporaryDirectory() as folder:
                found.append(play(fault, ranks, Path(folder), watched=not arguments.off))
                if found[-1]["lacks"] and not arguments.off:
                    print((Path(folder) / "log").read_text(), file=sys.stderr, flush=True)
            print(json.dumps(found[-1]), flush=True)
    lacking = [seen for seen in found if seen["lacks"]]
    print(f"{len(found)} faults, {len(lacking)} lacking something")
    sys.exit(bool(lacking) != arguments.off or (arguments.off and len(lacking) < len(found)))


if __name__ == "__main__":
    main()

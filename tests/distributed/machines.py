"""Lets one machine of two fail, and measures the time until the other one ends.

    python -m tests.distributed.machines [--only vanishes killed] [--preemptions 20]

With `--preemptions` one machine gets SIGTERM at random moments of a `Trainer`'s job, which is then
started again; it must end as an undisturbed job does, bit for bit.

Needs Linux, root and the `ip` command: each machine is a network namespace with a name, a boot id
and a torchrun of its own. The watchdog has its default settings.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from recsys.distributed.monitoring.watchdog import Watchdog
from tests.training.job import NUM_BATCHES, saved_in

ROOT = Path(__file__).parents[2]
MACHINES = ("recsys-a", "recsys-b")
ADDRESSES = ("10.213.0.1", "10.213.0.2")
HOLDS_S = 75  # longer than the watchdog waits for a sign of life
# by name: the first machine's report of rank 1, and the most seconds until it ends
FAULTS: dict[str, tuple[str, float]] = {
    "killed": ("rank 1 is gone, its process has ended; it was last seen in", 10),
    "stopped in pause": (r"rank 1 has sent no heartbeat for \d+ s, last seen in evaluation", 75),
    "vanishes": (r"rank 1 has sent no heartbeat for \d+ s, last seen in", 75),
}
HEALTHY = ("cloned", "holds the lock in pause")


def train(case: str, out: Path) -> None:
    """Run collectives on one rank for some seconds, and the fault on rank 1."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    rank = dist.get_rank()
    with Watchdog() as watchdog:
        for step in range(80):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.1)
            if step != 60 or rank != 1:
                continue
            (out / "fault").write_text(str(time.time()))
            if case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif case == "vanishes":
                time.sleep(3600)
            elif case == "stopped in pause":
                with watchdog.pause("evaluation"):
                    time.sleep(2)  # until a heartbeat has it
                    os.kill(os.getpid(), signal.SIGSTOP)
            elif case == "holds the lock in pause":
                with watchdog.pause("evaluation"):
                    ctypes.PyDLL(None).sleep(HOLDS_S)
        dist.barrier()
    (out / f"done-{rank}").touch()


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Two namespaces with a cable between them."""
    try:
        for name in MACHINES:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "link", "add", "ra", "netns", MACHINES[0], "type", "veth",
            "peer", "name", "rb", "netns", MACHINES[1])  # fmt: skip
        for name, link, address in zip(MACHINES, ("ra", "rb"), ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
        yield
    finally:
        for name in MACHINES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def start(node: int, name: str, module: str, out: Path) -> subprocess.Popen[bytes]:
    """Start a machine's torchrun; `module` with its arguments, `name` of the host."""
    boot_id = out / f"boot-id-{node}"
    boot_id.write_text(str(uuid.uuid4()))
    torchrun = (
        f"{sys.executable} -W ignore -m torch.distributed.run --nnodes=2 --nproc-per-node=1 "
        f"--node-rank={node} --master-addr={ADDRESSES[0]} --master-port=29611 -m {module}"
    )
    inside = f"hostname {name} && mount --bind {boot_id} /proc/sys/kernel/random/boot_id && exec "
    with (out / f"log-{node}").open("wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", MACHINES[node], "unshare", "--uts", "--mount",
             "sh", "-c", inside + torchrun],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                 "GLOO_SOCKET_IFNAME": ("ra", "rb")[node]},
        )  # fmt: skip


def play(case: str, out: Path) -> str:
    """Run a job; return the result, a text that begins with "right" or "wrong"."""
    with network():
        names = (MACHINES[0], MACHINES[0]) if case == "cloned" else MACHINES
        module = f"tests.distributed.machines --job '{case}' --out {out}"
        jobs = [start(node, name, module, out) for node, name in enumerate(names)]
        try:
            if case == "vanishes":
                _wait_for(out / "fault", 120)
                run("ip", "-n", MACHINES[1], "link", "set", "rb", "down")
            code = jobs[0].wait(timeout=300)
        finally:
            for job in jobs:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
            subprocess.run(["pkill", "-KILL", "-f", f"tests.distributed.machines --job .*{out}"])
        log = (out / "log-0").read_text()
        if case in HEALTHY:
            done = (out / "done-0").exists() and (out / "done-1").exists()
            return "right: the job ends well" if done and code == 0 else f"wrong: {log[-2000:]}"
        took = time.time() - float((out / "fault").read_text())
        report, limit = FAULTS[case]
        found = re.findall(f"Watchdog: .*{report}.*|RuntimeError.*{report}.*", log)
        if not found or took > limit:
            return f"wrong: ended after {took:.0f} s: {log[-3000:]}"
        return f"right: ended after {took:.1f} s: {found[-1][:200]}"  # warnings come first


def preempt(count: int, out: Path, seed: int) -> str:
    """End a job by signals to one machine, and compare its end with an undisturbed job."""
    chance, took, lost, saved = random.Random(seed), [], 0, 0

    def started(folder: str) -> list[subprocess.Popen[bytes]]:
        module = f"tests.training.job {out / folder} --epochs 40 --loader state"
        return [start(node, name, module, out) for node, name in enumerate(MACHINES)]

    with network():
        for number in range(count + 1):
            jobs = started("preempted")
            try:
                while number < count and "training" not in (out / "log-1").read_text():
                    assert jobs[1].poll() is None, (out / "log-1").read_text()
                    time.sleep(0.1)
                if number < count:
                    time.sleep(chance.uniform(0, 4))
                    at = time.monotonic()
                    chance.choice(jobs).send_signal(signal.SIGTERM)
                codes = [job.wait(timeout=600) for job in jobs]
            finally:
                for job in jobs:
                    if job.poll() is None:
                        os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
            log = (out / "log-0").read_text()
            resumed = re.findall(r"Resumed from .*: epoch (\d+), step (\d+)", log)
            step = (int(resumed[0][0]) - 1) * NUM_BATCHES + int(resumed[0][1]) if resumed else 0
            lost += step != saved
            if number == count:
                break
            ended = re.findall(r"Preempted: saved step (\d+)", log)
            if not ended or 0 in codes:
                return f"wrong: round {number}, exit codes {codes}: {log[-3000:]}"
            took.append(time.monotonic() - at)
            saved = int(ended[0])
        for job in started("undisturbed"):
            assert job.wait(timeout=600) == 0, (out / "log-0").read_text()
    equal = all(
        saved_in(out / "preempted", name) == saved_in(out / "undisturbed", name)
        for name in ("last", "best")
    )
    text = (
        f"{count} ends of at most {max(took):.1f} s, {lost} lost steps, equal at the end: {equal}"
    )
    return f"{'right' if equal and not lost else 'wrong'}: {text}"


def _wait_for(path: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.1)


def main() -> None:
    """Plays the cases, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[*FAULTS, *HEALTHY])
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--preemptions", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.preemptions:
        with tempfile.TemporaryDirectory() as folder:
            seen = preempt(arguments.preemptions, Path(folder), arguments.seed)
        print(f"preemptions: {seen}", flush=True)
        sys.exit(not seen.startswith("right"))
    if arguments.job:
        train(arguments.job, arguments.out)
        return
    wrong = 0
    for case in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            seen = play(case, Path(folder))
        wrong += not seen.startswith("right")
        print(f"{case}: {seen}", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()

"""Kills the processes of the DLRM example while it trains, and compares the final checkpoints.

    python -m tests.examples.kills [--ranks 2] [--one 10] [--all 5] [--agent 5] [--seed 0]

A job of several ranks under torchrun trains with `--resume auto`. At a random moment one of its
ranks is killed (signal 9), or all of them, which torchrun starts again. Or torchrun's agent is
killed: then no worker may live for 10 s, and the same command is started again. At its end the job
must save the same checkpoint as an undisturbed job: weights, optimizer states, position and random
generators, each with its CRC.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recsys.distributed.checkpoint import newest_version
from recsys.distributed.checkpoint.versions import read_manifest

ROOT = Path(__file__).parents[2]
SETTINGS = (
    *("--dataset", "random", "--num-embeddings", "200", "--batch-size", "32"),
    *("--embedding-dim", "16", "--epochs", "8", "--resume", "auto", "--save-every", "6"),
)


def start(out: Path, ranks: int) -> subprocess.Popen[bytes]:
    """Starts the job; its output is added to a file beside `out`."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", "--max-restarts=3", "--monitor-interval=0.1"),
        *(str(ROOT / "examples" / "dlrm" / "train.py"), *SETTINGS, "--out", str(out)),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/checkpoints.md gives the reason
    }
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def workers_of(agent: int) -> list[int]:
    """The ranks that an agent has started."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    found = []
    for child in map(int, children):
        try:
            if b"train.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
        except OSError:  # it has just ended
            continue
    return found


def lives(process: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def saved_by(out: Path) -> list[list[int]]:
    """Length and CRC of all that the last version holds."""
    version = newest_version(out / "last")
    assert version is not None, f"{out} has saved nothing"
    files = read_manifest(version)["files"]
    return sorted(list(block) for name, of in files.items() if name != ".metadata" for block in of)


def wait_for_training(job: subprocess.Popen[bytes], out: Path, seconds: float = 90.0) -> None:
    """Waits until the job has saved."""
    end = time.monotonic() + seconds
    while newest_version(out / "last") is None:
        if time.monotonic() > end or job.poll() is not None:
            raise TimeoutError(f"nothing was saved: {out.with_suffix('.log').read_text()}")
        time.sleep(0.01)


def kill(how: str, out: Path, ranks: int, chance: random.Random) -> dict[str, object]:
    """Runs a job to its end, and kills something of it on the way."""
    job = start(out, ranks)
    wait_for_training(job, out)
    time.sleep(chance.uniform(0, 3.0))
    workers = workers_of(job.pid)
    found: dict[str, object] = {"how": how}
    if how == "agent":
        job.kill()
        job.wait()
        began = time.monotonic()
        while any(map(lives, workers)):
            assert time.monotonic() < began + 10, "workers live without their agent"
            time.sleep(0.01)
        found["workers ended after"] = round(time.monotonic() - began, 2)
        job = start(out, ranks)
    else:
        for worker in [chance.choice(workers)] if how == "one" and workers else workers:
            os.kill(worker, signal.SIGKILL)
    code = job.wait(timeout=180)
    log = out.with_suffix(".log").read_text()
    assert code == 0, log
    found["went on"] = log.count("Resumed from")
    return found


def main() -> None:
    """Print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for how, times in (("one", 10), ("all", 5), ("agent", 5)):
        parser.add_argument(f"--{how}", type=int, default=times, help="kills of this kind")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the job (2)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ranks, chance = arguments.ranks, random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder) / "undisturbed"
        assert start(undisturbed, ranks).wait(timeout=180) == 0, undisturbed.with_suffix(".log")
        expected = saved_by(undisturbed)
        kills = [how for how in ("one", "all", "agent") for _ in range(getattr(arguments, how))]
        found = []
        for number, how in enumerate(kills):
            out = Path(folder) / f"{number}-{how}"
            found.append(kill(how, out, ranks, chance))
            assert saved_by(out) == expected, f"{how}: it ended elsewhere"
            print(found[-1], file=sys.stderr, flush=True)
        went_on = sum(bool(kill["went on"]) for kill in found)
        slowest = max((kill.get("workers ended after", 0.0) for kill in found), default=0.0)
    print(json.dumps({"kills": len(found), "went on": went_on, "workers ended after": slowest}))


if __name__ == "__main__":
    main()

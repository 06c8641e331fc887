"""Is this checkout slower than another one? Steps of both in turn, and of one beside itself.

    git worktree add ../before COMMIT
    python -m benchmarks.compare --before ../before --pairs 12 --out result.json

Three groups of ranks live side by side: one of the other checkout (A) and two of this one (B, B').
In each turn every group makes some steps of `benchmarks.engine`'s case alone, in random order, so
that slow and fast minutes of the machine fall on all. B/A says how much longer a step takes now,
B'/B how much the machine alone makes of it. A case counts as slower if the 95% interval of B/A lies
above 1.02 and outside that of B'/B.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
CASES = (
    "table_wise",
    "column_wise",
    "row_wise",
    "data_parallel",
    "mixed of four",
    "sequence table_wise",
    "sequence row_wise",
    "sequence distinct ids",
    "vbe",
    "three modules",
    "26 tables",
    "1000 tables",
)
LIMIT = 1.02


def serve(rank: int, world: int, port: int) -> None:
    """One rank of a group: builds the case it is told, and makes as many steps as it is told."""
    import warnings

    import torch
    import torch.distributed as dist

    from benchmarks.engine import CASES as ENGINE_CASES
    from benchmarks.engine import Library, Step

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    step: Any = None
    for line in sys.stdin:
        order, _, what = line.strip().partition(" ")
        answer = 0.0
        if order == "build":
            step = None
            step = Step(ENGINE_CASES[what], Library("recsys"))
            for _ in range(5):
                step()
        else:
            times = []
            for _ in range(int(what)):
                dist.barrier()
                began = time.perf_counter()
                step()
                times.append(time.perf_counter() - began)
            answer = statistics.median(times) * 1e3
        print(f"answer {answer}", flush=True)


class Group:
    """The ranks of one checkout."""

    def __init__(self, checkout: Path, world: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        script = str(Path(__file__).resolve())
        self._ranks = [
            subprocess.Popen(
                [sys.executable, script, "--serve", str(rank), str(world), str(port)],
                cwd=checkout,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world)
        ]

    def ask(self, order: str) -> float:
        """Gives all ranks an order; returns the largest answer, of steps milliseconds."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{order}\n")
            rank.stdin.flush()
        answers = []
        for rank in self._ranks:
            assert rank.stdout is not None
            for line in rank.stdout:
                if line.startswith("answer "):
                    answers.append(float(line.split()[1]))
                    break
            else:
                raise RuntimeError(f"A rank ended at {order!r}.")
        return max(answers)

    def close(self) -> None:
        """Ends the ranks."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The geometric mean, and its 95% interval by Student's t."""
    from scipy.stats import t

    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def compare(groups: dict[str, Group], case: str, pairs: int, steps: int) -> dict[str, Any]:
    """Makes the turns of one case."""
    for group in groups.values():
        group.ask(f"build {case}")
    times: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(pairs):
        for name in random.sample(list(groups), len(groups)):
            times[name].append(groups[name].ask(f"step {steps}"))
    now = interval([b / a for a, b in zip(times["A"], times["B"], strict=True)])
    alone = interval([c / b for b, c in zip(times["B"], times["B'"], strict=True)])
    return {
        "ms": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "B/A": [round(x, 4) for x in now],
        "B'/B": [round(x, 4) for x in alone],
        "slower": now[1] > LIMIT and now[1] > alone[2],
    }


def main() -> int:
    """Runs what the command line asks for; exits with 1 if a case is slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=9, help="of one turn; their median counts")
    parser.add_argument("--only", help="cases whose name has this text")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {}
    groups = {
        "A": Group(given.before.resolve(), 2),
        "B": Group(HERE, 2),
        "B'": Group(HERE, 2),
    }
    try:
        for case in CASES:
            if given.only is None or given.only in case:
                found[case] = compare(groups, case, given.pairs, given.steps)
                print(f"{case}: {found[case]}", flush=True)
    finally:
        for group in groups.values():
            group.close()
    if given.out is not None:
        result = {"pairs": given.pairs, "steps": given.steps, "cases": found}
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(case["slower"] for case in found.values()))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        sys.path[0] = os.getcwd()
        serve(*map(int, sys.argv[2:5]))
    else:
        sys.exit(main())

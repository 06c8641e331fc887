"""Is this checkout slower than another one? Steps of both in turn, and of one beside itself.

    git worktree add ../before COMMIT
    python -m benchmarks.compare --before ../before --pairs 12 --out result.json

Three groups of ranks live side by side: one of the other checkout (A) and two of this one (B, B').
For each case of `benchmarks.engine` every group makes some steps alone, in random order, so that
slow and fast minutes of the machine fall on all. Each pair has new processes: a process keeps what
it met at its start, such as where its memory lies, and is up to 15% faster or slower than its twin
for as long as it lives. B/A says how much longer a step takes now, B'/B how much chance alone makes
of it. A case counts as slower if the 95% interval of B/A lies above 1.02 and outside that of B'/B.
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
# Environment in which freed memory stays with the process. Whether glibc gives it back, so that
# each step meets it as new pages, hangs on what ran before, and made 1.39 of one ratio.
KEEPS_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
}


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
            **KEEPS_FREED_MEMORY,
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


def take_turns(groups: dict[str, Group], case: str, steps: int) -> dict[str, float]:
    """Milliseconds of a step of each group: the better of two turns."""
    for group in groups.values():
        group.ask(f"build {case}")
    turns = [
        {name: groups[name].ask(f"step {steps}") for name in random.sample(list(groups), 3)}
        for _ in range(2)
    ]
    return {name: min(turn[name] for turn in turns) for name in groups}


def verdict(taken: list[dict[str, float]]) -> dict[str, Any]:
    """What the pairs of one case say."""
    now = interval([times["B"] / times["A"] for times in taken])
    alone = interval([times["B'"] / times["B"] for times in taken])
    return {
        "ms": {name: round(statistics.median(t[name] for t in taken), 3) for name in taken[0]},
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
    checkouts = {"A": given.before.resolve(), "B": HERE, "B'": HERE}
    cases = [case for case in CASES if given.only is None or given.only in case]
    taken: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for pair in range(given.pairs):
        groups: dict[str, Group] = {}
        try:
            for name in random.sample(list(checkouts), 3):
                groups[name] = Group(checkouts[name], 2)
            for case in cases:
                taken[case].append(take_turns(groups, case, given.steps))
        finally:
            for group in groups.values():
                group.close()
        print(f"{pair + 1} of {given.pairs} pairs", file=sys.stderr, flush=True)
    found = {case: verdict(pairs) for case, pairs in taken.items()}
    for case, result in found.items():
        print(f"{case}: {result}", flush=True)
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

"""What benchmarks on several ranks share: starting the processes, taking turns, the result."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def launch(module: str, num_ranks: int, *arguments: str) -> dict[str, Any]:
    """Run a benchmark in its own processes, one thread each, and return its result.

    Raises:
        subprocess.CalledProcessError: A process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *(f"--nproc-per-node={num_ranks}", "-m", module, *arguments, "--out", str(out)),
            ],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            stderr=subprocess.DEVNULL,
            timeout=900,
        )
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the arguments, with those that all benchmarks have, and join the ranks."""
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return arguments


def measure(contenders: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> dict[str, Any]:
    """Run all in turn; per contender the median of each round in ms."""
    result: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        for _ in range(3):
            run()
    for _ in range(rounds):
        for name, run in contenders.items():
            times = []
            for _ in range(repeats):
                if dist.is_initialized() and dist.get_world_size() > 1:
                    dist.barrier()
                began = time.perf_counter()
                run()
                times.append((time.perf_counter() - began) * 1e3)
            result[name].append(statistics.median(times))
    return result


def show(what: str, times_ms: dict[str, list[float]]) -> None:
    """Print the medians, on rank 0."""
    if dist.get_rank() == 0:
        print(what, {name: round(statistics.median(t), 3) for name, t in times_ms.items()})


def end(result: dict[str, Any], out: Path | None) -> None:
    """Write the result, on rank 0, and leave the ranks."""
    if dist.get_rank() == 0 and out is not None:
        out.write_text(json.dumps(result))
    dist.destroy_process_group()

"""All CPU benchmarks beside TorchRec 1.8.0: `make bench`, about 25 minutes on two cores.

`--only planner` compares the planners, which takes the peer as long again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks import planner, report
from benchmarks.dlrm import PLANS
from benchmarks.engine import CASES
from benchmarks.ranks import launch

RESULTS = Path(__file__).parent / "results"


def run_engine(name: str, rounds: int) -> dict:
    """Run one case of the engine benchmark, without the peer if that takes the processes down."""

    def run(*extra: str) -> dict:
        return launch(
            "benchmarks.engine", CASES[name].ranks, "--case", name, "--rounds", str(rounds), *extra
        )

    try:
        return run()
    except subprocess.CalledProcessError:
        return run("--no-peer") | {"peer": "its processes die"}


def engine(rounds: int) -> None:
    """Run all cases of the engine benchmark and write the result."""
    cases = {}
    for name in CASES:
        print(f"engine: {name} ...", flush=True)
        cases[name] = run_engine(name, rounds)
    memory = {
        library: launch("benchmarks.engine", 2, "--memory", library)
        for library in ("recsys", "torchrec")
    }
    result = {"machine": machine(), "cases": cases, "memory": memory}
    (RESULTS / "engine-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    report.print_engine(result)


def import_seconds(module: str, repeats: int = 5) -> list[float]:
    """Time an import in fresh processes, without what `import torch` takes by itself."""
    code = (
        f"import time, torch; began = time.perf_counter(); import {module}; "
        "print(time.perf_counter() - began)"
    )
    times = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
        )
        if done.returncode:
            return []
        times.append(float(done.stdout.splitlines()[-1]))
    return times


def machine() -> dict[str, str | int | None]:
    """Describe what the numbers were taken on."""

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec")
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
        **{package: of(package) for package in packages if of(package)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["engine", "planner"], help="leave out all else")
    parser.add_argument("--rounds", type=int, default=7, help="turns each contender gets")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=PLANS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1024, 8])
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if arguments.only == "planner":
        planner.main([])
        return
    engine(arguments.rounds)
    if arguments.only == "engine":
        return
    cases = []
    for ranks, batch_size, plan in itertools.product(
        arguments.ranks, arguments.batch_sizes, arguments.plans
    ):
        print(f"{plan}, batch {batch_size}, {ranks} ranks ...", flush=True)
        given = ("--plan", plan, "--batch-size", str(batch_size))
        cases.append(launch("benchmarks.dlrm", ranks, *given, "--rounds", str(arguments.rounds)))
    imports = {name: import_seconds(name) for name in ("recsys", "torchrec")}
    result = {"machine": machine(), "cases": cases, "import_s": imports}
    (RESULTS / "dlrm-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    subprocess.run([sys.executable, "-m", "benchmarks.kjt"], check=True)
    metrics = ("benchmarks.metrics", "--out", str(RESULTS / "metrics-cpu.json"))
    subprocess.run([sys.executable, "-m", *metrics], check=True)
    report.main([])


if __name__ == "__main__":
    main()

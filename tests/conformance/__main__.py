"""Runs the whole matrix, and writes what came of it: ``make conformance``.

python -m tests.conformance [--only topology=2x2 wire=fp8 ...] [--pools 2]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.conformance.compare import compare_all
from tests.conformance.matrix import AXES, TOPOLOGIES, Cell, cells
from tests.ranks import RankError, RankPool

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_BATCH_S = 300.0


def versions() -> dict[str, str]:
    """Those that matter for a result."""
    found = {"python": platform.python_version()}
    for name in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def in_pools(
    jobs: Sequence[Any], work: Callable[[RankPool, Any], list[Any]], pools: int, what: str
) -> list[Any]:
    """Does jobs side by side, each on a pool of ranks; returns their results in order."""
    free: SimpleQueue[RankPool] = SimpleQueue()
    for _ in range(pools):
        free.put(RankPool())
    start, done = time.monotonic(), itertools.count(1)

    def one(job: Any) -> list[Any]:
        pool = free.get()
        try:
            return work(pool, job)
        finally:
            free.put(pool)
            count = next(done)
            spent = time.monotonic() - start
            print(f"{what}: {count} of {len(jobs)} batches, {spent:.0f} s", flush=True)

    with ThreadPoolExecutor(pools) as threads:
        results = [found for batch in threads.map(one, jobs) for found in batch]
    while not free.empty():
        free.get().close()
    return results


def _compare(pool: RankPool, batch: Sequence[Cell]) -> list[list[str]]:
    """For each cell what any rank found. A batch that fails as a whole is tried cell by cell."""
    world_size, _ = TOPOLOGIES[batch[0].topology]
    try:
        by_rank = pool(world_size, compare_all, [c.case() for c in batch], timeout=_BATCH_S)
    except RankError as error:
        if len(batch) == 1:
            return [[str(error)[-1500:]]]
        return [_compare(pool, [cell])[0] for cell in batch]
    return [list(itertools.chain(*found)) for found in zip(*by_rank, strict=True)]


def summary(chosen: Sequence[Cell], found: Sequence[list[str]]) -> dict[str, Any]:
    """Counts by strategy and every other axis' value, ``[equal, tried]``; and all differences."""
    counts: dict[str, dict[str, dict[str, list[int]]]] = {
        axis: {s: {v: [0, 0] for v in values} for s in AXES["strategy"]}
        for axis, values in AXES.items()
        if axis != "strategy"
    }
    for cell, problems in zip(chosen, found, strict=True):
        for axis, table in counts.items():
            count = table[cell.strategy][getattr(cell, axis)]
            count[0] += not problems
            count[1] += 1
    return {
        "cells": len(chosen),
        "equal": sum(not problems for problems in found),
        "counts": counts,
        "differences": {
            str(cell): problems[:3]
            for cell, problems in zip(chosen, found, strict=True)
            if problems
        },
    }


def write(name: str, result: dict[str, Any], seconds: float) -> None:
    """Writes a result with what it was obtained by."""
    stamp = {"date": datetime.now(UTC).date().isoformat(), "seconds": round(seconds)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**stamp, "versions": versions(), **result}, indent=1)
    (RESULTS / name).write_text(text + "\n")


def matching(everything: Iterable[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells with all of the values given as ``axis=value``."""
    wanted = [condition.partition("=")[::2] for condition in only]
    return [c for c in everything if all(getattr(c, axis) == v for axis, v in wanted)]


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="AXIS=VALUE")
    parser.add_argument("--pools", type=int, default=2, help="groups of ranks side by side")
    arguments = parser.parse_args()
    start = time.monotonic()
    chosen = matching(cells(), arguments.only)
    batches = [
        list(group)
        for _, group in itertools.groupby(
            chosen, lambda c: (c.topology, c.kind, c.batches, c.optimizer)
        )
    ]
    found = in_pools(batches, _compare, arguments.pools, "matrix")
    result = summary(chosen, found)
    print(f"{result['equal']} of {result['cells']} combinations equal the unsharded model")
    for name, problems in result["differences"].items():
        print(name, *problems, sep="\n    ")
    if not arguments.only:
        write("conformance.json", result, time.monotonic() - start)


if __name__ == "__main__":
    main()

"""Runs many batches of cases on pools of ranks, and writes results."""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.ranks import RankError, RankPool

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter for a result."""
    found = {"python": platform.python_version()}
    for name in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def in_pools(
    jobs: Sequence[Any],
    work: Callable[[Any, Any], list[Any]],
    pools: int,
    what: str,
    new_pool: Callable[[], Any] = RankPool,
) -> list[Any]:
    """Does jobs side by side, each on a pool of ranks; returns their results in order."""
    free: SimpleQueue[Any] = SimpleQueue()
    for _ in range(pools):
        free.put(new_pool())
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


def singly_if_failed(
    work: Callable[[Sequence[Any]], list[Any]],
    batch: Sequence[Any],
    failed: Callable[[RankError], Any],
) -> list[Any]:
    """Run a batch of jobs, and run them one by one if it fails as a whole.

    ``failed`` returns the result of a job that fails by itself.
    """
    try:
        return work(batch)
    except RankError as error:
        if len(batch) == 1:
            return [failed(error)]
        return [found for job in batch for found in singly_if_failed(work, [job], failed)]


def write(name: str, result: dict[str, Any], seconds: float) -> None:
    """Write a result with its date, duration and versions."""
    stamp = {"date": datetime.now(UTC).date().isoformat(), "seconds": round(seconds)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**stamp, "versions": versions(), **result}, indent=1)
    (RESULTS / name).write_text(text + "\n")

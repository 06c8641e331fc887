"""Runs everything, and writes the results: ``make conformance``.

python -m tests.conformance [--pools 2]
python -m tests.conformance --only topology=2x2 wire=fp8  # some of the matrix; writes nothing
python -m tests.conformance --only topology=2x2 --update  # some again, the rest as it was found
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.conformance.checkpoints import Move, moves, moves_by_checkpoint, try_moves
from tests.conformance.compare import compare_all
from tests.conformance.matrix import AXES, TOPOLOGIES, Cell, by_unsharded_run, cells, matching
from tests.conformance.runner import RESULTS, in_pools, singly_if_failed, write
from tests.ranks import RankError, RankPool

MATRIX = "conformance.json"
_BATCH_S = 300.0


def _compare(pool: RankPool, batch: Sequence[Cell]) -> list[list[str]]:
    """Return the differences of each cell, of all ranks."""
    world_size, _ = TOPOLOGIES[batch[0].topology]
    by_rank = pool(world_size, compare_all, [c.case() for c in batch], timeout=_BATCH_S)
    return [list(itertools.chain(*found)) for found in zip(*by_rank, strict=True)]


def _end_of(error: RankError) -> list[str]:
    return [str(error)[-1500:]]


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


def run_matrix(chosen: Sequence[Cell], pools: int) -> list[list[str]]:
    """Compare cells; cells that share an unsharded run are on the same pool."""

    def work(pool: RankPool, batch: Sequence[Cell]) -> list[list[str]]:
        return singly_if_failed(partial(_compare, pool), batch, _end_of)

    return in_pools(by_unsharded_run(chosen), work, pools, "matrix")


def updated(chosen: Sequence[Cell], found: Sequence[list[str]]) -> dict[str, Any]:
    """Return the result of the whole matrix: the new result of some cells, the old of others."""
    old = earlier()["differences"]
    new = dict(zip(chosen, found, strict=True))
    everything = list(cells())
    return summary(everything, [new.get(cell, old.get(str(cell), [])) for cell in everything])


def earlier() -> dict[str, Any]:
    """The committed result of the matrix."""
    result: dict[str, Any] = json.loads((RESULTS / MATRIX).read_text())
    return result


def run_checkpoints(pools: int) -> dict[str, Any]:
    """Makes every move; the loads of one checkpoint on the same pool."""

    def work(pool: RankPool, batch: Sequence[Move]) -> list[list[str]]:
        return singly_if_failed(partial(try_moves, pool), batch, _end_of)

    found = in_pools(moves_by_checkpoint(), work, pools, "checkpoints")
    outcomes = ["differs" if problems else "equal" for problems in found]
    return {
        **outcomes_by_strategies(moves(), outcomes),
        "differences": {
            str(move): problems[:3]
            for move, problems in zip(moves(), found, strict=True)
            if problems
        },
    }


def outcomes_by_strategies(tried: Sequence[Move], outcomes: Sequence[str]) -> dict[str, Any]:
    """Counts outcomes by optimizer, and the strategies that saved and loaded."""
    counts: dict[str, dict[str, dict[str, Counter[str]]]] = {}
    for move, outcome in zip(tried, outcomes, strict=True):
        by_saved = counts.setdefault(move.optimizer, {})
        by_loaded = by_saved.setdefault(move.saved.strategy.value, {})
        by_loaded.setdefault(move.loaded.strategy.value, Counter())[outcome] += 1
    total = Counter(outcomes)
    return {"moves": len(tried), "outcomes": dict(total), "counts": counts}


def main() -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="AXIS=VALUE")
    parser.add_argument("--update", action="store_true", help="write what was found of --only")
    parser.add_argument("--pools", type=int, default=2, help="groups of ranks side by side")
    parser.add_argument("--part", choices=["matrix", "checkpoints"], help="everything if left out")
    arguments = parser.parse_args()
    if arguments.part != "checkpoints":
        start = time.monotonic()
        chosen = matching(cells(), dict(given.split("=", 1) for given in arguments.only))
        found = run_matrix(chosen, arguments.pools)
        result = updated(chosen, found) if arguments.update else summary(chosen, found)
        print(f"{result['equal']} of {result['cells']} combinations equal the unsharded model")
        for name, problems in result["differences"].items():
            print(name, *problems, sep="\n    ")
        if arguments.update or not arguments.only:
            before = earlier()["seconds"] if arguments.update else 0
            write(MATRIX, result, before + time.monotonic() - start)
    if arguments.part != "matrix" and not arguments.only:
        start = time.monotonic()
        result = run_checkpoints(arguments.pools)
        print(f"{result['moves']} checkpoints loaded under other plans: {result['outcomes']}")
        for name, problems in result["differences"].items():
            print(name, *problems, sep="\n    ")
        write("conformance-checkpoints.json", result, time.monotonic() - start)


if __name__ == "__main__":
    main()

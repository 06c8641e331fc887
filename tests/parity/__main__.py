"""Runs both in full, ours and TorchRec 1.8.0, and writes the results.

python -m tests.parity [--part training] [--pools 2]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.conformance.__main__ import outcomes_by_strategies
from tests.conformance.checkpoints import moves, moves_by_checkpoint
from tests.conformance.matrix import TOPOLOGIES, Cell, by_unsharded_run
from tests.conformance.runner import in_pools, write
from tests.parity.checkpoints import try_moves
from tests.parity.peer import PeerPool
from tests.parity.training import cells, compare_with_peer, last_line, outcome_of
from tests.ranks import RankError

_CELL_S = 120.0


def compare_batch(pool: PeerPool, batch: Sequence[Cell]) -> list[str]:
    """The outcome of each cell, each in a process group of its own."""
    return [_compare(pool, cell) for cell in batch]


def _compare(pool: PeerPool, cell: Cell, attempts: int = 2) -> str:
    """Compare, and try again without answers: ranks of a node sometimes wait for each other."""
    world_size, _ = TOPOLOGIES[cell.topology]
    try:
        return outcome_of(pool(world_size, compare_with_peer, cell, timeout=_CELL_S))
    except RankError as error:
        if attempts > 1:
            return _compare(pool, cell, attempts - 1)
        return f"raises: {last_line(error)}"


def _training(pools: int) -> dict[str, Any]:
    chosen = cells()
    found = in_pools(by_unsharded_run(chosen), compare_batch, pools, "training", PeerPool)
    counts: dict[str, dict[str, dict[str, Counter[str]]]] = {}
    for cell, outcome in zip(chosen, found, strict=True):
        for axis in ("topology", "kind", "batches", "optimizer"):
            by_value = counts.setdefault(axis, {}).setdefault(cell.strategy, {})
            by_value.setdefault(getattr(cell, axis), Counter())[outcome.partition(":")[0]] += 1
    reasons: dict[str, list[str]] = {}
    for cell, outcome in zip(chosen, found, strict=True):
        if outcome != "equal":
            reasons.setdefault(outcome, []).append(str(cell))
    outcomes = Counter(outcome.partition(":")[0] for outcome in found)
    return {
        "cells": len(chosen),
        "outcomes": dict(outcomes),
        "counts": counts,
        "not equal": reasons,
    }


def _checkpoints(pools: int) -> dict[str, Any]:
    found = in_pools(moves_by_checkpoint(), try_moves, pools, "checkpoints", PeerPool)
    plain = [outcome.partition(":")[0] for outcome in found]
    reasons: dict[str, list[str]] = {}
    for move, outcome in zip(moves(), found, strict=True):
        if outcome != "equal":
            reasons.setdefault(outcome, []).append(str(move))
    return {**outcomes_by_strategies(moves(), plain), "not equal": reasons}


def main() -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", type=int, default=2, help="groups of ranks side by side")
    parser.add_argument("--part", choices=["training", "checkpoints"])
    arguments = parser.parse_args()
    for part, run, name in (
        ("training", _training, "parity.json"),
        ("checkpoints", _checkpoints, "conformance-checkpoints-peer.json"),
    ):
        if arguments.part in (None, part):
            start = time.monotonic()
            result = run(arguments.pools)
            print(f"{part}: {result['outcomes']}")
            write(name, result, time.monotonic() - start)


if __name__ == "__main__":
    main()

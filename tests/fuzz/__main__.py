"""``python -m tests.fuzz``: minutes of random cases; prints failed cases with their seeds."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator

from tests.fuzz.cases import Case
from tests.fuzz.faults import FAULTS, make_case
from tests.fuzz.player import complaint_about
from tests.fuzz.undo import UNDONE
from tests.ranks import RankPool


def cases(seed: int, fault: str | None = None) -> Iterator[Case]:
    """Random cases without end: of the fault, or half of them sound and each fault in turn."""
    faults = list(FAULTS)
    random.Random(seed).shuffle(faults)
    for number in itertools.count():
        own = fault
        if fault is None and number % 2:
            own = faults[number // 2 % len(faults)]
        yield make_case(seed + number, own)


def search(
    pool: RankPool,
    minutes: float,
    seed: int,
    *,
    fault: str | None = None,
    undone: str | None = None,
    stop: bool = False,
) -> list[tuple[Case, str]]:
    """Run cases for some minutes; return the failed ones, with the reason."""
    end = time.monotonic() + 60 * minutes
    start, found, played = time.monotonic(), [], 0
    for case in cases(seed, fault):
        played += 1
        complaint = complaint_about(pool, case, undone)
        if complaint is not None:
            found.append((case, complaint))
            print(f"{case}\n    {complaint}", flush=True)
        if time.monotonic() > end or (stop and found):
            break
    took = time.monotonic() - start
    print(f"{played} cases in {took:.0f} s, {len(found)} with a complaint", flush=True)
    return found


def main() -> int:
    """Run the search of the command line; exit with 1 after a find."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (0)")
    parser.add_argument("--fault", choices=FAULTS, help="make only this one")
    parser.add_argument("--stop", action="store_true", help="after the first complaint")
    parser.add_argument("--undo", choices=[*UNDONE, "each"], help="take a check out, or each")
    given = parser.parse_args()
    pool = RankPool()
    try:
        if given.undo is None:
            return bool(search(pool, given.minutes, given.seed, fault=given.fault, stop=given.stop))
        missed = []
        for undone in UNDONE if given.undo == "each" else [given.undo]:
            print(f"== without: {undone}", flush=True)
            if not search(pool, given.minutes, given.seed, undone=undone, stop=True):
                missed.append(undone)
        print(f"not found in {given.minutes:g} minutes each: {missed or 'none'}")
        return bool(missed)
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())

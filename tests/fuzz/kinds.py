"""``python -m tests.fuzz.kinds KIND --cases 2000``: random inputs of one kind of fault.

Each kind is a module with one function, `complaint_about(pool, seed)`: it makes a case from the
seed, runs it, and returns what is wrong, or None. The same seed makes the same case.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator

from tests.ranks import RankPool


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split()]


# Kind to the seeds of the cases that were wrong when the kind was first searched.
FINDS: dict[str, list[int]] = {
    "data": [
        *(5, 11, 12, 13, 16, 18, 24, 38, 49, 82, 124, 156, 160, 163, 171, 246, 269, 1078, 1383),
    ],
    "ranks": [],
    "metrics": _seeds(
        "45 54 72 80 100 106 108 123 142 188 214 216 238 248 265 281 291 301 314 315 358 373 "
        "376 384 393 404 413 494 501 508 523 527 533 571 578 580 595 599 605 613 614 628 649 "
        "713 722 743 828 832 835 838 850 900 906 936 960 973 1006 1029 1073 1102 1115 1121 1123 "
        "1134 1161 1183 1208 1233 1249 1265 1271 1284 1301 1328 1346 1359 1424 1425 1428 1443 "
        "1454 1456 1464 1476 1502 1516 1538 1563 1577 1620 1629 1667 1684 1689 1708 1711 1734 "
        "1756 1851 1874 1913 1970 1979 1999"
    ),
}


def search(pool: RankPool, kind: str, seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yields seed and complaint of the cases that are wrong."""
    module = importlib.import_module(f"tests.fuzz.{kind}")
    for seed in seeds:
        complaint = module.complaint_about(pool, seed)
        if complaint is not None:
            yield seed, complaint


def main() -> int:
    """Runs what the command line asks for; exits with 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kinds", description=__doc__)
    parser.add_argument("kind", choices=FINDS)
    parser.add_argument("--cases", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (0)")
    given = parser.parse_args()
    pool = RankPool()
    found = 0
    try:
        for seed, complaint in search(
            pool, given.kind, range(given.seed, given.seed + given.cases)
        ):
            found += 1
            print(f"seed {seed}: {complaint}", flush=True)
    finally:
        pool.close()
    print(f"{given.cases} cases of kind {given.kind!r}, {found} with a complaint")
    return found > 0


if __name__ == "__main__":
    sys.exit(main())

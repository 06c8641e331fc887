"""``python -m tests.fuzz.kinds KIND --cases 2000``: random inputs of one kind of fault.

Each kind is a module with one function, `complaint_about(pool, seed)`: it makes a case from the
seed, runs it, and returns the error, or None. The same seed makes the same case.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator

from tests.ranks import RankPool

# Kind to the seeds of the cases that were wrong when the kind was first searched.
FINDS: dict[str, list[int]] = {
    "containers": [0, 1, 2, 4, 9, 11, 19, 27, 40, 43, 52, 69, 108, 202, 287, 310, 666, 946, 1134],
    "data": [5, 11, 12, 13, 16, 18, 24, 38, 49, 82, 124, 156, 160, 163, 171, 246, 269, 1078, 1383],
    "metrics": [45, 54, 72, 80, 100, 106, 108, 123, 142, 188, 214, 216, 238, 248, 265, 281, 291],
    "quantized": [0],
    "ranks": [23, 24, 28, 37, 41, 45, 49, 53, 61],
    "scripts": [0, 3, 86],
    "wrong_types": [1, 2, 3, 4, 5, 8, 9, 11, 14, 15, 17, 18, 19, 27, 37, 44, 58],
}


def search(pool: RankPool, kind: str, seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield seed and error of the failed cases."""
    module = importlib.import_module(f"tests.fuzz.{kind}")
    for seed in seeds:
        complaint = module.complaint_about(pool, seed)
        if complaint is not None:
            yield seed, complaint


def main() -> int:
    """Run the search of the command line; exit with 1 after a find."""
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

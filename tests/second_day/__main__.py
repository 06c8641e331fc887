"""Random lives of models: `python -m tests.second_day --seed 0 --count 2000`.

Each life extends, fits again, trains, saves (in full and as deltas) and loads, and is compared with
dicts after each step: weights and optimizer states bit for bit. A failure prints its seed. With
`--ranks 2` the model is sharded, under another plan after each load. `--minutes` ends a run early;
its last line has the seed to continue with.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from functools import partial

from tests.ranks import RankPool
from tests.second_day.life import run, run_on_ranks


def main() -> int:
    """Run the lives; return 1 if one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.second_day", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first life")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=90)
    options = parser.parse_args()
    end, failed, seed = time.monotonic() + 60 * options.minutes, [], options.seed
    pool = RankPool() if options.ranks > 1 else None
    once = run if pool is None else partial(run_on_ranks, pool, options.ranks)
    try:
        for seed in range(options.seed, options.seed + options.count):
            if time.monotonic() > end:
                break
            try:
                once(seed, options.steps)
            except Exception:
                failed.append(seed)
                traceback.print_exc()
        else:
            seed += 1
    finally:
        if pool is not None:
            pool.close()
    print(
        f"{seed - options.seed} lives, {len(failed)} differ {failed}; continue with --seed {seed}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

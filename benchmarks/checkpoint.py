"""MB/s of saving and loading a checkpoint, beside those of another checkout of this repository.

    python -m benchmarks.checkpoint --other ../before [--mib 1024] [--rounds 10]

One rank, one thread: four tables of a DistributedModelParallel with row-wise Adagrad. The two
checkouts live in a process each and take turns: save, load, save ... A save ends when the disk has
it. Loads read what was just written, so mostly from memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TABLES, DIM = 4, 64


def work(mib: int, path: str) -> None:
    """Serve one checkout: save or load when told to, and say how many MB/s that was."""
    import torch

    from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
    from recsys.distributed.model_parallel import DistributedModelParallel
    from recsys.distributed.types import ShardingEnv
    from recsys.modules.embedding_configs import EmbeddingBagConfig
    from recsys.modules.embedding_modules import EmbeddingBagCollection
    from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward

    torch.set_num_threads(1)
    rows = (mib << 20) // (TABLES * DIM * 4)
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=DIM, num_embeddings=rows, feature_names=[f"f{i}"]
        )
        for i in range(TABLES)
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(ebc, env=ShardingEnv.from_local(), device=torch.device("cpu"))
    run = {"save": save_checkpoint, "load": load_checkpoint}
    print("ready", flush=True)
    for line in sys.stdin:
        what = line.strip()
        if what == "save":
            shutil.rmtree(path, ignore_errors=True)
        os.sync()
        began = time.perf_counter()
        run[what](path, model, model.fused_optimizer)
        print(mib * 1.048576 / (time.perf_counter() - began), flush=True)


class Checkout:
    """A process that saves and loads with the code of one checkout."""

    def __init__(self, root: Path, mib: int, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", __file__, "--mib", str(mib), "--work", path],
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        return line

    def rate(self, what: str) -> float:
        """Save or load; return the MB/s."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(other: Path, mib: int, rounds: int) -> dict[str, Any]:
    """Return the MB/s of both, turn by turn; the first turn warms up and does not count."""
    result: dict[str, Any] = {
        "mib": mib,
        "save": {"ours": [], "other": []},
        "load": {"ours": [], "other": []},
    }
    with tempfile.TemporaryDirectory() as folder:
        roots = {"ours": Path(__file__).parents[1], "other": other.resolve()}
        checkouts = {n: Checkout(root, mib, Path(folder) / n) for n, root in roots.items()}
        for turn in range(rounds + 1):
            for what in ("save", "load"):
                for name in sorted(checkouts, reverse=bool(turn % 2)):
                    rate = checkouts[name].rate(what)
                    if turn:
                        result[what][name].append(round(rate, 1))
        for checkout in checkouts.values():
            checkout.close()
    return result


def main() -> None:
    """Print medians and ratios; write all turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--mib", type=int, default=1024, help="of weights")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.mib, arguments.work)
        return
    if arguments.other is None:
        parser.error("name another checkout: --other ../before")
    result = compare(arguments.other, arguments.mib, arguments.rounds)
    for what in ("save", "load"):
        ours, other = result[what]["ours"], result[what]["other"]
        ratios = [a / b for a, b in zip(ours, other, strict=True)]
        print(
            f"{what}: {statistics.median(ours):.0f} MB/s, other {statistics.median(other):.0f}, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

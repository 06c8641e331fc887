"""Tables with rows on the disk beside tables that are large enough for all ids.

    python -m benchmarks.hashed_overflow [--pairs 40] [--folder FOLDER]

Tables of 16,384 rows of 64 columns with row-wise Adagrad; a table has 8,000 ids that come often and
30,000 that come back from the disk. A tenth of each batch is of the latter. Both models take turns
in one process with one thread; a ratio is one of wall clock times, as threads read the disk. Then
ids that never end: the bytes of memory and of the disk as the rows on the disk grow.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import benchmarks.hashed as common
from benchmarks.hashed import BATCH, DIM, NAMES, resident_mib, scattered, step, take_turns
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.hashed_ids import HashedIds
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward

SMALL, LARGE, HOT, COLD = 16_384, 65_536, 8_000, 30_000


def tables(num_tables: int, rows: int, folder: str | None) -> Any:
    """Return tables with or without an overflow."""
    configs = [
        EmbeddingBagConfig(rows, DIM, f"t{i}", feature_names=[name], ids=HashedIds(overflow=folder))
        for i, name in enumerate(NAMES[:num_tables])
    ]
    ebc = EmbeddingBagCollection(tables=configs)
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.01})
    return ebc


def batches(num_tables: int, ids_per_bag: int, share: float) -> Iterator[Tensor]:
    """Yield `[tables, ids]`; a share of the ids are cold ones, which come in turn."""
    size, first = BATCH * ids_per_bag, 0
    num_cold = int(size * share)
    while True:
        hot = torch.randint(0, HOT, (num_tables, size - num_cold))
        cold = HOT + torch.arange(first, first + num_cold).remainder(COLD).repeat(num_tables, 1)
        first += num_cold
        yield scattered(torch.cat([hot, cold], 1))


def logs_of(model: Any) -> list[Any]:
    return [bag.index.log for bag in model.embedding_bags.values()]


def measure_steps(folder: str, pairs: int) -> dict[str, Any]:
    """Return the ratios of steps, and of the share of ids that came from the disk."""
    found: dict[str, Any] = {}
    for num_tables, ids_per_bag in ((26, 1), (4, 8)):
        models = [tables(num_tables, SMALL, folder), tables(num_tables, LARGE, None)]
        gradient = torch.randn(BATCH, num_tables * DIM)
        for share in (0.5, 0.1):  # first all cold ids once, then as they are measured
            stream = batches(num_tables, ids_per_bag, share)
            for _ in range(int(COLD / BATCH / ids_per_bag / share)):
                ids = next(stream)
                for model in models:
                    step(model, ids, gradient)
        for share in (0.0, 0.1):
            stream = batches(num_tables, ids_per_bag, share)
            given = [next(stream) for _ in range(pairs + 2)]
            ours, other = iter(given), iter(given)
            before = [bag.index.stats().admitted for bag in models[0].embedding_bags.values()]
            times = take_turns(
                lambda: step(models[0], next(ours), gradient),  # noqa: B023
                lambda: step(models[1], next(other), gradient),  # noqa: B023
                pairs,
                common.time.perf_counter,
            )
            after = [bag.index.stats().admitted for bag in models[0].embedding_bags.values()]
            read = (sum(after) - sum(before)) / len(given) / given[0].numel()
            name = f"{num_tables} tables, {ids_per_bag} per bag, {share:.0%} cold"
            found[name] = times.summary() | {"from_disk": round(read, 4)}
    return found


def measure_growth(folder: str) -> list[dict[str, int]]:
    """Return sizes in MiB, and rows on the disk, as ids never end."""
    model, found, first = tables(1, SMALL, folder), [], 0
    gradient = torch.randn(BATCH, DIM)
    for _ in range(8):
        for _ in range(30):
            ids = torch.arange(first, first + 8 * BATCH)
            first += 8 * BATCH
            step(model, scattered(ids)[None], gradient)
        [log] = logs_of(model)
        found.append(
            {
                "rows_on_disk": len(log),
                "disk_mib": log.num_bytes >> 20,
                "resident_mib": round(resident_mib()),
            }
        )
    return found


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = {
            "step": measure_steps(folder, arguments.pairs),
            "growth": measure_growth(folder),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

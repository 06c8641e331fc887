"""What a learning rate per table costs: one lookup of 26 tables, forward and fused update.

    python -m benchmarks.rates [--out result.json]

Contenders take turns in one process, one thread: the same rate for all tables, two rates in turn,
26 rates, and 26 lookups of one table each, which is what rates of their own would need if tables of
one lookup had to share theirs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import ranks
from benchmarks.report import ratio
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.types import EmbOptimType, OptimizerSpec, PoolingType, TableSpec, UpdateMode

TABLES, ROWS, DIM = 26, 100_000, 32


def build(spec: OptimizerSpec, rates: Sequence[float]) -> TableBatchedEmbedding:
    """Build one lookup, a table for each rate."""
    tbe = TableBatchedEmbedding(
        [TableSpec(name=str(i), num_rows=ROWS, dim=DIM) for i in range(len(rates))],
        feature_table_map=range(len(rates)),
        pooling=PoolingType.SUM,
        optimizer=spec,
        update_mode=UpdateMode.FUSED,
        device=torch.device("cpu"),
    )
    tbe.storage.normal_()
    tbe.learning_rates = rates
    return tbe


def measure(algorithm: EmbOptimType, batch: int, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each contender, round by round."""
    spec = OptimizerSpec(algorithm=algorithm)
    ids = torch.randint(0, ROWS, (TABLES * batch,))
    offsets = torch.arange(TABLES * batch + 1)
    grad = torch.randn(batch, TABLES * DIM)
    of_one = list(zip(ids.split(batch), grad.split(DIM, dim=1), strict=True))
    apart = [build(spec, [0.01]) for _ in range(TABLES)]

    def step_apart() -> None:
        for tbe, (own, gradient) in zip(apart, of_one, strict=True):
            tbe.forward(own, offsets[: batch + 1]).backward(gradient)

    def step_of(count: int) -> Callable[[], None]:
        tbe = build(spec, [0.01 * (1 + i % count) for i in range(TABLES)])
        return lambda: tbe.forward(ids, offsets).backward(grad)

    contenders = {f"{n} rates": step_of(n) for n in (1, 2, TABLES)}
    contenders["26 lookups"] = step_apart
    return ranks.measure(contenders, rounds, repeats=1)


def main() -> None:
    """Print times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for algorithm in (EmbOptimType.SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
        for batch in (2048, 64):
            times = measure(algorithm, batch, arguments.rounds)
            results.append({"algorithm": algorithm.name, "batch": batch, "step_ms": times})
            for name, found in times.items():
                relative = ratio(found, times["1 rates"])
                print(
                    f"{algorithm.name:22} batch {batch:5} {name:10} "
                    f"{statistics.median(found):7.2f} ms, to one rate {relative}"
                )
    if arguments.out:
        arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

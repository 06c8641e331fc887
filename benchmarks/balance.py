"""Steps of HSTU on 2 ranks, balanced by the cost of attention beside batches in order.

    python -m benchmarks.balance

Lengths follow Zipf's law. Both ways train one model on the same samples and take turns in one run,
with a barrier before each turn. A turn includes the division of its batches. Printed first is the
imbalance of attention over 8 simulated ranks: by how much the costliest rank exceeds the mean.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import ranks
from recsys.datasets.balance import BalancedBatches, balanced_order, imbalance
from recsys.datasets.utils import Batch, rank_slice
from recsys.datasets.windows import take_rows
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.sequences.hstu import HSTU
from recsys.modules.sequences.next_item import NextItem, with_catalogue
from recsys.optim import SGD, in_backward_optimizer_filter
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor

CPU = torch.device("cpu")
ITEMS, DIM, MOST = 200, 32, 1024
NUM_BATCHES, SIZE = 4, 32  # batches of a turn, histories of a rank


def zipf_lengths(count: int, draw: np.random.Generator) -> np.ndarray[Any, Any]:
    shares = np.arange(1, MOST + 1) ** -1.05
    return draw.choice(np.arange(1, MOST + 1), count, p=shares / shares.sum())


def simulated(num_ranks: int, size: int, rounds: int = 20) -> dict[str, float]:
    """Return the mean imbalance of each division."""
    found: dict[str, list[float]] = {"balanced": [], "random": [], "in order": []}
    edges = np.arange(num_ranks + 1) * size
    for seed in range(rounds):
        draw = np.random.default_rng(seed)
        costs = zipf_lengths(num_ranks * size, draw).astype(np.float64) ** 2
        found["balanced"].append(imbalance(costs, *balanced_order(costs, num_ranks)))
        found["random"].append(imbalance(costs, draw.permutation(len(costs)), edges))
        found["in order"].append(imbalance(costs, np.arange(len(costs)), edges))
    return {name: statistics.mean(values) for name, values in found.items()}


def batch_of(seed: int, size: int) -> Batch:
    draw = np.random.default_rng(seed)
    lengths = torch.from_numpy(zipf_lengths(size, draw))
    ids = torch.from_numpy(draw.integers(0, ITEMS, 2 * int(lengths.sum())))
    features = KeyedJaggedTensor(["history", "target"], ids, lengths=torch.cat([lengths, lengths]))
    return Batch(torch.zeros(size, 0), features, torch.zeros(size))


def in_order(batches: Iterable[Batch], rank: int, world_size: int) -> Iterator[Batch]:
    for batch in batches:
        rows = np.arange(len(batch.labels))
        yield take_rows(batch, rows[rank_slice(len(rows), rank, world_size)])


def trainer_of() -> Callable[[Iterable[Batch]], None]:
    """Return a function that trains a sharded model on a rank's batches."""
    items = EmbeddingConfig(
        num_embeddings=ITEMS, embedding_dim=DIM, name="items",
        feature_names=["history", "target", "candidates"],
    )  # fmt: skip
    model: torch.nn.Module = NextItem(
        EmbeddingCollection(tables=[items]), HSTU(DIM, MOST, num_heads=2, dropout=0.0), "full"
    )
    apply_optimizer_in_backward(SGD, model.embedding_collection.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(model, env=ShardingEnv.default(), device=CPU)
    dense = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    optimizer = torch.optim.SGD(dense, lr=0.1)

    def train(batches: Iterable[Batch]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            features = with_catalogue(batch.sparse_features, ITEMS)
            model(replace(batch, sparse_features=features))[0].backward()
            optimizer.step()

    return train


def on_ranks(parser: argparse.ArgumentParser) -> None:
    arguments = ranks.begin(parser)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [batch_of(seed, world_size * SIZE) for seed in range(NUM_BATCHES)]
    balanced = BalancedBatches(batches, "history", rank, world_size)
    train = trainer_of()
    times = ranks.measure(
        {
            "in order": lambda: train(in_order(batches, rank, world_size)),
            "balanced": lambda: train(balanced),
        },
        arguments.rounds,
        arguments.repeats,
    )
    found = {"times": times, "imbalance": [balanced.unbalanced, balanced.imbalance]}
    ranks.end(found, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if "RANK" in os.environ:
        on_ranks(parser)
        return
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    for name, value in simulated(8, 64).items():
        print(f"8 simulated ranks, 64 histories each, {name}: {value:.1%} above the mean")
    found = ranks.launch("benchmarks.balance", 2, "--rounds", str(rounds), "--repeats", "1")
    before, after = found["imbalance"]
    print(f"2 ranks, {SIZE} histories each: {before:.1%} in order, {after:.1%} balanced")
    times = found["times"]
    shares = [one / other for one, other in zip(times["balanced"], times["in order"], strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4)
    print(f"in order: {statistics.median(times['in order']) / NUM_BATCHES:.1f} ms per step")
    print(f"balanced: {middle:.2f} of it; quartiles {low:.2f} and {high:.2f}")


if __name__ == "__main__":
    main()

"""The combinations that sharding must be invisible under, and a small cover of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from zlib import crc32

import torch

from recsys.distributed.ranks.wire import CommType
from recsys.distributed.types import ShardingType
from recsys.modules.embedding_configs import PoolingType
from recsys.optim import Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from tests.distributed.cases import Case

UNIT = 2.0**-20
"""The size of gradients: so small that fp16 loses them unless they are scaled on the wire."""
LOSS_SCALE = 2.0**12
_EPS = 4 * UNIT

STRATEGIES = {kind.value: (kind,) for kind in ShardingType} | {"mixed": tuple(ShardingType)}
TOPOLOGIES = {"1": (1, 1), "2": (2, 2), "3": (3, 3), "4": (4, 4), "2x1": (2, 1), "2x2": (4, 2)}
"""Ranks, and ranks per node, by ``nodes x ranks per node`` or by ranks on one node."""
KINDS = {
    "sum": {"pooling": PoolingType.SUM, "weighted": False},
    "mean": {"pooling": PoolingType.MEAN, "weighted": False},
    "weighted sum": {"pooling": PoolingType.SUM, "weighted": True},
    "weighted mean": {"pooling": PoolingType.MEAN, "weighted": True},
    "sequence": {"pooled": False},
    "sequence, distinct ids": {"pooled": False, "use_index_dedup": True},
}
BATCHES = {"one size": False, "size per feature": True}
WIRES = {wire.value: wire for wire in CommType}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer] | None, Mapping[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1 / UNIT}),
    "Adagrad": (Adagrad, {"lr": 0.1, "eps": _EPS}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": _EPS}),
    "Adam": (Adam, {"lr": 0.1, "eps": _EPS}),
    "PartialRowWiseAdam": (PartialRowWiseAdam, {"lr": 0.1, "eps": _EPS}),
    "none": (None, {}),
}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Cell:
    """One combination, by the names above."""

    topology: str
    kind: str
    batches: str
    optimizer: str
    strategy: str
    wire: str

    def case(self) -> Case:
        """The model, plan and batches to try it with."""
        optimizer, hyperparameters = OPTIMIZERS[self.optimizer]
        world_size, node_size = TOPOLOGIES[self.topology]
        # what differs only in how it is placed shares the model, and the unsharded run
        same = f"{world_size}, {self.kind.partition(',')[0]}, {self.batches}, {self.optimizer}"
        return Case(
            crc32(same.encode()) % 10**6,
            world_size,
            types=STRATEGIES[self.strategy],
            node_size=node_size,
            variable_batch=BATCHES[self.batches],
            wire=WIRES[self.wire],
            loss_scale=LOSS_SCALE,
            optimizer=optimizer,
            hyperparameters=tuple(hyperparameters.items()),
            feeds_back=False,
            **KINDS[self.kind],  # type: ignore[arg-type]
        )

    def __str__(self) -> str:
        return " | ".join(getattr(self, axis) for axis in AXES)


AXES: dict[str, Sequence[str]] = {
    "topology": list(TOPOLOGIES),
    "kind": list(KINDS),
    "batches": list(BATCHES),
    "optimizer": list(OPTIMIZERS),
    "strategy": list(STRATEGIES),
    "wire": list(WIRES),
}


def cells() -> Iterator[Cell]:
    """Yield all combinations, with cells of one unsharded run together.

    A single rank sends nothing, so there is one wire.
    """
    for values in itertools.product(*AXES.values()):
        cell = Cell(**dict(zip(AXES, values, strict=True)))
        if cell.topology != "1" or cell.wire == "fp32":
            yield cell


def matching(everything: Iterable[Cell], values: Mapping[str, str]) -> list[Cell]:
    """The cells with all of the given values, by axis."""
    return [c for c in everything if all(getattr(c, axis) == v for axis, v in values.items())]


def by_unsharded_run(chosen: Iterable[Cell]) -> list[list[Cell]]:
    """Batches of neighbours that share an unsharded run."""
    grouped = itertools.groupby(chosen, lambda c: (c.topology, c.kind, c.batches, c.optimizer))
    return [list(group) for _, group in grouped]


Value = tuple[str, str]
"""An axis, and one of its values."""


def pairs(cell: Cell) -> set[tuple[Value, Value]]:
    """All pairs of values that a cell combines."""
    return set(itertools.combinations([(axis, getattr(cell, axis)) for axis in AXES], 2))


@cache
def pairwise_cover(seed: int = 0) -> tuple[Cell, ...]:
    """Few cells that combine every two values that some cell combines.

    Greedy: among a random hundred cells with a pair that is still missing, the one with most.
    """
    rng = random.Random(seed)
    having: dict[tuple[Value, Value], list[Cell]] = {}
    for cell in cells():
        for pair in pairs(cell):
            having.setdefault(pair, []).append(cell)
    missing, chosen = set(having), []
    while missing:
        candidates = having[rng.choice(sorted(missing))]
        tried = rng.sample(candidates, min(100, len(candidates)))
        best = max(tried, key=lambda cell: len(pairs(cell) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return tuple(chosen)


@cache
def random_sample(count: int, seed: int = 0) -> tuple[Cell, ...]:
    """Cells at random."""
    return tuple(random.Random(seed).sample(list(cells()), count))

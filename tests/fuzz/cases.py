"""One random case: tables, a plan, an optimizer, and the batches of each rank; plain data."""

from __future__ import annotations

import random
from dataclasses import dataclass

TYPES = (
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@dataclass(frozen=True)
class Table:
    """A table and the features that read it."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    mean: bool = False


@dataclass(frozen=True)
class Batch:
    """The ids of one rank, by feature the bags of its samples; and their form as tensors."""

    bags: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]] | None = None
    inverse: dict[str, list[int]] | None = None
    """The bag that each sample reads, by feature; None: the bag of its own."""
    by_offsets: bool = False
    narrow: bool = False
    """True if ids and lengths are int32."""

    @property
    def num_samples(self) -> int:
        """The number of samples of every feature."""
        first = next(iter(self.bags))
        return len(self.bags[first] if self.inverse is None else self.inverse[first])

    def bag_of(self, feature: str, sample: int) -> int:
        """Return the bag of a feature that a sample reads."""
        return sample if self.inverse is None else self.inverse[feature][sample]


@dataclass(frozen=True)
class Case:
    """The work of the ranks, and the fault in it."""

    seed: int
    world: int
    tables: tuple[Table, ...]
    plan: dict[str, tuple[str, tuple[int, ...]]]
    optimizer: str
    rate: float
    steps: tuple[tuple[Batch, ...], ...]
    """Batches by step and rank."""
    sequence: bool = False
    weighted: bool = False
    distinct: bool = False
    deferred: bool = False
    fault: str | None = None
    bad_rank: int = 0
    """The rank of the fault, if it is on a single rank."""

    def __str__(self) -> str:
        kind = "sequence" if self.sequence else "weighted" if self.weighted else "pooled"
        plan = {name: f"{kind} {list(ranks)}" for name, (kind, ranks) in self.plan.items()}
        return (
            f"seed {self.seed}, {self.fault or 'sound'}, {self.world} ranks, {kind}, "
            f"{self.optimizer}, {plan}, dims {[t.dim for t in self.tables]}"
        )


def draw(seed: int, fault: str | None = None, **wanted: object) -> Case:
    """Draw a case; a fault's own ``wanted`` values replace the drawn ones."""
    rng = random.Random(seed)
    world = int(wanted.get("world") or rng.randint(1, 3))  # type: ignore[call-overload]
    sequence = bool(wanted.get("sequence", rng.random() < 0.3))
    weighted = bool(wanted.get("weighted", not sequence and rng.random() < 0.3))
    features = [f"f{i}" for i in range(rng.randint(1, 4))]
    dim_of_all = rng.choice((1, 2, 3, 4, 8))
    tables = []
    for i in range(rng.randint(1, 4)):
        read = rng.sample(features, rng.randint(1, min(2, len(features))))
        dim = dim_of_all if sequence else rng.choice((1, 2, 3, 4, 5, 8))
        mean = not sequence and rng.random() < 0.4
        tables.append(Table(f"t{i}", rng.randint(1, 12), dim, tuple(read), mean))
    keys = [*features, "unread"] if rng.random() < 0.3 else features
    keys = rng.sample(keys, len(keys))
    variable = bool(wanted.get("variable", not sequence and rng.random() < 0.2))
    steps = tuple(
        tuple(_draw_batch(rng, keys, tables, weighted, variable) for _ in range(world))
        for _ in range(rng.randint(1, 3))
    )
    return Case(
        seed=seed,
        world=world,
        tables=tuple(tables),
        plan={table.name: _place(rng, table, world) for table in tables},
        optimizer=str(wanted.get("optimizer") or rng.choice(OPTIMIZERS)),
        rate=rng.choice((0.1, 0.5)),
        steps=steps,
        sequence=sequence,
        weighted=weighted,
        distinct=sequence and rng.random() < 0.4,
        deferred=bool(wanted.get("deferred", rng.random() < 0.2)),
        fault=fault,
        bad_rank=rng.randrange(world),
    )


def _place(rng: random.Random, table: Table, world: int) -> tuple[str, tuple[int, ...]]:
    kind = rng.choice(TYPES)
    ranks = list(range(world))
    if kind == "table_wise":
        return kind, (rng.choice(ranks),)
    if kind in ("row_wise", "table_row_wise"):
        return kind, tuple(ranks[: table.rows])
    if kind in ("column_wise", "table_column_wise"):
        owners = sorted(rng.sample(ranks, rng.randint(1, world)))
        return kind, tuple(owners[: table.dim])
    if kind == "grid_shard" and world > table.rows:
        return "table_wise", (rng.choice(ranks),)
    return kind, tuple(ranks)


def _draw_batch(
    rng: random.Random, keys: list[str], tables: list[Table], weighted: bool, variable: bool
) -> Batch:
    samples = rng.choice((0, 1, 2, 5))
    bags, inverse = {}, {}
    for key in keys:
        rows = min((t.rows for t in tables if key in t.features), default=100)
        count = rng.randint(1, samples + 1) if variable else samples
        bags[key] = [
            [rng.randrange(rows) for _ in range(rng.choice((0, 0, 1, 2, 4)))] for _ in range(count)
        ]
        inverse[key] = [rng.randrange(count) for _ in range(samples)] if variable else []
    weights = {
        key: [[rng.choice((-1.0, 0.5, 2.0)) for _ in bag] for bag in of_key]
        for key, of_key in bags.items()
    }
    return Batch(
        bags,
        weights if weighted else None,
        inverse if variable else None,
        by_offsets=rng.random() < 0.3,
        narrow=rng.random() < 0.3,
    )

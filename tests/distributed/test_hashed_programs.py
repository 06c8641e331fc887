"""Random programs on tables with hashed ids, over ranks, against plain dicts of whole numbers.

A program trains, evaluates, loses batches, saves, loads under other plans, moves and resizes
tables. After each step the whole state equals the state of an `Oracle` per table. By hand, longer:

    python -m tests.distributed.test_hashed_programs --minutes 30
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.kernels.hashed.index import geometry
from recsys.modules.embedding_configs import PoolingType
from recsys.modules.hashed_ids import LFU, LRU, AtLeast, DistanceLFU, HashedIds, Probability
from recsys.modules.ids.rows import PINNED_BATCHES
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import FEATURES, shard, whole
from tests.distributed.test_hashed_ids import TYPES, HashedCase
from tests.kernels.hashed.oracle import Entry, Oracle, mix
from tests.ranks import RankPool

RULES = (
    HashedIds(),
    HashedIds(eviction=LRU(), ttl=5, seed=-3),
    HashedIds(eviction=LFU(3), admission=AtLeast(2), unknown="zero"),
    HashedIds(eviction=LFU(), ttl=7, unknown="zero", num_regions=4),
    HashedIds(eviction=DistanceLFU(2), admission=Probability(0.5), seed=2**64 - 1),
    HashedIds(eviction=None, unknown="zero"),
)
ENDS = (-(2**63), -1, 0, 1, 2**63 - 1)
START, RATE = 0.5, 2.0**-6
"""Initial weights, and the learning rate of SGD: all sums are exact in float32."""


class Table:
    """One table: who has which row, and how often a gradient was added to it.

    A row has the weights `START - RATE * (c + 1) * updates` in column c, as each id that is looked
    up gets the gradient c + 1 there.
    """

    def __init__(self, rules: HashedIds, num_rows: int) -> None:
        self.rules, self.num_rows = rules, num_rows
        _, regions = geometry(num_rows, rules.num_regions)
        self.region_rows = num_rows // regions
        self.oracle = Oracle(rules.settings(), regions, self.region_rows // 64, rules.seed)
        self.entries = self.oracle.entries
        self.updates = Counter[int]()
        self.step = 0
        self.waiting: list[int] = []
        """First steps that batches with updates to come may read."""
        self.evicted = 0

    @property
    def pin(self) -> int:
        return max(min([self.step - PINNED_BATCHES + 1, *self.waiting]), 0)

    def rows_of(self, keys: list[int], is_training: bool) -> dict[int, int]:
        """The row of each id of a batch of all ranks."""
        self.step += is_training
        rows, new, counts = self.oracle.map(keys, self.step, self.pin, is_training)
        for row, _ in new:
            self.updates[row] = 0
        self.evicted += counts[2]
        return dict(zip(keys, rows, strict=True))

    def is_shared(self, row: int) -> bool:
        return row % self.region_rows == 0

    def weight(self, row: int, column: int) -> float:
        if self.is_shared(row) and self.rules.unknown == "zero":
            return 0.0
        return START - RATE * (column + 1) * self.updates[row]


def crowd(count: int) -> list[int]:
    """Ids of one bucket of the smallest tables by the first rules."""
    oracle, found, number = Table(RULES[0], 256).oracle, list[int](), 0
    while len(found) < count:
        number += 1
        key = mix(number) - 2**63
        if oracle.place_of(key)[2:] == (64, 2):
            found.append(key)
    return found


CROWD = crowd(90)


@dataclass(frozen=True)
class ProgramCase(HashedCase):
    """Tables with sum pooling, whose weights are exact in float32."""

    sizes = (0, 9, 30, 50)
    num_ids: int = 700
    pooling: PoolingType | None = PoolingType.SUM
    weighted: bool | None = False
    hyperparameters: tuple[tuple[str, float], ...] = (("lr", RATE),)

    @property
    def deferred(self) -> bool:
        """True if the sharders choose the optimizer, whose updates wait for a step."""
        return self.optimizer is None

    def configs(self) -> list[Any]:
        rng = random.Random(self.seed + 9)
        configs = super().configs()
        for config in configs:
            config.weight_init_min = config.weight_init_max = START
            if config.ids is not None:
                config.ids = rng.choice(RULES)
                config.num_embeddings = rng.choice(self.rows)
                config.__post_init__()
        return configs

    def batches(self, step: int) -> list[KeyedJaggedTensor]:
        rng = random.Random(self.seed * 31 + step)
        batches = []
        for batch in super().batches(step):
            bags = batch.to_dict()
            parts = [bags[name].values() for name in FEATURES]
            for ids in parts[:3]:  # of hashed ids
                for i in range(len(ids)):
                    kind = rng.random()
                    if kind < 0.1:
                        ids[i] = rng.choice(ENDS)
                    elif kind < 0.3:
                        ids[i] = rng.choice(CROWD)
            batches.append(batch.with_values(torch.cat(parts)))
        return batches

    def sharders(self) -> list[Any] | None:
        if not self.deferred:
            return None
        fused = {"optimizer": "EXACT_SGD", "learning_rate": RATE, "update_mode": "deferred"}
        return [EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)]


class BackwardError(Exception):
    """Raised in the middle of a backward pass."""


class Program:
    """A sharded model and its oracle, on one rank."""

    def __init__(self, case: ProgramCase, folder: Path) -> None:
        self.case, self.folder, self.rank = case, folder, dist.get_rank()
        self.model = shard(case, sharders=case.sharders())
        self.configs = case.configs()
        self.tables = {
            config.name: Table(config.ids, config.num_embeddings)
            for config in self.configs
            if config.ids is not None
        }
        self.static = Counter[int]()
        self.batch = self.saves = 0

    # -- lookups ---------------------------------------------------------------------------------

    def ids_of(self, batches: list[KeyedJaggedTensor], config: Any) -> list[int]:
        """The ids of all ranks that a table looks up, as often as they occur."""
        found = [batch[name].values() for batch in batches for name in config.feature_names]
        return [int(one) for ids in found for one in ids]

    def map(self, batches: list[KeyedJaggedTensor]) -> dict[str, dict[int, int]]:
        return {
            config.name: self.tables[config.name].rows_of(self.ids_of(batches, config), True)
            for config in self.configs
            if config.ids is not None
        }

    def check_output(self, values: Tensor, batch: KeyedJaggedTensor, rows: Any) -> None:
        """The sum of a batch's output by column; `rows` has the row of each id by table."""
        expected: list[float] = []
        for config in self.configs:
            for name in config.feature_names:
                ids = batch[name].values().tolist()
                for column in range(config.embedding_dim):
                    if config.ids is None:
                        weights = [START - RATE * (column + 1) * self.static[i] for i in ids]
                    else:
                        table = self.tables[config.name]
                        weights = [table.weight(rows[config.name][i], column) for i in ids]
                    expected.append(sum(weights))
        assert values.sum(0).tolist() == expected

    def loss(self, values: Tensor) -> Tensor:
        """The gradient of an id is its column's number, times 1, on all ranks."""
        columns = [
            column + 1.0
            for config in self.configs
            for _ in config.feature_names
            for column in range(config.embedding_dim)
        ]
        return (values * torch.tensor(columns)).sum() * dist.get_world_size()

    def update(self, batches: list[KeyedJaggedTensor], rows: dict[str, dict[int, int]]) -> None:
        for config in self.configs:
            ids = self.ids_of(batches, config)
            if config.ids is None:
                self.static.update(ids)
            else:
                self.tables[config.name].updates.update(rows[config.name][one] for one in ids)

    def next_batches(self) -> list[KeyedJaggedTensor]:
        self.batch += 1
        return self.case.batches(self.batch)

    # -- steps of a program ------------------------------------------------------------------------

    def train(self, depth: int) -> None:
        """Seven batches, which are mapped ahead; updates come at once."""
        tables, ahead = self.model.module.ebc, deque[Any]()
        todo = [self.next_batches() for _ in range(7)]
        left = deque(todo)
        mapped = deque[Any]()
        for batches in todo:
            while len(ahead) <= depth and left:
                ctx = tables.create_context()
                own = tables.input_dist(ctx, left.popleft()[self.rank])
                ahead.append((ctx, own.wait().wait()))
            out = tables.compute_and_output_dist(*ahead.popleft()).wait()
            rows = self.map(batches)
            self.check_output(out.values().detach(), batches[self.rank], rows)
            self.loss(out.values()).backward()
            mapped.append((batches, rows))
            if self.case.deferred:
                self.model.fused_optimizer.step()
            self.update(batches, rows)

    def accumulate(self) -> None:
        """Two batches, then one update."""
        if not self.case.deferred:
            return self.train(0)
        done = []
        for _ in range(2):
            batches = self.next_batches()
            rows = self.map(batches)
            values = self.model.module.ebc(batches[self.rank]).values()
            self.check_output(values.detach(), batches[self.rank], rows)
            self.loss(values).backward()
            done.append((batches, rows))
            for table in self.tables.values():
                table.waiting.append(table.step - 3)
        self.model.fused_optimizer.step()
        for batches, rows in done:
            self.update(batches, rows)
        for table in self.tables.values():
            table.waiting.clear()
        return None

    def lose(self, raises: bool) -> None:
        """A batch without an update: its output is dropped, or its backward pass raises."""
        batches = self.next_batches()
        rows = self.map(batches)
        values = self.model.module.ebc(batches[self.rank]).values()
        self.check_output(values.detach(), batches[self.rank], rows)
        if raises and values.requires_grad:

            def fail(gradient: Tensor) -> Tensor:
                raise BackwardError

            values.register_hook(fail)
            with pytest.raises(BackwardError):
                self.loss(values).backward()
        del values
        gc.collect()

    def evaluate(self) -> None:
        """Reads known and unknown ids, and writes nothing."""
        batches = self.case.batches(self.batch + 1000)
        rows = {
            config.name: self.tables[config.name].rows_of(self.ids_of(batches, config), False)
            for config in self.configs
            if config.ids is not None
        }
        self.model.eval()
        values = self.model.module.ebc(batches[self.rank]).values()
        self.model.train()
        self.check_output(values.detach(), batches[self.rank], rows)

    def save(self, delta: bool, seed: int) -> None:
        """Save; every second time, continue in another model under another plan."""
        self.saves += 1
        save_checkpoint(self.folder, self.model, self.model.fused_optimizer, delta=delta)
        if self.saves % 2 == 0:
            plan = self.case.plan(seed)
            self.model = shard(self.case, plan=plan, sharders=self.case.sharders())
            load_checkpoint(self.folder, self.model, self.model.fused_optimizer)

    def reshard(self, seed: int) -> None:
        self.model.reshard(self.case.plan(seed))

    def resize(self, rows: int, seed: int) -> None:
        """Another number of rows: the ids with a row keep their weights, use and counts."""
        save_checkpoint(self.folder, self.model, self.model.fused_optimizer)
        old, batch, saves, static = self.tables, self.batch, self.saves, self.static
        self.case = replace(self.case, rows=(rows,))
        self.__init__(self.case, self.folder)  # type: ignore[misc]
        self.batch, self.saves, self.static = batch, saves, static
        load_checkpoint(
            self.folder, self.model, self.model.fused_optimizer, resize=list(self.tables)
        )
        state = self.state()
        for name, table in self.tables.items():
            path, before = f"ebc.embedding_bags.{name}.", old[name]
            table.step, now = before.step, before.step + 1  # of the next batch
            before.step = now
            row_of = {
                entry.id: row
                for row, entry in before.entries.items()
                if before.oracle.is_alive(entry, now, before.pin)
            }
            scores = {
                key: before.oracle.score(before.entries[row], now) for key, row in row_of.items()
            }
            ids, used = (state[f"{path}index.{key}"].tolist() for key in ("ids", "last_used"))
            kept = {ids[row]: row for row in range(table.num_rows) if used[row] > 0}
            assert len(kept) == sum(map(bool, used))
            assert kept.keys() <= row_of.keys()
            for key, row in kept.items():
                assert row // 64 * 64 == table.oracle.place_of(key)[2]
                entry = before.entries[row_of[key]]
                table.entries[row] = Entry(key, entry.last_used, entry.seen)
                table.updates[row] = before.updates[row_of[key]]
            for key in row_of.keys() - kept.keys():
                line = table.oracle.place_of(key)[2]
                stayed = [one for one, row in kept.items() if row // 64 * 64 == line]
                assert len(stayed) >= 63
                assert scores[key] <= min(scores[one] for one in stayed)
            for row in range(0, table.num_rows, table.region_rows):  # of unknown ids
                weight = float(state[f"{path}weight"][row, 0])
                table.updates[row] = round((START - weight) / RATE)
        self.reshard(seed)

    # -- the whole state ---------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        found = self.model.state_dict()
        return {name: whole(value) for name, value in found.items() if name.startswith("ebc.")}

    def check(self) -> None:
        state = self.state()
        for config in self.configs:
            path = f"ebc.embedding_bags.{config.name}."
            weight = state[path + "weight"]
            columns = torch.arange(1, config.embedding_dim + 1)
            if config.ids is None:
                counts = torch.tensor([self.static[row] for row in range(len(weight))])
                assert torch.equal(weight, START - RATE * columns * counts[:, None])
                continue
            table = self.tables[config.name]
            index = {name: state.get(f"{path}index.{name}") for name in INDEX}
            assert int(index["steps"]) == table.step
            used, ids = index["last_used"].tolist(), index["ids"].tolist()
            rows = sorted(table.entries)
            assert [row for row, one in enumerate(used) if one] == rows
            entries = [table.entries[row] for row in rows]
            assert [(ids[row], used[row]) for row in rows] == [(e.id, e.last_used) for e in entries]
            if index["seen"] is not None:
                assert index["seen"][rows].tolist() == [entry.seen for entry in entries]
            if index["sketch"] is not None:
                cells = index["sketch"].view(-1, 64)
                buckets = [line // 16 + home for line, home in table.oracle.cells]
                assert cells[buckets].tolist() == [*table.oracle.cells.values()]
                assert int(cells.sum()) == sum(map(sum, table.oracle.cells.values()))
            if table.rules.unknown == "shared":
                rows += range(0, table.num_rows, table.region_rows)
            counts = torch.tensor([table.updates[row] for row in rows])
            assert torch.equal(weight[rows], START - RATE * columns * counts[:, None])


INDEX = ("steps", "ids", "last_used", "seen", "sketch")

Step = tuple[str, tuple[Any, ...]]
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("train"), st.tuples(st.integers(0, 3))),
    st.tuples(st.just("accumulate"), st.just(())),
    st.tuples(st.just("lose"), st.tuples(st.booleans())),
    st.tuples(st.just("evaluate"), st.just(())),
    st.tuples(st.just("save"), st.tuples(st.booleans(), st.integers(0, 9))),
    st.tuples(st.just("reshard"), st.tuples(st.integers(0, 9))),
    st.tuples(st.just("resize"), st.tuples(st.sampled_from([256, 512, 1024]), st.integers(0, 9))),
)


def _play(case: ProgramCase, steps: list[Step], folder: Path) -> int:
    program = Program(case, folder)
    for name, arguments in [("train", (0,)), *steps, ("train", (2,)), ("evaluate", ())]:
        getattr(program, name)(*arguments)
        program.check()
    return sum(table.evicted for table in program.tables.values())


def types_of(world_size: int) -> tuple[Any, ...]:
    return TYPES if world_size > 1 else TYPES[:3]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("deferred", [False, True])
@settings(
    max_examples=5, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(seed=st.integers(0, 1000), steps=st.lists(STEPS, max_size=6))
def test_programs_equal_plain_dicts(
    ranks: RankPool, world_size: int, deferred: bool, seed: int, steps: list[Step]
) -> None:
    optimizer = None if deferred else torch.optim.SGD
    case = ProgramCase(seed, world_size, types=types_of(world_size), optimizer=optimizer)
    with tempfile.TemporaryDirectory() as folder:
        ranks(world_size, _play, case, steps, Path(folder), timeout=120)


def main() -> None:
    """Play random programs until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end, rng, count, evicted = time.monotonic() + 60 * options.minutes, random.Random(), 0, 0
    rng.seed(options.seed)
    pool = RankPool()
    try:
        while time.monotonic() < end:
            seed, world_size = rng.randrange(10**6), rng.choice([1, 2, 4])
            optimizer = rng.choice([None, torch.optim.SGD])
            case = ProgramCase(seed, world_size, types=types_of(world_size), optimizer=optimizer)
            made = {
                "train": lambda: (rng.randrange(4),), "accumulate": tuple, "evaluate": tuple,
                "lose": lambda: (rng.random() < 0.5,), "reshard": lambda: (rng.randrange(10),),
                "save": lambda: (rng.random() < 0.5, rng.randrange(10)),
                "resize": lambda: (rng.choice([256, 512, 1024]), rng.randrange(10)),
            }  # fmt: skip
            names = rng.choices(list(made), k=rng.randrange(12))
            steps = [(name, made[name]()) for name in names]
            with tempfile.TemporaryDirectory() as folder:
                try:
                    evicted += pool(world_size, _play, case, steps, Path(folder), timeout=200)[0]
                except BaseException:
                    print(f"failed: {case}, {steps}")
                    raise
            count += 1
    finally:
        pool.close()
    print(f"{count} programs, {evicted} evictions")


if __name__ == "__main__":
    main()

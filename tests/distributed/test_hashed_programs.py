"""Random programs on tables with hashed ids, over ranks, against plain dicts of whole numbers.

A program trains, evaluates, loses batches, saves, loads under other plans, moves and resizes
tables. After each step the whole state equals that of `hashed_oracle.PlainTable`. By hand, longer:

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
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import FEATURES, shard, whole
from tests.distributed.hashed_oracle import RATE, START, PlainTable, mix
from tests.distributed.test_hashed_ids import TYPES, HashedCase
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


def crowd(rules: HashedIds, count: int) -> list[int]:
    """Ids of one bucket of the smallest tables, which has 16 rows."""
    table = PlainTable(rules, 256, geometry(256, rules.num_regions)[1])
    found, number = [], 0
    while len(found) < count:
        number += 1
        key = mix(number) - 2**63
        if table.place(key)[:2] == (1, 2):
            found.append(key)
    return found


CROWD = crowd(HashedIds(), 40)


@dataclass(frozen=True)
class ProgramCase(HashedCase):
    """Tables with sum pooling, whose weights are exact in float32."""

    sizes = (0, 2, 9, 17)
    pooling: PoolingType | None = PoolingType.SUM
    weighted: bool | None = False
    hyperparameters: tuple[tuple[str, float], ...] = (("lr", RATE),)

    @property
    def deferred(self) -> bool:
        """Whether the sharders choose the optimizer, whose updates wait for a step."""
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
        self.oracle = {
            config.name: PlainTable(
                config.ids, config.num_embeddings,
                geometry(config.num_embeddings, config.ids.num_regions)[1],
            )
            for config in self.configs
            if config.ids is not None
        }  # fmt: skip
        self.static = Counter[int]()
        self.batch = self.saves = 0

    # -- lookups ---------------------------------------------------------------------------------

    def ids_of(self, batches: list[KeyedJaggedTensor], config: Any) -> list[int]:
        """The ids of all ranks that a table looks up, as often as they occur."""
        found = [batch[name].values() for batch in batches for name in config.feature_names]
        return [int(one) for ids in found for one in ids]

    def map(self, batches: list[KeyedJaggedTensor]) -> dict[str, dict[int, int]]:
        return {
            config.name: self.oracle[config.name].train(self.ids_of(batches, config))
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
                        table = self.oracle[config.name]
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
                self.oracle[config.name].update([rows[config.name][one] for one in ids])

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
            for table in self.oracle.values():
                table.waiting.append(table.step - 3)
        self.model.fused_optimizer.step()
        for batches, rows in done:
            self.update(batches, rows)
        for table in self.oracle.values():
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
            name: {one: table.read(one) for one in self.ids_of(batches, config)}
            for config in self.configs
            if (name := config.name) in self.oracle
            for table in [self.oracle[name]]
        }
        self.model.eval()
        values = self.model.module.ebc(batches[self.rank]).values()
        self.model.train()
        self.check_output(values.detach(), batches[self.rank], rows)

    def save(self, delta: bool, seed: int) -> None:
        """Saves; every second time the job goes on in another model under another plan."""
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
        old = self.oracle
        self.case = replace(self.case, rows=(rows,))
        batch, saves, static = self.batch, self.saves, self.static
        self.__init__(self.case, self.folder)  # type: ignore[misc]
        self.batch, self.saves, self.static = batch, saves, static
        load_checkpoint(
            self.folder, self.model, self.model.fused_optimizer, resize=list(self.oracle)
        )
        state = self.state()
        for name, table in self.oracle.items():
            before, step = old[name], old[name].step
            before.step += 1  # of the next batch, for expiry and scores
            row_of = {
                key: row
                for row, key in before.ids.items()
                if before.last_used[row] >= before.oldest
            }
            index = f"ebc.{self.case_name}.{name}.index."
            ids, used = state[f"{index}ids"].tolist(), state[f"{index}last_used"].tolist()
            kept = {row: ids[row] for row in range(table.rows) if used[row] > 0}
            assert len(set(kept.values())) == len(kept)
            assert {*kept.values()} <= row_of.keys()
            table.step, table.ids = step, kept
            for row, key in kept.items():
                assert table.place(key)[0] == row // LINE_ROWS
                table.last_used[row] = before.last_used[row_of[key]]
                table.updates[row] = before.updates[row_of[key]]
                if before.seen:
                    table.seen[row] = before.seen[row_of[key]]
            for key in row_of.keys() - {*kept.values()}:
                line = table.place(key)[0]
                in_line = [one for row, one in kept.items() if row // LINE_ROWS == line]
                assert len(in_line) >= 63
                scores = [before.score(row_of[one]) for one in in_line]
                assert before.score(row_of[key]) <= min(scores)
            for row in range(0, table.rows, table.lines * LINE_ROWS):  # a new shared row
                weight = float(state[f"ebc.{self.case_name}.{name}.weight"][row, 0])
                table.updates[row] = round((START - weight) / RATE)
        self.reshard(seed)

    # -- the whole state ---------------------------------------------------------------------------

    @property
    def case_name(self) -> str:
        return "embedding_bags"

    def state(self) -> dict[str, Tensor]:
        found = self.model.state_dict()
        return {name: whole(value) for name, value in found.items() if name.startswith("ebc.")}

    def check(self) -> None:
        state = self.state()
        for config in self.configs:
            path = f"ebc.{self.case_name}.{config.name}."
            weight = state[path + "weight"]
            columns = torch.arange(1, config.embedding_dim + 1)
            if config.ids is None:
                counts = torch.tensor([self.static[row] for row in range(len(weight))])
                assert torch.equal(weight, START - RATE * columns * counts[:, None])
                continue
            table = self.oracle[config.name]
            index = {name: state.get(f"{path}index.{name}") for name in INDEX}
            assert int(index["steps"]) == table.step
            used = index["last_used"].tolist()
            assert {row: one for row, one in enumerate(used) if one} == table.last_used
            ids = index["ids"].tolist()
            assert {row: ids[row] for row in table.last_used} == table.ids
            if index["seen"] is not None:
                seen = index["seen"].tolist()
                assert {row: seen[row] for row in table.seen} == table.seen
            if index["sketch"] is not None:
                cells = index["sketch"].view(-1, 64).tolist()
                assert {i: own for i, own in enumerate(cells) if any(own)} == {
                    i: own for i, own in table.sketch.items() if any(own)
                }
            rows = [row for row in range(table.rows) if row in table.ids]
            if table.rules.unknown == "shared":
                rows += [row for row in range(table.rows) if table.is_reserved(row)]
            counts = torch.tensor([table.updates[row] for row in rows])
            assert torch.equal(weight[rows], START - RATE * columns * counts[:, None])


INDEX = ("steps", "ids", "last_used", "seen", "sketch")
LINE_ROWS = 64

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
    return sum(table.evicted for table in program.oracle.values())


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

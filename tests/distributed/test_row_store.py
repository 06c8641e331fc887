"""Tables with rows on the disk train as tables that are large enough for all ids, bit for bit."""

from __future__ import annotations

import random
import tempfile
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from recsys.distributed.checkpoint import (
    load_checkpoint,
    read_hashed_table,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.dmp_collection import DMPCollection
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from recsys.distributed.types import ShardingType
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.hashed_ids import LFU, LRU, DistanceLFU, HashedIds
from recsys.modules.ids.row_log import split_records
from recsys.optim import Adagrad, Adam, RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import shard
from tests.distributed.test_hashed_ids import HashedCase
from tests.ranks import RankPool

LARGE = 16_384
EVICTIONS = (LRU(), LFU(3), LFU(), DistanceLFU(2))
OPTIMIZERS: tuple[Any, ...] = (Adagrad, RowWiseAdagrad, Adam, torch.optim.SGD, None)
"""None: the sharders choose one, whose updates wait for a step."""


@dataclass(frozen=True)
class OverflowCase(HashedCase):
    """Tables whose initial values do not depend on their rows; unknown ids read zeros.

    Rounding must not depend on a row's position among the rows of a batch: powers of Adam's betas
    are exact here.
    """

    sizes = (0, 3, 6)
    num_ids: int = 1500
    types: tuple[ShardingType, ...] = (
        ShardingType.TABLE_WISE,
        ShardingType.ROW_WISE,
        ShardingType.TABLE_ROW_WISE,
    )
    capacity: int = 512
    folder: str | None = None

    def configs(self) -> list[Any]:
        configs = super().configs()
        for config in configs:
            config.weight_init_min, config.weight_init_max = -0.5, 0.5
            if config.ids is not None:
                eviction = random.Random(config.name).choice(EVICTIONS)
                config.ids = HashedIds(
                    eviction=eviction, unknown="zero", num_regions=4, overflow=self.folder
                )
                config.num_embeddings = self.capacity if self.folder else LARGE
                config.__post_init__()
        return configs

    def sharders(self) -> list[Any] | None:
        if self.optimizer is not None:
            return None
        fused = {"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.1, "update_mode": "deferred"}
        return [EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)]


def case_of(seed: int, world_size: int, optimizer: Any, **changes: Any) -> OverflowCase:
    changes.setdefault("pooled", seed % 3 > 0)
    changes.setdefault("capacity", 256 * world_size)
    if optimizer is Adam:
        changes["hyperparameters"] = (("lr", 0.01), ("betas", (0.5, 0.5)))
    return OverflowCase(seed, world_size, optimizer=optimizer, **changes)


def rows_by_id(model: Any, table: str) -> dict[int, list[Tensor]]:
    """Weights and optimizer state of each id of this rank, in the table or on the disk."""
    found: dict[int, list[Tensor]] = {}
    for shard_ in model.module.ebc._stages.tables[table].shards:
        index, states = shard_.index, sorted(shard_.states.items())
        arrays = [shard_.parameter.detach(), *(state for _, state in states if state.dim())]
        for row in index.last_used.nonzero().flatten().tolist():
            found[int(index.ids[row])] = [array[row].reshape(-1) for array in arrays]
        if index.log is not None and len(index.log):
            numbers = index.log._numbers._index
            ids = numbers.ids[numbers.last_used > 0]
            values = split_records(index.log.read(ids), index.log.fields)
            for i, id_ in enumerate(ids.tolist()):
                assert id_ not in found
                found[id_] = [values[field.name][i] for field in index.log.fields]
    return found


def stats_of(model: Any) -> list[Any]:
    shards = [s for table in model.module.ebc._stages.tables.values() for s in table.shards]
    return [s.index.stats() for s in shards if s.index is not None]


def logged(model: Any) -> int:
    shards = [s for table in model.module.ebc._stages.tables.values() for s in table.shards]
    return sum(len(s.index.log) for s in shards if s.index is not None and s.index.log is not None)


class Program:
    """A table with an overflow and one without, of the same ids, on one rank."""

    def __init__(self, case: OverflowCase, folder: Path) -> None:
        self.cases = replace(case, folder=str(folder / "rows")), case
        self.folder, self.rank = folder, dist.get_rank()
        self.models = [shard(one, sharders=one.sharders()) for one in self.cases]
        self.batch = self.saves = 0

    def next_batch(self) -> KeyedJaggedTensor:
        self.batch += 1
        return self.cases[0].batches(self.batch)[self.rank]

    def values(self, output: Any) -> Tensor:
        if self.cases[0].pooled:
            return output.values()  # type: ignore[no-any-return]
        return torch.cat([jagged.values() for jagged in output.values()])

    def train(self, depth: int, count: int = 7) -> None:
        """Batches that are mapped ahead."""
        batches = [self.next_batch() for _ in range(count)]
        outputs = [self.train_one(model, batches, depth) for model in self.models]
        for received, expected in zip(*outputs, strict=True):
            assert torch.equal(received, expected)

    def train_one(self, model: Any, batches: list[Any], depth: int) -> list[Tensor]:
        tables, ahead, left, found = model.module.ebc, deque[Any](), deque(batches), []
        for _ in batches:
            while len(ahead) <= depth and left:
                ctx = tables.create_context()
                ahead.append((ctx, tables.input_dist(ctx, left.popleft()).wait().wait()))
            output = tables.compute_and_output_dist(*ahead.popleft()).wait()
            values = self.values(output)
            (values * values.detach().sin()).sum().backward()
            found.append(values.detach())
            if self.cases[0].optimizer is None:
                model.fused_optimizer.step()
        return found

    def accumulate(self) -> None:
        """Two batches, then one update."""
        batches = [self.next_batch() for _ in range(2)]
        for model in self.models:
            for batch in batches:
                values = self.values(model.module.ebc(batch))
                (values * values.detach().sin()).sum().backward()
            if self.cases[0].optimizer is None:
                model.fused_optimizer.step()

    def evaluate(self, has_gradients: bool) -> None:
        """Reads rows in the table, on the disk, and of unknown ids, and changes nothing."""
        batches = [self.cases[0].batches(self.batch - i)[self.rank] for i in range(-2, 30, 7)]
        before = rows_of_models(self.models[:1])
        outputs = []
        for model in self.models:
            model.eval()
            with torch.set_grad_enabled(has_gradients):
                tables, ahead = model.module.ebc, list[Any]()
                for batch in batches:
                    ctx = tables.create_context()
                    ahead.append((ctx, tables.input_dist(ctx, batch).wait().wait()))
                found = [tables.compute_and_output_dist(*one).wait() for one in ahead]
                outputs.append([self.values(one).detach() for one in found])
            model.train()
        for received, expected in zip(*outputs, strict=True):
            assert torch.equal(received, expected)
        assert_equal_rows(rows_of_models(self.models[:1]), before)

    def save(self, goes_aside: bool, seed: int) -> None:
        """Save, and continue in other models under another plan."""
        self.saves += 1
        models = []
        for name, case, model in zip("ab", self.cases, self.models, strict=True):
            path = self.folder / name
            if goes_aside:
                save_checkpoint_async(path, model, model.fused_optimizer).wait()
            else:
                save_checkpoint(path, model, model.fused_optimizer)
            other = shard(case, plan=case.plan(seed), sharders=case.sharders())
            load_checkpoint(path, other, other.fused_optimizer)
            models.append(other)
        self.models = models

    def check(self) -> None:
        assert_equal_rows(*(rows_of_models([model]) for model in self.models))
        assert {stats.refused for model in self.models for stats in stats_of(model)} <= {0}


def rows_of_models(models: list[Any]) -> dict[str, dict[int, list[Tensor]]]:
    return {
        name: {id_: [part.clone() for part in parts] for id_, parts in rows_by_id(m, name).items()}
        for m in models
        for name, table in m.module.ebc._stages.tables.items()
        if table.rules is not None
    }


def assert_equal_rows(received: Any, expected: Any) -> None:
    assert received.keys() == expected.keys()
    for name, rows in expected.items():
        assert received[name].keys() == rows.keys()
        for id_, parts in rows.items():
            assert all(map(torch.equal, received[name][id_], parts)), (name, id_)


Step = tuple[str, tuple[Any, ...]]
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("train"), st.tuples(st.integers(0, 3))),
    st.tuples(st.just("accumulate"), st.just(())),
    st.tuples(st.just("evaluate"), st.tuples(st.booleans())),
    st.tuples(st.just("save"), st.tuples(st.booleans(), st.integers(0, 9))),
)


def _play(case: OverflowCase, steps: list[Step], folder: Path) -> int:
    program = Program(case, folder)
    program.train(1, count=80)
    found = 0
    for name, arguments in [*steps, ("train", (2,)), ("evaluate", (False,)), ("train", (0,))]:
        getattr(program, name)(*arguments)
        program.check()
        found = max(found, logged(program.models[0]))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(
    max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(seed=st.integers(0, 1000), steps=st.lists(STEPS, min_size=2, max_size=5))
def test_programs_equal_a_large_table(
    ranks: RankPool, world_size: int, optimizer: Any, seed: int, steps: list[Step]
) -> None:
    case = case_of(seed, world_size, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        found = ranks(world_size, _play, case, steps, Path(folder), timeout=120)
        assert sum(found) > 20
        assert not [*(Path(folder) / "rows").iterdir()]


def _save_and_read(case: OverflowCase, folder: Path) -> int:
    program = Program(case, folder)
    program.train(1, count=120)
    program.check()
    program.save(False, seed=1)
    program.check()
    if program.rank == 0:
        for config in case.configs():
            if config.ids is not None:
                found = [read_hashed_table(folder / name, config.name) for name in "ab"]
                assert torch.equal(found[0].ids, found[1].ids)
                assert torch.equal(found[0].values, found[1].values)
    return logged(program.models[0])


def _load_and_train(case: OverflowCase, folder: Path, count: int) -> int:
    program = Program(case, folder)
    program.batch = count
    for model, name in zip(program.models, "ab", strict=True):
        load_checkpoint(folder / name, model, model.fused_optimizer)
    program.check()
    found = logged(program.models[0])
    program.train(3)
    program.check()
    for model, name in zip(program.models, "ab", strict=True):
        save_checkpoint(folder / name, model, model.fused_optimizer)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_checkpoint_loads_on_other_ranks(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    """Every row on the disk of a rank is afterwards in the table or on the disk of one rank."""
    types = (ShardingType.ROW_WISE, ShardingType.TABLE_WISE)
    optimizer = (Adam, RowWiseAdagrad, None)[seed]
    case = case_of(seed, 2, optimizer, types=types, capacity=1024, num_ids=4000)
    saved = sum(ranks(2, _save_and_read, case, tmp_path, timeout=60))
    assert saved > 20
    for i, world_size in enumerate((1, 4, 2)):
        other = replace(case, world_size=world_size)
        loaded = sum(ranks(world_size, _load_and_train, other, tmp_path, 100 * i, timeout=60))
        assert loaded == saved or i


PIPELINES = (
    TrainPipelineBase,
    TrainPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
)


class _Loss(torch.nn.Module):
    """The loss of a sharded model, as pipelines take it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        values, _ = self.model(batch)
        return (values * values.detach().sin()).sum(), values.detach()


@torch.no_grad()
def _read(model: _Loss, batches: list[KeyedJaggedTensor]) -> Tensor:
    model.eval()
    values = model(batches[dist.get_rank()])[1]
    model.train()
    return values


def _run_pipelines(case: OverflowCase, folder: Path) -> list[int]:
    small = replace(case, folder=str(folder / "rows"))
    found, cpu = [], torch.device("cpu")
    for kind in PIPELINES:
        outputs = []
        for one in (small, case):
            model = _Loss(shard(one))
            dense = torch.optim.SGD(model.model.module.over.parameters(), lr=0.0)
            train = kind(model, dense, cpu)
            evaluate = EvalPipelineSparseDist(model, dense, cpu)
            values = []
            for first in (0, 40):
                model.train()
                batches = iter([one.batches(first + i)[dist.get_rank()] for i in range(40)])
                for i in range(40):
                    values.append(train.progress(batches))
                    if i % 9 == 8:  # batches that are mapped ahead wait meanwhile
                        values.append(_read(model, one.batches(first + i // 2)))
                model.eval()
                batches = iter([one.batches(first + i * 4)[dist.get_rank()] for i in range(8)])
                values += [evaluate.progress(batches) for _ in range(8)]
            outputs.append(values)
            if one is small:
                found.append(logged(model.model))
                assert {stats.refused for stats in stats_of(model.model)} <= {0}
        for received, expected in zip(*outputs, strict=True):
            assert torch.equal(received, expected)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("pooled", [True, False])
def test_pipelines_equal_a_large_table(
    ranks: RankPool, world_size: int, pooled: bool, tmp_path: Path
) -> None:
    case = case_of(4, world_size, RowWiseAdagrad, pooled=pooled)
    for found in ranks(world_size, _run_pipelines, case, tmp_path, timeout=100):
        assert min(found) > 20


def _average(folder: str) -> None:
    rules = HashedIds(overflow=folder)
    tables = [EmbeddingBagConfig(64, 4, "t", feature_names=["a"], ids=rules)]
    with pytest.raises(ValueError, match=r"A DMPCollection needs all rows.*'t'"):
        DMPCollection(
            EmbeddingBagCollection(tables=tables),
            device=torch.device("cpu"),
            plan=None,
            world_size=2,
            sharding_group_size=1,
            global_pg=dist.group.WORLD,
        )


def test_tables_that_are_averaged_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, _average, str(tmp_path))

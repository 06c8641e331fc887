"""One random sequence of extensions, training, saves, loads and services, compared with dicts."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recsys import DistributedModelParallel, EmbeddingBagCollection
from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recsys.features import Categorical, FeatureSpec, Hashed
from recsys.inference import Predictor, package, quantize_embeddings
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.optim.keyed import KeyedOptimizer
from tests.distributed.cases import whole
from tests.distributed.checkpoint.test_hashed import line_of
from tests.features.plain import fnv, signed
from tests.ranks import RankPool

DIM = 8
_NUM_VALUES = 42
_REGION_ROWS = 64
"""Rows of a region of tables with hashed ids, which have few rows."""
_KINDS = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.DATA_PARALLEL,
)


@dataclass
class Expected:
    """Knowledge of the oracle: values in the order of their rows, their ages and their rows.

    A table with hashed ids has an unknown row for each region, `unknown`, `unknown1` and so on.
    """

    values: list[Any]
    ages: list[int]
    hashed_rows: int = 0
    """Rows of a table with hashed ids; 0: the table has a vocabulary."""
    rows: dict[Any, list[float]] = field(default_factory=dict)

    @classmethod
    def of_counts(cls, counts: Counter[Any], min_count: int, max_size: int | None) -> Expected:
        kept = [value for value, count in counts.items() if count >= min_count]
        kept.sort(key=lambda value: (-counts[value], value))
        kept = kept[:max_size]
        return cls(kept, [0] * len(kept))

    def extended(
        self, counts: Counter[Any], min_count: int, max_size: int | None, retire_after: int | None
    ) -> Expected:
        new = [v for v, n in counts.items() if n >= min_count and v not in self.values]
        new.sort(key=lambda value: (-counts[value], value))
        values = list(self.values)
        ages = [0 if v in counts else a + 1 for v, a in zip(values, self.ages, strict=True)]
        by_age = sorted(range(len(values)), key=lambda place: -ages[place])
        retired = [p for p in by_age if retire_after is not None and ages[p] >= retire_after]
        room = len(new) if max_size is None else max(max_size - len(values), 0) + len(retired)
        for value, place in zip(new[:room], [*retired, *[None] * len(new)], strict=False):
            if place is None:
                values.append(value)
                ages.append(0)
            else:
                values[place], ages[place] = value, 0
        return Expected(values, ages)


@dataclass
class State:
    """A model with its spec, and the expectations of the oracle."""

    spec: FeatureSpec
    model: Any
    optimizer: KeyedOptimizer
    expected: Expected


class Life:
    """A random sequence.

    Args:
        seed: Seed of the sequence.
        folder: Folder of the checkpoints, shared by the ranks.
        wrap: Function that shards a model; each call may choose another plan.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        wrap: Callable[[Any, np.random.Generator], Any] = lambda model, random: (
            DistributedModelParallel(model)
        ),
    ) -> None:
        self.random, self.folder, self._wrap = np.random.default_rng(seed), folder, wrap
        self.kind = [str, int][seed % 2]
        self.min_count = int(self.random.integers(1, 3))
        self.max_size = [None, 6, 12][int(self.random.integers(3))]
        self.retire_after = [None, 1, 2][int(self.random.integers(3))]
        self.column = Categorical("item", min_count=self.min_count, max_size=self.max_size)
        self.saved: list[tuple[Path, FeatureSpec, bool, Expected]] = []
        self.has_chain = False
        data = self._data()
        spec = FeatureSpec([self.column]).fit({"item": data})
        expected = Expected.of_counts(Counter(data), self.min_count, self.max_size)
        if self.random.integers(4) == 0:
            spec = FeatureSpec([Hashed("item", rows=256, growing=True)]).fit({"item": data})
            expected = _hashed(256)
        self.now = self._new(spec, expected)
        self._note_all()

    def _data(self) -> list[Any]:
        first = int(self.random.integers(0, 30))
        numbers = self.random.integers(first, first + 12, int(self.random.integers(1, 30)))
        return [self._value(int(number)) for number in numbers]

    def _value(self, number: int) -> Any:
        return f"v{number}" if self.kind is str else number * 2**40

    def _new(self, spec: FeatureSpec, expected: Expected) -> State:
        torch.manual_seed(int(self.random.integers(2**31)))
        model = EmbeddingBagCollection(tables=spec.tables(DIM))
        apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.5})
        model = self._wrap(model, self.random)
        return State(spec, model, model.fused_optimizer, expected)

    def rows(self, state: State) -> dict[Any, list[float]]:
        """Return weights and optimizer state by value, looked up in the whole table."""
        weight, momentum = _whole(state.model, state.optimizer)
        both = torch.cat([weight, momentum.reshape(len(weight), -1)], 1).tolist()
        if not state.expected.hashed_rows:
            names = state.spec.values_of("item", np.arange(len(weight))).tolist()
            names[:2] = ["missing", "unknown"]
            return dict(zip(names, both, strict=True))
        values = {_id_of(value): value for value in map(self._value, range(_NUM_VALUES))}
        found = {_unknown(i): row for i, row in enumerate(both[::_REGION_ROWS])}
        index = [_index(state.model, name).tolist() for name in ("ids", "last_used")]
        for row, id_, used in zip(both, *index, strict=True):
            if used:
                assert values[id_] not in found
                found[values[id_]] = row
        return found

    def _note_all(self) -> None:
        self.now.expected.rows = self.rows(self.now)

    def check(self) -> None:
        """Compare the model with the expectations."""
        if not self.now.expected.hashed_rows:
            values = self.now.spec.fitted.vocabularies["item"]
            assert values.values.to_pylist() == self.now.expected.values
            assert values.ages.tolist() == self.now.expected.ages
        assert self.rows(self.now) == self.now.expected.rows

    # -- steps -------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train on some values: others keep their rows, and lookups read the rows of values."""
        data = self._data()
        batch = self.now.spec.transform({"item": data}).sparse_features
        expected = self.now.expected
        assert self._answers(data) == [self._row_of(value)[:DIM] for value in data]
        self.now.model(batch).values().pow(2).sum().backward()
        trained, before = self.rows(self.now), expected.rows
        touched = {v if v in before or expected.hashed_rows else "unknown" for v in data}
        assert trained.keys() == before.keys() | touched
        assert {v: r for v, r in trained.items() if v not in touched} == {
            v: r for v, r in before.items() if v not in touched
        }
        expected.rows = trained

    def _answers(self, data: list[Any]) -> list[list[float]]:
        """Return the pooled row of each value, without training."""
        with torch.no_grad():
            features = self.now.spec.transform({"item": data}).sparse_features
            answers: list[list[float]] = self.now.model(features).values().tolist()
        return answers

    def _row_of(self, value: Any) -> list[float]:
        """Return the row that a value reads, known or not."""
        expected, name = self.now.expected, "unknown"
        if value not in expected.rows and expected.hashed_rows:
            regions = _regions(expected.hashed_rows)
            index = SimpleNamespace(seed=0, num_regions=regions, lines=1)
            name = _unknown(line_of(_id_of(value), index))
        return expected.rows.get(value, expected.rows[name])

    def serve(self) -> None:
        """Answer raw rows, also unknown and missing ones, by the model and by some packages."""
        data = [*self._data(), None, self._value(0)]
        trained = self._answers(data)
        zeros = [0.0] * DIM
        missing = self.now.expected.rows.get("missing", zeros)[:DIM]
        assert trained == [missing if v is None else self._row_of(v)[:DIM] for v in data]
        if self.random.integers(4):
            return  # a package takes as long as a life
        served = quantize_embeddings(self.now.model, torch.float32, dst=0)
        folder = self.folder / f"models/{self.random.integers(2**62)}"
        if dist.is_initialized() and dist.get_rank():
            return
        version = package(
            served, folder, {"item": data}, spec=self.now.spec, programs=["torchscript"]
        )
        assert torch.as_tensor(Predictor(version)({"item": data})["item"]).tolist() == trained

    def save(self) -> None:
        """Save in full or as a delta, with or without the spec."""
        is_delta, has_spec = bool(self.random.integers(2)), bool(self.random.integers(2))
        spec = self.now.spec if has_spec else None
        save_checkpoint(
            self.folder, self.now.model, self.now.optimizer, spec=spec, delta=is_delta, keep=None
        )
        number = len(self.saved) + 1
        path = self.folder / f"step-{number}"
        assert path.is_dir()
        self.saved.append((path, self.now.spec, has_spec, copy.deepcopy(self.now.expected)))

    def load(self) -> None:
        """Load any version into a new model of its fit."""
        if self.saved:
            path, spec, _, expected = self.saved[int(self.random.integers(len(self.saved)))]
            self.now = self._new(spec, copy.deepcopy(expected))
            load_checkpoint(path, self.now.model, self.now.optimizer)

    def extend(self) -> None:
        """Extend the spec, and load the rows by value."""
        if self.now.expected.hashed_rows:
            return
        self.save()
        data = self._data()
        if self.now.spec.partial({"item": data}).digest() in self.now.spec.fitted.digests:
            return  # by chance the data of an earlier day, which `extend` refuses
        rules = self.min_count, self.max_size, self.retire_after
        spec = self.now.spec.extend({"item": data}, retire_after=self.retire_after).spec
        self._load_by_value(spec, self.now.expected.extended(Counter(data), *rules))

    def forget(self) -> None:
        """Remove some values; the last ones take their rows."""
        if self.now.expected.hashed_rows:
            return
        self.save()
        expected = copy.deepcopy(self.now.expected)
        removed = [v for v in expected.values if self.random.integers(4) == 0]
        spec = self.now.spec.forget({"item": [*removed, *removed[:1]]})
        both = zip(expected.values, expected.ages, strict=True)
        size = len(expected.values) - len(removed)
        kept = [(value, age) for value, age in both if value not in removed]
        stay = {value for value in expected.values[:size] if value not in removed}
        tail = iter([pair for pair in kept if pair[0] not in stay])
        of_value = dict(kept)
        pairs = [
            (value, of_value[value]) if value in stay else next(tail)
            for value in expected.values[:size]
        ]
        expected.values, expected.ages = [v for v, _ in pairs], [a for _, a in pairs]
        self._load_by_value(spec, expected)

    def refit(self) -> None:
        """Fit a new spec from scratch, of another order, and load the rows by value."""
        if self.saved:
            data = self._data()
            spec = FeatureSpec([self.column]).fit({"item": data})
            expected = Expected.of_counts(Counter(data), self.min_count, self.max_size)
            self._load_by_value(spec, expected)

    def hash(self) -> None:
        """Give a saved vocabulary, or hashed ids of any number of rows, to a hashed table."""
        self.save()
        rows = _REGION_ROWS * int(self.random.choice([4, 8, 16]))
        column = Hashed("item", rows=rows, growing=True)
        self._load_by_value(FeatureSpec([column]).fit({"item": self._data()}), _hashed(rows))

    def _load_by_value(self, spec: FeatureSpec, expected: Expected) -> None:
        path, old, has_spec, before = self.saved[int(self.random.integers(len(self.saved)))]
        new_rows = ("init", "unknown")[int(self.random.integers(2))]
        self.now, expected.rows = self._new(spec, expected), {}
        rows = expected.hashed_rows
        is_resized = rows and before.hashed_rows and rows != before.hashed_rows
        initial = self.rows(self.now)
        load_checkpoint(
            path,
            self.now.model,
            self.now.optimizer,
            spec=spec,
            saved_spec=None if has_spec else old,
            new_rows=new_rows,  # type: ignore[arg-type]
            resize=["item"] if is_resized else [],
        )
        if rows:
            old_regions = _regions(before.hashed_rows)
            names = {_unknown(i) for i in range(old_regions)} | {"missing"}
            expected.rows = {v: row for v, row in before.rows.items() if v not in names}
            for i in range(_regions(rows)):
                source = _unknown(i * old_regions // _regions(rows))
                expected.rows[_unknown(i)] = before.rows[source]
            return
        for value, row in initial.items():
            if value in before.rows:
                expected.rows[value] = before.rows[value]
            elif new_rows == "unknown" and old.fingerprints() != spec.fingerprints():
                expected.rows[value] = before.rows["unknown"][:DIM] + row[DIM:]
            else:
                expected.rows[value] = row

    def run(self, steps: int) -> None:
        """Take some random steps, and compare after each."""
        for _ in range(steps):
            step = (
                self.train,
                self.train,
                self.extend,
                self.save,
                self.load,
                self.refit,
                self.forget,
                self.hash,
                self.serve,
            )
            step[int(self.random.integers(len(step)))]()
            self.check()


def _hashed(rows: int) -> Expected:
    return Expected([], [], rows)


def _regions(rows: int) -> int:
    """Return the regions of a table with hashed ids; 1 for a vocabulary."""
    return max(rows // _REGION_ROWS, 1)


def _unknown(region: int) -> str:
    return f"unknown{region or ''}"


def _id_of(value: Any) -> int:
    return signed(fnv(value)) if isinstance(value, str) else int(value)


def _index(model: Any, name: str) -> torch.Tensor:
    [array] = [whole(v) for key, v in model.state_dict().items() if key.endswith(f"index.{name}")]
    return array


def _whole(model: Any, optimizer: KeyedOptimizer) -> tuple[torch.Tensor, torch.Tensor]:
    [weight] = [whole(value) for name, value in model.state_dict().items() if "weight" in name]
    [states] = optimizer.state_dict()["state"].values()
    [state] = states.values()
    return weight.detach().clone(), whole(state).clone()


def run(seed: int, steps: int = 8) -> None:
    """Run a sequence on this process."""
    with tempfile.TemporaryDirectory() as folder:
        Life(seed, Path(folder)).run(steps)


def run_on_ranks(pool: RankPool, num_ranks: int, seed: int, steps: int = 8) -> None:
    """Run a sequence on several ranks, under another plan after each load."""
    with tempfile.TemporaryDirectory() as folder:
        pool(num_ranks, _run_on_rank, seed, folder, steps)


def _run_on_rank(seed: int, folder: str, steps: int) -> None:
    Life(seed, Path(folder), _shard).run(steps)


def _shard(model: Any, random: np.random.Generator) -> Any:
    [config] = model.embedding_bag_configs()
    kinds = _KINDS if config.ids is None else _KINDS[:-1]  # not of replicas
    kind = kinds[int(random.integers(len(kinds)))]
    world = list(range(dist.get_world_size()))
    ranks = world[-1:] if kind is ShardingType.TABLE_WISE else world
    tables = EmbeddingModuleShardingPlan()
    tables["item"] = parameter_sharding(kind, config.num_embeddings, DIM, ranks)
    return DistributedModelParallel(model, plan=ShardingPlan({"": tables}))

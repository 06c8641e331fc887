"""One random sequence of extensions, training, saves and loads, compared with dicts."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recsys import DistributedModelParallel, EmbeddingBagCollection
from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recsys.features import Categorical, FeatureSpec
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.optim.keyed import KeyedOptimizer
from tests.distributed.cases import whole
from tests.ranks import RankPool

DIM = 8
_KINDS = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.DATA_PARALLEL,
)


@dataclass
class Expected:
    """Knowledge of the oracle: values in the order of their rows, their ages and their rows."""

    values: list[Any]
    ages: list[int]
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
        self.now = self._new(spec, Expected.of_counts(Counter(data), self.min_count, self.max_size))
        self._note_all()

    def _data(self) -> list[Any]:
        first = int(self.random.integers(0, 30))
        values = self.random.integers(first, first + 12, int(self.random.integers(1, 30)))
        return [self.kind(f"v{value}" if self.kind is str else value * 2**40) for value in values]

    def _new(self, spec: FeatureSpec, expected: Expected) -> State:
        torch.manual_seed(int(self.random.integers(2**31)))
        model = EmbeddingBagCollection(tables=spec.tables(DIM))
        apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.5})
        model = self._wrap(model, self.random)
        return State(spec, model, model.fused_optimizer, expected)

    def rows(self, state: State) -> dict[Any, list[float]]:
        """Return weights and optimizer state by value, looked up in the whole table."""
        weight, momentum = _whole(state.model, state.optimizer)
        names = state.spec.values_of("item", np.arange(len(weight))).tolist()
        names[:2] = ["missing", "unknown"]
        both = torch.cat([weight, momentum.reshape(len(weight), -1)], 1)
        return dict(zip(names, both.tolist(), strict=True))

    def _note_all(self) -> None:
        self.now.expected.rows = self.rows(self.now)

    def check(self) -> None:
        """Compare the model with the expectations."""
        values = self.now.spec.fitted.vocabularies["item"]
        assert values.values.to_pylist() == self.now.expected.values
        assert values.ages.tolist() == self.now.expected.ages
        assert self.rows(self.now) == self.now.expected.rows

    # -- steps -------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train on some values: others keep their rows, and lookups read the rows of values."""
        data = self._data()
        batch = self.now.spec.transform({"item": data}).sparse_features
        found = self.now.model(batch).values().detach()
        expected = self.now.expected
        for value, row in zip(data, found.tolist(), strict=True):
            name = value if value in expected.values else "unknown"
            assert row == expected.rows[name][:DIM]
        self.now.model(batch).values().pow(2).sum().backward()
        trained, before = self.rows(self.now), expected.rows
        touched = {v if v in expected.values else "unknown" for v in data}
        assert {v: r for v, r in trained.items() if v not in touched} == {
            v: r for v, r in before.items() if v not in touched
        }
        expected.rows = trained

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
        self.save()
        data = self._data()
        if self.now.spec.partial({"item": data}).digest() in self.now.spec.fitted.digests:
            return  # by chance the data of an earlier day, which `extend` refuses
        rules = self.min_count, self.max_size, self.retire_after
        spec = self.now.spec.extend({"item": data}, retire_after=self.retire_after).spec
        self._load_by_value(spec, self.now.expected.extended(Counter(data), *rules))

    def forget(self) -> None:
        """Remove some values; the last ones take their rows."""
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

    def _load_by_value(self, spec: FeatureSpec, expected: Expected) -> None:
        path, old, has_spec, before = self.saved[int(self.random.integers(len(self.saved)))]
        new_rows = ("init", "unknown")[int(self.random.integers(2))]
        self.now, expected.rows = self._new(spec, expected), {}
        initial = self.rows(self.now)
        load_checkpoint(
            path,
            self.now.model,
            self.now.optimizer,
            spec=spec,
            saved_spec=None if has_spec else old,
            new_rows=new_rows,  # type: ignore[arg-type]
        )
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
            )
            step[int(self.random.integers(len(step)))]()
            self.check()


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
    kind = _KINDS[int(random.integers(len(_KINDS)))]
    world = list(range(dist.get_world_size()))
    ranks = world[-1:] if kind is ShardingType.TABLE_WISE else world
    [config] = model.embedding_bag_configs()
    tables = EmbeddingModuleShardingPlan()
    tables["item"] = parameter_sharding(kind, config.num_embeddings, DIM, ranks)
    return DistributedModelParallel(model, plan=ShardingPlan({"": tables}))

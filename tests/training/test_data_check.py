"""A job of the next day starts from another job's weights, and data of another fit is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from recsys import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, datasets
from recsys.datasets.utils import Batch
from recsys.datasets.windows import join_rows, split_rows, take_rows
from recsys.distributed.checkpoint import CheckpointError, read_checkpoint
from recsys.distributed.checkpoint.values import saved_spec
from recsys.distributed.checkpoint.versions import open_version
from recsys.features import Categorical, FeatureSpec, Hashed, Label, Numeric
from recsys.inference import package, quantize_embeddings
from recsys.inference.scoring import score
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.prepare import prepare
from recsys.training import Trainer


def _day(path: Path, first: int, seed: int) -> str:
    random = np.random.default_rng(seed)
    users = [f"u{first + user}" for user in random.zipf(1.5, 400) % 30]
    ages = random.integers(10, 80, 400)
    table = pa.table({"user": users, "age": ages, "click": random.integers(0, 2, 400)})
    pq.write_table(table, path)
    return str(path)


@pytest.fixture
def days(tmp_path: Path) -> list[str]:
    return [_day(tmp_path / f"{day}.parquet", day * 5, day) for day in range(2)]


def _spec() -> FeatureSpec:
    return FeatureSpec([Categorical("user"), Numeric("age", standardize=True), Label("click")])


def _model(tables: list[EmbeddingBagConfig]) -> DLRMTrain:
    torch.manual_seed(1)
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), 1, [4], [4, 1]))


def _trainer(model: Any, folder: Path, optimizer: Any = None, **settings: Any) -> Trainer:
    adam = optimizer or torch.optim.Adam(model.parameters(), lr=0.05)
    quiet: dict[str, Any] = {"loggers": (), "shows_bar": False, "log_every": None, "epochs": 1}
    return Trainer(model, adam, folder, **{**quiet, **settings})


def _rows(model: Any, spec: FeatureSpec) -> dict[str | None, list[float]]:
    weight = model.model.sparse_arch.embedding_bag_collection.embedding_bags["user"].weight
    values = spec.values_of("user", np.arange(len(weight))).tolist()
    return dict(zip(values, weight.tolist(), strict=True))


def test_the_next_day_starts_from_the_weights_of_each_value(
    days: list[str], tmp_path: Path
) -> None:
    spec = _spec().fit(days[0])
    model = _model(spec.tables(4))
    reader = datasets.parquet(days[0], spec, batch_size=50)
    _trainer(model, tmp_path / "1").fit(DataLoader(reader, batch_size=None))
    of_day_1 = saved_spec(*open_version(tmp_path / "1/last"))
    assert of_day_1 is not None
    assert of_day_1.fingerprints() == spec.fingerprints()
    extended, report = spec.extend(days[1])
    assert report.tables["user"].new > 2
    next_model = _model(extended.tables(4))
    trainer = _trainer(
        next_model, tmp_path / "2", start_from=tmp_path / "1/last", steps=1, epochs=None
    )
    before = _rows(model, spec)
    started: dict[str | None, list[float]] = {}

    def note(module: Any, arguments: Any) -> None:
        started.update(started or _rows(next_model, extended))

    next_model.register_forward_pre_hook(note)
    trainer.fit(datasets.parquet(days[1], extended, batch_size=50))
    assert {value: row for value, row in started.items() if value in before} == before
    assert len(started) == len(before) + report.tables["user"].new
    moments = read_checkpoint(tmp_path / "2/last", "user", optimizer=True)
    steps = [v for name, v in moments.items() if name.endswith(".step")]
    assert steps == [9.0]  # 8 steps of the first day, one of the second
    with pytest.raises(CheckpointError, match=r"'user' .* have another row"):
        _trainer(_model(extended.tables(4)), tmp_path / "1", resume=True).fit(
            datasets.parquet(days[1], extended, batch_size=50)
        )


def test_the_next_day_changes_a_vocabulary_to_hashed_ids_and_back(
    days: list[str], tmp_path: Path
) -> None:
    fitted = _spec().fit(days[0])
    columns = [Hashed("user", rows=128, growing=True), *fitted.columns[1:]]
    hashed = FeatureSpec(columns).fit(days[0])
    users = fitted.values_of("user", range(2, fitted.features()[0].rows)).tolist()

    def answers(model: Any, spec: FeatureSpec) -> list[list[float]]:
        features = spec.transform({"user": users, "age": [0] * len(users)}, labels=False)
        tables = model.module.model.sparse_arch.embedding_bag_collection
        with torch.no_grad():
            return tables(features.sparse_features).values().tolist()

    before: list[list[float]] = []
    for number, spec in enumerate((fitted, hashed, fitted)):
        core = _model(spec.tables(4))
        tables = core.model.sparse_arch.embedding_bag_collection
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
        model = DistributedModelParallel(core)
        adam = torch.optim.Adam(p for n, p in model.named_parameters() if "bags" not in n)
        start = {"start_from": tmp_path / str(number - 1) / "last"} if number else {}
        trainer = _trainer(model, tmp_path / str(number), pipeline=False, optimizer=adam, **start)
        started: list[Any] = []
        model.register_forward_pre_hook(
            lambda model, _, spec=spec, started=started: started.append(answers(model, spec))
        )
        trainer.fit(datasets.parquet(days[0], spec, batch_size=50))
        assert started[0] == before or not number
        before = answers(model, spec)
        assert before != started[0]


def test_batches_of_another_fit_are_refused(days: list[str], tmp_path: Path) -> None:
    first, other = _spec().fit(days[0]), _spec().fit(days[1])
    readers = [datasets.parquet(days[0], spec, batch_size=50) for spec in (first, other)]
    with pytest.raises(ValueError, match="Batches must be of the fit that made table 'user'"):
        _trainer(_model(first.tables(4)), tmp_path / "a").fit(readers[1])
    by_hand = [EmbeddingBagConfig(99, 4, "user", feature_names=["user"])]
    trainer = _trainer(_model(by_hand), tmp_path / "b")
    trainer.fit(readers[0])
    with pytest.raises(ValueError, match="table 'user'"):
        trainer.evaluate(readers[1])
    with pytest.raises(ValueError, match="table 'user'"):
        _trainer(_model(by_hand), tmp_path / "b", resume=True, epochs=2).fit(readers[1])
    by_hand = [EmbeddingBagConfig(99, 4, "user", feature_names=["user"])]
    with pytest.raises(CheckpointError, match=r"'user' .* another fit"):
        _trainer(_model(other.tables(4)), tmp_path / "c", start_from=tmp_path / "b/last").fit(
            [batch for batch in readers[1]]
        )


def test_copies_of_a_batch_keep_its_fingerprints() -> None:
    spec = FeatureSpec([Categorical("user"), Label("click")]).fit({"user": ["a"], "click": [1]})
    batch = spec.transform({"user": ["a", "b"], "click": [0, 1]})
    leaves, structure = pytree.tree_flatten(batch)
    copies = [
        batch.to(torch.device("cpu")),
        pickle.loads(pickle.dumps(batch)),
        pytree.tree_unflatten(leaves, structure),
        *split_rows(batch, [0, 1, 2]),
        join_rows([batch, batch]),
        take_rows(batch, np.array([1])),
    ]
    assert [dict(copy.fingerprints) for copy in copies] == [spec.fingerprints()] * len(copies)
    older = {name: value for name, value in vars(batch).items() if name != "fingerprints"}
    restored = Batch.__new__(Batch)
    restored.__setstate__(older)
    assert restored.fingerprints == {}


def test_numbers_of_another_scale_are_refused(days: list[str], tmp_path: Path) -> None:
    spec = FeatureSpec([Numeric("age", standardize=True), Categorical("user"), Label("click")])
    spec.fit(days[0])
    other = spec.extend(days[1], refit=["age"]).spec
    batches = [*datasets.parquet(days[0], spec, batch_size=50)]
    rescaled = [*datasets.parquet(days[0], other, batch_size=50)]
    for batch in rescaled:
        batch.fingerprints = {"age": batch.fingerprints["age"]}
    trainer = _trainer(_model(spec.tables(4)), tmp_path)
    with pytest.raises(ValueError, match="feature 'age' is of another fit"):
        trainer.fit([*batches, *rescaled])


def test_prepared_files_of_another_fit_are_refused(days: list[str], tmp_path: Path) -> None:
    specs = [_spec().fit(day) for day in days]
    for number, spec in enumerate(specs):
        prepare(spec, days[0], tmp_path / f"ready{number}")
    readers = [
        datasets.parquet(
            tmp_path / f"ready{number}/*.parquet",
            FeatureSpec.load(tmp_path / f"ready{number}/prepared"),
            batch_size=50,
        )
        for number in range(2)
    ]
    model = _model(specs[0].tables(4))
    _trainer(model, tmp_path / "job").fit(readers[0])
    with pytest.raises(ValueError, match="Batches must be of the fit that made table 'user'"):
        _trainer(model, tmp_path / "other").fit(readers[1])


def test_scores_and_packages_of_another_fit_are_refused(days: list[str], tmp_path: Path) -> None:
    first, other = _spec().fit(days[0]), _spec().fit(days[1])
    model = _model(first.tables(4))
    assert score(model, days[0], tmp_path / "scores", spec=first)
    with pytest.raises(ValueError, match=r"score: spec must be of the fit .* 'user'"):
        score(model, days[0], tmp_path / "others", spec=other)
    served, example = quantize_embeddings(model.eval()), pq.read_table(days[0])
    with pytest.raises(ValueError, match=r"package: spec must be of the fit .* 'user'"):
        package(served, tmp_path / "package", example, spec=other)

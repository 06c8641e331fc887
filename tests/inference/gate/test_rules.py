"""Ordinary days pass the gate, and each kind of worse model is refused by the rule of its name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from recsys import EmbeddingBagCollection
from recsys.features import Categorical, FeatureSpec, Label, Numeric
from recsys.inference import package, quantize_embeddings
from recsys.inference.gate import Gate, GateReport, publish, rollback
from recsys.inference.gate.scored import Task, score_both
from recsys.inference.gate.segments import auc_change
from recsys.sparse import KeyedJaggedTensor

GATE = Gate(segments=("country",), min_rows=500, min_segment_rows=200, max_slowdown=20.0)
COLUMNS = [Categorical("item"), Categorical("country"), Numeric("age"), Label("click")]
_CHANCE = np.random.default_rng(5).uniform(0.05, 0.6, 200)


def _day(seed: int, items: range = range(40), rows: int = 4000) -> pa.Table:
    random = np.random.default_rng(seed)
    item = random.choice(np.array(items), rows)
    country = random.integers(0, 3, rows)
    chance = np.clip(_CHANCE[item] + 0.1 * (country - 1), 0.01, 0.99)
    return pa.table(
        {
            "item": [f"i{number}" for number in item],
            "country": [["no", "it", "de"][number] for number in country],
            "age": random.integers(18, 80, rows),
            "click": (random.random(rows) < chance).astype(int),
        }
    )


class _Model(nn.Module):
    """Adds a number per item, per country, and per item and country of its weights."""

    def __init__(self, spec: FeatureSpec, dim: int = 4) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(tables=spec.tables(dim))
        self.slow = nn.Identity()

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        rows = self.tables(ids).values()
        dim = rows.shape[1] // 2
        return self.slow(rows[:, 0] + rows[:, dim])


class _Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(1200))

    def forward(self, logits: Tensor) -> Tensor:
        square = self.weight
        for _ in range(6):
            square = square @ self.weight
        return logits + 0 * square.sum()


def _trained(spec: FeatureSpec, rows: pa.Table, dim: int = 4) -> _Model:
    """Return a model with the log odds of each item and country in the rows."""
    model = _Model(spec, dim)
    clicks = rows["click"].to_numpy()
    mean = np.log(clicks.mean() / (1 - clicks.mean()))
    with torch.no_grad():
        for name, table in model.tables.embedding_bags.items():
            table.weight.zero_()
            bags = spec.transform(rows).sparse_features[name].values().numpy()
            for row in np.unique(bags):
                seen = clicks[bags == row]
                chance = (seen.sum() + 1) / (len(seen) + 4)
                table.weight[row, 0] = float(
                    np.log(chance / (1 - chance)) - mean * (name != "item")
                )
            if name == "item":
                table.weight[:2, 0] = float(mean)
    return model.eval()


def _package(
    model: _Model, folder: Path, spec: FeatureSpec, dtype: torch.dtype = torch.int8
) -> Path:
    quantized = quantize_embeddings(copy.deepcopy(model), dtype)
    example = _day(0).slice(0, 4)
    return package(quantized, folder, example, spec=spec, programs=["torchscript"])


class _World(NamedTuple):
    served: Path
    spec: FeatureSpec
    training: pa.Table
    data: dict[str, pa.Table]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> _World:
    folder, first = tmp_path_factory.mktemp("gate"), _day(1)
    spec = FeatureSpec(COLUMNS).fit(first)
    served = _package(_trained(spec, first), folder / "served", spec)
    training = _day(2, range(60), rows=8000)
    data = {"today": _day(3, range(10, 60)), "yesterday": _day(4)}
    return _World(served, spec.extend(training).spec, training, data)


def _compare(world: _World, new: Path) -> GateReport:
    return GATE.compare(new, world.served, world.data)


def _refused(report: GateReport) -> set[tuple[str, str]]:
    return {(rule.name, rule.subject) for rule in report.refused}


def _mixed(rows: pa.Table, where: Callable[[np.ndarray[Any, Any]], Any]) -> pa.Table:
    """Return rows with random labels in some of them."""
    clicks = rows["click"].to_numpy().copy()
    chosen = where(rows["country"].to_numpy(zero_copy_only=False))
    clicks[chosen] = 1 - clicks[chosen]
    return rows.set_column(3, "click", pa.array(clicks))


def test_a_good_day_is_published_and_can_be_taken_back(world: _World, tmp_path: Path) -> None:
    model = _trained(world.spec, world.training)
    new = _package(model, tmp_path / "staged", world.spec)
    report = _compare(world, new)
    assert report.passed, str(report)
    assert str(report).endswith(f"{new}: publish")
    segments = {(segment.data, segment.name) for segment in report.segments}
    assert ("today", "country=it") in segments
    assert ("today", "new values of item=new") in segments
    report.write_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<rect") == 2 * 2 * len(report.segments)
    first = publish(report, tmp_path / "models", 4)
    assert first.name == "4"
    with pytest.raises(FileExistsError, match=r"newest version .* 4; received 4"):
        publish(report, tmp_path / "models", 4)
    second = _package(model, tmp_path / "staged", world.spec)
    assert publish(_compare(world, second), tmp_path / "models").name == "5"
    assert rollback(tmp_path / "models").name == "6"
    contents = [(tmp_path / f"models/{n}/manifest.json").read_bytes() for n in (4, 6)]
    assert contents[0] == contents[1]


def test_a_segment_that_is_broken(world: _World, tmp_path: Path) -> None:
    clicks = _mixed(world.training, lambda country: country == "de")
    new = _package(_trained(world.spec, clicks), tmp_path / "p", world.spec)
    report = _compare(world, new)
    assert ("calibration", "today, country=de") in _refused(report)
    with pytest.raises(ValueError, match=r"must meet all rules .* country=de"):
        publish(report, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_predictions_that_are_20_percent_too_high(world: _World, tmp_path: Path) -> None:
    model = _trained(world.spec, world.training)
    with torch.no_grad():
        model.tables.embedding_bags["item"].weight[:, 0] += 0.5
    refused = _refused(_compare(world, _package(model, tmp_path / "p", world.spec)))
    assert ("calibration", "today") in refused
    assert {name for name, _ in refused} <= {"calibration", "drift"}


def test_new_items_without_training(world: _World, tmp_path: Path) -> None:
    model = _trained(world.spec, world.training)
    with torch.no_grad():
        model.tables.embedding_bags["item"].weight[42:] = 0.3 * torch.randn(20, 4)
    refused = _refused(_compare(world, _package(model, tmp_path / "p", world.spec)))
    assert ("calibration", "today, new values of item=new") in refused


def test_values_that_are_not_numbers(world: _World, tmp_path: Path) -> None:
    model = _trained(world.spec, world.training)
    model.slow = _Slow()
    with torch.no_grad():
        model.slow.weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match="must return the model's outputs"):
        _package(model, tmp_path / "p", world.spec)
    with torch.no_grad():
        model.tables.embedding_bags["item"].weight[17, 3] = torch.nan
    with pytest.raises(ValueError, match="Table 'item' cannot be quantized"):
        _package(model, tmp_path / "q", world.spec)
    scores = np.append(np.full(999, 0.5), np.nan)
    task = Task("click", False, scores, None, np.arange(1000) % 2.0, {})
    assert [rule.name for rule in GATE._data_rules("today", task) if not rule.passed] == ["finite"]


def test_labels_of_other_rows(world: _World, tmp_path: Path) -> None:
    clicks = np.roll(world.training["click"].to_numpy(), 1)
    rows = world.training.set_column(3, "click", pa.array(clicks))
    new = _package(_trained(world.spec, rows), tmp_path / "p", world.spec)
    assert ("auc", "yesterday") in _refused(_compare(world, new))


def test_training_on_the_rows_that_compare(world: _World, tmp_path: Path) -> None:
    """A column that has one value per row lets the model learn the rows by heart."""
    held = world.data["today"].append_column("row", pa.array([f"r{i}" for i in range(4000)]))
    columns = [Categorical("row"), *COLUMNS[1:]]
    leaky = FeatureSpec(columns).fit(held)
    model = _Model(leaky)
    with torch.no_grad():
        for table in model.tables.embedding_bags.values():
            table.weight.zero_()
        ids = leaky.transform(held).sparse_features["row"].values()
        clicks = torch.from_numpy(held["click"].to_numpy().copy())
        model.tables.embedding_bags["row"].weight[ids, 0] = clicks.float() * 2 - 2
    example = held.slice(0, 4)
    quantized = quantize_embeddings(model.eval())
    new = package(quantized, tmp_path / "p", example, spec=leaky, programs=["torchscript"])
    report = GATE.compare(new, world.served, {"today": held})
    assert ("gain", "today") in _refused(report)


def test_a_slower_and_larger_version(world: _World, tmp_path: Path) -> None:
    model = _trained(world.spec, world.training)
    model.slow = _Slow()
    new = _package(model, tmp_path / "p", world.spec)
    gate = replace(GATE, max_slowdown=2.0, max_growth=1.2)
    report = gate.compare(new, world.served, {"today": world.data["today"]})
    assert _refused(report) == {("speed", "package"), ("size", "package")}


def test_another_vocabulary_is_not_packaged(world: _World, tmp_path: Path) -> None:
    model = _trained(world.spec, world.training)
    other = FeatureSpec(COLUMNS).fit(world.data["yesterday"])
    with pytest.raises(ValueError, match=r"spec must be of the fit .* 'item'"):
        _package(model, tmp_path / "p", other)


def test_a_version_without_rows_and_a_day_without_rows(world: _World, tmp_path: Path) -> None:
    few = world.training.slice(0, 3)
    spec = FeatureSpec(COLUMNS).fit(few)
    new = _package(_trained(spec, world.training.slice(0, 300)), tmp_path / "p", spec)
    empty = world.data["today"].slice(0, 0)
    report = GATE.compare(new, world.served, {"today": empty})
    assert ("rows", "item") in _refused(report)
    assert ("data", "today") in _refused(report)


def test_optional_columns_are_read_where_they_are(world: _World, tmp_path: Path) -> None:
    """A day without the column has the predictions of a day of nulls, in files and in memory."""
    spec = FeatureSpec([replace(COLUMNS[0]), replace(COLUMNS[1], optional=True), *COLUMNS[2:]])
    spec.fitted = world.spec.fitted
    version, rows = _package(_trained(spec, world.training), tmp_path / "new", spec), _day(7)
    lacking, place = rows.drop_columns(["country"]), rows.column_names.index("country")
    nulls = rows.set_column(place, "country", pa.nulls(len(rows), pa.string()))
    for number, table in enumerate((lacking, rows)):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    found = [
        score_both(version, None, data, None, (), ()).tasks[0].new
        for data in (pa.concat_tables([nulls, rows]), str(tmp_path / "*.parquet"), [lacking, rows])
    ]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_a_few_clicks_in_many_rows_are_judged() -> None:
    for seed in range(20):
        labels = (np.random.default_rng(seed).random(20_000) < 0.003).astype(np.float64)
        good, bad = np.where(labels, 0.02, 0.00295), np.where(labels, 0.0, 0.003)
        change, error = auc_change(bad, good, labels)
        assert change == -1.0
        assert error < 0.01
    labels = np.zeros(1000)
    labels[:1] = 1
    assert not np.isfinite(auc_change(labels, labels, labels)[1])


@pytest.mark.slow
def test_30_ordinary_days_pass(world: _World, tmp_path: Path) -> None:
    spec, served = world.spec, world.served
    for day in range(30):
        items = range(10 + day, 60 + day)
        training = _day(100 + day, range(60 + day), rows=8000)
        spec = spec.extend(training, retire_after=5).spec
        new = _package(_trained(spec, training), tmp_path / str(day), spec)
        report = GATE.compare(new, served, {"today": _day(200 + day, items)})
        assert report.passed, str(report)
        served = new


def test_wrong_settings_and_data_are_named(world: _World) -> None:
    for name in ("max_drop", "max_growth", "min_table_share"):
        with pytest.raises(ValueError, match=f"Gate.{name} must be at least 0"):
            Gate(**{name: -0.1})
    with pytest.raises(ValueError, match="must have a data set or more"):
        GATE.compare(world.served, None, {})
    with pytest.raises(ValueError, match=r"must be labels of the package, .* received 'buy'"):
        Gate(label="buy").compare(world.served, None, world.data)
    bad = world.data["today"].set_column(3, "click", pa.array([2] * 4000))
    with pytest.raises(ValueError, match="'click' must have the labels 0 and 1; received 2"):
        GATE.compare(world.served, None, {"today": bad})
    with pytest.raises(KeyError, match="country"):
        GATE.compare(world.served, None, {"today": world.data["today"].drop_columns(["country"])})


class _Both(nn.Module):
    """Returns the logit of a model, and seconds from it."""

    def __init__(self, model: _Model, slope: float) -> None:
        super().__init__()
        self.model, self.slope = model, slope

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        logits = self.model(dense, ids)
        return {"click": logits, "seconds": self.slope * torch.sigmoid(logits)}


def test_each_label_is_judged_by_its_rows(tmp_path: Path) -> None:
    """A package has two labels, clicks and seconds; some rows lack seconds."""
    columns = [*COLUMNS, Label("seconds", low=-1e3, high=1e3)]
    days = []
    for number, day in enumerate([_day(1, rows=8000), _day(2)]):
        seconds = np.random.default_rng(number).normal(100 * day["click"].to_numpy(), 5)
        mask = np.arange(len(day)) % 4 == 0
        days.append(day.append_column("seconds", pa.array(seconds, mask=mask)))
    spec = FeatureSpec(columns).fit(days[0])
    model = _trained(spec, days[0])
    versions = [
        package(
            quantize_embeddings(_Both(copy.deepcopy(model), slope)), tmp_path / name,
            days[0].slice(0, 4), spec=spec, programs=["torchscript"],
        )
        for name, slope in (("good", 100.0), ("bad", 20.0))
    ]  # fmt: skip
    gate = replace(GATE, regression=("seconds",))
    report = gate.compare(versions[0], versions[0], {"day": days[1]})
    assert report.passed, str(report)
    data = {rule.subject: rule.value for rule in report.rules if rule.name == "data"}
    assert data == {"day, click": 4000, "day, seconds": 3000}
    report = gate.compare(versions[1], versions[0], {"day": days[1]})
    assert {subject.split(", ")[1] for _, subject in _refused(report)} == {"seconds"}
    assert ("error", "day, seconds") in _refused(report)
    only = replace(gate, label="click").compare(versions[1], versions[0], {"day": days[1]})
    assert only.passed, str(only)

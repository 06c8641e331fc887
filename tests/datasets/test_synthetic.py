"""Tables of clicks with known probabilities."""

from __future__ import annotations

import datetime
import itertools
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from recsys.datasets.synthetic import ClickModel, bayes
from recsys.features import Categorical, FeatureSpec, Group, Hashed, Label, Numeric, Timestamp

FULL = ClickModel(seed=3, users=500, films=70, missing=0.2, buys=True, weights=True)


@pytest.mark.parametrize("seed", range(10))
def test_scores_equal_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = [5, 1000][seed % 2]
    chances = np.clip(np.round(rng.random(size), 1 + seed % 3), 0.01, 0.99)  # with ties
    labels = (rng.random(size) < chances).astype(np.int8)
    labels[:2] = [0, 1]
    weights = None if seed < 5 else rng.random(size)
    found = bayes(labels, chances, weights)
    auc = roc_auc_score(labels, chances, sample_weight=weights)
    assert found.auc == pytest.approx(auc, abs=1e-12)
    loss = log_loss(labels, chances, sample_weight=weights)
    assert found.log_loss == pytest.approx(loss, abs=1e-12)
    assert math.isnan(bayes(np.ones(3), np.full(3, 0.5)).auc)


def effects_by_value(model: ClickModel) -> dict[str, Any]:
    """Effects by the values of the columns."""
    effects = model._effects
    factor = 0x9E3779B97F4A7C15
    users = [(i + 1) * factor % 2**64 for i in range(model.users)]
    signed = [user - 2**64 if user >> 63 else user for user in users]
    return {
        "user": dict(zip(signed, effects["user"], strict=True)),
        "film": {f"film-{i:05}": value for i, value in enumerate(effects["film"])},
        "tag": {f"tag-{i:02}": value for i, value in enumerate(effects["tag"])},
    }


def test_probabilities_are_those_of_the_columns() -> None:
    clicks = FULL.draw(2000)
    effects, by_value = FULL._effects, effects_by_value(FULL)
    from recsys.datasets.synthetic import _CITIES, _GENRES

    start = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    for i, row in enumerate(clicks.table.to_pylist()):
        city = len(_CITIES) if row["city"] is None else _CITIES.index(row["city"])
        genre = _GENRES.index(row["genre"])
        assert genre == effects["genre"][int(row["film"][5:])]
        seconds = (row["time"] - start).total_seconds()
        logit = -1.5 + by_value["user"][row["user"]] + by_value["film"][row["film"]]
        logit += effects["taste"][city, genre] + sum(by_value["tag"][t] for t in row["tags"])
        age, price = row["age"], row["price"]
        logit += 0.3 if age is None else 0.5 - ((age - 40) / 20) ** 2 / 2
        logit += 0.2 if price is None else 0.4 * (2 - math.log1p(price))
        logit += 0.4 * math.cos((seconds / 3600 % 24 - 20) * math.pi / 12)
        logit += effects["trend"][genre] * (seconds / (28 * 86_400) - 0.5)
        chance = 1 / (1 + math.exp(-logit))
        assert clicks.probabilities["click"][i] == pytest.approx(chance, rel=1e-9)
        bought = by_value["user"][row["user"]] - 0.5 - (0 if price is None else price / 20)
        chance /= 1 + math.exp(-bought)
        assert clicks.probabilities["buy"][i] == pytest.approx(chance, rel=1e-9)
        assert row["buy"] <= row["click"]
        assert 0.5 <= row["weight"] <= 2


def test_labels_have_their_probabilities() -> None:
    clicks = ClickModel(buys=True).draw(200_000)
    for label, chances in clicks.probabilities.items():
        labels = clicks.table[label].to_numpy()
        order = np.argsort(chances)
        for rows in np.array_split(order, 20):
            deviation = math.sqrt((chances[rows] * (1 - chances[rows])).sum())
            assert abs(labels[rows].sum() - chances[rows].sum()) < 4.5 * deviation
    found = clicks.bayes()
    labels = clicks.table["click"].to_numpy()
    assert found.auc == pytest.approx(roc_auc_score(labels, clicks.probabilities["click"]))
    assert 0.75 < found.auc < 0.9
    assert 0.1 < labels.mean() < 0.4
    # no other score is better than the probabilities
    rng = np.random.default_rng(0)
    for noise in (0.1, 0.5):
        worse = clicks.probabilities["click"] * np.exp(noise * rng.normal(size=len(labels)))
        assert roc_auc_score(labels, worse) < found.auc


def test_columns() -> None:
    table = ClickModel().draw(100_000).table
    assert table["user"].type == pa.int64()
    users = table["user"].to_numpy()
    assert 0.3 < (users < 0).mean() < 0.7
    _, counts = np.unique(users, return_counts=True)
    assert counts.max() > 100 * np.median(counts)  # skewed
    for name in ("city", "age", "price"):
        assert 0.045 < table[name].null_count / 100_000 < 0.055
    for name in ("user", "film", "genre", "tags", "time", "click"):
        assert table[name].null_count == 0
    sizes = table["tags"].combine_chunks().value_lengths().to_numpy()
    assert np.bincount(sizes).min() > 15_000
    assert len(np.bincount(sizes)) == 6
    times = table["time"].to_numpy()
    assert (np.diff(times) >= np.timedelta64(0)).all()
    assert str(times[0])[:10] == "2024-01-01"
    assert str(times[-1])[:10] == "2024-01-28"
    films = table["film"].to_numpy()
    assert len({*films[-5000:]} - {*films[:5000]}) > 30  # other films become popular


def test_parts_are_the_whole_and_seeds_differ() -> None:
    whole = FULL.draw(70_000)
    parts = [*FULL.parts(70_000)]
    assert [part.table.num_rows for part in parts] == [65_536, 4464]
    assert pa.concat_tables([part.table for part in parts]).equals(whole.table)
    for label in ("click", "buy"):
        joined = np.concatenate([part.probabilities[label] for part in parts])
        assert joined.tolist() == whole.probabilities[label].tolist()
    assert ClickModel(seed=3).draw(100).table.equals(ClickModel(seed=3).draw(100).table)
    assert not ClickModel(seed=3).draw(100).table.equals(ClickModel(seed=4).draw(100).table)
    first, second = itertools.islice(ClickModel().parts(10**9), 2)  # in constant memory
    assert not first.table["user"].equals(second.table["user"])


def test_some_rows() -> None:
    clicks = FULL.draw(1000)
    rows = np.array([5, 3, 998])
    some = clicks.take(rows)
    assert some.table["user"].to_pylist() == clicks.table["user"].to_numpy()[rows].tolist()
    assert some.probabilities["buy"].tolist() == clicks.probabilities["buy"][rows].tolist()
    labels, weights = clicks.table["buy"].to_numpy(), clicks.table["weight"].to_numpy()
    assert clicks.bayes("buy") == bayes(labels, clicks.probabilities["buy"], weights)


def test_a_spec_reads_the_table() -> None:
    spec = FeatureSpec(
        [
            Hashed("user", rows=1000),
            Categorical("film"),
            Categorical("city"),
            Categorical("genre"),
            Categorical("tags", is_list=True),
            Numeric("age", standardize=True),
            Numeric("price", log1p=True),
            Timestamp("time"),
            Label("click"),
            Label("buy"),
            Group("user"),
        ]
    )
    table = FULL.draw(500).table
    batch = spec.fit(table).transform(table)
    assert batch.labels.shape == (500, 2)
    assert batch.groups is not None
    assert batch.groups.tolist() == table["user"].to_pylist()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"missing": 1.5}, ValueError, "missing must .*received 1.5"),
        ({"missing": -0.5}, ValueError, "ClickModel: missing"),
        ({"users": 0}, ValueError, "ClickModel: users"),
        ({"seed": "a"}, TypeError, "seed"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ClickModel(**arguments)
    with pytest.raises(ValueError, match="num_rows"):
        ClickModel().draw(0)

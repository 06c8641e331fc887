"""`FeatureSpec`: fit and transform, against loops over single values."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from recsys.datasets.utils import Batch
from recsys.features import (
    Categorical,
    FeatureSpec,
    Group,
    Hashed,
    Ids,
    Label,
    Numeric,
    SampleWeight,
    Timestamp,
)
from recsys.sparse import KeyedJaggedTensor, hash_ids
from tests.features import plain
from tests.features.tables import COLUMNS, rows_of, spec


def check(batch: Batch, training: dict[str, Any], rows: dict[str, Any]) -> None:
    """Compare a batch of the columns `COLUMNS` with loops over single values."""
    years = plain.vocabulary(training["born"] + training["died"])
    known = {
        "city": plain.vocabulary(training["city"], 2, 5),
        "tags": plain.vocabulary(plain.flat(training["tags"], True)),
        "born": years,
        "died": years,
    }
    expected: dict[str, plain.Bags] = {}
    dense = []
    size = len(rows["city"])
    for column in COLUMNS:
        if isinstance(column, Categorical | Hashed | Ids):
            weights = rows[column.weights] if column.weights else None
            bags = plain.bags(column, rows[column.name], weights, known.get(column.name))
            expected[column.name] = bags
        elif isinstance(column, Timestamp):
            own = plain.parts(column, rows[column.name])
            for part, numbers in zip(column.parts, own, strict=True):
                expected[f"seen_{part}"] = plain.Bags(numbers, [1] * size, [1.0] * size)
        elif isinstance(column, Numeric) and column.buckets is None:
            dense.append(plain.dense(column, training[column.name], rows[column.name]))
    features = batch.sparse_features
    assert features.stride() == size
    for name, bags in expected.items():
        found = features[name]
        assert found.values().tolist() == bags.ids, name
        assert found.lengths().tolist() == bags.lengths, name
        np.testing.assert_allclose(found.weights().numpy(), bags.weights, rtol=1e-6)
    present = [x for x in training["size"] if x is not None]
    edges = np.linspace(min(present), max(present), 5)[1:-1]
    buckets = [0 if x is None else 1 + sum(e <= x for e in edges) for x in rows["size"]]
    assert features["size"].values().tolist() == buckets
    assert features.keys() == [
        *("city", "tags", "born", "died", "user", "words", "item", "name", "films", "genre"),
        *("size", "seen_hour", "seen_weekday", "seen_day", "seen_month"),
    ]
    assert batch.dense_names == ("age", "price")
    np.testing.assert_allclose(batch.dense_features.numpy(), np.transpose(dense), atol=1e-6)
    labels = np.float32([rows["click"], rows["rating"]]).T.reshape(-1, 2)
    np.testing.assert_array_equal(batch.labels.numpy(), labels)
    assert batch.sample_weights is not None
    assert batch.groups is not None
    np.testing.assert_array_equal(batch.sample_weights.numpy(), np.float32(rows["weight"]))
    assert batch.groups.tolist() == rows["session"]


def typed(rows: dict[str, Any]) -> pa.Table:
    """A table whose empty columns have their types, too."""
    whole = pa.table(rows_of(0, 300))
    return pa.table(rows, schema=whole.schema)


@pytest.mark.parametrize("seed", range(12))
def test_batches_equal_loops_over_values(seed: int) -> None:
    training = rows_of(seed, 300)
    fitted = spec().fit(typed(training))
    for size in (0, 1, 2, 77):
        rows = rows_of(seed + 1000, size)
        check(fitted.transform(typed(rows)), training, rows)
    with_labels = fitted.transform(typed(rows))
    inputs = typed(rows).drop_columns(["click", "rating", "weight", "session"])
    without = fitted.transform(inputs, labels=False)
    assert without.labels.tolist() == [0.0] * 77
    assert (without.sample_weights, without.groups) == (None, None)
    assert torch.equal(without.sparse_features.values(), with_labels.sparse_features.values())


@pytest.mark.parametrize("seed", range(6))
def test_parts_in_any_order_equal_fit_of_all(seed: int) -> None:
    rng = random.Random(seed)
    training = typed(rows_of(seed, 500))
    at_once = spec().fit(training).fitted
    cuts = sorted(rng.choices(range(501), k=6))
    pieces = [training.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, 500], strict=True)]
    parts = [spec().partial(piece, limit=rng.choice([20, 10**6])) for piece in pieces]
    rng.shuffle(parts)
    parts = [pickle.loads(pickle.dumps(part)) for part in parts]
    for joined in (spec().fit_parts(parts).fitted, spec().fit(iter(pieces), limit=20).fitted):
        assert joined.num_rows == 500
        for name, vocabulary in at_once.vocabularies.items():
            assert joined.vocabularies[name].values.equals(vocabulary.values)
        for found, expected in [
            (joined.means, at_once.means),
            (joined.deviations, at_once.deviations),
        ]:
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert joined.edges["size"].tolist() == at_once.edges["size"].tolist()
    again = spec().fit_parts(parts).fitted  # the parts are unchanged
    assert again.num_rows == 500
    assert again.means == pytest.approx(at_once.means, rel=1e-9)


def test_parts_of_other_specs_and_no_rows() -> None:
    part = FeatureSpec([Categorical("a")]).partial({"a": ["x"]})
    with pytest.raises(ValueError, match="Parts must be of one spec"):
        FeatureSpec([Categorical("a", min_count=2)]).fit_parts([part])
    for data in ({"a": []}, [], iter([]), {"a": pa.array([], pa.string())}):
        with pytest.raises(ValueError, match="fit needs at least one row"):
            FeatureSpec([Categorical("a")]).fit(data)
    with pytest.raises(RuntimeError, match="must be fitted"):
        FeatureSpec([Categorical("a")]).transform({"a": ["x"]})
    assert len(FeatureSpec([Ids("a", rows=3)]).transform({"a": [2]}).labels) == 1


@pytest.mark.parametrize("rows", [1, 7, 1000, 2**62])
def test_hashed_integers_have_the_rows_of_hash_ids(rows: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(-(2**63), 2**63, 500, dtype=np.int64)
    ids[:3] = [-(2**63), 2**63 - 1, -1]
    features = KeyedJaggedTensor(["a"], torch.from_numpy(ids), lengths=torch.ones(500).long())
    expected = hash_ids(features, {"a": rows}).values().tolist()
    made = FeatureSpec([Hashed("a", rows=rows)])
    for column in (ids, ids.view(np.uint64), pa.array(ids), torch.from_numpy(ids)):
        found = made.transform({"a": column}).sparse_features.values()
        assert found.tolist() == expected
    assert found.tolist() == [plain.hashed(int(i), rows) for i in ids]


def test_extreme_ids() -> None:
    unsigned = pa.array([2**64 - 1, 2**63, 2**63 - 1, 0, None], pa.uint64())
    growing = FeatureSpec([Hashed("a", rows=5, growing=True)])
    found = growing.transform({"a": unsigned}).sparse_features
    assert found.values().tolist() == [-1, -(2**63), 2**63 - 1, 0]
    assert found.lengths().tolist() == [1, 1, 1, 1, 0]
    fitted = FeatureSpec([Categorical("a")]).fit({"a": [-(2**63), 2**63 - 1]})
    found = fitted.transform({"a": [2**63 - 1, -(2**63), 0]}).sparse_features
    assert found.values().tolist() == [3, 2, 1]
    with pytest.raises(ValueError, match=r"'a' must .*below 2\^63; .*808.*row 1"):
        fitted.transform({"a": pa.array([1, 2**63], pa.uint64())})


@pytest.mark.parametrize("values", [["Oslo", "Rome", "Zürich"], [-(2**63), 0, 7]])
def test_values_of_rows(values: list[Any]) -> None:
    fitted = FeatureSpec([Categorical("city")]).fit({"city": [*values, *values[1:], values[2]]})
    data = {"city": [*values, None, "Bonn" if values[0] == "Oslo" else 8]}
    rows = fitted.transform(data).sparse_features.values()
    assert fitted.values_of("city", rows).tolist() == [*values, None, None]
    assert fitted.values_of("city", rows.view(5, 1).int())[2].tolist() == [values[2]]
    assert fitted.values_of("city", torch.full((0, 3), 9)).shape == (0, 3)
    assert fitted.values_of("city", [[-1, 2]]).tolist() == [[None, values[2]]]
    for wrong in (5, -2):
        with pytest.raises(ValueError, match="must be from -1 to 4"):
            fitted.values_of("city", [2, wrong])
    with pytest.raises(TypeError, match="rows must be whole numbers"):
        fitted.values_of("city", [1.0])
    with pytest.raises(KeyError, match=r"Categorical column, \['city'\]; received 'town'"):
        fitted.values_of("town", [1])


def test_tables_of_features() -> None:
    fitted = spec().fit(typed(rows_of(0, 300)))
    by_name = {table.name: table for table in fitted.tables(dim=4)}
    assert by_name["years"].feature_names == ["born", "died"]
    assert by_name["years"].num_embeddings == 2 + 5
    assert (by_name["user"].num_embeddings, by_name["user"].ids) == (1000, None)
    assert by_name["item"].ids is not None
    assert by_name["seen_month"].num_embeddings == 13
    assert by_name["size"].num_embeddings == 5
    assert by_name["films"].num_embeddings == 30
    special = {name: table.num_special_rows for name, table in by_name.items()}
    assert {special[name] for name in ("user", "item", "films")} == {0}
    assert (special["years"], special["seen_month"], special["size"]) == (2, 1, 1)
    dims = {name: 4 + i for i, name in enumerate(by_name)}
    assert {t.name: t.embedding_dim for t in fitted.tables(dim=dims)} == dims
    with pytest.raises(KeyError, match="dim must have all tables"):
        fitted.tables(dim={"years": 4})
    assert fitted.column_names(labels=False)[:3] == ["city", "tags", "tag_weights"]
    assert fitted.column_names()[-4:] == ["click", "rating", "weight", "session"]
    assert (fitted.is_weighted, fitted.label_names) == (True, ["click", "rating"])


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ([Categorical("a"), Hashed("a", rows=2)], ValueError, r"distinct names; received \['a'\]"),
        ([Ids("t_hour", rows=2), Timestamp("t")], ValueError, r"received \['t_hour'\] twice"),
        ([Label("a"), Label("a")], ValueError, r"received \['a'\] twice"),
        ([SampleWeight("a"), SampleWeight("b")], ValueError, "at most one SampleWeight"),
        ([Group("a"), Group("b")], ValueError, "at most one Group"),
        (
            [Categorical("a", table="x"), Categorical("b", table="x", min_count=2)],
            ValueError,
            "Columns of one table .*same settings",
        ),
        (
            [Hashed("a", rows=3, table="x"), Ids("b", rows=3, table="x")],
            ValueError,
            "Columns of one table .*same settings",
        ),
        (
            [Categorical("a", table="x"), Numeric("x", buckets=3)],
            ValueError,
            r"tables of their own; received \['x'\]",
        ),
        (["a"], TypeError, r"FeatureSpec\.columns must be columns .*received 'a'"),
    ],
)
def test_columns_that_exclude_each_other(
    columns: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FeatureSpec(columns)


def test_a_column_may_be_feature_and_label() -> None:
    made = FeatureSpec([Numeric("x", missing=0.0), Label("x", high=9), Group("x")]).fit({"x": [1]})
    batch = made.transform({"x": [3, 4]})
    assert batch.dense_features.tolist() == [[3.0], [4.0]]
    assert (batch.labels.tolist(), batch.groups.tolist()) == ([3.0, 4.0], [3, 4])


def test_a_batch_has_its_own_memory() -> None:
    made = FeatureSpec([Hashed("a", rows=3, growing=True), Group("a"), Label("y")])
    ids, labels = np.arange(4), np.zeros(4, np.float32)
    batch = made.transform({"a": ids, "y": labels})
    assert batch.groups is not None
    batch.groups.add_(1)
    batch.labels.add_(1)
    batch.sparse_features.values().add_(1)
    assert (ids.tolist(), labels.tolist()) == ([0, 1, 2, 3], [0.0] * 4)


@pytest.mark.parametrize("buckets", [None, 3])
def test_a_column_that_states_its_missing_value_may_be_absent(buckets: int | None) -> None:
    rows = {"x": [1.0, 2.0, 3.0, 4.0], "y": [1.0, 2.0, 3.0, 5.0]}
    spec = FeatureSpec([Numeric("x", missing=2.0, buckets=buckets), Numeric("y")]).fit(rows)
    absent = spec.transform({"y": rows["y"], "further": ["a"] * 4})
    stated = spec.transform({**rows, "x": [2.0] * 4})
    assert torch.equal(absent.dense_features, stated.dense_features)
    assert torch.equal(absent.sparse_features.values(), stated.sparse_features.values())
    with pytest.raises(KeyError) as raised:
        spec.transform({"x": rows["x"]})
    assert str(raised.value) == "The table must have a column 'y'; it has ['x']."
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_unequal_settings_of_a_table_are_named() -> None:
    wanted = r"min_count=2 for 'a' .*=1 for 'b'\."
    with pytest.raises(ValueError, match=wanted):
        FeatureSpec([Categorical("a", table="t", min_count=2), Categorical("b", table="t")])

"""Raw and prepared tables give equal batches, bit for bit."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
from recsys.features.prepared import prepared_spec, prepared_table


def raw_table(count: int, seed: int) -> pa.Table:
    draw = np.random.default_rng(seed)

    def lists(values: Any) -> list[Any]:
        return [
            None if size < 0 else [values(draw) for _ in range(size)]
            for size in draw.integers(-1, 4, count)
        ]

    tags = lists(lambda draw: draw.choice(["a", "b", "c", None]))
    return pa.table(
        {
            "city": pa.array(draw.choice(["Oslo", "Rome", None], count).tolist(), pa.string()),
            "tags": pa.array(tags, pa.list_(pa.string())),
            "strengths": pa.array(
                [None if bag is None else draw.random(len(bag)).tolist() for bag in tags],
                pa.list_(pa.float64()),
            ),
            "user": pa.array(
                draw.integers(-(2**63), 2**63 - 1, count), mask=draw.random(count) < 0.2
            ),
            "films": pa.array(lists(lambda draw: int(draw.integers(0, 9))), pa.list_(pa.int64())),
            "shop": pa.array(draw.integers(0, 5, count), mask=draw.random(count) < 0.3),
            "trust": pa.array(draw.random(count)),
            "price": pa.array(draw.lognormal(2, 3, count), mask=draw.random(count) < 0.1),
            "age": pa.array(draw.integers(0, 99, count), mask=draw.random(count) < 0.1),
            "seen": pa.array(draw.integers(0, 2**31, count)),
            "ok": pa.array(draw.integers(0, 2, count)),
            "stars": pa.array(draw.integers(0, 6, count)),
            "weight": pa.array(draw.random(count)),
            "session": pa.array([f"s{i}" for i in draw.integers(0, 9, count)]),
        }
    )


def raw_spec() -> FeatureSpec:
    return FeatureSpec(
        [
            Categorical("city"),
            Numeric("price", log1p=True, standardize=True),
            Categorical("tags", is_list=True, weights="strengths", min_count=2),
            Hashed("user", rows=50, growing=True),
            Hashed("films", rows=7, is_list=True, table="titles"),
            Ids("shop", rows=5, weights="trust"),
            Numeric("age", buckets=4),
            Numeric("stars"),
            Timestamp("seen", parts=("hour", "month")),
            Label("ok"),
            SampleWeight("weight"),
            Group("session"),
        ]
    )


def _bytes(batch: Batch) -> bytes:
    ids = batch.sparse_features
    tensors = [
        batch.dense_features,
        batch.labels,
        batch.sample_weights,
        batch.groups,
        ids.values(),
        ids.lengths(),
        ids.weights_or_none(),
    ]
    arrays = [None if tensor is None else tensor.numpy() for tensor in tensors]
    return pickle.dumps(
        [
            ids.keys(),
            batch.dense_names,
            batch.label_name,
            [array if array is None else (str(array.dtype), array.tobytes()) for array in arrays],
        ]
    )


@pytest.mark.parametrize("labels", [True, False])
def test_batches_are_equal(tmp_path: Path, labels: bool) -> None:
    spec = raw_spec().fit(raw_table(500, 0))
    ready = prepared_spec(spec)
    assert ready.features() == spec.features()
    assert ready.tables(dim=4) == spec.tables(dim=4)
    for seed in range(5):
        table = raw_table(100, seed)
        prepared = prepared_table(spec, table, labels=labels)
        pq.write_table(prepared, tmp_path / "part.parquet")
        found = ready.transform(pq.read_table(tmp_path / "part.parquet"), labels=labels)
        assert _bytes(found) == _bytes(spec.transform(table, labels=labels))
    assert ready.column_names(labels) == [*prepared.column_names] or {
        *ready.column_names(labels)
    } == {*prepared.column_names}


def test_several_labels() -> None:
    spec = FeatureSpec([Ids("film", rows=3), Label("a"), Label("b", high=5)])
    table = pa.table({"film": [0, 1], "a": [0, 1], "b": [4, 5]})
    found = prepared_spec(spec).transform(prepared_table(spec, table))
    assert found.labels.tolist() == [[0, 4], [1, 5]]
    table = pa.table({"film": [0, 1], "a": [0, None], "b": pa.nulls(2)})
    ready = prepared_table(spec, table)
    assert ready.select(["a", "b"]).to_pydict() == {"a": [0, None], "b": [None, None]}
    found, expected = prepared_spec(spec).transform(ready), spec.transform(table)
    assert found.labels.tolist() == expected.labels.tolist() == [[0, 0], [0, 0]]
    assert found.label_mask is not None
    assert expected.label_mask is not None
    assert found.label_mask.tolist() == expected.label_mask.tolist() == [[1, 0], [0, 0]]


def test_names_are_distinct() -> None:
    spec = FeatureSpec([Ids("stars", rows=9), Label("stars")])
    with pytest.raises(ValueError, match=r"prepared tables must have .*stars.* twice"):
        prepared_spec(spec)
    with pytest.raises(RuntimeError, match="must be fitted"):
        prepared_spec(FeatureSpec([Categorical("city")]))


def test_a_column_has_several_roles() -> None:
    """The group and the weight have columns of their own in prepared tables."""
    spec = FeatureSpec(
        [
            Hashed("user", rows=50),
            Ids("user_group", rows=50),
            Numeric("age", standardize=True),
            Label("ok"),
            SampleWeight("age"),
            Group("user"),
        ]
    )
    table = pa.table(
        {"user": [3, 4, 4], "user_group": [1, 2, 3], "age": [1, 2, 3], "ok": [0, 1, 0]}
    )
    prepared = prepared_table(spec.fit(table), table)
    assert {*prepared.column_names} == {
        *("user", "user_group", "age", "ok", "age_weight", "user_group_group")
    }
    assert prepared["user_group_group"].to_pylist() == [3, 4, 4]
    assert _bytes(prepared_spec(spec).transform(prepared)) == _bytes(spec.transform(table))


def test_a_table_without_rows() -> None:
    """A block of an engine may be empty."""
    columns = [Categorical("city"), Numeric("age"), Label("ok"), Label("stars", high=5)]
    table = raw_table(9, 0)
    for chosen in (columns, columns[:3], columns[:2]):
        spec = FeatureSpec(chosen).fit(table)
        for labels in (True, False):
            found = prepared_table(spec, table, labels=labels)
            empty = prepared_table(spec, table.slice(0, 0), labels=labels)
            assert empty.num_rows == 0
            assert empty.schema.equals(found.schema)

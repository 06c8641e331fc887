"""Labels, weights and groups."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import torch

from recsys.features import FeatureSpec, Group, Ids, Label, SampleWeight
from tests.features import plain

SPEC = FeatureSpec([Label("click"), SampleWeight("weight"), Group("session")])
GOOD: dict[str, Any] = {"click": [0, 1], "weight": [0.5, 2], "session": [7, -7]}


def test_values_of_all_types() -> None:
    batch = SPEC.transform(GOOD)
    assert batch.label_name == "click"
    assert batch.labels.tolist() == [0.0, 1.0]
    assert batch.sample_weights is not None
    assert batch.groups is not None
    assert batch.sample_weights.tolist() == [0.5, 2.0]
    assert batch.groups.tolist() == [7, -7]
    other = {"click": [False, True], "weight": [1, 0], "session": ["é", ""]}
    batch = SPEC.transform(other)
    assert (batch.labels.tolist(), batch.label_name) == ([0.0, 1.0], "click")
    assert batch.groups is not None
    assert batch.sample_weights is not None
    assert batch.groups.tolist() == [plain.fnv("é"), plain.fnv("")]
    assert batch.sample_weights.tolist() == [1.0, 0.0]
    batch = SPEC.transform(GOOD | {"session": pa.array([2**64 - 1, 0], pa.uint64())})
    assert batch.groups is not None
    assert batch.groups.tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"click": [0, 2]}, ValueError, "'click' must .*from 0 to 1.*2"),
        ({"click": [-0.1, 1]}, ValueError, r"'click' must .*labels .*-0\.1.*row 0"),
        ({"click": [0, None]}, ValueError, "'click' must .*missing value; .*row 1"),
        ({"click": [0, math.nan]}, ValueError, "'click' must .*finite.*nan in row 1"),
        ({"click": ["0", "1"]}, TypeError, "'click' must have numbers; received string"),
        ({"click": [[0], [1]]}, TypeError, "'click' must .*one value .*received list"),
        ({"weight": [0, -1]}, ValueError, "'weight' must .*from 0; received -1"),
        ({"weight": [1, 1e39]}, ValueError, r"'weight' must .*float32; .*1e\+39.*row 1"),
        ({"weight": [None, 1]}, ValueError, "'weight' must .*missing value; .*row 0"),
        ({"session": [None, 1]}, ValueError, "'session' must .*missing key; .*row 0"),
        ({"session": ["a", None]}, ValueError, "'session' must .*missing key; .*row 1"),
        ({"session": [0.5, 1]}, TypeError, r"'session' must .*exact whole.*0\.5.*row 0"),
    ],
)
def test_bad_values_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SPEC.transform(GOOD | change)
    SPEC.transform({"x": [1]}, labels=False)
    missing = {name: column for name, column in GOOD.items() if name not in change}
    with pytest.raises(KeyError, match=f"must have a column {next(iter(change))!r}"):
        SPEC.transform(missing)


LISTS = FeatureSpec([Ids("films", rows=9, is_list=True, weights="w")])
ONE = FeatureSpec([Ids("film", rows=9, weights="w")])


@pytest.mark.parametrize(
    ("films", "weights", "message"),
    [
        (
            [[1], [2, 3]],
            [[1], [2]],
            "'w' must .*id of 'films'.*1 weights.*2",
        ),
        ([[1], None], [[1], [2]], "1 weights and 0 ids.*row 1"),
        ([[1], []], None, "0 weights and 1 ids.*row 0"),
        ([[1], [2, 3]], [[1], [2, None]], "'w' must .*a weight.*None.*row 1"),
        ([[1], [2, 3]], [[1], [2, math.inf]], "'w' must .*finite .*inf.*row 1"),
        ([[1], [2, 3]], [[1], [2, 1e40]], r"'w' must .*float32; .*1e\+40.*row 1"),
        ([[1], [2, 9]], [[1], [2, 3]], "'films' must .*from 0 to 8.*9"),
    ],
)
def test_weights_of_lists(films: Any, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LISTS.transform({"films": films, "w": weights or pa.nulls(2)})


def test_missing_ids_need_no_weight() -> None:
    batch = LISTS.transform({"films": [[1, None], None], "w": [[0.5, None], None]})
    assert batch.sparse_features.values().tolist() == [1]
    assert batch.sparse_features.weights().tolist() == [0.5]
    assert batch.sparse_features.lengths().tolist() == [1, 0]
    batch = ONE.transform({"film": [None, 3], "w": [None, -2.5]})
    assert batch.sparse_features.weights().tolist() == [-2.5]
    with pytest.raises(ValueError, match=r"'w' must have a weight.*row 1"):
        ONE.transform({"film": [None, 3], "w": [1, None]})
    # a missing entry of a dictionary is a missing id
    ids = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array([None, 3]))
    batch = ONE.transform({"film": ids, "w": [None, 2.0]})
    assert batch.sparse_features.values().tolist() == [3]


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, pa.table])
def test_one_of_several_labels_may_be_missing(kind: Any) -> None:
    spec = FeatureSpec([Label("click"), Label("rating", low=1, high=5), SampleWeight("w")])
    rows = {"click": [1, 0, None], "rating": [4.0, None, None], "w": [1.0, 2.0, 3.0]}
    batch = spec.transform(kind(rows))
    assert batch.labels.tolist() == [[1, 4], [0, 0], [0, 0]]
    assert batch.label_mask is not None
    assert batch.label_mask.tolist() == [[True, True], [True, False], [False, False]]
    first = {name: column[:1] for name, column in rows.items()}
    assert spec.transform(kind(first)).label_mask is None
    with pytest.raises(ValueError, match=r"'rating' must .*from 1 to 5.*9"):
        spec.transform(rows | {"rating": [None, 9, None]})
    with pytest.raises(ValueError, match=r"'rating' must have finite.*nan.*row 2"):
        spec.transform(rows | {"rating": [None, 2.0, math.nan]})
    moved = pickle.loads(pickle.dumps(batch)).to(torch.device("cpu"))
    assert torch.equal(moved.label_mask, batch.label_mask)

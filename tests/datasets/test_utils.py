"""Batches from tables."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from recsys.datasets.utils import Batch
from recsys.distributed.train_pipeline.batches import to_device
from recsys.sparse import finish_value_checks
from recsys.sparse.value_checks import check_dense_values, check_labels
from tests.pretended_cuda import CUDA, PretendedCuda
from tests.saved import through_torch_save

TABLE: dict[str, Any] = {
    "age": [31, 44, 5],
    "price": [0.5, 2.0, 1.0],
    "user": [7, 8, 9],
    "films": [[1, 2], [], [3]],
    "seconds": [[10.0, 20.0], [], [5.0]],
    "liked": [True, False, True],
}


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, pa.table])
def test_from_a_table(kind: Any) -> None:
    batch = Batch.from_columns(
        kind(TABLE),
        sparse=["user", "films"],
        dense=["age", "price"],
        label="liked",
        weights={"films": "seconds"},
    )
    assert batch.dense_features.tolist() == [[31.0, 0.5], [44.0, 2.0], [5.0, 1.0]]
    assert batch.labels.tolist() == [1.0, 0.0, 1.0]
    assert {t.dtype for t in (batch.dense_features, batch.labels)} == {torch.float32}
    assert batch.sparse_features.keys() == ["user", "films"]
    assert batch.sparse_features["films"].weights().tolist() == [10.0, 20.0, 5.0]
    assert batch.sparse_features["user"].weights().tolist() == [1.0, 1.0, 1.0]


def test_a_copy_without_blocking_waits_for_nothing_pinned_or_not() -> None:
    batch = Batch.from_columns(TABLE, sparse=["user", "films"], dense=["age"], label="liked")
    with PretendedCuda() as cuda:
        batch.to(CUDA)
        assert {kind for kind, _, _ in cuda.notes} == {"upload"}
        cuda.forget()
        for given in (batch, batch.pin_memory()):
            moved = given.to(CUDA, non_blocking=True)
            features = moved.sparse_features
            parts = moved.dense_features, moved.labels, features.values(), features.lengths()
            assert all(map(cuda.is_on_device, parts))
        assert cuda.notes == []
        assert moved.labels.tolist() == [1.0, 0.0, 1.0]


def test_dense_columns_and_labels_may_be_left_out() -> None:
    batch = Batch.from_columns({"user": np.array([[1, 0], [2, 3]])}, sparse=["user"], padding=0)
    assert batch.dense_features.shape == (2, 0)
    assert batch.labels.tolist() == [0.0, 0.0]
    assert batch.sparse_features.lengths().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"liked": [1.0]}, ValueError, "received 3 in 'user' and 1 in 'liked'"),
        ({"age": [[1.0]] * 3}, ValueError, "Column 'age' must hold one number per row"),
        (
            {"age": [1.0, None, 2.0]},
            ValueError,
            "Column 'age' must be finite; received nan in row 1",
        ),
        ({"liked": [1.0, 0.0, math.inf]}, ValueError, "Column 'liked' must be .* inf in row 2"),
        ({"age": ["a", "b", "c"]}, TypeError, "Column 'age' must hold numbers"),
    ],
)
def test_columns_that_do_not_fit(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    table = TABLE | change
    with pytest.raises(error, match=message):
        Batch.from_columns(table, sparse=["user"], dense=["age"], label="liked")
    with pytest.raises(KeyError, match="no such"):
        Batch.from_columns(table, sparse=["no such"])


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, pa.table])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_weights_are_named_by_their_column(kind: Any, bad: float) -> None:
    table = kind(TABLE | {"films": [1, 2, 3], "seconds": [1.0, bad, 2.0]})
    with pytest.raises(ValueError, match=r"^Column 'seconds' must .* in row 1"):
        Batch.from_columns(table, sparse=["films"], weights={"films": "seconds"})
    with pytest.raises(KeyError, match=r"weights must .*received"):
        Batch.from_columns(table, sparse=["user"], weights={"films": "seconds"})


@pytest.mark.parametrize(
    "travel",
    [
        lambda batch: batch.to(torch.device("cpu")),
        copy.copy,
        copy.deepcopy,
        lambda batch: pickle.loads(pickle.dumps(batch)),
        through_torch_save,
        lambda batch: torch.utils._pytree.tree_map(lambda leaf: leaf, batch),
        lambda batch: dataclasses.replace(batch, labels=batch.labels + 0),
        lambda batch: to_device(batch, torch.device("cpu")),
    ],
    ids=["to", "copy", "deepcopy", "pickle", "save", "tree_map", "replace", "to_device"],
)
def test_names_travel_with_a_batch(travel: Callable[[Batch], Batch]) -> None:
    batch = Batch.from_columns(TABLE, sparse=["user"], dense=["age", "price"], label="liked")
    travelled = travel(batch)
    assert travelled.dense_names == ("age", "price")
    assert travelled.label_name == "liked"
    travelled.dense_features[2, 1] = math.nan
    with pytest.raises(ValueError, match="nan in row 2 of column 'price'"):
        check_dense_values(travelled.dense_features)
    travelled.labels[0] = 3
    with pytest.raises(ValueError, match=r"received 3.0 in row 0 of column 'liked'"):
        check_labels(travelled.labels)


def test_names_travel_to_a_gpu() -> None:
    batch = Batch.from_columns(TABLE, sparse=["user"], dense=["age", "price"], label="liked")
    with PretendedCuda():
        moved = batch.pin_memory().to(CUDA, non_blocking=True)
        assert (moved.dense_names, moved.label_name) == (("age", "price"), "liked")
        moved.dense_features[2, 1] = math.nan
        check_dense_values(moved.dense_features)
        with pytest.raises(ValueError, match="nan in row 2 of column 'price'"):
            finish_value_checks()


def test_a_batch_needs_no_names() -> None:
    made = Batch.from_columns(TABLE, sparse=["user"])
    batch = Batch(torch.full((3, 1), math.nan), made.sparse_features, made.labels)
    assert (batch.dense_names, batch.label_name) == ((), "")
    with pytest.raises(ValueError, match=r"received nan in row 0 \(3 such"):
        check_dense_values(batch.dense_features)
    old = pickle.loads(pickle.dumps(batch))
    del old.__dict__["dense_names"], old.__dict__["label_name"]  # as of an earlier version
    assert pickle.loads(pickle.dumps(old)).dense_names == ()

"""Batches from tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from recsys.datasets.utils import Batch
from tests.pretended_cuda import CUDA, PretendedCuda

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
        ({"liked": [1.0]}, ValueError, r"received 3 in 'user' and shape \(1,\) in 'liked'"),
        ({"age": [[1.0]] * 3}, ValueError, r"shape \(3, 1\) in 'age'"),
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

"""Columns of every kind, against the same ids as plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.sparse import KeyedJaggedTensor, from_columns

LISTS = [[1, 2, 3], [], [4], [2**40, 5]]
ONES = [7, 8, 9, 0]


def lists_of(batch: KeyedJaggedTensor, feature: str) -> list[list[int]]:
    return [bag.tolist() for bag in batch[feature].to_dense()]


@pytest.mark.parametrize(
    "table",
    [
        {"films": LISTS, "user": ONES},
        {"films": [tuple(ids) for ids in LISTS], "user": np.array(ONES, dtype=np.int32)},
        {"films": [np.array(ids, dtype=np.int64) for ids in LISTS], "user": torch.tensor(ONES)},
        pd.DataFrame({"films": LISTS, "user": ONES}),
        pd.DataFrame({"films": LISTS, "user": pd.array(ONES, dtype="Int64")}),
        pa.table({"films": LISTS, "user": ONES}),
        pa.table(
            {
                "films": pa.chunked_array([LISTS[:1], LISTS[1:]]),
                "user": pa.chunked_array([ONES[:3], ONES[3:]]),
            }
        ),
        pa.table({"films": [[0], *LISTS], "user": [0, *ONES]}).slice(1),
    ],
    ids=["lists", "tuples", "arrays", "pandas", "pandas-Int64", "arrow", "chunks", "slice"],
)
def test_tables(table: Any) -> None:
    batch = from_columns(table)
    assert batch.keys() == ["films", "user"]
    assert (batch.values().dtype, batch.lengths().dtype) == (torch.int64, torch.int64)
    assert lists_of(batch, "films") == LISTS
    assert lists_of(batch, "user") == [[one] for one in ONES]
    assert batch.weights_or_none() is None
    batch.validate()


@pytest.mark.parametrize(
    "column",
    [
        [5, None, 6],
        [5, float("nan"), 6],
        np.array([5.0, np.nan, 6.0]),
        pd.Series([5, None, 6]),
        pd.Series([5, pd.NA, 6], dtype="Int64"),
        pa.array([5, None, 6]),
        [[5], None, [6]],
        pd.Series([[5], None, [6]]),
        pa.array([[5], None, [6]]),
    ],
)
def test_what_is_missing_is_an_empty_bag(column: Any) -> None:
    assert lists_of(from_columns({"f": column}), "f") == [[5], [], [6]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**62), max_size=4), min_size=1, max_size=6))
def test_matrices_with_padding(lists: list[list[int]]) -> None:
    width = max(map(len, lists))
    matrix = np.full((len(lists), width), -1, dtype=np.int64)
    for row, ids in zip(matrix, lists, strict=True):
        row[: len(ids)] = ids
    for given_as in (matrix, torch.from_numpy(matrix)):
        assert lists_of(from_columns({"f": given_as}, padding=-1), "f") == lists
    assert lists_of(from_columns({"f": lists}), "f") == lists
    assert lists_of(from_columns({"f": matrix}), "f") == matrix.tolist()


def test_weights() -> None:
    batch = from_columns({"a": LISTS, "b": ONES}, {"a": [[0.5, 1, 2], [], [3.0], [4, 0.25]]})
    assert batch.weights().tolist() == [0.5, 1.0, 2.0, 3.0, 4.0, 0.25, 1.0, 1.0, 1.0, 1.0]
    assert batch.weights().dtype == torch.float32


@pytest.mark.parametrize(
    ("table", "options", "error", "message"),
    [
        ({}, {}, ValueError, "needs at least one column; received none"),
        ({"s": ["x", "y"]}, {}, TypeError, r"Column 's' must hold numbers; .* such as \['x'\]"),
        ({"s": [1.5, 2]}, {}, TypeError, r"must be whole numbers; .* in column 's', such as \[1.5"),
        ({"s": torch.tensor([True])}, {}, TypeError, r"must be whole numbers; .*torch.bool"),
        ({"s": np.array([2.0**60])}, {}, TypeError, r"Ids above 2\*\*53 .* dtype 'Int64'"),
        ({"a": [1], "b": [1, 2]}, {}, ValueError, "received 1 in 'a' and 2 in 'b'"),
        ({"a": np.zeros((1, 1, 1))}, {}, ValueError, r"received shape \(1, 1, 1\)"),
        ({"a": pa.array([[1, None]])}, {}, ValueError, "list of column 'a' holds a missing value"),
        ({"a": [1]}, {"weights": {"b": [1.0]}}, KeyError, r"given for \['b'\], which are no"),
        ({"a": [1]}, {"weights": {"a": [[1, 2]]}}, ValueError, r"\[1\] ids and \[2\] weights"),
        ({"a": [1]}, {"weights": {"a": torch.tensor([True])}}, TypeError, "must be numbers"),
    ],
)
def test_what_is_no_batch_is_refused(
    table: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_columns(table, **options)

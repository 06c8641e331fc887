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
        ({}, {}, ValueError, "at least one column; received none"),
        ({"s": [7, 1.5]}, {}, TypeError, r"'s' must .*1\.5 in row 1\."),
        ({"s": torch.tensor([True])}, {}, TypeError, "whole numbers; .*True in row 0"),
        (
            {"s": np.array([2.0**60])},
            {},
            TypeError,
            r"rounds those from 9007199254740992 .*'Int64'",
        ),
        ({"a": [1], "b": [1, 2]}, {}, ValueError, "1 in 'a' and 2 in"),
        ({"a": np.zeros((1, 1, 1))}, {}, ValueError, r"received shape \(1, 1, 1\)"),
        ({"a": [[], [1, None]]}, {}, ValueError, "'a' must not .*missing value.*row 1"),
        ({"a": pa.array([[], [1, None]])}, {}, ValueError, "a missing value .*None.*row 1"),
        ({"a": [1, [2, np.nan]]}, {}, ValueError, "a missing value .*nan.*row 1"),
        ({"a": [1]}, {"weights": {"b": [1.0]}}, KeyError, r"received \['b'\]"),
        ({"a": [1]}, {"weights": {"a": [[1, 2]]}}, ValueError, "2 weights and 1 ids.*row 0"),
        ({"a": [1]}, {"weights": {"a": [1, 2]}}, ValueError, "2 rows .*weights and 1 of"),
        ({"a": [1]}, {"weights": {"a": torch.tensor([True])}}, TypeError, "'a' must hold numbers"),
        (
            {"a": [1, 2]},
            {"weights": {"a": [1.0, np.inf]}},
            ValueError,
            "of 'a' must .*inf.*row 1",
        ),
    ],
)
def test_what_is_no_batch_is_refused(
    table: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_columns(table, **options)


BIG = 2**63 + 5


@pytest.mark.parametrize(
    "column",
    [
        [7, BIG],
        [7, BIG, None],
        [[7], [BIG]],
        [np.array([7], dtype=np.uint64), np.array([BIG], dtype=np.uint64)],
        np.array([7, BIG], dtype=np.uint64),
        np.array([[7], [BIG]], dtype=np.uint64),
        torch.from_numpy(np.array([7, BIG], dtype=np.uint64)),
        pd.Series([7, BIG], dtype="uint64"),
        pd.Series([7, BIG, None], dtype="UInt64"),
        pd.Series([7, BIG], dtype="uint64[pyarrow]"),
        pa.array([7, BIG, None], pa.uint64()),
        pa.array([[7], [BIG]], pa.list_(pa.uint64())),
    ],
)
def test_an_unsigned_id_that_int64_does_not_hold_is_refused(column: Any) -> None:
    message = rf"^Column 'f' must .*{BIG}.*row 1\. Hash"
    with pytest.raises(ValueError, match=message):
        from_columns({"f": column})
    with pytest.raises(ValueError, match=message):
        from_columns({"f": column}, padding=-1)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", ">i4"])
def test_ids_of_every_integer_dtype_are_taken(dtype: str) -> None:
    values = np.array([1, 100], dtype=dtype)
    for column in (values, [values, values[:1]], np.array([[1, 0], [100, 0]], dtype=dtype)):
        bags = lists_of(from_columns({"f": column}, padding=0), "f")
        assert bags == ([[1, 100], [1]] if isinstance(column, list) else [[1], [100]])
    if dtype != ">i4":
        assert lists_of(from_columns({"f": torch.from_numpy(values)}), "f") == [[1], [100]]


@pytest.mark.parametrize(
    "column",
    [
        [2**60 + 1, None],
        [2**60 + 1, float("nan")],
        pd.Series([2**60 + 1, None], dtype="Int64"),
        pd.Series([2**60 + 1, None], dtype=object),
        pd.array([2**60 + 1, None], dtype="Int64"),
        pd.Series([2**60 + 1, None], dtype="int64[pyarrow]"),
        pa.array([2**60 + 1, None]),
        pa.chunked_array([[2**60 + 1], [None]]),
        np.array([2**60 + 1, None], dtype=object),
    ],
)
def test_a_missing_value_leaves_the_others_exact(column: Any) -> None:
    assert lists_of(from_columns({"f": column}), "f") == [[2**60 + 1], []]


@pytest.mark.parametrize(
    ("column", "limit"),
    [
        (np.array([2.0**53]), 2**53),
        (np.array([2.0**24], dtype=np.float32), 2**24),
        (torch.tensor([2.0**11], dtype=torch.float16), 2**11),
        (torch.tensor([2.0**8], dtype=torch.bfloat16), 2**8),
        ([2.0**53, 1], 2**53),
        (pa.array([2.0**24], pa.float32()), 2**24),
    ],
)
def test_floats_that_may_stand_for_several_ids_are_refused(column: Any, limit: int) -> None:
    with pytest.raises(TypeError, match=rf"from {limit} on; received {limit}\.0 in"):
        from_columns({"f": column})
    if not isinstance(column, list | pa.Array):
        assert from_columns({"f": column - 1}).values().tolist() == [limit - 1]


NAMES = ["b", "a", None, "b"]
ENCODED = pa.array(NAMES).dictionary_encode()
DICTIONARY = pa.dictionary(pa.int32(), pa.string())
CHUNKS = [pa.array(names).dictionary_encode() for names in (["b", "a"], ["c", "a"])]


@pytest.mark.parametrize(
    ("column", "bags"),
    [
        (pd.Categorical(NAMES), [[1], [0], [], [1]]),
        (pd.Series(NAMES, dtype="category"), [[1], [0], [], [1]]),
        (pd.CategoricalIndex(["b", "a"], categories=["c", "b", "a"]), [[1], [2]]),
        (ENCODED, [[0], [1], [], [0]]),
        (pd.Series(ENCODED, dtype=pd.ArrowDtype(DICTIONARY)), [[0], [1], [], [0]]),
        (pa.chunked_array(CHUNKS), [[0], [1], [2], [1]]),
        (
            pa.DictionaryArray.from_arrays(
                pa.array([0, 1, None], pa.uint8()), pa.array(["x", None])
            ),
            [[0], [], []],
        ),
        (
            pa.DictionaryArray.from_arrays(pa.array([3, 2, 1, 0]), pa.array(["x", "x", "y", "x"])),
            [[0], [2], [0], [0]],
        ),
        (pa.array([["a", "b"], None, ["b"]], pa.list_(DICTIONARY)), [[0, 1], [], [1]]),
        # categories that are numbers are ids themselves
        (pd.Categorical([20, 10, None]), [[20], [10], []]),
        (pd.Categorical(pd.Series([7, 5], dtype=object)), [[7], [5]]),
        (pa.array([20, 10, None]).dictionary_encode(), [[20], [10], []]),
    ],
)
def test_categories_have_codes(column: Any, bags: list[list[int]]) -> None:
    assert lists_of(from_columns({"city": column}), "city") == bags


@pytest.mark.parametrize(
    "column",
    [
        ["a long text", "b"],
        [["a long text"], ["b"]],
        np.array(["a long text", "b"]),
        np.array([["a long text"], ["b"]]),
        pd.Series(["a long text", "b"]),
        pd.Series(["a long text", None], dtype="string"),
        pa.array(["a long text", None]),
        pa.array([["a long text"]]),
    ],
)
def test_a_text_is_shown_whole_with_what_converts_it(column: Any) -> None:
    message = r"^Column 'city' .*text' in row 0\..*\.astype\('category'\).*dictionary_encode"
    with pytest.raises(TypeError, match=message):
        from_columns({"city": column})


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        (pd.Series(pd.to_datetime(["2020-01-02"])), "2020-01-02"),
        (np.array([5], dtype="timedelta64[s]"), "timedelta64"),
        (pa.array([{"a": 1}]), r"\{'a': 1\}"),
        ([[[1]]], r"\[1\]"),
        (np.array([1j]), "1j"),
        (torch.tensor([1j]), "1j"),
        ([object], "object"),
    ],
)
def test_what_is_no_id_is_shown(column: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"'f' must hold whole numbers; .*{shown}"):
        from_columns({"f": column})


@pytest.mark.parametrize("column", [5, "text", b"text", {"a": 1}])
def test_what_is_no_column_is_refused(column: Any) -> None:
    with pytest.raises(TypeError, match="'f' must be a list, an"):
        from_columns({"f": column})


def test_columns_of_libraries_that_give_arrow() -> None:
    class Series:
        """A column like polars'."""

        def __init__(self, values: list[Any]) -> None:
            self._values = values

        def to_arrow(self) -> pa.Array:
            return pa.array(self._values)

    class Frame(dict[str, Series]):
        @property
        def columns(self) -> list[str]:
            return list(self)

        def get_columns(self) -> list[Series]:
            return list(self.values())

    batch = from_columns(Frame(user=Series([7, None]), films=Series([[1, 2], None])))
    assert lists_of(batch, "user") == [[7], []]
    assert lists_of(batch, "films") == [[1, 2], []]

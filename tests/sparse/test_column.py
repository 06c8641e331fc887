"""Columns of one number per row; columns of ids are in test_columns.py."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from recsys.sparse import set_value_checks
from recsys.sparse.column import read_numbers
from tests.pretended_cuda import CUDA, PretendedCuda

VALUES = [1.5, 2.0, -3.0]


@pytest.mark.parametrize(
    "column",
    [
        VALUES,
        tuple(VALUES),
        np.array(VALUES),
        np.array(VALUES, dtype=np.float16),
        np.array(VALUES, dtype=object),
        torch.tensor(VALUES, dtype=torch.float64),
        pd.Series(VALUES),
        pd.Series(VALUES, dtype="Float64"),
        pd.Series(VALUES, dtype="double[pyarrow]"),
        pd.Categorical(VALUES),
        pa.array(VALUES),
        pa.chunked_array([VALUES[:1], VALUES[1:]]),
        pa.array(VALUES).dictionary_encode(),
        [decimal.Decimal("1.5"), 2, -3.0],
    ],
)
def test_numbers_of_every_kind(column: Any) -> None:
    numbers = read_numbers("Column 'x'", column)
    assert numbers.dtype == torch.float32
    assert numbers.tolist() == VALUES


@pytest.mark.parametrize(
    "column", [[True, False], np.array([True, False]), pa.array([True, False])]
)
def test_truth_values_are_numbers(column: Any) -> None:
    assert read_numbers("Column 'x'", column).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        ([1.0, None], "nan"),
        ([1, math.nan], "nan"),
        (np.array([1, np.nan], dtype=np.float32), "nan"),
        (torch.tensor([1.0, -math.inf]), "-inf"),
        (pd.Series([1, None], dtype="Int64"), "nan"),
        (pd.Series([True, None], dtype="boolean"), "nan"),
        (pa.array([1, None]), "nan"),
        (pa.array([1.0, math.inf]), "inf"),
        ([1.0, 1e300], r"1e\+300"),
        ([1, 10**400], "inf"),
        (np.array([1.0, 1e39]), r"1e\+39"),
    ],
)
def test_what_is_not_finite_in_float32_is_refused(column: Any, shown: str) -> None:
    message = rf"^Column 'x' must .*{shown}.*row 1\."
    with pytest.raises(ValueError, match=message):
        read_numbers("Column 'x'", column)


def test_without_checks_a_missing_value_is_nan() -> None:
    set_value_checks(False)
    try:
        found = read_numbers("Column 'x'", [1.0, None, 1e300])
    finally:
        set_value_checks(True)
    assert found[0] == 1
    assert found[1].isnan()
    assert found[2] == math.inf


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        (["1", "2"], "'1'"),
        (pd.Categorical(["a", "b"]), "'a'"),
        (pa.array(["a", "b"]).dictionary_encode(), "'a'"),
        (pd.Series(pd.to_datetime(["2020-01-02"])), "2020-01-02"),
        (np.array([5], dtype="timedelta64[s]"), "timedelta64"),
        (np.array([1j]), "1j"),
        (torch.tensor([1j]), "1j"),
    ],
)
def test_what_is_no_number_is_refused(column: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"^Column 'x' must hold numbers; .*{shown}"):
        read_numbers("Column 'x'", column)


@pytest.mark.parametrize("column", [[[1.0]], np.ones((2, 1)), torch.ones(2, 1), pa.array([[1.0]])])
def test_lists_are_refused(column: Any) -> None:
    with pytest.raises(ValueError, match="'x' must hold one number per"):
        read_numbers("Column 'x'", column)


def test_a_tensor_on_a_device_is_read_without_waiting() -> None:
    with PretendedCuda() as cuda:
        column = torch.tensor(VALUES).to(CUDA)
        cuda.forget()
        assert cuda.is_on_device(read_numbers("Column 'x'", column))
        assert cuda.notes == []

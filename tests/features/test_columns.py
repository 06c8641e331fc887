"""Descriptions of columns."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from recsys.features import (
    Categorical,
    Group,
    Hashed,
    Ids,
    Label,
    Numeric,
    SampleWeight,
    Timestamp,
    Vector,
)
from tests.features.tables import COLUMNS


def test_columns_are_values() -> None:
    for column in COLUMNS:
        again = pickle.loads(pickle.dumps(column))
        assert again == column
        assert hash(again) == hash(column)
        with pytest.raises(dataclasses.FrozenInstanceError):
            column.name = "other"  # type: ignore[misc]
    assert Categorical("a") == Categorical("a", table="a")
    assert Numeric("a", clip=(0, 1)) == Numeric("a", clip=(0.0, 1.0))
    assert Timestamp("a").parts == ("hour", "weekday")
    assert (SampleWeight("a"), Group("a")) == (SampleWeight("a"), Group("a"))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Categorical("a", min_count=0), ValueError, "Categorical 'a': min_count .*0"),
        (lambda: Categorical("a", max_size=0), ValueError, "Categorical 'a': max_size .*0"),
        (lambda: Categorical("a", min_count=1.5), TypeError, "min_count .*1.5"),
        (lambda: Categorical(3), TypeError, "name .*3"),
        (lambda: Categorical("a", weights=3), TypeError, "weights .*3"),
        (lambda: Hashed("a", rows=0), ValueError, "Hashed 'a': rows .*0"),
        (lambda: Hashed("a", rows="9"), TypeError, "rows .*'9'"),
        (lambda: Ids("a", rows=-1), ValueError, "Ids 'a': rows .*-1"),
        (lambda: Numeric("a", missing=float("nan")), ValueError, "Numeric 'a': missing .*nan"),
        (lambda: Numeric("a", clip=(1, 1)), ValueError, "clip must have .*below .*1, 1"),
        (lambda: Numeric("a", clip=(0, float("inf"))), ValueError, "Numeric 'a': clip .*inf"),
        (lambda: Numeric("a", buckets=1), ValueError, "Numeric 'a': buckets .*1"),
        (lambda: Numeric("a", buckets=3, standardize=True), ValueError, "exclude each other"),
        (lambda: Numeric("a", spacing="even"), ValueError, "spacing must be one of .*'even'"),
        (lambda: Timestamp("a", parts=("year",)), ValueError, "parts must be one of .*'year'"),
        (lambda: Timestamp("a", unit="m"), ValueError, "unit must be one of .*'m'"),
        (lambda: Vector("a", dim=0), ValueError, "Vector 'a': dim .*0"),
        (lambda: Vector("a", dim=2.5), TypeError, "dim .*2.5"),
        (lambda: Label("a", low=2), ValueError, "Label 'a': low .*above high; .*2"),
        (lambda: Label("a", high=float("inf")), ValueError, "Label 'a': high .*inf"),
        (lambda: SampleWeight(None), TypeError, "name .*None"),
        (lambda: Group(b"a"), TypeError, "name .*b'a'"),
    ],
)
def test_bad_settings_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()

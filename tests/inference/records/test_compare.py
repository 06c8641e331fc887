"""A record is compared with the training data as a further day is by `extend`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.features import Categorical, FeatureSpec, Label, Numeric
from recsys.inference.records import compare_record


def _index(before: Any, after: Any) -> float:
    old, new = (np.maximum(np.asarray(shares, np.float64), 1e-4) for shares in (before, after))
    return float(((new - old) * np.log(new / old)).sum())


def test_columns_are_compared_with_the_data_of_fit(tmp_path: Path) -> None:
    columns = [Categorical("city"), Numeric("age", missing=0.0), Label("ok")]
    days = {"city": ["a"] * 60 + ["b"] * 40, "age": np.arange(100.0), "ok": [0, 1] * 50}
    spec = FeatureSpec(columns).fit(days)
    rows = {"city": ["a", "b", "b", "c", None], "age": [5.0, 15.0, None, 95.0, 96.0]}
    rows |= {"prediction_output": [0.5] * 5}
    pq.write_table(pa.table(rows), tmp_path / "1.parquet")
    report = compare_record(tmp_path, spec)
    assert report.num_rows == 5
    assert report.shifts["city"].missing == (0.0, 0.2)
    assert report.shifts["city"].stability_index == pytest.approx(
        _index([0.6, 0.4, 0.0], [0.25, 0.5, 0.25])
    )
    ages = np.bincount([0, 0, 1, 9, 9], minlength=10) / 5  # a missing age is 0
    assert report.shifts["age"].stability_index == pytest.approx(
        _index(spec.fitted.profiles["age"].shares, ages)
    )
    assert str(report).splitlines()[0] == "5 rows"
    same = compare_record(days, spec)
    assert all(shift.stability_index < 1e-9 for shift in same.shifts.values())
    with pytest.raises(KeyError, match="city"):
        compare_record({"age": [1.0]}, spec)
    with pytest.raises(ValueError, match="compare_record needs at least one row"):
        compare_record({"city": [], "age": []}, spec)
    with pytest.raises(TypeError, match=r"compare_record\.spec must be a FeatureSpec"):
        compare_record(days, "spec")  # type: ignore[arg-type]

"""Partial fits."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.features import Categorical, FeatureSpec, Hashed, Numeric
from recsys.features.fit import PartialFit


def test_rows_are_counted_over_all_tables() -> None:
    part = PartialFit([Numeric("x"), Hashed("y", rows=3)])
    part.add(pa.table({"x": [1.0, 2.0]}))
    part.add(pa.table({"x": [1.0]}))
    with pytest.raises(ValueError, match="'x' must have finite numbers; received nan in row 4"):
        part.add(pa.table({"x": [1.0, float("nan")]}))


@pytest.mark.parametrize("row", [3, 70_000, 150_001])
def test_a_bad_value_of_files_is_named_by_its_row(tmp_path: Path, row: int) -> None:
    numbers = [float(i) for i in range(200_000)]
    numbers[row] = float("inf")
    table = pa.table({"x": numbers})
    pq.write_table(table.slice(0, 100_000), tmp_path / "0.parquet")
    pq.write_table(table.slice(100_000), tmp_path / "1.parquet")
    with pytest.raises(ValueError, match=f"'x' .*received inf in row {row}"):
        FeatureSpec([Numeric("x")]).fit(tmp_path)


def test_other_settings_do_not_merge() -> None:
    part, other = PartialFit([Categorical("a")]), PartialFit([Categorical("a", max_size=3)])
    with pytest.raises(ValueError, match="Parts must be of one spec"):
        part.merge(other)

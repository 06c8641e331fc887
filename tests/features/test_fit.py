"""Partial fits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.features import Categorical, FeatureSpec, Hashed, Numeric
from recsys.features.arrow import column_of
from recsys.features.fit import PartialFit


def test_rows_are_counted_over_all_tables() -> None:
    part = PartialFit([Numeric("x"), Hashed("y", rows=3)])
    part.add(pa.table({"x": [1.0, 2.0]}))
    part.add(pa.table({"x": [1.0]}))
    with pytest.raises(ValueError, match=r"'x' must have finite.*nan.*row 4"):
        part.add(pa.table({"x": [1.0, float("nan")]}))


@pytest.mark.parametrize("row", [3, 70_000, 150_001])
def test_a_bad_value_of_files_is_named_by_its_row(tmp_path: Path, row: int) -> None:
    numbers = [float(i) for i in range(200_000)]
    numbers[row] = float("inf")
    table = pa.table({"x": numbers})
    pq.write_table(table.slice(0, 100_000), tmp_path / "0.parquet")
    pq.write_table(table.slice(100_000), tmp_path / "1.parquet")
    file, place = divmod(row, 100_000)
    rule = rf"^Column 'x' .*row {place} of {tmp_path}/{file}\.parquet"
    with pytest.raises(ValueError, match=rule):
        FeatureSpec([Numeric("x")]).fit(tmp_path)
    with pytest.raises(ValueError, match=rf"'x' .*received inf in row {row}\."):
        FeatureSpec([Numeric("x")]).fit([table.slice(0, 100_000), table.slice(100_000)])
    texts = table.slice(0, 3).set_column(0, "x", pa.array(["a", "b", "c"]))
    pq.write_table(texts, tmp_path / "2.parquet")
    rule = rf"^{tmp_path}/2\.parquet: .*'x' must .*received string"
    with pytest.raises(TypeError, match=rule):
        FeatureSpec([Numeric("x")]).fit(tmp_path / "2.parquet")


def test_columns_that_one_array_cannot_hold() -> None:
    def overflow() -> None:
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    # as Arrow does for 3 GiB of texts, which would take seconds
    column = SimpleNamespace(num_chunks=3, nbytes=3 * 2**30, combine_chunks=overflow)
    table = SimpleNamespace(column_names=["x"], column=lambda _: column)
    with pytest.raises(ValueError, match=r"'x' must have .*2 GiB.*3\.0 GiB"):
        column_of(table, "x")


def test_large_tables_are_counted_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recsys.features.spec._WINDOW", 7)
    rows = {"a": [str(i % 5) for i in range(50)], "x": [float(i) for i in range(50)]}
    spec = FeatureSpec([Categorical("a"), Numeric("x", buckets=5), Hashed("y", rows=3)])
    fitted = spec.fit(pa.table(rows)).fitted
    assert fitted.num_rows == 50
    assert fitted.vocabularies["a"].values.to_pylist() == ["0", "1", "2", "3", "4"]
    assert fitted.edges["x"].tolist() == [9.0, 19.0, 29.0, 39.0]
    with pytest.raises(ValueError, match="received nan in row 30"):
        spec.fit(pa.table(rows | {"x": [float("nan") if i == 30 else 0.0 for i in range(50)]}))


def test_other_settings_do_not_merge() -> None:
    part, other = PartialFit([Categorical("a")]), PartialFit([Categorical("a", max_size=3)])
    with pytest.raises(ValueError, match="Parts must be of one spec"):
        part.merge(other)


def test_missing_entries_of_a_dictionary_are_missing_values() -> None:
    """A column of nothing but such entries has no kind."""
    missing = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array([None, "a"]))
    spec = FeatureSpec([Hashed("user", rows=9)]).fit({"user": missing})
    assert spec.fitted.kinds == {}
    assert spec.transform({"user": missing}).sparse_features.lengths().tolist() == [0, 0]
    assert spec.transform({"user": [1, 2]}).sparse_features.lengths().tolist() == [1, 1]

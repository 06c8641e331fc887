"""Parts of rows: shares, stability, and agreement with a plain hash."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys.features.splits import Split, TimeSplit


def _mix(number: int) -> int:
    """The output function of SplitMix64, as published, without the sign bit."""
    mask = (1 << 64) - 1
    number &= mask
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
    return (number ^ (number >> 31)) & ((1 << 63) - 1)


def test_groups_stay_together_and_do_not_move() -> None:
    draw = np.random.default_rng(0)
    users = draw.integers(-(2**62), 2**62, 5000)
    rows = draw.integers(0, 5000, 20_000)
    table = pa.table({"user": users[rows]})
    split = Split("user", shares=(0.7, 0.2, 0.1), seed=3)
    parts = split.parts_of(table, "a", np.arange(len(rows)))
    wanted = []
    for user in users.tolist():
        share = (_mix(_mix(user) ^ _mix(3)) >> 10) / 2**53
        wanted.append(0 if share < 0.7 else 1 if share < 0.9 else 2)
    assert parts.tolist() == [wanted[row] for row in rows]
    found = np.bincount(wanted, minlength=3) / 5000
    assert np.abs(found - [0.7, 0.2, 0.1]).max() < 4 * np.sqrt(0.7 * 0.3 / 5000)
    order = draw.permutation(len(rows))
    again = split.parts_of(table.take(pa.array(order)), "b", np.arange(len(rows)) + 9)
    assert again.tolist() == parts[order].tolist()
    other = Split("user", shares=(0.7, 0.2, 0.1), seed=4)
    assert (other.parts_of(table, "a", np.arange(len(rows))) != parts).any()


@pytest.mark.parametrize(
    "convert",
    [
        lambda names: pa.array(names),
        lambda names: pa.array(names, pa.large_string()),
        lambda names: pa.array(names).dictionary_encode(),
    ],
)
def test_texts_do_not_depend_on_their_type(convert: Any) -> None:
    names = [f"user {i}" for i in range(300)]
    rows = np.arange(300)
    wanted = Split("user").parts_of(pa.table({"user": names}), "a", rows)
    assert (Split("user").parts_of(pa.table({"user": convert(names)}), "a", rows) == wanted).all()
    assert len({*wanted.tolist()}) == 3


def test_single_rows_depend_on_file_and_row() -> None:
    split = Split(shares=(0.5, 0.25, 0.25))
    table = pa.table({"x": range(40_000)})
    first = split.parts_of(table, "a.parquet", np.arange(40_000))
    assert np.abs(np.bincount(first) / 40_000 - [0.5, 0.25, 0.25]).max() < 0.01
    later = split.parts_of(table.slice(100, 50), "a.parquet", np.arange(100, 150))
    assert (later == first[100:150]).all()
    other = split.parts_of(table, "b.parquet", np.arange(40_000))
    assert abs((other == first).mean() - 0.375) < 0.01  # independent


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        (pa.array([1, 5, 7, 9]), (5, 9)),
        (pa.array([1.0, 5.0, 7.5, 9.5]), (5, 9.0)),
        (pa.array([date(2024, 1, d) for d in (1, 5, 7, 9)]), (date(2024, 1, 5), date(2024, 1, 9))),
        (
            pa.array([datetime(2024, 1, d) for d in (1, 5, 7, 9)]),
            ("2024-01-05", "2024-01-09"),
        ),
        (
            pa.array([date(2024, 1, d) for d in (1, 5, 7, 9)]),
            (datetime(2024, 1, 5), datetime(2024, 1, 9)),
        ),
        (
            pa.array([datetime(2024, 1, d, tzinfo=UTC) for d in (1, 5, 7, 9)]),
            (datetime(2024, 1, 5), datetime(2024, 1, 9)),
        ),
    ],
)
def test_times(values: pa.Array, limits: Any) -> None:
    validation, test = limits
    if type(validation) is not type(test):
        validation = type(test)(validation)
    split = TimeSplit("time", validation=validation, test=test)
    table = pa.table({"time": values})
    assert split.parts_of(table, "", np.arange(4)).tolist() == [0, 1, 1, 2]
    import pyarrow.dataset as ds

    for part, wanted in (("train", 1), ("validation", 2), ("test", 1)):
        kept = ds.dataset(table).to_table(filter=split.filter_of(part, table.schema))
        assert kept.num_rows == wanted


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Split(shares=(0.5, 0.5, 0.5)), ValueError, "add up to 1"),
        (lambda: Split(shares=(1.5, -0.5, 0.0)), ValueError, "numbers from 0"),
        (lambda: Split(by=3), TypeError, "Split.by must be"),
        (lambda: TimeSplit("t", validation=3, test=2), ValueError, "must not be above"),
        (lambda: TimeSplit("t", validation=3, test="2024"), TypeError, "must have one type"),
        (lambda: TimeSplit("t", validation=None, test=None), TypeError, "a number, a date"),
        (
            lambda: TimeSplit("t", validation=1, test=2).parts_of(
                pa.table({"t": ["a"]}), "", np.arange(1)
            ),
            TypeError,
            "'t' must .*to divide by.*received string",
        ),
        (
            lambda: TimeSplit("t", validation="2020", test="2021").parts_of(
                pa.table({"t": pa.array(["2020-01-01", "a"]).dictionary_encode()}), "", np.arange(2)
            ),
            TypeError,
            "'t' must .*received string .a.",
        ),
        (
            lambda: TimeSplit("t", validation=1, test=2).parts_of(
                pa.table({"t": [1, None]}), "", np.arange(2)
            ),
            ValueError,
            "'t' must .*missing time; .*None.*row 1",
        ),
        (
            lambda: TimeSplit("t", validation=1, test=2).parts_of(
                pa.table({"t": [datetime(2024, 1, 1)]}), "", np.arange(1)
            ),
            TypeError,
            r"of column 't', timestamp\[us\].*1 and 2",
        ),
        (
            lambda: TimeSplit(
                "t", validation=datetime(2024, 1, 5, 12), test=datetime(2024, 1, 6)
            ).filter_of("train", pa.schema([("t", pa.date32())])),
            TypeError,
            "type of column 't', date32",
        ),
        (
            lambda: Split("u").parts_of(pa.table({"u": ["a", None]}), "", np.arange(2)),
            ValueError,
            "'u' must .*missing value; .*None.*row 1",
        ),
    ],
)
def test_wrong_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_times_that_are_nan_are_refused() -> None:
    table = pa.table({"t": [0.5, float("nan"), 3.0]})
    with pytest.raises(ValueError, match=r"'t' must .*missing time; .*nan.*row 1"):
        TimeSplit("t", validation=1.0, test=2.0).parts_of(table, "x.parquet", np.arange(3))


def test_dictionaries_are_read_as_their_values() -> None:
    days = [datetime(2024, 1, d) for d in (1, 5, 1, 9)]
    kind = pa.timestamp("us")
    codes = pa.array([3, 1, 0, 2], pa.int8())
    entries = pa.array([days[0], days[1], days[3], days[0]], kind)
    split = TimeSplit("t", validation="2024-01-05", test="2024-01-09")
    table = pa.table({"t": pa.DictionaryArray.from_arrays(codes, entries)})
    assert split.parts_of(table, "", np.arange(4)).tolist() == [0, 1, 0, 2]
    import pyarrow.dataset as ds

    kept = ds.dataset(table).to_table(filter=split.filter_of("train", table.schema))
    assert kept.num_rows == 2
    entries = pa.array([days[0], None, days[3], days[0]], kind)
    table = pa.table({"t": pa.DictionaryArray.from_arrays(codes, entries)})
    with pytest.raises(ValueError, match=r"'t' must .*missing time; .*None.*row 1"):
        split.parts_of(table, "", np.arange(4))


def test_texts_of_times_are_times() -> None:
    split = TimeSplit("t", validation="2026-11-28", test="2026-11-29T12:00")
    texts = ["2026-11-27", "2026-11-28", "2026-11-28 23:59:59", "2026-11-29 12:00", "2027-01-01"]
    plain = [0, 1, 1, 2, 2]
    for array in (
        pa.array(texts),
        pa.array(texts).dictionary_encode(),
        pa.array(texts).cast("large_string"),
    ):
        assert split.parts_of(pa.table({"t": array}), "", np.arange(5)).tolist() == plain
    zones = pa.array([text + "Z" for text in ("2026-11-28T00:00:00", "2026-11-27T23:59:59")])
    assert split.parts_of(pa.table({"t": zones}), "", np.arange(2)).tolist() == [1, 0]
    assert split.filter_of("train", pa.schema([("t", pa.string())])) is None

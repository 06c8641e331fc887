"""Parts of times, against pandas and datetime."""

from __future__ import annotations

import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from recsys.features import FeatureSpec, Timestamp
from tests.features import plain

COLUMN = Timestamp("t", parts=("hour", "weekday", "day", "month"))
SECONDS = [0, -1, -86_400, -86_401, 951_782_400, 253_402_300_799, -62_135_596_800, None]


def seconds_of(seed: int) -> list[int | None]:
    found = np.random.default_rng(seed).integers(-(2**33), 2**33, 500).tolist()
    return [*SECONDS, *found]


def parts_of(column: Timestamp, data: object) -> list[list[int]]:
    features = FeatureSpec([column]).transform({"t": data}).sparse_features
    names = [f"t_{part}" for part in column.parts]
    assert features.keys() == names
    return [features[name].values().tolist() for name in names]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_in_all_units(unit: str) -> None:
    rng = np.random.default_rng(1)
    factor = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    seconds = [s for s in seconds_of(0) if s is None or abs(s * factor) < 2**62]
    expected = plain.parts(COLUMN, seconds)
    # a part of a second later is the same second
    numbers = [None if s is None else s * factor + int(rng.integers(factor)) for s in seconds]
    column = Timestamp("t", parts=COLUMN.parts, unit=unit)  # type: ignore[arg-type]
    assert parts_of(column, numbers) == expected
    for zone in (None, "UTC", "Asia/Kolkata"):
        assert parts_of(COLUMN, pa.array(numbers, pa.timestamp(unit, zone))) == expected
    categories = pa.array(numbers, pa.timestamp(unit)).dictionary_encode()
    assert parts_of(COLUMN, categories) == expected


@pytest.mark.parametrize("zone", [None, "Europe/Vienna", "America/St_Johns"])
def test_parts_equal_those_of_pandas_in_utc(zone: str | None) -> None:
    times = pd.Series(pd.date_range("1961-03-01", "2031-01-01", periods=999, tz=zone))
    times[5] = pd.NaT
    utc = times if zone is None else times.dt.tz_convert("UTC")
    expected = [utc.dt.hour + 1, utc.dt.day_of_week + 1, utc.dt.day, utc.dt.month]
    found = FeatureSpec([COLUMN]).transform(pd.DataFrame({"t": times})).sparse_features
    for name, part in zip(found.keys(), expected, strict=True):
        assert found[name].values().tolist() == part.fillna(0).astype(int).tolist()


def test_dates() -> None:
    days = [datetime.date(1969, 12, 31), None, datetime.date(2024, 2, 29), datetime.date(1, 1, 1)]
    expected = [
        [1, 0, 1, 1],
        [3, 0, 4, 1],
        [31, 0, 29, 1],
        [12, 0, 2, 1],
    ]
    for kind in (pa.date32(), pa.date64()):
        assert parts_of(COLUMN, pa.array(days, kind)) == expected
    found = FeatureSpec([COLUMN]).transform(pd.DataFrame({"t": days})).sparse_features
    assert found["t_day"].values().tolist() == expected[2]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (["noon"], TypeError, "'t' must .*received string"),
        ([0, 1.5], TypeError, "'t' must .*received 1.5 in"),
        ([datetime.time(3)], TypeError, "'t' must .*received time64"),
        ([datetime.timedelta(3)], TypeError, "'t' must .*received duration"),
        (
            [None, 1_700_000_000_000],
            ValueError,
            "'t' must .*received 1700000000000 in",
        ),
    ],
)
def test_other_values_are_named(data: list[object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parts_of(COLUMN, data)


@pytest.mark.parametrize(
    "times",
    [
        pa.array([0, 10**15]).cast(pa.timestamp("s")),
        pa.array([0, 10**15]).cast(pa.timestamp("s")).dictionary_encode(),
        pa.array([0, -(10**15)]).cast(pa.timestamp("ms", "UTC")),
        pa.array([0, 10**8], pa.int32()).cast(pa.date32()),
    ],
)
def test_times_that_python_does_not_have_are_named(times: pa.Array) -> None:
    rule = r"'t' must have times of the years 1 to 9999; received '.+' in row 1\. Set unit\."
    with pytest.raises(ValueError, match=rule):
        parts_of(COLUMN, times)

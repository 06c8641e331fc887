import datetime
import decimal
import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.datasets.histories import leave_one_out

ROWS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(-5, 5), st.integers(0, 6)), min_size=1
)


def expected(rows, left_out, max_length, min_length):
    found = {}
    for user in {user for user, _, _ in rows}:
        own = sorted((row for row in rows if row[0] == user), key=lambda row: row[2])
        history = own[:-left_out]
        if len(own) < min_length or not history:
            continue
        first = max(0, len(history) - max_length)
        found[user] = {
            "user": user,
            "history": [item for _, item, _ in history[first:]],
            "target": [item for _, item, _ in own[first + 1 : len(history) + 1]],
            "earlier": [item for _, item, _ in history[:first]],
            "times": [time for _, _, time in history[first:]],
        }
    return found


@settings(deadline=None)  # the first example imports pyarrow
@given(ROWS, st.integers(1, 6), st.integers(3, 5))
def test_against_lists(rows, max_length, min_length):
    columns = dict(zip(("who", "what", "when"), map(list, zip(*rows, strict=True)), strict=True))
    options = {"user": "who", "item": "what", "time": "when"}
    wanted = expected(rows, 1, max_length, min_length)
    if not wanted:
        with pytest.raises(ValueError, match="must have at least min_length"):
            leave_one_out(columns, **options, max_length=max_length, min_length=min_length)
        return
    parts = leave_one_out(columns, **options, max_length=max_length, min_length=min_length)
    for name, left_out in (("train", 3), ("validation", 2), ("test", 1)):
        found = {row["user"]: row for row in parts[name].to_pylist()}
        assert found == expected(rows, left_out, max_length, min_length)


def test_times_of_one_unit_keep_their_order():
    data = {"user": [1] * 4, "item": [3, 0, 2, 1], "time": [0.75, -0.5, 0.5, 0.25]}
    (row,) = leave_one_out(data)["test"].to_pylist()
    assert (row["history"], row["target"], row["times"]) == ([0, 1, 2], [1, 2, 3], [0, 0, 0])


def test_errors():
    with pytest.raises(ValueError, match=r"'time' must have.*int64; .*nan.*row 1"):
        leave_one_out({"user": [1] * 3, "item": [1] * 3, "time": [0.0, float("nan"), 1.0]})
    with pytest.raises(KeyError, match="must have a column 'time'"):
        leave_one_out({"user": [1], "item": [2]})
    with pytest.raises(ValueError, match="'item' must have no missing value"):
        leave_one_out({"user": [1], "item": [None], "time": [1]})
    user = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["ann", None]))
    with pytest.raises(ValueError, match=r"'user' must have no missing.*None"):
        leave_one_out({"user": user, "item": [1] * 3, "time": [1] * 3})
    with pytest.raises(ValueError, match=r"'time' must have numbers below 2\^63"):
        leave_one_out({"user": [1] * 3, "item": [1] * 3, "time": [1, 2**63, 3]})
    for times in (["1", "10", "9"], ["2020-01-02", "2020-01-01", "2020-01-03"]):
        for column in (pa.array(times), pa.array(times).dictionary_encode()):
            rule = "'time' must .*or numbers; received string"
            with pytest.raises(TypeError, match=rule):
                leave_one_out({"user": [1] * 3, "item": [1] * 3, "time": column})
    with pytest.raises(ValueError, match="min_length"):
        leave_one_out({"user": [1], "item": [1], "time": [1]}, min_length=2)


def _coded(values, seed):
    """Return a dictionary column with equal and unused entries."""
    draw = random.Random(seed)
    entries = [*dict.fromkeys(values)] * 2 + [values[0]]
    codes = [draw.choice([i for i, e in enumerate(entries) if e == v]) for v in values]
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int16()), pa.array(entries))


@pytest.mark.parametrize("seed", range(20))
def test_each_type_of_column_gives_the_same_histories(seed):
    """Equal values are one user and one item, under any codes of a dictionary."""
    draw = random.Random(seed)
    rows = [
        (draw.choice("abc"), f"item {draw.randrange(8)}", draw.randrange(9, 12)) for _ in range(40)
    ]
    users, items, times = map(list, zip(*rows, strict=True))
    day = datetime.date(1970, 1, 1)
    dates = [day + datetime.timedelta(days=time) for time in times]
    half = [decimal.Decimal(time) + decimal.Decimal("0.5") for time in times]
    kinds = [
        pa.array(times),
        pa.array(times, pa.uint64()),
        pa.array(times, pa.timestamp("ms")),
        pa.array(times, pa.timestamp("s", "Asia/Tokyo")),
        pa.array(dates, pa.date32()),
        pa.array(times, pa.float32()),
        pa.array(half),
        pa.array(times, pa.float16()),
        _coded(times, seed),
    ]
    wanted = leave_one_out({"user": users, "item": items, "time": times})
    for column in kinds:
        data = {"user": _coded(users, seed), "item": _coded(items, seed), "time": column}
        found = leave_one_out(data)
        for part, table in wanted.items():
            by_user = {row["user"]: row for row in found[part].to_pylist()}
            assert by_user == {row["user"]: row for row in table.to_pylist()}

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
    with pytest.raises(ValueError, match="'time' must have finite times"):
        leave_one_out({"user": [1] * 3, "item": [1] * 3, "time": [0.0, float("nan"), 1.0]})
    with pytest.raises(KeyError, match="must have a column 'time'"):
        leave_one_out({"user": [1], "item": [2]})
    with pytest.raises(ValueError, match="'item' must have no missing value"):
        leave_one_out({"user": [1], "item": [None], "time": [1]})
    with pytest.raises(ValueError, match="min_length"):
        leave_one_out({"user": [1], "item": [1], "time": [1]}, min_length=2)

"""Histories of users from a table of interactions, split by leave-one-out.

Shapes: `U` users.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.datasets.memory import table_of
from recsys.features.arrow import Keys, Values, decoded, read_integers, read_keys, read_values

__all__ = ["leave_one_out"]

_LEAST: Final = 3
_LIMIT: Final = 2.0**63


@checked
def leave_one_out(
    data: Any,
    *,
    user: str = "user",
    item: str = "item",
    time: str = "time",
    max_length: int = 200,
    min_length: int = 3,
) -> dict[str, Any]:
    """Return a row per user: the history, and the item that follows each value of it.

    The last item of a user is the target of the test, the item before it the target of validation.
    The history of a target is all items before it, at most the last `max_length`. Each item before
    these two is a target of training. Items of equal time keep
    the order of the table.

    Args:
        data: A table of interactions, as for `recsys.datasets.table`.
        user: Column of users: texts or whole numbers.
        item: Column of items: texts or whole numbers.
        time: Column of times, dates or numbers, in any unit.
        max_length: Most items of a history.
        min_length: Users with fewer items are left out; at least 3.

    Returns:
        Arrow tables by name: "train", "validation" and "test", each with the columns `user`, and
        lists `history`, `target`, `earlier` and `times`. A target list has the item after each item
        of the history; its last is the one to predict. `earlier` has the items that
        `max_length` cuts off before the history; the user has seen these, too. `times` has the
        times of the history as int64, in the unit of the column, without fractions. Dates of 32
        bits are days.

    Raises:
        KeyError: There is no such column.
        TypeError: A column has values of another type, such as texts as times.
        ValueError: A value is missing, a number is out of its range, or no user has enough items.

    Example:
        >>> data = {"user": [7, 7, 7, 7, 8], "item": [1, 2, 3, 4, 1], "time": [4, 1, 2, 3, 0]}
        >>> parts = leave_one_out(data)
        >>> parts["train"].to_pylist()
        [{'user': 7, 'history': [2], 'target': [3], 'earlier': [], 'times': [1]}]
        >>> parts["test"].select(["history", "target", "times"]).to_pylist()
        [{'history': [2, 3, 4], 'target': [3, 4, 1], 'times': [1, 2, 3]}]
    """
    whole("max_length", max_length)
    whole("min_length", min_length, _LEAST)
    table = table_of(data)
    columns = {name: read_values(table, name, False) for name in (user, item, time)}
    keys = {name: _present_keys(columns[name]) for name in (user, item)}
    users, number_U = np.unique(keys[user].numbers, return_inverse=True)
    exact, times = _read_times(columns[time])
    order = np.lexsort((exact, number_U))
    number_U = number_U[order]
    edges = np.searchsorted(number_U, np.arange(len(users) + 1))
    is_kept = np.diff(edges) >= min_length
    if not is_kept.any():
        raise ValueError(
            f"A user must have at least min_length={min_length} items; received none such."
        )
    starts, ends = edges[:-1][is_kept], edges[1:][is_kept]
    own_users = columns[user].array.take(pa.array(order[starts]))
    items, times = columns[item].array.take(pa.array(order)), times[order]
    histories: dict[str, Any] = {}
    for name, left_out in (("train", 3), ("validation", 2), ("test", 1)):
        lasts = ends - left_out  # positions after the history
        has_some = lasts > starts
        firsts, stops = np.maximum(starts, lasts - max_length)[has_some], lasts[has_some]
        offsets, rows = _ranges(firsts, stops)
        earlier_offsets, earlier_rows = _ranges(starts[has_some], firsts)
        histories[name] = pa.table(
            {
                "user": own_users.filter(pa.array(has_some)),
                "history": _lists(offsets, items.take(pa.array(rows))),
                "target": _lists(offsets, items.take(pa.array(rows + 1))),
                "earlier": _lists(earlier_offsets, items.take(pa.array(earlier_rows))),
                "times": _lists(offsets, pa.array(times[rows])),
            }
        )
    return histories


def _present_keys(values: Values) -> Keys:
    keys = read_keys(values, unsigned=True)
    if keys.is_missing is not None:
        _refuse_missing(values, keys.is_missing)
    return keys


def _refuse_missing(values: Values, is_missing: Any) -> None:
    values.reject(ValueError, "must have no missing value", is_missing, "Remove the rows.")


def _read_times(values: Values) -> tuple[Any, Any]:
    """Return times in their order, and as int64 without fractions.

    Raises:
        TypeError: The values are neither times nor numbers.
        ValueError: A time is missing, or does not fit into int64.
    """
    array = decoded(values.array)
    kind = array.type
    is_number = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    _refuse_missing(values, array.is_null().to_numpy(zero_copy_only=False))
    if not is_number and not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        times, _ = read_integers(values, "times, dates or numbers")
        return times, times
    if not is_number:  # dates have 32 or 64 bits
        times = array.cast(pa.int32()) if kind == pa.date32() else array
        times = times.cast(pa.int64()).to_numpy()
        return times, times
    numbers = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
    is_wrong = ~(np.abs(numbers) < _LIMIT)
    values.reject(ValueError, "must have times that fit into int64", is_wrong, "Remove the rows.")
    exact = pc.rank(array, tiebreaker="dense").to_numpy() if pa.types.is_decimal(kind) else numbers
    return exact, numbers.astype(np.int64)


def _ranges(firsts: Any, stops: Any) -> tuple[Any, Any]:
    """Return the offsets and the positions of ranges."""
    lengths = stops - firsts
    offsets = np.concatenate([[0], lengths.cumsum()])
    return offsets, np.repeat(firsts - offsets[:-1], lengths) + np.arange(offsets[-1])


def _lists(offsets: Any, values: Any) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)

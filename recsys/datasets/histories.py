"""Histories of users from a table of interactions, split by leave-one-out.

Legend: `U` users.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys.datasets.memory import table_of
from recsys.kernels.arguments import whole
from recsys.kernels.checked import checked

__all__ = ["leave_one_out"]

_LEAST: Final = 3


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
        data: a table of interactions, as for `recsys.datasets.table`.
        user: column of users, of any type.
        item: column of items, of any type.
        time: column of times, in any unit.
        max_length: most items of a history.
        min_length: users with fewer items are left out; at least 3.

    Returns:
        Arrow tables by name: "train", "validation" and "test", each with the columns `user`, and
        lists `history`, `target`, `earlier` and `times`. A target list has the item after each item
        of the history; its last is the one to predict. `earlier` has the items that
        `max_length` cuts off before the history; the user has seen these, too. `times` has the
        times of the history as int64, without fractions.

    Raises:
        KeyError: there is no such column.
        ValueError: a value is missing, a number is out of its range, or no user has enough items.

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
    columns = {}
    for name in (user, item, time):
        if name not in table.column_names:
            raise KeyError(f"data must have a column {name!r}; it has {table.column_names}.")
        columns[name] = table[name].combine_chunks()
        if columns[name].null_count:
            raise ValueError(f"Column {name!r} must have no missing value. Remove the rows.")
    users, number_U = np.unique(_numbered(columns[user]), return_inverse=True)
    exact = columns[time].to_numpy(zero_copy_only=False)  # floats keep their fractions
    if exact.dtype.kind == "f" and not np.isfinite(exact).all():
        raise ValueError(f"Column {time!r} must have finite times. Remove the other rows.")
    order = np.lexsort((exact, number_U))
    times = columns[time].cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)
    number_U = number_U[order]
    edges = np.searchsorted(number_U, np.arange(len(users) + 1))
    is_kept = np.diff(edges) >= min_length
    if not is_kept.any():
        raise ValueError(
            f"A user must have at least min_length={min_length} items; received none such."
        )
    starts, ends = edges[:-1][is_kept], edges[1:][is_kept]
    own_users = columns[user].take(pa.array(order[starts]))
    items, times = columns[item].take(pa.array(order)), times[order]
    found: dict[str, Any] = {}
    for name, left_out in (("train", 3), ("validation", 2), ("test", 1)):
        lasts = ends - left_out  # positions after the history
        has_some = lasts > starts
        firsts, stops = np.maximum(starts, lasts - max_length)[has_some], lasts[has_some]
        offsets, rows = _ranges(firsts, stops)
        earlier_offsets, earlier_rows = _ranges(starts[has_some], firsts)
        found[name] = pa.table(
            {
                "user": own_users.filter(pa.array(has_some)),
                "history": _lists(offsets, items.take(pa.array(rows))),
                "target": _lists(offsets, items.take(pa.array(rows + 1))),
                "earlier": _lists(earlier_offsets, items.take(pa.array(earlier_rows))),
                "times": _lists(offsets, pa.array(times[rows])),
            }
        )
    return found


def _numbered(column: Any) -> Any:
    """Return a number for each distinct value."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False)


def _ranges(firsts: Any, stops: Any) -> tuple[Any, Any]:
    """Return the offsets and the positions of ranges."""
    lengths = stops - firsts
    offsets = np.concatenate([[0], lengths.cumsum()])
    return offsets, np.repeat(firsts - offsets[:-1], lengths) + np.arange(offsets[-1])


def _lists(offsets: Any, values: Any) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)

"""Features computed one value at a time, in plain Python, to compare with."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from recsys.features import Categorical, Hashed, Ids, Numeric, Timestamp

MASK = (1 << 64) - 1


class Bags(NamedTuple):
    """Ids of a feature."""

    ids: list[int]
    lengths: list[int]
    weights: list[float]


def signed(number: int) -> int:
    number &= MASK
    return number - (1 << 64) if number >> 63 else number


def fnv(text: str) -> int:
    value = 14695981039346656037
    for byte in text.encode():
        value = ((value ^ byte) * 1099511628211) & MASK
    return signed(value)


def split_mix(number: int) -> int:
    value = number & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return (value ^ (value >> 31)) & ((1 << 63) - 1)


def hashed(value: int | str, rows: int) -> int:
    return split_mix(fnv(value) if isinstance(value, str) else value) % rows


def vocabulary(
    values: Iterable[Any], min_count: int = 1, max_size: int | None = None
) -> dict[Any, int]:
    """Rows of values: by falling count, then by value."""
    counts = Counter(value for value in values if value is not None)
    kept = [value for value, count in counts.items() if count >= min_count]
    kept.sort(key=lambda v: (-counts[v], v.encode() if isinstance(v, str) else int(v)))
    return {value: row for row, value in enumerate(kept[:max_size], 2)}


def flat(rows: Sequence[Any], is_list: bool) -> list[Any]:
    return [value for row in rows for value in (row or [])] if is_list else list(rows)


def bags(
    column: Categorical | Hashed | Ids,
    rows: Sequence[Any],
    weights: Sequence[Any] | None = None,
    known: dict[Any, int] | None = None,
) -> Bags:
    """The bags of a column, from values or lists of values by row."""
    found = Bags([], [], [])
    for i, row in enumerate(rows):
        values = (row or []) if column.is_list else [row]
        own = [1.0] * len(values)
        if weights is not None:
            own = (weights[i] or []) if column.is_list else [weights[i]]
        length = 0
        for value, weight in zip(values, own, strict=True):
            if isinstance(column, Categorical):
                assert known is not None
                row_number = 0 if value is None else known.get(value, 1)
            elif value is None:
                continue
            elif isinstance(column, Ids):
                row_number = value
            else:
                assert isinstance(column, Hashed)
                row_number = hashed(value, column.rows)
                if column.growing:
                    row_number = fnv(value) if isinstance(value, str) else signed(value)
            found.ids.append(row_number)
            found.weights.append(weight)
            length += 1
        found.lengths.append(length)
    return found


def scaled(column: Numeric, value: float | None) -> float | None:
    if value is None:
        value = column.missing
    if value is None:
        return None
    if column.clip is not None:
        value = min(max(value, column.clip[0]), column.clip[1])
    return math.log1p(value) if column.log1p else value


def dense(column: Numeric, training: Sequence[Any], rows: Sequence[Any]) -> list[float]:
    """The dense feature of a column, fitted on `training`."""
    known = [x for value in training if (x := scaled(column, value)) is not None]
    mean = math.fsum(known) / len(known) if known else 0.0
    deviation = 1.0
    if known:
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in known) / len(known))
        deviation = deviation if max(known) > min(known) else 1.0
    found = []
    for value in rows:
        x = scaled(column, value)
        x = mean if x is None else x
        found.append((x - mean) / deviation if column.standardize else x)
    return found


def parts(column: Timestamp, rows: Sequence[int | None]) -> list[list[int]]:
    """The parts of times, from seconds since 1970."""
    start = datetime.datetime(1970, 1, 1)
    found = []
    for part in column.parts:
        own = []
        for seconds in rows:
            if seconds is None:
                own.append(0)
                continue
            time = start + datetime.timedelta(seconds=seconds)
            numbers = {
                "hour": time.hour + 1,
                "weekday": time.isoweekday(),
                "day": time.day,
                "month": time.month,
            }
            own.append(numbers[part])
        found.append(own)
    return found

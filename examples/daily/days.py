"""Made-up days of clicks: users and items come and go, tastes drift, and some days are broken.

Each user and item has a vector of four numbers; the chance of a click grows with their product. A
day has the users and items of a window that moves, and tastes turn a little each day.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COUNTRIES = np.array(["no", "it", "de", "br"])
USERS, ITEMS = 3000, 400  # of a day
NEW_USERS, NEW_ITEMS = 150, 20  # of a day, in place of as many others


def write_day(path: Path, day: int, rows: int = 20_000, broken: str = "") -> Path:
    """Write the clicks of a day as Parquet.

    Args:
        path: The file; it appears whole.
        day: Number of the day, from 0.
        rows: Number of impressions.
        broken: "" for an ordinary day; "empty", "late" (labels are not there yet, all are 0), or
            "twice" (the rows of the day before).
    """
    day -= broken == "twice"
    random = np.random.default_rng(1000 + day)
    rows = 0 if broken == "empty" else rows
    users = day * NEW_USERS + (random.power(0.5, rows) * USERS).astype(int)
    items = day * NEW_ITEMS + (random.power(0.6, rows) * ITEMS).astype(int)
    tastes = np.random.default_rng(1).normal(size=(200_000, 4))
    wares = np.random.default_rng(2).normal(size=(20_000, 4)) + 0.1 * day * np.array([1, -1, 0, 0])
    ages = 18 + users * 7919 % 60
    score = (tastes[users] * wares[items]).sum(1) - 1.0 + 0.02 * (ages - 48)
    clicks = random.random(rows) < 1 / (1 + np.exp(-score))
    table = pa.table(
        {
            "user": pa.array([f"u{user}" for user in users], pa.string()),
            "item": pa.array([f"i{item}" for item in items], pa.string()),
            "country": pa.array(COUNTRIES[users % 4], pa.string()),
            "age": pa.array(ages, pa.int64()),
            "click": pa.array(clicks & (broken != "late"), pa.int8()),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}")
    pq.write_table(table, part)
    part.rename(path)
    return path

"""Random tables with all kinds of columns."""

from __future__ import annotations

import random
from typing import Any

from recsys.features import (
    Categorical,
    FeatureSpec,
    Group,
    Hashed,
    Ids,
    Label,
    Numeric,
    SampleWeight,
    Timestamp,
)
from recsys.features.columns import Column

EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 2**53 + 1]

COLUMNS: list[Column] = [
    Categorical("city", min_count=2, max_size=5),
    Categorical("tags", is_list=True, weights="tag_weights"),
    Categorical("born", table="years"),
    Categorical("died", table="years"),
    Hashed("user", rows=1000),
    Hashed("words", rows=50, is_list=True),
    Hashed("item", rows=10, growing=True),
    Hashed("name", rows=10, growing=True),
    Ids("films", rows=30, is_list=True, weights="film_weights"),
    Ids("genre", rows=4, weights="genre_weight"),
    Numeric("age", clip=(0, 80), standardize=True),
    Numeric("price", log1p=True, missing=3.0),
    Numeric("size", buckets=4, spacing="uniform"),
    Timestamp("seen", parts=("hour", "weekday", "day", "month")),
    Label("click"),
    Label("rating", high=5),
    SampleWeight("weight"),
    Group("session"),
]


def spec() -> FeatureSpec:
    return FeatureSpec(COLUMNS)


def rows_of(seed: int, count: int, gaps: bool = True) -> dict[str, list[Any]]:
    """Columns of a random table; None is a missing value."""
    rng = random.Random(seed)

    def one(make: Any) -> list[Any]:
        return [None if gaps and rng.random() < 0.15 else make() for _ in range(count)]

    def many(make: Any) -> list[Any]:
        def make_list() -> list[Any]:
            size = rng.choice([0, 0, 1, 2, 5])
            return [None if gaps and rng.random() < 0.15 else make() for _ in range(size)]

        return one(make_list)

    def weights_of(lists: list[Any]) -> list[Any]:
        return [row and [round(rng.random(), 3) for _ in row] for row in lists]

    def text() -> str:
        return rng.choice(["é", "a", "", "漢字", "zz"]) * rng.randint(1, 3)

    tags, films = many(text), many(lambda: rng.randrange(30))
    genre = one(lambda: rng.randrange(4))
    return {
        "city": one(text),
        "tags": tags,
        "tag_weights": weights_of(tags),
        "born": one(lambda: rng.choice([1900, 1950, -3])),
        "died": one(lambda: rng.choice([1950, 1999, 2**40])),
        "user": one(lambda: rng.choice([*EXTREMES, rng.randrange(-(2**63), 2**63)])),
        "words": many(text),
        "item": one(lambda: rng.choice(EXTREMES)),
        "name": one(text),
        "films": films,
        "film_weights": weights_of(films),
        "genre": genre,
        "genre_weight": [None if g is None else rng.random() for g in genre],
        "age": one(lambda: rng.uniform(-10, 100)),
        "price": one(lambda: rng.lognormvariate(0, 2)),
        "size": one(lambda: rng.randrange(20)),
        "seen": one(lambda: rng.randrange(-(2**33), 2**33)),
        "click": [rng.randrange(2) for _ in range(count)],
        "rating": [rng.uniform(0, 5) for _ in range(count)],
        "weight": [rng.uniform(0, 2) for _ in range(count)],
        "session": [rng.randrange(-5, 5) for _ in range(count)],
    }

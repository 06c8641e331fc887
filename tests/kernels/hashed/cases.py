"""Settings, indexes and ids for the tests of the hash index."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from recsys.kernels.hashed import twin
from recsys.kernels.hashed.index import IdIndex, IndexSettings
from tests.kernels.hashed.oracle import id_of_hash

EXTREMES = [-(2**63), -1, 0, 1, 2**63 - 1]


def settings_of(**changes: Any) -> IndexSettings:
    values: dict[str, Any] = {
        "eviction": "lru",
        "half_life": 0,
        "exponent": 1,
        "ttl": 0,
        "admission": "always",
        "admission_value": 0,
        "is_shared": True,
    }
    return IndexSettings(**values | changes)


SETTINGS = {
    "lru": settings_of(),
    "none": settings_of(eviction="none", is_shared=False),
    "lfu": settings_of(eviction="lfu", half_life=3),
    "lfu without decay": settings_of(eviction="lfu"),
    "distance": settings_of(eviction="distance_lfu", exponent=2),
    "distance, 4": settings_of(eviction="distance_lfu", exponent=4, ttl=9),
    "ttl": settings_of(ttl=2),
    "ttl, none": settings_of(ttl=3, eviction="none", is_shared=False),
    "at least 2": settings_of(admission="at_least", admission_value=2, ttl=4),
    "at least 5": settings_of(admission="at_least", admission_value=5, eviction="lfu"),
    "probability": settings_of(admission="probability", admission_value=1 << 31, ttl=3),
}


def index_of(
    settings: IndexSettings, lines: int = 1, num_regions: int = 2, seed: int = 7
) -> IdIndex:
    rows = lines * num_regions * 64
    return IdIndex.empty(settings, rows, num_regions, 0, num_regions, seed)


def ids_of_line(count: int, seed: int) -> list[int]:
    """Ids that fall into the first line of the first region, of any home bucket."""
    draw = random.Random(count)
    return [id_of_hash(draw.getrandbits(32), seed) for _ in range(count)]


def batch_of(draw: random.Random, most_ids: int, universe: int) -> list[int]:
    """Return a batch: many repeats, some extreme ids."""
    size = draw.randrange(most_ids + 1)
    return [
        draw.choice(EXTREMES) if draw.random() < 0.02 else draw.randrange(universe) * 977 - 10_000
        for _ in range(size)
    ]


def state_of(index: IdIndex) -> dict[str, Tensor]:
    names = ("ids", "last_used", "seen", "digests", "sketch")
    return {name: getattr(index, name) for name in names}


def assert_same_state(index: IdIndex, other: IdIndex) -> None:
    for name, value in state_of(index).items():
        assert torch.equal(value, state_of(other)[name]), name


def assert_same(found: twin.Found, other: twin.Found) -> None:
    for value, expected in zip(found, other, strict=True):
        same = torch.equal(value, expected) if isinstance(value, Tensor) else value == expected
        assert same, (value, expected)

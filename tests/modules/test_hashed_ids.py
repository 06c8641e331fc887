"""Rules of hashed ids."""

from __future__ import annotations

from typing import Any

import pytest

from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.hashed_ids import LFU, LRU, AtLeast, DistanceLFU, HashedIds, Probability


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        (HashedIds(), ("lru", 0, 1, 0, "always", 0)),
        (HashedIds(eviction=None, ttl=7), ("none", 0, 1, 7, "always", 0)),
        (HashedIds(eviction=LFU(9), admission=AtLeast(3)), ("lfu", 9, 1, 0, "at_least", 3)),
        (
            HashedIds(eviction=DistanceLFU(2), admission=Probability(0.25)),
            ("distance_lfu", 0, 2, 0, "probability", 2**30),
        ),
    ],
)
def test_settings(rules: HashedIds, wanted: tuple[Any, ...]) -> None:
    found = rules.settings()
    assert (
        found.eviction, found.half_life, found.exponent, found.ttl, found.admission,
        found.admission_value,
    ) == wanted  # fmt: skip
    assert found.is_shared
    assert HashedIds().eviction == LRU()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LFU(-1), "LFU.half_life"),
        (lambda: DistanceLFU(5), "DistanceLFU.exponent"),
        (lambda: AtLeast(1), "AtLeast.batches"),
        (lambda: Probability(1.0), r"above 0 .*received 1\.0"),
        (lambda: HashedIds(ttl=0), "HashedIds.ttl"),
        (lambda: HashedIds(num_regions=3), "power of two; received 3"),
        (lambda: HashedIds(unknown="row"), "'shared' or 'zero'; received 'row'"),  # type: ignore[arg-type]
        (lambda: HashedIds(eviction="lru"), "HashedIds.eviction"),  # type: ignore[arg-type]
        (
            lambda: EmbeddingBagConfig(9, 4, "t", feature_names=["a"], ids=LRU()),  # type: ignore[arg-type]
            "'t'.ids must be HashedIds or None",
        ),
    ],
)
def test_wrong_values_are_named(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()

"""The short form of ``python -m tests.fuzz.kinds``: some cases of each kind, and old finds."""

from __future__ import annotations

import pytest

from tests.fuzz.kinds import FINDS, search
from tests.ranks import RankPool

CASES = 40


@pytest.mark.parametrize("kind", FINDS)
def test_random_cases(ranks: RankPool, kind: str) -> None:
    assert list(search(ranks, kind, range(CASES))) == []


@pytest.mark.parametrize("kind", FINDS)
def test_what_was_found_stays_mended(ranks: RankPool, kind: str) -> None:
    assert list(search(ranks, kind, FINDS[kind])) == []

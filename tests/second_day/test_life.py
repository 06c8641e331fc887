"""A few random lives; `python -m tests.second_day` runs more."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool
from tests.second_day.life import run, run_on_ranks


@pytest.mark.parametrize("seed", range(12))
def test_rows_stay_with_their_values(seed: int) -> None:
    run(seed)


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 100), (2, 101), (3, 102)])
def test_rows_stay_with_their_values_on_ranks(ranks: RankPool, num_ranks: int, seed: int) -> None:
    run_on_ranks(ranks, num_ranks, seed)

"""Statistics of future ids from a sample of batches, against draws from known distributions."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.distributed.planner.pooling_stats import (
    FeatureStats,
    IdSkew,
    PoolingStats,
    uniform_distinct,
)
from recsys.sparse import KeyedJaggedTensor

ROWS = 20_000
EXPONENTS = [0.0, 0.6, 1.0, 1.4]  # of Zipf laws; 0 is an even spread


def chances(exponent: float, rows: int = ROWS) -> np.ndarray:
    weights = np.arange(1, rows + 1) ** -exponent
    return weights / weights.sum()


def seen(chances: np.ndarray, draws: int, seed: int = 0) -> FeatureStats:
    ids = np.random.default_rng(seed).choice(len(chances), size=draws, p=chances)
    times = np.unique(np.unique(ids, return_counts=True)[1], return_counts=True)
    return FeatureStats(
        ids_per_sample=1.0,
        batch_size=float(draws),
        histogram=tuple(zip(*(part.tolist() for part in times), strict=True)),
    )


def expected_distinct(chances: np.ndarray, draws: float) -> float:
    return float((1 - np.exp(draws * np.log1p(-chances))).sum())


def kjt(**features: tuple[list[int], list[int]]) -> KeyedJaggedTensor:
    """Features by name with (ids, lengths), of one batch size or several."""
    lengths = [length for _, of in features.values() for length in of]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor([i for ids, _ in features.values() for i in ids]),
        lengths=torch.tensor(lengths),
        stride_per_key_per_rank=[[len(of)] for _, of in features.values()],
    )


class TestDistinct:
    @pytest.mark.parametrize("exponent", EXPONENTS)
    @pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 1.0])
    def test_within_the_sample(self, exponent: float, share: float) -> None:
        law = chances(exponent)
        skew = IdSkew(seen(law, 20_000), ROWS)
        expected = expected_distinct(law, share * 20_000)
        assert skew.distinct(share * 20_000) == pytest.approx(expected, rel=0.05)

    @pytest.mark.parametrize("exponent", EXPONENTS)
    @pytest.mark.parametrize("times", [2, 8, 64])
    def test_beyond_the_sample(self, exponent: float, times: int) -> None:
        law = chances(exponent)
        skew = IdSkew(seen(law, 20_000), ROWS)
        expected = expected_distinct(law, times * 20_000)
        assert skew.distinct(times * 20_000) == pytest.approx(expected, rel=0.1)

    def test_beyond_the_sample_where_half_of_the_rows_never_occur(self) -> None:
        law = np.concatenate([chances(0.0, ROWS // 2), np.zeros(ROWS // 2)])
        skew = IdSkew(seen(law, 10_000), ROWS)
        assert skew.distinct(160_000) == pytest.approx(ROWS // 2, rel=0.1)

    @given(
        counts=st.lists(st.integers(1, 50), min_size=1, max_size=200),
        more_rows=st.integers(0, 1000),
        draws=st.lists(st.floats(0, 1e6), min_size=2, max_size=6),
    )
    @settings(max_examples=50, deadline=None)
    def test_is_possible_and_grows(
        self, counts: list[int], more_rows: int, draws: list[float]
    ) -> None:
        histogram = tuple(sorted(collections.Counter(counts).items()))
        stats = FeatureStats(ids_per_sample=1.0, batch_size=1.0, histogram=histogram)
        rows = len(counts) + more_rows
        skew = IdSkew(stats, rows)
        assert skew.distinct(sum(counts)) == pytest.approx(len(counts))
        found = [skew.distinct(draw) for draw in sorted(draws)]
        assert found == sorted(found)
        assert all(0 <= n <= min(rows, d) + 1e-6 for n, d in zip(found, sorted(draws), strict=True))

    def test_no_ids_say_nothing(self) -> None:
        empty = IdSkew(FeatureStats(ids_per_sample=0.0, batch_size=8.0, histogram=()), 100)
        assert empty.distinct(100) == uniform_distinct(100, 100)
        assert empty.hit_rate(20) == 0.2

    def test_a_uniform_table_of_one_row(self) -> None:
        assert uniform_distinct(1, 5) == 1
        assert uniform_distinct(0, 5) == 0


class TestHitRate:
    @pytest.mark.parametrize("exponent", EXPONENTS)
    @pytest.mark.parametrize("share", [0.01, 0.1, 0.2, 0.5, 1.0])
    def test_is_the_share_of_the_most_frequent_rows(self, exponent: float, share: float) -> None:
        law = chances(exponent)
        skew = IdSkew(seen(law, 200_000), ROWS)
        best = law[: int(share * ROWS)].sum()
        # among rows of equal frequency the sample cannot find the best
        assert skew.hit_rate(share * ROWS) == pytest.approx(best, abs=0.03)
        assert skew.hit_rate(0) == 0

    def test_grows_with_the_cache(self) -> None:
        skew = IdSkew(seen(chances(1.0), 5_000), ROWS)
        rates = [skew.hit_rate(held) for held in np.linspace(0, ROWS, 100)]
        assert rates == sorted(rates)
        assert rates[-1] == 1


class Named(NamedTuple):
    dense: torch.Tensor
    sparse: KeyedJaggedTensor


@dataclass
class Data:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor


class Plain:
    def __init__(self, dense: torch.Tensor, sparse_features: KeyedJaggedTensor) -> None:
        self.dense = dense
        self.sparse_features = sparse_features


class TestFromBatches:
    FEATURES = kjt(a=([1, 1, 2], [2, 1, 0]), b=([7], [1]))

    def test_means_and_histograms_by_feature(self) -> None:
        stats = PoolingStats.from_batches([self.FEATURES, kjt(a=([2, 3, 1], [3]), b=([], [0, 0]))])
        assert stats.features == {
            # id 1 three times, 2 twice, 3 once, in 3 and 1 samples
            "a": FeatureStats(
                ids_per_sample=6 / 4, batch_size=2.0, histogram=((1, 1), (2, 1), (3, 1))
            ),
            "b": FeatureStats(ids_per_sample=1 / 3, batch_size=1.5, histogram=((1, 1),)),
        }

    @pytest.mark.parametrize("kind", [Named, Data, Plain])
    def test_batches_that_hold_features(self, kind: type) -> None:
        batch = kind(torch.zeros(3), self.FEATURES)
        plain = PoolingStats.from_batches([self.FEATURES])
        assert PoolingStats.from_batches([batch]) == plain
        assert PoolingStats.from_batches([{"x": 1, "y": self.FEATURES}]) == plain

    def test_batches_without_features_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"from_batches.*received a Tensor\."):
            PoolingStats.from_batches([torch.zeros(3)])
        with pytest.raises(ValueError, match="at least one batch; received none"):
            PoolingStats.from_batches([])


def test_one_batch_by_itself_is_refused() -> None:
    batch = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([7]), torch.tensor([1]))
    with pytest.raises(TypeError, match="received one KeyedJaggedTensor"):
        PoolingStats.from_batches(batch)

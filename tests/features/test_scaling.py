"""Moments, quantiles, buckets and scaling."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
from sklearn.preprocessing import FunctionTransformer, KBinsDiscretizer, StandardScaler

from recsys.features import FeatureSpec, Numeric
from recsys.features.scaling import Moments, Quantiles


def test_moments_of_pieces_equal_those_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        numbers = rng.normal(rng.choice([0, 1e6]), 10 ** rng.uniform(-2, 3), 5000)
        cuts = np.sort(rng.integers(0, 5000, 9))
        pieces = [Moments.of(piece) for piece in np.split(numbers, cuts)]
        rng.shuffle(pieces)
        found = Moments.of(np.empty(0))
        for piece in pieces:
            found = found.merged(piece)
        assert found.count == 5000
        assert (found.low, found.high) == (numbers.min(), numbers.max())
        assert math.isclose(found.mean, math.fsum(numbers) / 5000, rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(found.deviation, numbers.std(), rel_tol=1e-9)


@pytest.mark.parametrize("number", [0.1, -3e37, 0.0, 1e-300])
def test_a_constant_column_becomes_zero(number: float) -> None:
    spec = FeatureSpec([Numeric("x", standardize=True)])
    tables = [{"x": np.full(size, number)} for size in (100_003, 7, 0, 1)]
    assert spec.fit(tables).transform(tables[1]).dense_features.tolist() == [[0.0]] * 7


def ranks(numbers: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of the numbers below each value, and up to it."""
    ordered = np.sort(numbers)
    below = np.searchsorted(ordered, values, "left") / len(numbers)
    return below, np.searchsorted(ordered, values, "right") / len(numbers)


@pytest.mark.parametrize("kind", ["normal", "rising", "falling", "few"])
@pytest.mark.parametrize("num_parts", [1, 5])
def test_quantiles_of_millions(kind: str, num_parts: int) -> None:
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=3_000_017)
    if kind in ("rising", "falling"):
        numbers = np.sort(numbers)[:: 1 if kind == "rising" else -1].copy()
    elif kind == "few":
        numbers = np.round(numbers * 3)
    parts = []
    for piece in np.array_split(numbers, num_parts):
        parts.append(Quantiles())
        for chunk in np.array_split(piece, 11):
            parts[-1].add(chunk)
    rng.shuffle(parts)  # type: ignore[arg-type]
    first, *others = parts
    for other in others:
        first.merge(other)
    shares = np.linspace(0, 1, 1001)
    below, up_to = ranks(numbers, first.at(shares))
    bound = math.log2(len(numbers) / 65_536) / 131_072  # as documented: far below 0.1%
    assert (below - shares).max() < bound + 1e-9
    assert (shares - up_to).max() < bound + 1e-9
    if kind != "few" and num_parts == 1:
        assert abs((up_to - shares)[1:].mean()) < bound / 8  # neither too high nor too low
    assert sum(len(block) for block in first.levels if block is not None) < 6 * 65_536


def test_few_numbers_have_exact_quantiles() -> None:
    rng = np.random.default_rng(2)
    for size in (1, 2, 100, 65_536, 131_071):
        numbers = rng.integers(0, 1000, size).astype(np.float64)
        found = Quantiles()
        for piece in np.array_split(numbers, 3):
            found.add(piece)
        shares = rng.random(50)
        places = np.maximum(np.ceil(shares * size).astype(int) - 1, 0)
        assert found.at(shares).tolist() == np.sort(numbers)[places].tolist()
    assert Quantiles().at(np.array([0.5])).tolist() == []


def skewed(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 2, size)


@pytest.mark.parametrize("seed", range(5))
def test_transform_equals_scikit_learn(seed: int) -> None:
    training, other = skewed(seed, 5000), skewed(seed + 100, 3000)
    spec = FeatureSpec([Numeric("x", standardize=True)]).fit({"x": training})
    ours = spec.transform({"x": other}).dense_features.numpy()[:, 0]
    theirs = StandardScaler().fit(training[:, None]).transform(other[:, None])[:, 0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)

    spec = FeatureSpec([Numeric("x", log1p=True)]).fit({"x": training})
    ours = spec.transform({"x": other}).dense_features.numpy()[:, 0]
    theirs = FunctionTransformer(np.log1p).fit_transform(other[:, None])[:, 0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)

    for numbers in (training, np.round(training)):  # whole numbers fall on edges
        spec = FeatureSpec([Numeric("x", buckets=10, spacing="uniform")]).fit({"x": numbers})
        theirs = KBinsDiscretizer(10, encode="ordinal", strategy="uniform").fit(numbers[:, None])
        for asked in (numbers, other, np.round(other)):
            rows = spec.transform({"x": asked}).sparse_features["x"].values().numpy()
            assert (rows - 1).tolist() == theirs.transform(asked[:, None])[:, 0].tolist()


def test_buckets_of_quantiles_have_as_many_values() -> None:
    numbers = skewed(0, 2_000_000)
    spec = FeatureSpec([Numeric("x", buckets=50)])
    parts = [spec.partial({"x": piece}) for piece in np.array_split(numbers, 7)]
    rows = spec.fit_parts(parts[::-1]).transform({"x": numbers}).sparse_features["x"].values()
    shares = np.bincount(rows.numpy(), minlength=51)[1:] / len(numbers)
    assert len(shares) == 50
    assert abs(shares - 0.02).max() < 1e-3


def test_equal_edges_are_joined_and_missing_numbers_have_row_0() -> None:
    column = Numeric("x", buckets=4)
    spec = FeatureSpec([column])
    with pytest.warns(UserWarning, match="'x' has 2 buckets.*of 4"):
        spec.fit({"x": [1.0, 1, 1, 1, 1, 1, 1, 5, None]})
    rows = spec.transform({"x": [0.0, 1.0, 4.0, 5.0, 9.0, None]}).sparse_features["x"].values()
    assert rows.tolist() == [1, 1, 1, 2, 2, 0]
    assert [feature.rows for feature in spec.features()] == [3]
    empty = FeatureSpec([column]).fit({"x": [None, None]})
    assert empty.transform({"x": [3.0, None]}).sparse_features["x"].values().tolist() == [1, 0]


@pytest.mark.filterwarnings("ignore:Numeric 'x' has")
@pytest.mark.parametrize("seed", range(300))
def test_values_of_many_rows_have_buckets_of_their_own(seed: int) -> None:
    draw = np.random.default_rng(seed)
    size, buckets = int(draw.integers(1, 200)), int(draw.integers(2, 12))
    kind = seed % 3  # of few distinct values, of many, and zeros among many
    numbers = draw.normal(size=size)
    if kind == 0:
        numbers = draw.choice(numbers[: draw.integers(1, 8)], size)
    elif kind == 1:
        numbers[draw.random(size) < draw.random()] = 0.0
    spec = FeatureSpec([Numeric("x", buckets=buckets)]).fit({"x": numbers})
    rows = spec.transform({"x": numbers}).sparse_features["x"].values().numpy()
    num_edges = len(spec.fitted.edges["x"])
    assert num_edges < buckets
    assert {*rows.tolist()} == {*range(1, num_edges + 2)}  # no bucket is empty
    distinct, counts = np.unique(numbers, return_counts=True)
    assert len(distinct) == 1 or num_edges > 0
    for value in distinct[counts * buckets >= 2 * size]:
        assert {*numbers[np.isin(rows, rows[numbers == value])].tolist()} == {value}


@pytest.mark.parametrize("spacing", ["quantile", "uniform"])
def test_fewer_buckets_are_a_warning(spacing: Literal["quantile", "uniform"]) -> None:
    spec = FeatureSpec([Numeric("x", buckets=5, spacing=spacing)])
    with pytest.warns(UserWarning, match=r"'x' has \d buckets.*of 5"):
        spec.fit({"x": [3.0] * 100})
    spec.fit({"x": np.arange(100.0)})  # without a warning


def test_rare_values_among_millions_of_zeros() -> None:
    numbers = np.zeros(1_000_000)
    numbers[:100_000] = np.random.default_rng(0).integers(1, 9, 100_000)
    spec = FeatureSpec([Numeric("x", buckets=8)])
    with pytest.warns(UserWarning, match="'x' has 2 buckets.*of 8"):
        spec.fit({"x": np.random.default_rng(1).permutation(numbers)})
    rows = spec.transform({"x": [0.0, 1.0, 8.0]}).sparse_features["x"].values()
    assert rows.tolist() == [1, 2, 2]


def test_the_order_of_steps() -> None:
    column = Numeric("x", missing=10.0, clip=(0, 7), log1p=True)
    spec = FeatureSpec([column]).fit({"x": [1.0]})
    found = spec.transform({"x": [None, -5.0, 1.0, 100.0]}).dense_features[:, 0]
    expected = np.log1p([7.0, 0.0, 1.0, 7.0]).astype(np.float32)
    assert found.numpy().tolist() == expected.tolist()


def test_numbers_out_of_range_are_named() -> None:
    spec = FeatureSpec([Numeric("x", log1p=True)])
    with pytest.raises(ValueError, match=r"'x' must .*above -1 .*received -1\.0"):
        spec.fit({"x": [0.0, None, -1.0]})
    with pytest.raises(ValueError, match=r"'x' must .*float32; .*1e\+39.*row 1"):
        FeatureSpec([Numeric("x")]).fit({"x": [0.0, 1e39]})
    spec = FeatureSpec([Numeric("x", standardize=True)]).fit({"x": [0.0, 1e-10]})
    with pytest.raises(ValueError, match=r"'x' must .*float32; .*1e\+30.*row 0"):
        spec.transform({"x": [1e30]})
    clipped = FeatureSpec([Numeric("x", clip=(0, 1))]).fit({"x": [0.0, 1e300]})
    assert clipped.transform({"x": pa.array([1e300])}).dense_features.tolist() == [[1.0]]

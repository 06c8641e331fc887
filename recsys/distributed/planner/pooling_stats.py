"""Statistics of sample batches: ids per sample, and the skew of ids.

For each feature a histogram is kept: the number `f_k` of ids that occurred `k` times among `n`. It
determines:

- *distinct rows among N ids*, up to `n`: `sum f_k (1 - (1 - N/n)^k)`, the expected remainder of a
  sample in which each id is kept with probability `N/n`. Good and Toulmin, "The number of new
  species, and the increase in population coverage, when a sample is increased", 1956 (their series
  inside `n`).
- *beyond* `n` this series diverges. The growth is then taken from a Zipf law, `p_i` proportional to
  `i^-s` over `v` rows, fitted to the number of distinct ids and to the number of ids that occurred
  once (Zipf, "Human behavior and the principle of least effort", 1949); `s = 0` is uniform.
- *hit rate of a cache* with the most frequent ids: ids that occurred at least `k` times receive the
  share `sum over j > k of j f_j / n` of further ids, and all rows receive all of them. Good, "The
  population frequencies of species and the estimation of population parameters", 1953.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import TypeAlias, final

import numpy as np
import torch

from recsys.base.arguments import wrong_type
from recsys.base.checked import checked_but
from recsys.sparse import KeyedJaggedTensor

_Floats: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

_BINS = 96  # of the ranks of a Zipf law, spaced evenly in their logarithm
_SIZES = 16  # numbers of rows tried in a fit
_STEPS = 24  # bisection steps
_STEEPEST = 4.0  # largest Zipf exponent tried


def uniform_distinct(rows: float, draws: float) -> float:
    """Return the expected number of distinct rows among draws from equally likely rows.

    Example:
        >>> round(uniform_distinct(1000, 1000))
        632
    """
    if rows <= 1:
        return float(rows)
    # rows * (1 - (1 - 1 / rows) ** draws) without its cancellation in large tables
    return -rows * math.expm1(draws * math.log1p(-1 / rows))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureStats:
    """Statistics of one feature.

    Args:
        ids_per_sample: Mean ids per sample.
        batch_size: Mean samples per batch.
        histogram: Pairs of occurrences and the number of ids with so many occurrences, ascending.

    Example:
        >>> stats = FeatureStats(ids_per_sample=2.0, batch_size=3.0, histogram=((1, 4), (2, 1)))
        >>> stats.num_ids
        6
    """

    ids_per_sample: float
    batch_size: float
    histogram: tuple[tuple[int, int], ...]

    @property
    def num_ids(self) -> int:
        """Number of ids in the batches."""
        return sum(times * count for times, count in self.histogram)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingStats:
    """Ids per sample, batch sizes and skew of ids, by feature.

    Args:
        features: Statistics by feature name.

    Example:
        >>> batch = KeyedJaggedTensor.from_lengths_sync(
        ...     ["f"], torch.tensor([7, 7, 3]), torch.tensor([2, 1])
        ... )
        >>> PoolingStats.from_batches([batch]).features["f"]
        FeatureStats(ids_per_sample=1.5, batch_size=2.0, histogram=((1, 1), (2, 1)))
    """

    features: Mapping[str, FeatureStats]

    @classmethod
    @checked_but("batches")
    def from_batches(cls, batches: Iterable[object]) -> PoolingStats:
        """Count the ids of some batches of one rank.

        A few thousand ids of each feature determine its ids per sample. Its skew is the more
        accurate the closer their number is to the ids of a step on all ranks.

        Args:
            batches: Each a KeyedJaggedTensor or a container of some: a mapping, a sequence, a
                dataclass, or an object with attributes, such as `sparse_features`.

        Raises:
            TypeError: A batch contains no KeyedJaggedTensor, or a single batch was passed.
            ValueError: There is no batch.
        """
        if isinstance(batches, str | bytes | torch.Tensor) or not isinstance(
            batches, Iterable | KeyedJaggedTensor
        ):
            wrong_type("PoolingStats.from_batches.batches", "a list of batches", batches)
        if isinstance(batches, KeyedJaggedTensor):
            raise TypeError(
                "PoolingStats.from_batches.batches must be a list of batches; received one "
                "KeyedJaggedTensor. Pass a list."
            )
        ids: dict[str, list[torch.Tensor]] = {}
        samples: dict[str, list[int]] = {}
        for batch in batches:
            inputs = _features_of(batch)
            if not inputs:
                raise TypeError(
                    "PoolingStats.from_batches.batches must be KeyedJaggedTensors or contain some; "
                    f"received a {type(batch).__name__}. Pass the input of the model."
                )
            for features in inputs:
                for key, size in zip(features.keys(), features.stride_per_key(), strict=True):
                    ids.setdefault(key, []).append(features[key].values().detach().cpu())
                    samples.setdefault(key, []).append(size)
        if not ids:
            raise ValueError("PoolingStats.from_batches needs at least one batch; received none.")
        return cls(features={key: _stats(ids[key], samples[key]) for key in ids})


def _features_of(batch: object) -> list[KeyedJaggedTensor]:
    parts: Iterable[object] = getattr(batch, "__dict__", {}).values()
    if isinstance(batch, KeyedJaggedTensor):
        parts = [batch]
    elif isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, tuple | list):
        parts = batch
    elif is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in fields(batch)]
    return [part for part in parts if isinstance(part, KeyedJaggedTensor)]


def _stats(ids: Sequence[torch.Tensor], samples: Sequence[int]) -> FeatureStats:
    _, times = torch.cat([part.long() for part in ids]).unique(return_counts=True)
    seen, counts = times.unique(return_counts=True)
    total = sum(samples)
    return FeatureStats(
        ids_per_sample=int(times.sum()) / total if total else 0.0,
        batch_size=total / len(samples),
        histogram=tuple(zip(seen.tolist(), counts.tolist(), strict=True)),
    )


@final
class IdSkew:
    """Distribution of a feature's ids over the rows of its table.

    Args:
        stats: Statistics of the feature.
        rows: Rows of the table.

    Example:
        >>> stats = FeatureStats(ids_per_sample=1.0, batch_size=6.0, histogram=((1, 2), (4, 1)))
        >>> skew = IdSkew(stats, rows=100)
        >>> skew.distinct(6), round(skew.distinct(1), 2), round(skew.hit_rate(1), 2)
        (3.0, 0.85, 0.67)
    """

    def __init__(self, stats: FeatureStats, rows: int) -> None:
        self._rows = rows
        self._times = np.array([times for times, _ in stats.histogram], dtype=np.float64)
        self._counts = np.array([count for _, count in stats.histogram], dtype=np.float64)
        self._num_ids = float(self._times @ self._counts)
        self._num_distinct = float(self._counts.sum())

    def distinct(self, draws: float) -> float:
        """Return the expected number of distinct rows among some ids."""
        if not self._num_ids:
            return uniform_distinct(self._rows, draws)
        if draws <= self._num_ids:
            missed = np.power(1 - draws / self._num_ids, self._times)
            expected = float(self._counts @ (1 - missed))
        else:
            weights, chances = self._zipf
            more = np.exp(-self._num_ids * chances) - np.exp(-draws * chances)
            expected = self._num_distinct + float(weights @ more)
        return min(expected, draws, float(self._rows))

    def hit_rate(self, cached_rows: float) -> float:
        """Return the share of ids that a cache of the most frequent rows contains.

        It is the hit rate of a cache that evicts the least frequent rows (LFU) and knows
        frequencies from a sample of the same size.
        """
        if not self._num_ids:
            return min(cached_rows / max(self._rows, 1), 1.0)
        held, hits = self._cache_curve
        return float(np.interp(cached_rows, held, hits))

    @cached_property
    def _cache_curve(self) -> tuple[_Floats, _Floats]:
        """Numbers of cached rows, ascending, and the share of ids among them."""
        times, counts = self._times, self._counts
        held = np.minimum(np.cumsum(counts[::-1]), self._rows)
        # ids with at least `least` occurrences, the smallest such number for the same ids
        least = np.concatenate([[1.0], times[:-1] + 1])
        of_ids = np.concatenate([np.cumsum((times * counts)[::-1])[::-1], [0.0]]) / self._num_ids
        hits = of_ids[np.searchsorted(times, least + 1)][::-1]
        curve = [(0.0, 0.0)]
        for x, y in (*zip(held.tolist(), hits.tolist(), strict=True), (float(self._rows), 1.0)):
            # further rows receive fewer ids, so the curve is concave: drop points below its hull
            while len(curve) > 1:
                (x0, y0), (x1, y1) = curve[-2:]
                if (y1 - y0) * (x - x0) > (y - y0) * (x1 - x0):
                    break
                curve.pop()
            curve.append((x, y))
        return np.array(curve)[:, 0], np.array(curve)[:, 1]

    @cached_property
    def _zipf(self) -> tuple[_Floats, _Floats]:
        """Fitted id distribution as (row counts, probability per row)."""
        n, distinct = self._num_ids, self._num_distinct
        once = float(self._counts[self._times == 1].sum())
        sizes_V = np.geomspace(max(distinct, 2.0), max(float(self._rows), distinct, 2.0), _SIZES)
        low_V, high_V = np.zeros(_SIZES), np.full(_SIZES, _STEEPEST)
        for _ in range(_STEPS):  # a steeper law has fewer distinct ids
            middle_V = (low_V + high_V) / 2
            weights, chances = _law(sizes_V, middle_V)
            is_flat_V = (weights * -np.expm1(-n * chances)).sum(1) > distinct
            low_V = np.where(is_flat_V, middle_V, low_V)
            high_V = np.where(is_flat_V, high_V, middle_V)
        weights, chances = _law(sizes_V, low_V)
        seen_V = (weights * -np.expm1(-n * chances)).sum(1)
        once_V = (weights * n * chances * np.exp(-n * chances)).sum(1)
        best = int(np.argmin(np.abs(seen_V - distinct) + np.abs(once_V - once)))
        return weights[best], chances[best]


def _law(sizes_V: _Floats, exponents_V: _Floats) -> tuple[_Floats, _Floats]:
    """Return Zipf laws over some rows, in bins: rows per bin, and the probability of each row."""
    edges = np.power(sizes_V[:, None] + 1, np.linspace(0, 1, _BINS + 1)[None, :])
    weights = np.diff(edges, axis=1)
    chances = np.power(np.sqrt(edges[:, :-1] * edges[:, 1:]), -exponents_V[:, None])
    return weights, chances / (weights * chances).sum(1, keepdims=True)

"""Sums and quantiles of numbers, in pieces that merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np

__all__ = ["Moments", "Quantiles"]

_Array: TypeAlias = np.ndarray[Any, Any]
_BLOCK: Final = 1 << 16


@final
@dataclass(frozen=True)
class Moments:
    """Number, mean, squared deviations, minimum and maximum of numbers.

    Pieces merge by the formulas of Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances" (1979).

    Example:
        >>> Moments.of(np.array([1.0, 3.0])).merged(Moments.of(np.array([5.0]))).mean
        3.0
    """

    count: int
    mean: float
    squares: float
    low: float
    high: float

    @staticmethod
    def of(numbers: _Array) -> Moments:
        """Return the moments of [N] float64."""
        if not len(numbers):
            return Moments(0, 0.0, 0.0, float("inf"), float("-inf"))
        low, high = float(numbers.min()), float(numbers.max())
        mean = float(numbers.mean()) if low < high else low  # exact for constants
        squares = float(((numbers - mean) ** 2).sum())
        return Moments(len(numbers), mean, squares, low, high)

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both pieces."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        squares = self.squares + other.squares + apart**2 * self.count * other.count / count
        return Moments(count, mean, squares, min(self.low, other.low), max(self.high, other.high))

    @property
    def deviation(self) -> float:
        """Standard deviation of the population; 1 if it is 0, so that it can divide."""
        return float(np.sqrt(self.squares / self.count)) or 1.0 if self.count else 1.0


@final
class Quantiles:
    """Quantiles of numbers in bounded memory, in pieces that merge in any order.

    Up to 65,536 numbers are exact. Two sorted blocks of 65,536 numbers become one by dropping each
    second number, and its numbers count twice (Munro and Paterson, "Selection and Sorting with
    Limited Storage", 1980). With n numbers the rank is wrong by at most log2(n / 65,536) / 131,072:
    0.015% for a trillion numbers.

    Example:
        >>> sketch = Quantiles()
        >>> sketch.add(np.arange(1000.0))
        >>> sketch.at(np.array([0.5])).tolist()
        [499.0]
    """

    def __init__(self) -> None:
        self.levels: list[_Array | None] = []
        self.rest = np.empty(0)
        self._num_merges = 0

    def add(self, numbers: _Array) -> None:
        """Add [N] float64."""
        rest = np.concatenate([self.rest, numbers])
        while len(rest) >= _BLOCK:
            self._push(np.sort(rest[:_BLOCK]), 0)
            rest = rest[_BLOCK:]
        self.rest = rest

    def merge(self, other: Quantiles) -> None:
        """Add the numbers of another piece."""
        self.add(other.rest)
        for level, block in enumerate(other.levels):
            if block is not None:
                self._push(block, level)

    def _push(self, block: _Array, level: int) -> None:
        while True:
            self.levels += [None] * (level + 1 - len(self.levels))
            present = self.levels[level]
            if present is None:
                self.levels[level] = block
                return
            self._num_merges += 1
            self.levels[level] = None
            block = np.sort(np.concatenate([present, block]))[self._num_merges % 2 :: 2]
            level += 1

    def at(self, shares: _Array) -> _Array:
        """Return the smallest numbers with at least these shares of the numbers up to them.

        Args:
            shares: [K] float64 from 0 to 1.

        Returns:
            [K] float64; empty if there are no numbers.
        """
        numbers, reached = self._sorted()
        if not len(numbers):
            return numbers
        places = np.searchsorted(reached, shares * reached[-1], "left")
        values: _Array = numbers[np.minimum(places, len(numbers) - 1)]
        return values

    def edges(self, buckets: int) -> _Array:
        """Return the inner edges of buckets with equal shares of the numbers, as far as possible.

        A number with the share of a bucket or more has an edge below it and one above it, which is
        the next number, if several quantiles fall on it; else the one whose share is nearer. No
        edge is at the smallest number, where it would divide nothing.

        Args:
            buckets: Number of buckets, at least 2.

        Returns:
            [K] float64, rising; K is at most `buckets` - 1.

        Example:
            >>> sketch = Quantiles()
            >>> sketch.add(np.array([0.0] * 8 + [1.0, 2.0]))
            >>> sketch.edges(3).tolist()
            [1.0]
        """
        shares = np.arange(1, buckets) / buckets
        numbers, reached = self._sorted()
        quantiles = self.at(shares)
        edges: list[float] = []
        for value, count in zip(*np.unique(quantiles, return_counts=True), strict=True):
            first = int(np.searchsorted(numbers, value, "left"))
            after = int(np.searchsorted(numbers, value, "right"))
            below = reached[first - 1] / reached[-1] if first else 0.0
            up_to = reached[after - 1] / reached[-1]
            value_share = shares[quantiles == value].mean()
            is_single = count == 1 and up_to - below >= 1 / buckets
            is_last = after == len(numbers)
            is_nearer_above = (
                is_single and not is_last and up_to - value_share < value_share - below
            )
            if first and not is_nearer_above:
                edges.append(float(value))
            if not is_last and (not first or is_nearer_above or count > 1):
                edges.append(float(numbers[after]))
        return np.unique(edges)

    def shares(self, edges: _Array) -> _Array:
        """Return the share of the numbers between edges, [K + 1] float64.

        Args:
            edges: [K] rising inner edges; a number at an edge is above it.
        """
        numbers, reached = self._sorted()
        if not len(numbers):
            return np.zeros(len(edges) + 1)
        places = np.searchsorted(numbers, edges, "left")
        up_to = np.concatenate([[0], np.where(places > 0, reached[places - 1], 0), reached[-1:]])
        shares: _Array = np.diff(up_to) / reached[-1]
        return shares

    def _sorted(self) -> tuple[_Array, _Array]:
        """Return the numbers, rising, and how many numbers each one and those before stand for."""
        blocks = [self.rest, *(block for block in self.levels if block is not None)]
        sizes = [1, *(2**i for i, block in enumerate(self.levels) if block is not None)]
        numbers: _Array = np.concatenate(blocks)
        weights = np.repeat(np.array(sizes, np.int64), [len(block) for block in blocks])
        order = np.argsort(numbers, kind="stable")
        return numbers[order], weights[order].cumsum()

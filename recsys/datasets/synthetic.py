"""Tables of clicks from a stated model, so that the best possible AUC and log loss are known.

Shapes: `N` rows. The module needs pyarrow (extra `data`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa

from recsys.base.arguments import finite, whole
from recsys.base.checked import check_fields

__all__ = ["Bayes", "ClickModel", "Clicks", "bayes"]

_Array: TypeAlias = np.ndarray[Any, Any]
_PART: Final = 1 << 16
_CITIES: Final = (
    *("Wien", "Köln", "São Paulo", "東京", "Łódź", "New York", "Αθήνα", "Kyiv", "Roma", "Oslo"),
    *("Paris", "Lima", "Delhi", "Accra", "Perth", "Quito", "Busan", "Tunis", "Porto", "Graz"),
)
_GENRES: Final = ("comedy", "crime", "drama", "fantasy", "horror", "music", "news", "romance")
_NUM_TAGS: Final = 50
_SKEW: Final = 1.1
_START: Final = 1_704_067_200  # 2024-01-01, a Monday
_SPAN: Final = 28 * 86_400
_NEW_ITEMS: Final = 0.2  # share of the items that become popular within the span


@final
class Bayes(NamedTuple):
    """Scores of the true probabilities: no model is better, except by chance."""

    auc: float
    """Area under the ROC curve."""
    log_loss: float
    """Mean of the binary cross entropy."""


def bayes(labels: _Array, probabilities: _Array, weights: _Array | None = None) -> Bayes:
    """Return the scores of probabilities.

    Args:
        labels: [N], 0 or 1.
        probabilities: [N] float64 between 0 and 1.
        weights: [N] weights of the rows; None: 1.

    Returns:
        AUC (ties count half) and log loss. The AUC is NaN if all labels are equal.

    Example:
        >>> bayes(np.array([0, 1, 1]), np.array([0.2, 0.1, 0.9])).auc
        0.5
    """
    is_click = np.asarray(labels, np.float64)
    weights_N = np.ones(len(is_click)) if weights is None else np.asarray(weights, np.float64)
    order = np.argsort(probabilities, kind="stable")
    ranked = probabilities[order]
    firsts = np.flatnonzero(np.diff(ranked, prepend=np.nan))  # of equal probabilities
    clicks = np.add.reduceat((weights_N * is_click)[order], firsts)
    others = np.add.reduceat((weights_N * (1 - is_click))[order], firsts)
    below = others.cumsum() - others / 2
    pairs = clicks.sum() * others.sum()
    chosen = np.where(is_click > 0, probabilities, 1 - probabilities)
    return Bayes(
        float((clicks * below).sum() / pairs) if pairs else float("nan"),
        float(-(weights_N * np.log(chosen)).sum() / weights_N.sum()),
    )


@final
class Clicks(NamedTuple):
    """A table of clicks with its probabilities."""

    table: Any
    """An Arrow table with N rows."""
    probabilities: dict[str, _Array]
    """The probability of each label: [N] float64, by column."""

    def bayes(self, label: str = "click") -> Bayes:
        """Return the scores of the true probabilities, weighted if the table has weights.

        Args:
            label: The column.
        """
        weights = self.table["weight"].to_numpy() if "weight" in self.table.column_names else None
        return bayes(self.table[label].to_numpy(), self.probabilities[label], weights)

    def take(self, rows: _Array) -> Clicks:
        """Return some rows, such as a test set.

        Args:
            rows: [N] numbers of the rows.
        """
        probabilities = {label: values[rows] for label, values in self.probabilities.items()}
        return Clicks(self.table.take(pa.array(rows)), probabilities)


@final
@dataclass(frozen=True)
class ClickModel:
    """A model of clicks on films.

    The logit of a click is a sum of: an effect of the user; of the film; of the pair of city and
    genre (a missing city is a city of its own); of each tag; of the age, strongest at 40 years; of
    the logarithm of the price; of the hour; and of a trend of the genre over the 28 days. Missing
    ages and prices have effects of their own. The probability so is a function of the row, and its
    scores are the best possible.

    Columns, ordered by time:

    - `user`: int64 of any size, half of them negative; skewed (Zipf, exponent 1.1).
    - `film`: strings; skewed, and other films become popular over time.
    - `city`: strings, some missing. `genre`: strings, one per film.
    - `tags`: lists of 0 to 5 strings.
    - `age`: float64 and `price`: float64, some missing; the price is skewed (log-normal).
    - `time`: timestamps in UTC, from 2024-01-01 on.
    - `click`: int8, and with `buys` also `buy`, 1 for a part of the clicks.
    - `weight`: float32, with `weights`.

    Args:
        seed: Seed of effects and rows.
        users: Number of users.
        films: Number of films.
        missing: Share of missing cities, ages and prices, from 0 to 1.
        buys: True for a second label.
        weights: True for sample weights.

    Raises:
        TypeError: A value has another type.
        ValueError: A number is out of its range.

    Example:
        >>> clicks = ClickModel(seed=1).draw(1000)
        >>> clicks.table.column_names[:4]
        ['user', 'film', 'city', 'genre']
        >>> 0.7 < clicks.bayes().auc < 0.9
        True
    """

    _: KW_ONLY
    seed: int = 0
    users: int = 5000
    films: int = 1000
    missing: float = 0.05
    buys: bool = False
    weights: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        whole("ClickModel: seed", self.seed, 0)
        whole("ClickModel: users", self.users)
        whole("ClickModel: films", self.films)
        finite("ClickModel: missing", self.missing, 0)
        if self.missing > 1:
            raise ValueError(
                f"ClickModel: missing must be a share from 0 to 1; received {self.missing}."
            )

    def draw(self, num_rows: int) -> Clicks:
        """Return a table.

        Args:
            num_rows: Number of rows.
        """
        parts = [*self.parts(num_rows)]
        return Clicks(
            pa.concat_tables([part.table for part in parts]),
            {
                label: np.concatenate([part.probabilities[label] for part in parts])
                for label in parts[0].probabilities
            },
        )

    def parts(self, num_rows: int) -> Iterator[Clicks]:
        """Yield the rows of `draw` in tables of 65,536 rows, in constant memory.

        Args:
            num_rows: Number of rows of all tables.
        """
        whole("ClickModel.parts: num_rows", num_rows)
        for start in range(0, num_rows, _PART):
            rng = np.random.default_rng([self.seed, 1, start])
            yield self._part(rng, np.arange(start, min(start + _PART, num_rows)), num_rows)

    @cached_property
    def _effects(self) -> dict[str, _Array]:
        rng = np.random.default_rng([self.seed, 0])
        return {
            "user": 0.5 * rng.normal(size=self.users),
            "film": 0.5 * rng.normal(size=self.films),
            "genre": rng.integers(len(_GENRES), size=self.films),
            "base price": rng.normal(2, 0.7, self.films),
            "taste": rng.normal(size=(len(_CITIES) + 1, len(_GENRES))),
            "tag": 0.6 * rng.normal(size=_NUM_TAGS),
            "trend": rng.normal(size=len(_GENRES)),
        }

    def _part(self, rng: np.random.Generator, row: _Array, num_rows: int) -> Clicks:
        size = len(row)
        effects = self._effects
        seconds = ((row + 0.5) / num_rows * _SPAN).astype(np.int64)
        progress = seconds / _SPAN
        user = _skewed(rng, self.users, size)
        shift = (progress * _NEW_ITEMS * self.films).astype(np.int64)
        film = (_skewed(rng, self.films, size) + shift) % self.films
        genre = effects["genre"][film]
        city = np.where(self._gaps(rng, size), len(_CITIES), _skewed(rng, len(_CITIES), size))
        ages, no_age = rng.uniform(15, 80, size).round(1), self._gaps(rng, size)
        prices = np.exp(effects["base price"][film] + rng.normal(0, 0.5, size)).round(2)
        no_price = self._gaps(rng, size)
        num_tags = rng.integers(0, 6, size)
        ends = np.concatenate([[0], num_tags.cumsum()])
        tags = _skewed(rng, _NUM_TAGS, int(ends[-1]))
        tag_sums = np.concatenate([[0.0], effects["tag"][tags].cumsum()])[ends]

        logits = -1.5 + effects["user"][user] + effects["film"][film]
        logits += effects["taste"][city, genre] + np.diff(tag_sums)
        logits += np.where(no_age, 0.3, 0.5 - ((ages - 40) / 20) ** 2 / 2)
        logits += np.where(no_price, 0.2, 0.4 * (2 - np.log1p(prices)))
        logits += 0.4 * np.cos((seconds / 3600 % 24 - 20) * np.pi / 12)
        logits += effects["trend"][genre] * (progress - 0.5)

        probabilities = {"click": _sigmoid(logits)}
        click = rng.random(size) < probabilities["click"]
        films = pa.array([f"film-{i:05}" for i in range(self.films)])
        cities = pa.array([*_CITIES, None])
        names = pa.array([f"tag-{i:02}" for i in range(_NUM_TAGS)])
        columns: dict[str, Any] = {
            "user": _ids(user),
            "film": films.take(pa.array(film)),
            "city": cities.take(pa.array(city)),
            "genre": pa.array(_GENRES).take(pa.array(genre)),
            "tags": pa.ListArray.from_arrays(
                pa.array(ends.astype(np.int32)), names.take(pa.array(tags))
            ),
            "age": pa.array(ages, mask=no_age),
            "price": pa.array(prices, mask=no_price),
            "time": pa.array(_START + seconds).cast(pa.timestamp("s", "UTC")),
            "click": click.astype(np.int8),
        }
        if self.buys:  # a part of the clicks, more at a low price
            chance = _sigmoid(effects["user"][user] - 0.5 - np.where(no_price, 0, prices / 20))
            probabilities["buy"] = probabilities["click"] * chance
            columns["buy"] = (click & (rng.random(size) < chance)).astype(np.int8)
        if self.weights:
            columns["weight"] = rng.uniform(0.5, 2, size).astype(np.float32)
        return Clicks(pa.table(columns), probabilities)

    def _gaps(self, rng: np.random.Generator, size: int) -> _Array:
        gaps: _Array = rng.random(size) < self.missing
        return gaps


def _sigmoid(logits: _Array) -> _Array:
    chances: _Array = 1 / (1 + np.exp(-logits))
    return chances


def _skewed(rng: np.random.Generator, count: int, size: int) -> _Array:
    """Return [size] int64 numbers below `count`, with Zipf's distribution."""
    reached = (1 / np.arange(1, count + 1) ** _SKEW).cumsum()
    numbers: _Array = np.searchsorted(reached, rng.random(size) * reached[-1], "right")
    return numbers


def _ids(numbers: _Array) -> _Array:
    """Return distinct int64 for small numbers, half of them negative."""
    ids: _Array = (
        (numbers + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # odd: distinct mod 2^64
    ).view(np.int64)
    return ids

"""MovieLens: will this user rate this film 4 or more?

`load_movielens` reads ratings (fetching the 100K release if no folder is given), builds columns
from the past of each rating, splits the ratings, and fits the description of the columns to the
training part. `recsys.datasets.table` gives batches of a part.

The two splits:

- ``time``: of each user's ``n`` ratings in order of time, the last ``n // 10`` are for test and the
  ``n // 10`` before them for validation. Ratings that a user made in the same second stay
  together, in the part of the last of them. So every training rating of a user is strictly older
  than every validation rating, and every validation rating is strictly older than every test
  rating. All ratings contribute to the features of strictly later ones, as in a running system.
- ``random``: 80%, 10% and 10% of all ratings, by hash. Only training ratings contribute to the
  features of strictly later ones: the history of a training sample must not reveal test labels.
"""

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from movielens.download import WheelData, fetch_from_wheel
from movielens.features import past_of, with_features
from movielens.files import read_movielens
from recsys.datasets import Split
from recsys.features import Categorical, FeatureSpec, Label, Numeric

__all__ = ["MovieLens", "fetch_movielens_100k", "load_movielens", "popularity"]

COLUMNS = (
    Categorical("user_id"),
    Categorical("item_id"),
    Categorical("occupation"),
    Categorical("zip"),
    Categorical("year"),
    Categorical("genres", is_list=True),
    Categorical("history", is_list=True, table="item_id"),
    Categorical("gender"),
    Numeric("age", standardize=True),
    Numeric("user_like_rate", standardize=True),
    Numeric("user_mean", standardize=True),
    Numeric("item_ratings", log1p=True, standardize=True),
    Numeric("item_like_rate", standardize=True),
    Numeric("item_mean", standardize=True),
    Numeric("item_days", log1p=True, standardize=True),
    Numeric("film_age", clip=(0, 100), log1p=True, standardize=True),
    Label("liked"),
)
"""The columns of the model."""

ML_100K = WheelData(
    requirement="recbole==1.2.1",
    sha256="9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
    folder="recbole/dataset_example/ml-100k",
    sizes_bytes={"ml-100k.inter": 1979230, "ml-100k.item": 66632, "ml-100k.user": 22697},
)
"""The RecBole wheel carries MovieLens 100K; it is unpacked, never installed."""


def fetch_movielens_100k(cache: str | Path | None = None) -> Path:
    """Fetch MovieLens 100K with pip, unless it is in the cache already.

    Args:
        cache: where to keep it; ``None`` for ``$RECSYS_CACHE``, or ``~/.cache/recsys``.

    Returns:
        The folder with the three files.

    Raises:
        RuntimeError: pip could not fetch it.
        ValueError: the wheel or a cached file is not the expected one.
    """
    return fetch_from_wheel(ML_100K, "ml-100k", cache)


class MovieLens(NamedTuple):
    """Ratings with the columns of `COLUMNS`, in three parts."""

    spec: FeatureSpec
    """Fitted to the training part."""
    train: pa.Table
    validation: pa.Table
    test: pa.Table


def popularity(train: pa.Table, part: pa.Table) -> NDArray[np.float64]:
    """Score ratings by their film alone: the share of likes it got in training.

    A baseline. Films with few ratings are smoothed towards the base rate.

    Args:
        train: the training part.
        part: the part to score, with N ratings.

    Returns:
        ``[N]`` probabilities.
    """
    films = train.group_by("item_id").aggregate([("liked", "sum"), ("liked", "count")])
    places = pc.index_in(part["item_id"], films["item_id"].combine_chunks())
    likes, ratings = (
        pc.fill_null(films[name].take(places).cast(pa.float64()), 0.0).to_numpy()
        for name in ("liked_sum", "liked_count")
    )
    return (likes + 10.0 * pc.mean(train["liked"]).as_py()) / (ratings + 10.0)


def load_movielens(
    folder: str | Path | None = None,
    *,
    split: Literal["time", "random"] = "time",
    history: int = 20,
    seed: int = 0,
    cache: str | Path | None = None,
) -> MovieLens:
    """Read MovieLens, build its columns and split it.

    Args:
        folder: a release of GroupLens; ``None`` to fetch MovieLens 100K.
        split: ``"time"`` or ``"random"``; see the module's docstring.
        history: longest history of liked items.
        seed: of the random split.
        cache: where fetched data is kept; see `fetch_movielens_100k`.

    Returns:
        All samples.

    Raises:
        FileNotFoundError: ``folder`` holds no release.
        ValueError: a file is damaged, or an argument is not one of its choices.
        RuntimeError: pip could not fetch the data.
    """
    if split not in ("time", "random"):
        raise ValueError(f"split must be one of time, random; received {split!r}.")
    if history < 1:
        raise ValueError(f"history must be at least 1 item; received {history}.")
    ratings = read_movielens(fetch_movielens_100k(cache) if folder is None else folder)
    return build_movielens(ratings, split=split, history=history, seed=seed)


def build_movielens(
    ratings: pa.Table, *, split: Literal["time", "random"], history: int = 20, seed: int = 0
) -> MovieLens:
    """Build columns and split of ratings that have been read; arguments as `load_movielens`."""
    if split == "time":
        part_N = split_by_time(ratings["user_id"].to_numpy(), ratings["timestamp"].to_numpy())
        visible_N = np.ones(len(ratings), np.bool_)
    else:
        part_N = Split(seed=seed).parts_of(ratings, "ratings", np.arange(len(ratings)))
        visible_N = part_N == 0
    table = with_features(ratings, visible_N, history)
    parts = [table.filter(pa.array(part_N == part)) for part in range(3)]
    return MovieLens(FeatureSpec(COLUMNS).fit(parts[0]), *parts)


def split_by_time(user_N: NDArray[np.int64], timestamp_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give each rating its part under the split by time (see the module's docstring).

    Args:
        user_N: the rating's user, from 0.
        timestamp_N: seconds.

    Returns:
        ``[N]``: 0 for training, 1 for validation, 2 for test.

    Example:
        >>> one_user = np.zeros(11, np.int64)
        >>> split_by_time(one_user, np.arange(11)).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
        >>> split_by_time(one_user, np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10])).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2]
    """
    (later_N,) = past_of(user_N, -timestamp_N, np.ones(len(user_N)))
    tenth_N = np.bincount(user_N)[user_N] // 10
    return (later_N < 2 * tenth_N).astype(np.int64) + (later_N < tenth_N)

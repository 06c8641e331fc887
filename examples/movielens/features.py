"""Turn ratings into columns that know only the past.

The features of a rating made at time ``t`` use ratings made strictly before ``t``; those made in
the same second, by anyone, do not count. Everything is a sort and a running sum: no loop over
ratings.

Shapes: ``N`` ratings, ``V`` values.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

LIKED = 4.0
"""A user who gives this rating or more likes the film: the label."""

_SMOOTHING = 10.0
"""Weight of the base rate in a like rate, in ratings: a film's first rating has little weight."""

_SECONDS_PER_DAY = 86_400.0


def past_of(
    group_N: NDArray[np.int64], timestamp_N: NDArray[np.int64], *columns_N: NDArray[np.float64]
) -> list[NDArray[np.float64]]:
    """Sum columns over the strictly earlier ratings of the same group.

    Args:
        group_N: the rating's group: its user, its item, or a constant.
        timestamp_N: seconds.
        columns_N: the columns to sum.

    Returns:
        For each column its sums ``[N]``, in the order of the ratings.

    Example:
        >>> likes = np.array([1.0, 1.0, 0.0, 1.0])
        >>> past_of(np.zeros(4, np.int64), np.array([5, 5, 9, 9]), likes)[0].tolist()
        [0.0, 0.0, 2.0, 2.0]
    """
    order = np.lexsort((timestamp_N, group_N))
    group, time = group_N[order], timestamp_N[order]
    new_group = _changes(group)
    new_moment = new_group | _changes(time)
    group_start = np.maximum.accumulate(np.where(new_group, np.arange(len(order)), 0))
    moment_start = np.maximum.accumulate(np.where(new_moment, np.arange(len(order)), 0))
    sums = []
    for column_N in columns_N:
        before = np.concatenate([[0.0], np.cumsum(column_N[order])])
        past = np.empty(len(order))
        past[order] = before[moment_start] - before[group_start]
        sums.append(past)
    return sums


def _changes(sorted_N: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.concatenate([[True], sorted_N[1:] != sorted_N[:-1]])[: len(sorted_N)]


def past_lists(
    user_N: NDArray[np.int64],
    item_N: NDArray[np.int64],
    timestamp_N: NDArray[np.int64],
    visible_N: NDArray[np.bool_],
    length: int,
    *columns_N: NDArray[np.int64],
) -> list[pa.Array]:
    """List columns over the user's latest visible ratings from strictly before, oldest first.

    Ratings of the same second are ordered by item id, regardless of their order in the file.

    Args:
        user_N: the rating's user, numbered from 0.
        item_N: the rating's item.
        timestamp_N: seconds.
        visible_N: which ratings may appear in a list.
        length: at most so many ratings.
        columns_N: the columns to list.

    Returns:
        For each column its lists, perhaps empty, in the order of the ratings.
    """
    order = np.lexsort((item_N, timestamp_N, user_N))
    (visible_before_N,) = past_of(user_N, timestamp_N, visible_N.astype(np.float64))
    # Ratings are listed user by user, so a user's list starts after the previous users' lists.
    per_user = np.bincount(user_N, weights=visible_N)
    first_N = (np.cumsum(per_user) - per_user)[user_N]
    size_N = np.minimum(visible_before_N, length)
    start_N = first_N + visible_before_N - size_N
    starts, sizes = pa.array(start_N, pa.int32()), pa.array(size_N, pa.int32())
    offsets = pa.array(np.concatenate([[0], np.cumsum(size_N)]), pa.int32())
    lists = []
    for column_N in columns_N:
        values_V = column_N[order][visible_N[order]]
        overlapping = pa.ListViewArray.from_arrays(starts, sizes, pa.array(values_V))
        lists.append(pa.ListArray.from_arrays(offsets, overlapping.flatten()))
    return lists


def with_features(ratings: pa.Table, visible_N: NDArray[np.bool_], history: int) -> pa.Table:
    """Add the columns of a model to ratings.

    How many ratings the user has made, how long ago the first was, and the date are left out: under
    a split by time they hardly overlap between training and test (DLRM's test AUC falls by 0.002, a
    mean of four seeds). So is the hour, by which a model remembers whole sessions (0.005).

    Args:
        ratings: the result of `read_movielens`.
        visible_N: ratings that later ones may know of.
        history: longest history of liked items.

    Returns:
        The ratings with more columns: `liked`, 1 from the rating 4; the list `history` of item ids;
        like rate and mean rating of user and item so far (`user_like_rate` and so on), the number
        `item_ratings` so far, `item_days` since the item's first rating, and `film_age` in years.
        `zip` has two characters. Missing days and ages are null.
    """
    _, user_N = np.unique(ratings["user_id"], return_inverse=True)
    item_N, time_N, rating_N = (
        ratings[name].to_numpy() for name in ("item_id", "timestamp", "rating")
    )
    liked_N = rating_N >= LIKED
    sums_N = [visible_N * column_N for column_N in (1.0, liked_N, rating_N.astype(np.float64))]
    all_count, all_likes, all_ratings = past_of(np.zeros_like(user_N), time_N, *sums_N)
    base_rate = (all_likes + 1.0) / (all_count + 2.0)
    base_mean = (all_ratings + 3.5) / (all_count + 1.0)
    likes_N = visible_N & liked_N
    (histories,) = past_lists(user_N, item_N, time_N, likes_N, history, item_N)
    found = {"liked": liked_N.astype(np.float32), "history": histories}
    for name, group_N in (("user", user_N), ("item", item_N)):
        count, likes, total = past_of(group_N, time_N, *sums_N)
        weight = count + _SMOOTHING
        found[f"{name}_like_rate"] = (likes + _SMOOTHING * base_rate) / weight
        found[f"{name}_mean"] = (total + _SMOOTHING * base_mean) / weight
        found[f"{name}_ratings"] = count
    first = (
        ratings.filter(pa.array(visible_N)).group_by("item_id").aggregate([("timestamp", "min")])
    )
    places = pc.index_in(ratings["item_id"], first["item_id"].combine_chunks())
    since = pc.subtract(ratings["timestamp"], first["timestamp_min"].take(places))
    days = pc.divide(since.cast(pa.float64()), _SECONDS_PER_DAY)
    found["item_days"] = pc.if_else(pc.greater(since, 0), days, None)
    now = pa.array(1970.0 + time_N / (365.25 * _SECONDS_PER_DAY))
    found["film_age"] = pc.subtract(now, ratings["year"].cast(pa.float64()))
    found["zip"] = pc.utf8_slice_codeunits(ratings["zip"].cast(pa.string()), 0, 2)
    return pa.table({**{name: ratings[name] for name in ratings.column_names}, **found})

"""The array operations give what a loop over ratings gives, and no feature knows its own future."""

import dataclasses

import numpy as np
import pytest
from movielens.data import build_movielens
from movielens.features import DENSE_NAMES, LIKED, SPARSE_NAMES, past_of

from tests.examples.movielens.case import made_up_files

FILES = made_up_files()


def ids(data, name, row):
    values, lengths = data.sparse[name].take(np.array([row]))
    assert lengths.tolist() == [len(values)]
    return values.tolist()


@pytest.mark.parametrize("split", ["time", "random"])
def test_history_equals_a_loop(split):
    data = build_movielens(FILES, split=split, history=5)
    visible = np.ones(len(FILES.user_N), bool) if split == "time" else data.part_N == 0
    item_ids = np.unique(FILES.item_N)
    longest = 0
    for row in range(len(FILES.user_N)):
        earlier = [
            (FILES.timestamp_N[other], FILES.item_N[other])
            for other in range(len(FILES.user_N))
            if FILES.user_N[other] == FILES.user_N[row]
            and FILES.timestamp_N[other] < FILES.timestamp_N[row]
            and FILES.rating_N[other] >= LIKED
            and visible[other]
        ]
        expected = [item for _, item in sorted(earlier)[-5:]]
        assert item_ids[ids(data, "history", row)].tolist() == expected
        longest = max(longest, len(expected))
    assert longest == 5


@pytest.mark.parametrize("group", ["user_N", "item_N"])
def test_past_sums_equal_a_loop(group):
    group_N = getattr(FILES, group)
    (found,) = past_of(group_N, FILES.timestamp_N, FILES.rating_N.astype(float))
    for row in range(len(group_N)):
        earlier = (group_N == group_N[row]) & (FILES.timestamp_N < FILES.timestamp_N[row])
        assert found[row] == FILES.rating_N[earlier].sum()


def standing(data, row):
    return [ids(data, name, row) for name in SPARSE_NAMES], data.dense_ND[row]


@pytest.mark.parametrize("split", ["time", "random"])
def test_the_present_and_the_future_cannot_change_a_feature(split):
    """Whatever the ratings from some moment on, features of all samples up to it stay the same."""
    moment = np.quantile(FILES.timestamp_N, 0.6)
    generator = np.random.default_rng(1)
    other_ratings = np.where(
        FILES.timestamp_N >= moment, generator.integers(1, 6, len(FILES.user_N)), FILES.rating_N
    ).astype(np.float32)
    data = build_movielens(FILES, split=split, scale=False)
    other = build_movielens(
        dataclasses.replace(FILES, rating_N=other_ratings), split=split, scale=False
    )
    assert (data.label_N != other.label_N).any()
    changed = 0
    for row in range(len(FILES.user_N)):
        same = standing(data, row)[0] == standing(other, row)[0] and np.array_equal(
            data.dense_ND[row], other.dense_ND[row]
        )
        assert same or FILES.timestamp_N[row] > moment
        changed += not same
    assert changed > 20, "later features do see the ratings"


def test_random_split_features_know_training_labels_only():
    data = build_movielens(FILES, split="random", scale=False)
    hidden = data.part_N > 0
    flipped = np.where(hidden, 6 - FILES.rating_N, FILES.rating_N).astype(np.float32)
    other = build_movielens(
        dataclasses.replace(FILES, rating_N=flipped), split="random", scale=False
    )
    np.testing.assert_array_equal(data.dense_ND, other.dense_ND)
    rows = np.arange(len(hidden))
    for mine, theirs in zip(
        data.sparse["history"].take(rows), other.sparse["history"].take(rows), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_order_of_the_file_does_not_matter():
    order = np.random.default_rng(2).permutation(len(FILES.user_N))
    shuffled = dataclasses.replace(
        FILES,
        **{
            name: getattr(FILES, name)[order]
            for name in ("user_N", "item_N", "rating_N", "timestamp_N")
        },
    )
    data, other = build_movielens(FILES, split="time"), build_movielens(shuffled, split="time")
    np.testing.assert_array_equal(data.part_N[order], other.part_N)
    np.testing.assert_allclose(data.dense_ND[order], other.dense_ND, atol=1e-5)
    for place, row in enumerate(order):
        assert standing(data, row)[0] == standing(other, place)[0]


def test_known_values():
    data = build_movielens(FILES, split="time", scale=False)
    row = int(np.flatnonzero((FILES.item_N == 503) & (FILES.user_N == 104))[0])
    assert ids(data, "user_id", row) == [4]
    assert ids(data, "item_id", row) == [3]
    assert ids(data, "occupation", row) == [1]
    assert ids(data, "genres", row) == [1, 2, 3]
    assert ids(data, "year", row) == [4], "0 unknown, 1 before 1930, 2 the thirties, 3 the forties"
    assert data.dense_ND[row, DENSE_NAMES.index("age")] == 24
    film = (FILES.item_N == 503) & (FILES.timestamp_N < FILES.timestamp_N[row])
    assert data.dense_ND[row, DENSE_NAMES.index("item_ratings")] == pytest.approx(
        np.log1p(film.sum())
    )
    first = FILES.timestamp_N[FILES.item_N == 503].min()
    days = (FILES.timestamp_N[row] - first) / 86_400
    assert data.dense_ND[row, DENSE_NAMES.index("item_days")] == pytest.approx(np.log1p(days))


def test_scaled_over_the_training_part():
    data = build_movielens(FILES, split="time")
    train_ND = data.dense_ND[data.part_N == 0]
    assert np.abs(train_ND).max() <= 5
    np.testing.assert_allclose(train_ND.mean(axis=0), 0, atol=0.05)

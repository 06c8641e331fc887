import numpy as np
import pytest
import torch
from movielens.data import COLUMNS, build_movielens, load_movielens, popularity, split_by_time

from recsys import datasets
from recsys.features import Categorical
from tests.examples.movielens.case import made_up_ratings

RATINGS = made_up_ratings()


@pytest.fixture(scope="module")
def data():
    return build_movielens(RATINGS, split="time")


def test_split_by_time_equals_a_loop():
    user_N, time_N = RATINGS["user_id"].to_numpy(), RATINGS["timestamp"].to_numpy()
    part_N = split_by_time(user_N, time_N)
    for user in np.unique(user_N):
        mine = np.flatnonzero(user_N == user)
        tenth = len(mine) // 10
        for row in mine:
            later = (time_N[mine] > time_N[row]).sum()
            expected = 2 if later < tenth else 1 if later < 2 * tenth else 0
            assert part_N[row] == expected
        times = [time_N[mine][part_N[mine] == part] for part in range(3)]
        assert times[0].max() < times[1].min()
        assert times[1].max() < times[2].min()


def test_users_with_few_ratings_are_in_training():
    assert split_by_time(np.zeros(9, np.int64), np.arange(9)).tolist() == [0] * 9


@pytest.mark.parametrize("split", ["time", "random"])
def test_parts(split):
    data = build_movielens(RATINGS, split=split, seed=3)
    parts = data[1:]
    rows = [row for part in parts for row in part.select(RATINGS.column_names[:4]).to_pylist()]
    key = sorted(rows, key=lambda row: (row["user_id"], row["item_id"]))
    whole = RATINGS.select(RATINGS.column_names[:4]).to_pylist()
    assert key == sorted(whole, key=lambda row: (row["user_id"], row["item_id"]))
    shares = [len(part) / len(RATINGS) for part in parts]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.05)
    if split == "random":
        assert build_movielens(RATINGS, split=split, seed=3).test == data.test
        assert build_movielens(RATINGS, split=split, seed=4).test != data.test


def test_batch(data):
    (batch,) = datasets.table(data.test, data.spec, batch_size=10_000)
    size = len(data.test)
    assert batch.dense_features.shape == (size, len(data.spec.dense_names))
    assert batch.labels.tolist() == (data.test["rating"].to_numpy() >= 4).tolist()
    ids = batch.sparse_features
    assert ids.keys() == [one.name for one in COLUMNS if isinstance(one, Categorical)]
    # the films of a history are rows of the films' table
    films = data.spec.fitted.vocabularies["item_id"].values.to_pylist()
    for name in ("item_id", "history"):
        found = [films[row - 2] if row > 1 else None for row in ids[name].values().tolist()]
        expected = data.test[name].to_pylist()
        flat = expected if name == "item_id" else [one for bag in expected for one in bag]
        assert found == [film if film in films else None for film in flat]
    assert ids["history"].lengths().unique().numel() > 3


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_steps_are_equal_on_any_number_of_ranks(data, world_size, shuffle):
    def steps(world_size):
        ranks = [
            datasets.table(
                data.train, data.spec, 36 // world_size, rank=rank, world_size=world_size,
                divide="batches", shuffle=shuffle,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        for step in zip(*ranks, strict=True):
            sizes = [len(batch.labels) for batch in step]
            assert max(sizes) - min(sizes) <= 1
            yield torch.cat([batch.dense_features for batch in step])

    for one, several in zip(steps(1), steps(world_size), strict=True):
        assert torch.equal(one, several)


def test_scaled_over_the_training_part(data):
    dense = data.spec.transform(data.train).dense_features
    assert dense.mean(0).abs().max() < 1e-5
    deviations = dense.std(0, correction=0)
    assert (deviations < 1.001).all()  # below 1: missing values are the mean
    assert (deviations > 0.8).all()


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"split must be .*time, random; .*'user'"):
        load_movielens(tmp_path, split="user")
    with pytest.raises(ValueError, match="history must be at least 1"):
        load_movielens(tmp_path, history=0)


def test_popularity_equals_a_loop(data):
    train = data.train.to_pylist()
    base = np.mean([row["liked"] for row in train])
    scores = popularity(data.train, data.test)
    for row, found in zip(data.test.to_pylist(), scores, strict=True):
        likes = [one["liked"] for one in train if one["item_id"] == row["item_id"]]
        assert found == pytest.approx((sum(likes) + 10 * base) / (len(likes) + 10))

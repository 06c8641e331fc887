import numpy as np
import pytest
import torch
from movielens.data import (
    PARTS,
    MovieLensBatches,
    build_movielens,
    load_movielens,
    split_at_random,
    split_by_time,
)
from movielens.features import DENSE_NAMES, SPARSE_NAMES

from tests.examples.movielens.case import made_up_files

FILES = made_up_files()


@pytest.fixture(scope="module")
def data():
    return build_movielens(FILES, split="time")


def test_split_by_time_equals_a_loop():
    user_N = FILES.user_N - FILES.user_N.min()
    part_N = split_by_time(user_N, FILES.timestamp_N)
    for user in np.unique(user_N):
        mine = np.flatnonzero(user_N == user)
        tenth = len(mine) // 10
        for row in mine:
            later = (FILES.timestamp_N[mine] > FILES.timestamp_N[row]).sum()
            expected = 2 if later < tenth else 1 if later < 2 * tenth else 0
            assert part_N[row] == expected
        times = [FILES.timestamp_N[mine][part_N[mine] == part] for part in range(3)]
        assert times[0].max() < times[1].min()
        assert times[1].max() < times[2].min()


def test_users_with_few_ratings_are_in_training():
    assert split_by_time(np.zeros(9, np.int64), np.arange(9)).tolist() == [0] * 9


def test_split_at_random():
    part_N = split_at_random(1000, seed=3)
    assert np.bincount(part_N).tolist() == [800, 100, 100]
    assert np.array_equal(part_N, split_at_random(1000, seed=3))
    assert not np.array_equal(part_N, split_at_random(1000, seed=4))


def test_batch(data):
    (batch,) = data.batches("test", batch_size=10_000)
    rows = data.rows("test")
    size = len(rows)
    assert batch.dense_features.shape == (size, len(DENSE_NAMES))
    assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
    np.testing.assert_array_equal(batch.labels, FILES.rating_N[rows] >= 4)
    ids = batch.sparse_features
    assert ids.keys() == list(SPARSE_NAMES)
    assert ids.stride() == size
    for name, rows_needed in data.num_embeddings.items():
        assert ids[name].values().dtype == torch.int64
        assert 0 <= ids[name].values().min() <= ids[name].values().max() < rows_needed
    np.testing.assert_array_equal(ids["item_id"].values(), FILES.item_N[rows] - 500)
    assert ids["history"].lengths().unique().numel() > 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_once_and_ranks_in_step(data, world_size, shuffle):
    ranks = [data.batches("train", 32, rank, world_size, shuffle) for rank in range(world_size)]
    shares = [list(batches) for batches in ranks]
    assert {len(share) for share in shares} == {len(ranks[0])}
    for step in zip(*shares, strict=True):
        sizes = [len(batch.labels) for batch in step]
        assert max(sizes) - min(sizes) <= 1
    seen = torch.cat([batch.dense_features for share in shares for batch in share])
    expected = torch.from_numpy(data.dense_ND[data.rows("train")])
    assert torch.equal(seen.sort(dim=0).values, expected.sort(dim=0).values)


def test_order_changes_by_epoch_and_seed_only(data):
    def order(batches):
        return torch.cat([batch.dense_features[:, 0] for batch in batches]).tolist()

    batches = data.batches("train", 32, shuffle=True)
    first, second = order(batches), order(batches)
    assert first != second
    again = data.batches("train", 64, shuffle=True)
    assert order(again) == first, "the order does not depend on the batch size"
    again.set_epoch(1)
    assert order(again) == second
    assert order(data.batches("train", 32, shuffle=True, seed=1)) != first


def test_fewer_samples_than_ranks_leave_an_empty_batch(data):
    (batch,) = MovieLensBatches(data, rows=np.array([3]), batch_size=4, rank=0, world_size=2)
    assert batch.labels.shape == (0,)
    assert batch.sparse_features.stride() == 0
    assert batch.sparse_features.keys() == list(SPARSE_NAMES)


def test_bad_arguments(data, tmp_path):
    with pytest.raises(ValueError, match="part must be one of train, validation, test"):
        data.rows("valid")
    with pytest.raises(ValueError, match="rank 2 and world_size 2"):
        data.batches("train", 4, rank=2, world_size=2)
    with pytest.raises(ValueError, match=r"batch_size.* must be at least 1; received 0"):
        data.batches("train", 0)
    with pytest.raises(ValueError, match="split must be one of time, random; received 'user'"):
        load_movielens(tmp_path, split="user")
    with pytest.raises(ValueError, match="history must be at least 1"):
        load_movielens(tmp_path, history=0)
    assert PARTS == ("train", "validation", "test")


def test_popularity_equals_a_loop(data):
    train = data.rows("train")
    base = data.label_N[train].mean()
    for row, found in zip(data.rows("test"), data.popularity("test"), strict=True):
        of_film = train[FILES.item_N[train] == FILES.item_N[row]]
        likes = data.label_N[of_film].sum()
        assert found == pytest.approx((likes + 10 * base) / (len(of_film) + 10))

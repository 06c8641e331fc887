import itertools

import pytest
import torch

from recsys.datasets.random import RandomRecDataset


def content(batch):
    ids = batch.sparse_features
    return (
        batch.dense_features.tolist(),
        ids.lengths().tolist(),
        ids.values().tolist(),
        batch.labels.tolist(),
    )


def test_shapes_and_ranges():
    data = RandomRecDataset(
        ["a", "b"], 64, hash_sizes=[3, 1000], ids_per_features=[2, 5], min_ids_per_features=[2, 0],
        num_dense=7, manual_seed=0, num_batches=1,
    )  # fmt: skip
    (batch,) = data
    assert batch.dense_features.shape == (64, 7)
    assert batch.sparse_features.keys() == ["a", "b"]
    a, b = batch.sparse_features["a"], batch.sparse_features["b"]
    assert a.lengths().unique().tolist() == [2]
    assert b.lengths().unique().tolist() == [0, 1, 2, 3, 4, 5]
    assert a.values().unique().tolist() == [0, 1, 2]
    assert 3 < b.values().max() < 1000
    assert batch.labels.unique().tolist() == [0, 1]


def test_count_without_minimum_is_exact():
    (batch,) = RandomRecDataset(["a"], 8, ids_per_feature=3, num_batches=1)
    assert batch.sparse_features.lengths().tolist() == [3] * 8


def test_counts_for_each_feature_are_the_most():
    (batch,) = RandomRecDataset(
        ["a", "b"], 64, ids_per_features=[2, 4], num_batches=1, manual_seed=0
    )
    assert [jt.lengths().unique().tolist() for jt in batch.sparse_features.to_dict().values()] == [
        [0, 1, 2],
        [0, 1, 2, 3, 4],
    ]


def test_seed_repeats_and_pool_cycles():
    arguments = dict(num_generated_batches=2, num_batches=5, manual_seed=3)
    data = RandomRecDataset(["a"], 4, **arguments)
    epoch = [content(batch) for batch in data]
    assert len(epoch) == len(data) == 5
    assert epoch[0] == epoch[2] == epoch[4]
    assert epoch[0] != epoch[1]
    assert epoch == [content(batch) for batch in RandomRecDataset(["a"], 4, **arguments)]


def test_without_a_pool_every_batch_is_new():
    data = RandomRecDataset(["a"], 4, num_generated_batches=0, manual_seed=0)
    first = [content(batch) for batch in itertools.islice(data, 3)]
    assert first[0] != first[1] != first[2]
    with pytest.raises(TypeError, match="no length unless num_batches"):
        len(data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(hash_sizes=[1]), "hash_sizes must have .*the 2 keys"),
        (dict(hash_size=2, hash_sizes=[2, 2]), "only one of hash_size and hash_sizes"),
        (dict(hash_size=0), "feature 'a' must .*hash_size >= 1"),
        (dict(ids_per_feature=2, min_ids_per_feature=3), r"received \d+, 3 and 2"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        RandomRecDataset(["a", "b"], 4, **arguments)


@pytest.mark.parametrize(
    ("keys", "arguments", "message"),
    [
        ([], {}, r"list of feature names; received \[\]"),
        (["a"], dict(batch_size=-1), "must not .*received -1, 50"),
        (["a"], dict(num_dense=-1), "must not .*received 4, -1"),
        (["a"], dict(num_batches=-1), "must not .*received 4, 50"),
    ],
)
def test_bad_shapes(keys, arguments, message):
    with pytest.raises(ValueError, match=message):
        RandomRecDataset(keys, **{"batch_size": 4, **arguments})


def test_pin_and_move():
    (batch,) = RandomRecDataset(["a"], 4, num_batches=1, manual_seed=0)
    assert content(batch.to(torch.device("cpu"))) == content(batch)
    assert batch.to(torch.device("meta")).labels.is_meta

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from recsys.datasets.criteo import DEFAULT_CAT_NAMES
from recsys.datasets.criteo_binary import InMemoryBinaryCriteoIterDataPipe


def write_days(folder, sizes):
    """Files of some days; the first count is the row's number."""
    generator = np.random.default_rng(0)
    paths = ([], [], [])
    rows, start = [], 0
    for day, size in enumerate(sizes):
        dense = generator.normal(size=(size, 13)).astype(np.float32)
        dense[:, 0] = np.arange(start, start + size)
        sparse = generator.integers(0, 1000, (size, 26)).astype(np.int32)
        labels = generator.integers(0, 2, (size, 1)).astype(np.int32)
        for listed, kind, array in zip(
            paths, ("dense", "sparse", "labels"), (dense, sparse, labels), strict=True
        ):
            path = folder / f"day_{day}_{kind}.npy"
            np.save(path, array)
            listed.append(str(path))
        rows += list(zip(dense.tolist(), sparse.tolist(), labels[:, 0].tolist(), strict=True))
        start += size
    return paths, rows


def rows_of(batch):
    """The rows of a batch, as plain Python."""
    ids = batch.sparse_features
    assert ids.keys() == DEFAULT_CAT_NAMES
    assert ids.lengths().unique().tolist() in ([], [1])
    columns = [ids[key].values().tolist() for key in DEFAULT_CAT_NAMES]
    return list(
        zip(
            batch.dense_features.tolist(),
            map(list, zip(*columns, strict=True)),
            batch.labels.tolist(),
            strict=True,
        )
    )


def dealt(rows, batch_size, world_size, drop_last):
    """Per rank and step its rows, dealt one after another."""
    steps = []
    rows = list(rows)
    while len(rows) >= batch_size * world_size:
        steps.append([[rows.pop(0) for _ in range(batch_size)] for _ in range(world_size)])
    if rows and not drop_last:
        if len(rows) < world_size and steps:
            rows = [row for part in steps.pop() for row in part] + rows
        share, more = divmod(len(rows), world_size)
        steps.append([[rows.pop(0) for _ in range(share + (r < more))] for r in range(world_size)])
    return [[step[rank] for step in steps] for rank in range(world_size)]


@pytest.mark.parametrize("mmap_mode", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("stage", ["train", "val", "test"])
@pytest.mark.parametrize(("batch_size", "world_size"), [(3, 1), (3, 2), (2, 3), (4, 2), (20, 3)])
def test_ranks_share_the_rows(tmp_path, mmap_mode, drop_last, stage, batch_size, world_size):
    paths, rows = write_days(tmp_path, [5, 0, 8])
    wanted = {"train": rows, "val": rows[:7], "test": rows[7:]}[stage]
    expected = dealt(wanted, batch_size, world_size, drop_last)
    for rank in range(world_size):
        data = InMemoryBinaryCriteoIterDataPipe(
            stage, *paths, batch_size, rank, world_size, drop_last, mmap_mode=mmap_mode
        )
        for _ in range(2):
            assert [rows_of(batch) for batch in data] == expected[rank]
        assert len(data) == len(expected[rank])


def test_dtypes_and_a_data_loader(tmp_path):
    paths, rows = write_days(tmp_path, [7])
    data = InMemoryBinaryCriteoIterDataPipe("train", *paths, batch_size=4, rank=0, world_size=1)
    first, last = DataLoader(data, batch_size=None)
    assert rows_of(first) + rows_of(last) == rows
    assert first.dense_features.dtype == torch.float32
    assert (first.labels.dtype, first.labels.shape) == (torch.int32, (4,))
    assert first.sparse_features.values().dtype == torch.int32
    assert first.sparse_features.stride() == 4


@pytest.mark.parametrize("mmap_mode", [False, True])
def test_batches_are_shuffled_within_and_anew(tmp_path, mmap_mode):
    paths, rows = write_days(tmp_path, [30, 20])
    data = InMemoryBinaryCriteoIterDataPipe(
        "train", *paths, 25, 0, 1, shuffle_batches=True, mmap_mode=mmap_mode
    )
    epochs = [[rows_of(batch) for batch in data] for _ in range(2)]
    for epoch in epochs:
        assert [sorted(batch) for batch in epoch] == [sorted(rows[:25]), sorted(rows[25:])]
        assert epoch[0] != rows[:25]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("mmap_mode", [False, True])
def test_training_rows_are_shuffled_over_days_and_ranks(tmp_path, mmap_mode):
    paths, rows = write_days(tmp_path, [9, 8])

    def found(seed, stage="train"):
        ranks = [
            InMemoryBinaryCriteoIterDataPipe(
                stage, *paths, 4, rank, 2, shuffle_training_set=True,
                shuffle_training_set_random_seed=seed, mmap_mode=mmap_mode,
            )
            for rank in range(2)
        ]  # fmt: skip
        assert len(ranks[0]) == len(ranks[1])
        return [[rows_of(batch) for batch in data] for data in ranks]

    first = found(0)
    assert [[len(batch) for batch in rank] for rank in first] == [[4, 5], [4, 4]]
    assert sorted(row for rank in first for batch in rank for row in batch) == sorted(rows)
    assert found(0) == first
    assert found(1) != first
    assert [row for batch in first[0] for row in batch] != rows[:9]
    assert found(0, "test")[0][0] == dealt(rows[9:], 4, 2, False)[0][0]


@pytest.mark.parametrize("mmap_mode", [False, True])
def test_ids_are_taken_modulo_the_tables_rows(tmp_path, mmap_mode):
    paths, rows = write_days(tmp_path, [6])
    hashes = list(range(1, 27))
    data = InMemoryBinaryCriteoIterDataPipe(
        "train", *paths, 6, 0, 1, mmap_mode=mmap_mode, hashes=hashes
    )
    (batch,) = data
    expected = [[i % h for i, h in zip(ids, hashes, strict=True)] for _, ids, _ in rows]
    assert [ids for _, ids, _ in rows_of(batch)] == expected


def test_bad_arguments(tmp_path):
    paths, _ = write_days(tmp_path, [5, 4])
    arguments = dict(batch_size=2, rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"stage must be .*train, val, test.*'eval'"):
        InMemoryBinaryCriteoIterDataPipe("eval", *paths, **arguments)
    with pytest.raises(ValueError, match="as many rows, 26 columns of"):
        InMemoryBinaryCriteoIterDataPipe("train", paths[0], paths[1][::-1], paths[2], **arguments)
    with pytest.raises(ValueError, match="as many rows, 26 columns of"):
        InMemoryBinaryCriteoIterDataPipe("train", paths[0], paths[0], paths[2], **arguments)
    with pytest.raises(ValueError, match=r"hashes must be 26 .*\[4\]"):
        InMemoryBinaryCriteoIterDataPipe("train", *paths, **arguments, hashes=[4])
    with pytest.raises(ValueError, match="rank must be in"):
        InMemoryBinaryCriteoIterDataPipe("train", *paths, **arguments | {"rank": 1})
    with pytest.raises(FileNotFoundError):
        InMemoryBinaryCriteoIterDataPipe("train", ["/nowhere.npy"], *paths[1:], **arguments)

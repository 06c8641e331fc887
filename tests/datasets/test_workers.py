"""The workers of a DataLoader share the rows of a data set: each comes once an epoch, in order."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from recsys.datasets.criteo import CriteoDataset
from recsys.datasets.criteo_binary import InMemoryBinaryCriteoIterDataPipe
from recsys.datasets.criteo_utils import BinaryCriteoUtils
from recsys.datasets.random import RandomRecDataset
from recsys.datasets.rows import criteo_kaggle, criteo_terabyte, movielens_20m
from recsys.datasets.utils import Batch

LINES = (7, 0, 13, 1)  # of files


def _write_criteo(folder: Path) -> list[Path]:
    """Lines whose first count is their number."""
    number, paths = itertools.count(), []
    for day, size in enumerate(filter(None, LINES)):
        lines = (
            "\t".join(["1", str(next(number)), *["3"] * 12, *["68fd1e64"] * 26])
            for _ in range(size)
        )
        paths.append(folder / f"day_{day}")
        paths[-1].write_text("\n".join(lines) + "\n")
    return paths


def _criteo(folder: Path, rank: int, world_size: int) -> CriteoDataset:
    return CriteoDataset(_write_criteo(folder), 2, 1000, rank, world_size)


def _binary(folder: Path, rank: int, world_size: int, **more: Any) -> IterableDataset[Batch]:
    files: tuple[list[str], ...] = ([], [], [])
    for path in _write_criteo(folder):
        names = [f"{path}_{kind}.npy" for kind in ("dense", "sparse", "labels")]
        BinaryCriteoUtils.tsv_to_npys(str(path), *names)
        for listed, name in zip(files, names, strict=True):
            listed.append(name)
    return InMemoryBinaryCriteoIterDataPipe("train", *files, 2, rank, world_size, **more)


def _mapped(folder: Path, rank: int, world_size: int) -> IterableDataset[Batch]:
    return _binary(folder, rank, world_size, mmap_mode=True, shuffle_training_set=True)


def _random(folder: Path, rank: int, world_size: int) -> RandomRecDataset:
    return RandomRecDataset(["f"], 2, manual_seed=rank, num_batches=11, num_generated_batches=11)


def _rows_of(item: Any) -> list[Any]:
    """Return the values that identify rows."""
    if isinstance(item, Batch):
        return [tuple(np.round(row, 4)) for row in item.dense_features.tolist()]
    return [tuple(item.values())]


BATCHES: dict[str, Callable[..., IterableDataset[Any]]] = {
    "CriteoDataset": _criteo,
    "binary": _binary,
    "binary, mapped and shuffled": _mapped,
    "random": _random,
}


def _rows(folder: Path, name: str, **ranks: int) -> IterableDataset[Any]:
    if name == "movielens":
        lines = (f"{user},1,3.5,9" for user in range(20))
        (folder / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *lines]))
        return movielens_20m(str(folder), **ranks)
    paths = [str(path) for path in _write_criteo(folder)]
    if name == "terabyte":
        return criteo_terabyte(paths, **ranks)
    return criteo_kaggle(paths[1], **ranks)


def _in_turn(data: IterableDataset[Any], num_workers: int) -> Iterator[Any]:
    """Gives the items as a DataLoader with so many workers gives them, in one process."""

    def of_worker(number: int) -> list[Any]:
        copied = pickle.loads(pickle.dumps(data))
        info = torch_worker.WorkerInfo(
            id=number, num_workers=num_workers, seed=100 + number, dataset=copied
        )
        with mock.patch.object(torch_worker, "_worker_info", info):
            return list(copied)

    workers = [of_worker(number) for number in range(num_workers)]
    for items in itertools.zip_longest(*workers):
        yield from (item for item in items if item is not None)


@pytest.mark.parametrize("build", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_and_workers_give_each_row_once(
    tmp_path: Path, build: Callable[..., IterableDataset[Any]], world_size: int
) -> None:
    alone = [list(build(tmp_path, rank, world_size)) for rank in range(world_size)]
    whole = Counter(row for batches in alone for batch in batches for row in _rows_of(batch))
    if build is not _random:
        assert list(whole.values()) == [1] * sum(LINES)
    for num_workers in (1, 2, 3):
        for rank in range(world_size):
            found = list(_in_turn(build(tmp_path, rank, world_size), num_workers))
            # the same steps in the same order
            assert [*map(_rows_of, found)] == [*map(_rows_of, alone[rank])]


@pytest.mark.parametrize("name", ["terabyte", "kaggle", "movielens"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_rows_come_once(tmp_path: Path, name: str, num_workers: int) -> None:
    data = _rows(tmp_path, name)
    alone = list(data)
    assert len({tuple(row.values()) for row in alone}) == len(alone) > 10
    assert list(_in_turn(data, num_workers)) == alone


@pytest.mark.parametrize("name", ["terabyte", "kaggle", "movielens"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_rows(tmp_path: Path, name: str, world_size: int) -> None:
    alone = list(_rows(tmp_path, name))
    for rank in range(world_size):
        data = _rows(tmp_path, name, rank=rank, world_size=world_size)
        assert list(data) == list(_in_turn(data, 2)) == alone[rank::world_size]
    with pytest.raises(ValueError, match=r"rank must be .*world_size.*received rank 2"):
        _rows(tmp_path, name, rank=2, world_size=2)


@pytest.mark.parametrize("build", BATCHES.values(), ids=BATCHES)
def test_a_real_loader(tmp_path: Path, build: Callable[..., IterableDataset[Any]]) -> None:
    data = build(tmp_path, 0, 2)
    alone = list(build(tmp_path, 0, 2))
    found = list(DataLoader(data, batch_size=None, num_workers=2))
    assert [*map(_rows_of, found)] == [*map(_rows_of, alone)]
    names = {(batch.dense_names, batch.label_name) for batch in (*alone, *found)}
    assert len(names) == 1  # they are sent with a batch


def test_a_real_loader_of_rows(tmp_path: Path) -> None:
    data = _rows(tmp_path, "kaggle")
    loader = DataLoader(data, batch_size=4, num_workers=2, collate_fn=list)
    found = [row["int_0"] for rows in loader for row in rows]
    assert sorted(found) == [row["int_0"] for row in data]


def test_new_random_batches_differ_between_workers() -> None:
    for seed in (None, 3):
        data = RandomRecDataset(
            ["f"], 2, manual_seed=seed, num_batches=7, num_generated_batches=0, num_dense=1
        )
        batches = [tuple(_rows_of(batch)) for batch in _in_turn(data, 3)]
        assert len(set(batches)) == len(batches) == 7
        again = [tuple(_rows_of(batch)) for batch in _in_turn(data, 3)]
        assert again == batches  # of the same seeds


def test_shuffled_batches_differ_between_epochs(tmp_path: Path) -> None:
    data = _binary(tmp_path, 0, 1, shuffle_batches=True)
    loader = DataLoader(data, batch_size=None, num_workers=2)
    epochs = [[_rows_of(batch) for batch in loader] for _ in range(4)]
    assert all([*map(sorted, epoch)] == [*map(sorted, epochs[0])] for epoch in epochs)
    assert any(epoch != epochs[0] for epoch in epochs)


def test_an_error_of_a_worker_names_the_line(tmp_path: Path) -> None:
    paths = _write_criteo(tmp_path)
    paths[1].write_text(paths[1].read_text()[:-20])
    data = CriteoDataset(paths, 2, 1000)
    with pytest.raises(ValueError, match=r"day_1, line 13: must.* 40 fields"):
        list(_in_turn(data, 2))

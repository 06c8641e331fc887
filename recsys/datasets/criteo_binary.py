"""Criteo batches from arrays on disk, as `BinaryCriteoUtils` writes them.

All ranks take the same number of steps and read each row once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from recsys.base.checked import checked
from recsys.datasets.criteo import CAT_FEATURE_COUNT, DEFAULT_CAT_NAMES, criteo_batch
from recsys.datasets.criteo_utils import gather_rows
from recsys.datasets.utils import (
    PATH_MANAGER_KEY,
    Batch,
    check_path_manager_key,
    check_rank,
    of_worker,
)

_STAGES = ("train", "val", "test")


@final
class InMemoryBinaryCriteoIterDataPipe(IterableDataset[Batch]):
    """Batches of the rows of some days, in their order or shuffled.

    A step has `world_size` consecutive batches, in the order of the ranks. Ranks share the rows
    after the last full step equally, as a smaller step; fewer rows than ranks join the last full
    step. Pass the dataset to a DataLoader with `batch_size=None`: its workers take the steps in
    turn, so steps and their order do not depend on `num_workers`.

    Args:
        stage: "train" for all rows, "val" for the first half of the rows (one more if the number is
            odd), "test" for the second half.
        dense_paths: `.npy` files of `[N, 13]` floats, one file per day.
        sparse_paths: `.npy` files of `[N, 26]` integers.
        labels_paths: `.npy` files of `[N, 1]` labels.
        batch_size: Rows per rank and step.
        rank: Rank of this process.
        world_size: Number of processes.
        drop_last: Drop the rows after the last full step.
        shuffle_batches: Shuffle the rows within each batch, differently in each epoch. DataLoader
            workers use their own torch seeds.
        shuffle_training_set: Shuffle the rows of stage "train", in the same order in each epoch.
        shuffle_training_set_random_seed: Seed of that order; the same on all ranks.
        mmap_mode: Read rows from the files when they are used. If False, this rank's rows are
            loaded into memory.
        hashes: Rows of each of the 26 tables; ids are taken modulo these numbers. If None, ids are
            unchanged and must have a signed dtype.
        path_manager_key: Must be `PATH_MANAGER_KEY`: only local files are supported.

    Attributes:
        keys: The names of the 26 sparse features.
        num_rows_per_file: Rows of each day.

    Raises:
        ValueError: The stage is unknown, array shapes do not match, the rank is not below the world
            size, or `hashes` is not 26 numbers of at least 1.
        FileNotFoundError: A file is missing.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> np.save(f"{folder}/dense.npy", np.zeros((5, 13), np.float32))
        >>> np.save(f"{folder}/sparse.npy", np.ones((5, 26), np.int32))
        >>> np.save(f"{folder}/labels.npy", np.ones((5, 1), np.int32))
        >>> paths = ([f"{folder}/{kind}.npy"] for kind in ("dense", "sparse", "labels"))
        >>> data = InMemoryBinaryCriteoIterDataPipe(
        ...     "train", *paths, batch_size=2, rank=0, world_size=1
        ... )
        >>> [batch.labels.numel() for batch in data]
        [2, 2, 1]
    """

    @checked
    def __init__(
        self,
        stage: str,
        dense_paths: list[str],
        sparse_paths: list[str],
        labels_paths: list[str],
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool | None = False,
        shuffle_batches: bool = False,
        shuffle_training_set: bool = False,
        shuffle_training_set_random_seed: int = 0,
        mmap_mode: bool = False,
        hashes: list[int] | None = None,
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        super().__init__()
        check_rank(rank, world_size, batch_size)
        check_path_manager_key(path_manager_key)
        if stage not in _STAGES:
            raise ValueError(f"stage must be one of {', '.join(_STAGES)}; received {stage!r}.")
        if hashes is not None and (len(hashes) != CAT_FEATURE_COUNT or min(hashes) < 1):
            raise ValueError(
                f"hashes must be {CAT_FEATURE_COUNT} table sizes of at least 1; received {hashes}."
            )
        self.stage = stage
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.shuffle_batches = shuffle_batches
        self.shuffle_training_set = shuffle_training_set
        self.mmap_mode = mmap_mode
        self.hashes = None if hashes is None else np.array(hashes)
        self.keys = DEFAULT_CAT_NAMES
        kinds = [
            [np.load(path, mmap_mode="r") for path in paths]
            for paths in (dense_paths, sparse_paths, labels_paths)
        ]
        shapes = [[array.shape for array in arrays] for arrays in kinds]
        self.num_rows_per_file = [shape[0] for shape in shapes[0]]
        if [[len(array) for array in arrays] for arrays in kinds] != [
            self.num_rows_per_file
        ] * 3 or any(shape[1:] != (CAT_FEATURE_COUNT,) for shape in shapes[1]):
            raise ValueError(
                "Each day needs dense, sparse and label files of as many rows, "
                f"{CAT_FEATURE_COUNT} columns of sparse ones; received shapes {shapes}."
            )
        total = sum(self.num_rows_per_file)
        half = (total + 1) // 2
        first, stop = {"train": (0, total), "val": (0, half), "test": (half, total)}[stage]
        self._order: NDArray[np.int64] | None = None
        if shuffle_training_set and stage == "train":
            generator = np.random.default_rng(shuffle_training_set_random_seed)
            self._order = generator.permutation(total)
        self._steps = [
            slice(first + mine.start, first + mine.stop) for mine in self._deal(stop - first)
        ]
        self._arrays = kinds
        self._generator = np.random.default_rng(rank)
        self._worker_seed: int | None = None
        if not mmap_mode:
            rows = [self._rows_of(step) for step in self._steps]
            mine = np.concatenate([np.arange(0), *rows])
            self._arrays = [[gather_rows(arrays, mine)] for arrays in kinds]
            bounds = itertools.accumulate(map(len, rows), initial=0)
            self._steps = list(itertools.starmap(slice, itertools.pairwise(bounds)))
            self._order = None

    def _deal(self, num_rows: int) -> Iterator[slice]:
        """Yield this rank's slice of each step."""
        step_size = self.batch_size * self.world_size
        num_full, left = divmod(num_rows, step_size)
        if self.drop_last:
            left = 0
        joins_last = 0 < left < self.world_size and num_full > 0
        for step in range(num_full - joins_last):
            start = step * step_size + self.rank * self.batch_size
            yield slice(start, start + self.batch_size)
        if left:
            start = (num_full - joins_last) * step_size
            size = left + joins_last * step_size
            share, more = divmod(size, self.world_size)
            start += self.rank * share + min(self.rank, more)
            yield slice(start, start + share + (self.rank < more))

    def _rows_of(self, step: slice) -> NDArray[np.int64]:
        rows = np.arange(step.start, step.stop)
        return rows if self._order is None else self._order[rows]

    def __len__(self) -> int:
        """Return the number of batches of an epoch, equal on all ranks."""
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch."""
        worker = get_worker_info()
        if worker is not None and worker.seed != self._worker_seed:
            # a new worker: its generator is a copy that all workers share
            self._generator = np.random.default_rng((self.rank, worker.seed))
            self._worker_seed = worker.seed
        for step in of_worker(self._steps):
            rows = self._rows_of(step)
            if self.shuffle_batches:
                rows = self._generator.permutation(rows)
            dense, sparse, labels = (gather_rows(arrays, rows) for arrays in self._arrays)
            if self.hashes is not None:
                sparse = sparse % self.hashes.astype(sparse.dtype)
                if sparse.dtype.kind == "u":  # lookups take signed ids
                    sparse = sparse.astype(np.int64)
            yield criteo_batch(dense, sparse, labels)

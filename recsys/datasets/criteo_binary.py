"""Batches of Criteo from arrays on disk, as `BinaryCriteoUtils` writes them.

All ranks take the same number of steps, and no row is read twice or left out unless asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from recsys.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DEFAULT_CAT_NAMES,
    DEFAULT_INT_NAMES,
    DEFAULT_LABEL_NAME,
)
from recsys.datasets.criteo_utils import gather_rows
from recsys.datasets.utils import (
    PATH_MANAGER_KEY,
    Batch,
    check_path_manager_key,
    check_rank,
    of_worker,
)
from recsys.kernels.checked import checked
from recsys.sparse import KeyedJaggedTensor

_STAGES = ("train", "val", "test")


@final
class InMemoryBinaryCriteoIterDataPipe(IterableDataset[Batch]):
    """Batches of the rows of some days, in their order or shuffled.

    A step is `world_size` batches that follow one another, rank 0's first. What is left after the
    full steps is dealt evenly: as a step of its own, or, if there would not be a row for each rank,
    to the last full step. Pass it to a DataLoader with `batch_size=None`: its workers take steps
    in turn, so that any `num_workers` gives the same steps in the same order.

    Args:
        stage: "train": all rows; "val": the first half of them, the larger one; "test": the rest.
        dense_paths: `.npy` files of `[N, 13]` floats, one a day.
        sparse_paths: of `[N, 26]` integers.
        labels_paths: of `[N, 1]`.
        batch_size: rows per rank and step.
        rank: this process.
        world_size: number of processes.
        drop_last: leave out what follows the full steps.
        shuffle_batches: shuffle the rows within each batch, differently in each epoch; with workers
            of a DataLoader by the seed that torch draws for each of them.
        shuffle_training_set: deal the rows of stage "train" in a random order, the same in each
            epoch.
        shuffle_training_set_random_seed: of that order; the same on all ranks.
        mmap_mode: read rows from the files when they are needed; else this rank's rows are kept in
            memory.
        hashes: the rows of each of the 26 tables: ids are taken modulo them. None: ids as they
            are, which must be of a signed dtype.
        path_manager_key: must be `PATH_MANAGER_KEY`: files are local ones.

    Attributes:
        keys: the names of the 26 sparse features.
        num_rows_per_file: rows of each day.

    Raises:
        ValueError: an unknown stage, files that do not fit together, a rank outside its world, or
            not 26 hashes of at least 1.
        FileNotFoundError: a file is missing.

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
                f"hashes must be {CAT_FEATURE_COUNT} numbers of at least 1, the tables' rows; "
                f"received {hashes}."
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
            rows = [self._rows_of(step) for step in self._steps] or [np.arange(0)]
            mine = np.concatenate(rows)
            self._arrays = [[gather_rows(arrays, mine)] for arrays in kinds]
            ends = np.cumsum([len(step_rows) for step_rows in rows])
            self._steps = [
                slice(int(end) - (step.stop - step.start), int(end))
                for step, end in zip(self._steps, ends, strict=False)
            ]
            self._order = None

    def _deal(self, num_rows: int) -> Iterator[slice]:
        """Give this rank's part of each step."""
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
        """Count the batches of an epoch, as many on every rank."""
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        """Give the batches of one epoch."""
        worker = get_worker_info()
        if worker is not None and worker.seed != self._worker_seed:
            # a new worker, with a copy of the generator that all others have, too
            self._generator = np.random.default_rng((self.rank, worker.seed))
            self._worker_seed = worker.seed
        for step in of_worker(self._steps):
            rows = self._rows_of(step)
            if self.shuffle_batches:
                rows = self._generator.permutation(rows)
            yield self._to_batch(*(gather_rows(arrays, rows) for arrays in self._arrays))

    def _to_batch(self, dense: NDArray[Any], sparse: NDArray[Any], labels: NDArray[Any]) -> Batch:
        if self.hashes is not None:
            sparse = sparse % self.hashes.astype(sparse.dtype)
            if sparse.dtype.kind == "u":  # lookups take signed ids
                sparse = sparse.astype(np.int64)
        ids = np.ascontiguousarray(sparse.T).reshape(-1)
        return Batch(
            dense_features=torch.from_numpy(dense),
            sparse_features=KeyedJaggedTensor(
                keys=self.keys,
                values=torch.from_numpy(ids),
                lengths=torch.ones(len(ids), dtype=torch.int32),
                stride=len(sparse),
            ),
            labels=torch.from_numpy(labels.reshape(-1)),
            dense_names=DEFAULT_INT_NAMES,
            label_name=DEFAULT_LABEL_NAME,
        )

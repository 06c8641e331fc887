"""MovieLens: will this user rate this film 4 or more?

`load_movielens` reads ratings (fetching the 100K release if no folder is given), builds features
from the past of each rating, and splits the ratings; `MovieLens.batches` returns batches.

The two splits:

- ``time``: of each user's ``n`` ratings in order of time, the last ``n // 10`` are for test and the
  ``n // 10`` before them for validation. Ratings that a user made in the same second stay
  together, in the part of the last of them. So every training rating of a user is strictly older
  than every validation rating, and every validation rating is strictly older than every test
  rating. All ratings contribute to the features of strictly later ones, as in a running system.
- ``random``: a random 80%, 10% and 10% of all ratings. Only training ratings contribute to
  the features of strictly later ones: the history of a training sample must not reveal test labels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from movielens.download import WheelData, fetch_from_wheel
from movielens.features import (
    LIKED,
    SPARSE_NAMES,
    Jagged,
    dense_features,
    sparse_features,
)
from movielens.files import (
    Item,
    MovieLensFiles,
    User,
    read_movielens,
)
from recsys.datasets.utils import Batch, check_rank, of_worker, rank_slice
from recsys.sparse import KeyedJaggedTensor

__all__ = [
    "MovieLens",
    "MovieLensBatches",
    "fetch_movielens_100k",
    "load_movielens",
]

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")

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


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MovieLens:
    """Ratings as samples.

    Args:
        dense_ND: features at zero mean and unit deviation over the training part, within 5.
        sparse: features by name; see ``features.SPARSE_NAMES``.
        label_N: 1 where the rating is 4 or more.
        part_N: position in ``PARTS``.
    """

    dense_ND: NDArray[np.float32]
    sparse: dict[str, Jagged]
    label_N: NDArray[np.float32]
    part_N: NDArray[np.int64]

    @property
    def num_embeddings(self) -> dict[str, int]:
        """Rows that each sparse feature's table needs."""
        return {name: feature.num_embeddings for name, feature in self.sparse.items()}

    def rows(self, part: Part) -> NDArray[np.int64]:
        """Give the positions of one part's ratings.

        Args:
            part: ``"train"``, ``"validation"`` or ``"test"``.

        Returns:
            Positions, rising.

        Raises:
            ValueError: there is no such part.
        """
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}; received {part!r}.")
        return np.flatnonzero(self.part_N == PARTS.index(part))

    def popularity(self, part: Part) -> NDArray[np.float64]:
        """Score ratings by their film alone: the share of likes it got in training.

        A baseline. Films with few ratings are smoothed towards the base rate.

        Args:
            part: ``"train"``, ``"validation"`` or ``"test"``.

        Returns:
            ``[N]`` probabilities, in the order of ``rows(part)``.

        Raises:
            ValueError: there is no such part.
        """
        film = self.sparse["item_id"]
        film_N, train = film.values_V[film.start_N], self.rows("train")
        liked_N = self.label_N[train]
        likes = np.bincount(film_N[train], weights=liked_N, minlength=film.num_embeddings)
        ratings = np.bincount(film_N[train], minlength=film.num_embeddings)
        share: NDArray[np.float64] = (likes + 10.0 * liked_N.mean()) / (ratings + 10.0)
        return share[film_N[self.rows(part)]]

    def batch(self, rows_B: NDArray[np.int64]) -> Batch:
        """Collect some ratings.

        Args:
            rows_B: their positions.

        Returns:
            A batch on the CPU: dense ``[B, 13]`` float32, ids int64, labels ``[B]`` float32.
        """
        taken = [feature.take(rows_B) for feature in self.sparse.values()]
        return Batch(
            dense_features=torch.from_numpy(self.dense_ND[rows_B]),
            sparse_features=KeyedJaggedTensor(
                keys=list(self.sparse),
                values=torch.from_numpy(np.concatenate([values for values, _ in taken])),
                lengths=torch.from_numpy(
                    np.concatenate([lengths for _, lengths in taken]).astype(np.int32)
                ),
            ),
            labels=torch.from_numpy(self.label_N[rows_B]),
        )

    def batches(
        self,
        part: Part,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
    ) -> "MovieLensBatches":
        """Walk over one rank's share of one part.

        Args:
            part: ``"train"``, ``"validation"`` or ``"test"``.
            batch_size: samples per rank and step.
            rank: this process.
            world_size: number of processes; all take the same number of steps.
            shuffle: a new order each epoch, the same on all ranks for the same ``seed``.
            seed: of the orders.

        Returns:
            An iterable of batches, to be iterated once per epoch.

        Raises:
            ValueError: no such part, no such rank, or empty batches.
        """
        return MovieLensBatches(
            data=self,
            rows=self.rows(part),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=seed,
        )


@final
class MovieLensBatches(IterableDataset[Batch]):
    """One rank's batches of some ratings.

    The step's ``batch_size * world_size`` samples are assigned to the ranks in order. The last,
    smaller step is divided evenly, so its batches may differ by one sample. Under a DataLoader
    (`batch_size=None`), its workers take the steps in turn; call ``set_epoch`` before each epoch.

    Args:
        data: what to take ratings from.
        rows: the ratings' positions ``[N]``.
        batch_size: samples per rank and step.
        rank: this process.
        world_size: number of processes.
        shuffle: a new order each epoch.
        seed: of the orders.

    Raises:
        ValueError: no such rank, or empty batches.
    """

    def __init__(
        self,
        data: MovieLens,
        rows: NDArray[np.int64],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_rank(rank, world_size, batch_size)
        self._data = data
        self._rows = rows
        self._step_size = batch_size * world_size
        self._rank = rank
        self._world_size = world_size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; otherwise each one takes the next.

        Args:
            epoch: from 0.
        """
        self._epoch = epoch

    def __len__(self) -> int:
        """Count the steps of an epoch, the same on all ranks."""
        return -(-len(self._rows) // self._step_size)

    def __iter__(self) -> Iterator[Batch]:
        """Give the batches of one epoch."""
        rows = self._rows
        if self._shuffle:
            rows = np.random.default_rng((self._seed, self._epoch)).permutation(rows)
        self._epoch += 1
        for start in of_worker(range(0, len(rows), self._step_size)):
            step = rows[start : start + self._step_size]
            yield self._data.batch(step[rank_slice(len(step), self._rank, self._world_size)])


def load_movielens(
    folder: str | Path | None = None,
    *,
    split: Literal["time", "random"] = "time",
    history: int = 20,
    seed: int = 0,
    cache: str | Path | None = None,
) -> MovieLens:
    """Read MovieLens, build its features and split it.

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
    files = read_movielens(fetch_movielens_100k(cache) if folder is None else folder)
    return build_movielens(files, split=split, history=history, seed=seed)


def build_movielens(
    files: MovieLensFiles,
    *,
    split: Literal["time", "random"],
    history: int = 20,
    seed: int = 0,
    scale: bool = True,
) -> MovieLens:
    """Build features and split of ratings that have been read.

    Args:
        files: the result of `read_movielens`.
        split: ``"time"`` or ``"random"``.
        history: longest history of liked items.
        seed: of the random split.
        scale: bring dense features to a common scale.

    Returns:
        All samples.
    """
    user_ids, user_N = np.unique(files.user_N, return_inverse=True)
    item_ids, item_N = np.unique(files.item_N, return_inverse=True)
    users = [files.users.get(int(user), User()) for user in user_ids]
    items = [files.items.get(int(item), Item()) for item in item_ids]
    if split == "time":
        part_N = split_by_time(user_N, files.timestamp_N)
        visible_N = np.ones(len(user_N), np.bool_)
    else:
        part_N = split_at_random(len(user_N), seed)
        visible_N = part_N == 0
    dense_ND = dense_features(files, user_N, item_N, users, items, visible_N)
    if scale:
        dense_ND = _scaled(dense_ND, dense_ND[part_N == 0])
    sparse = sparse_features(files, user_N, item_N, users, items, visible_N, history)
    assert tuple(sparse) == SPARSE_NAMES
    return MovieLens(
        dense_ND=dense_ND,
        sparse=sparse,
        label_N=(files.rating_N >= LIKED).astype(np.float32),
        part_N=part_N,
    )


def _scaled(dense_ND: NDArray[np.float32], train_ND: NDArray[np.float32]) -> NDArray[np.float32]:
    """Give columns the mean 0 and the deviation 1 over the training part."""
    mean_D = train_ND.mean(axis=0, dtype=np.float64)
    deviation_D = train_ND.std(axis=0, dtype=np.float64)
    scaled_ND = (dense_ND - mean_D) / np.where(deviation_D > 0, deviation_D, 1.0)
    # A film's first day is 20 deviations from the others and would drown them.
    clipped_ND: NDArray[np.float32] = np.clip(scaled_ND, -5.0, 5.0).astype(np.float32)
    return clipped_ND


def split_by_time(user_N: NDArray[np.int64], timestamp_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give each rating its part under the split by time (see the module's docstring).

    Args:
        user_N: the rating's user, numbered from 0.
        timestamp_N: seconds.

    Returns:
        Positions in ``PARTS``, ``[N]``.

    Example:
        >>> one_user = np.zeros(11, np.int64)
        >>> split_by_time(one_user, np.arange(11)).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
        >>> split_by_time(one_user, np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10])).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2]
    """
    num_N = np.bincount(user_N)[user_N]
    order = np.lexsort((timestamp_N, user_N))
    user, time = user_N[order], timestamp_N[order]
    last = np.concatenate([(user[1:] != user[:-1]) | (time[1:] != time[:-1]), [True]])
    # Of every rating, the place in the whole order of the last one of the same user and second.
    places = np.flatnonzero(last)
    place = places[np.searchsorted(places, np.arange(len(order)))]
    after = np.cumsum(np.bincount(user_N))[user] - 1 - place
    after_N = np.empty(len(order), np.int64)
    after_N[order] = after
    tenth_N = num_N // 10
    return (after_N < 2 * tenth_N).astype(np.int64) + (after_N < tenth_N)


def split_at_random(num_ratings: int, seed: int) -> NDArray[np.int64]:
    """Give each rating its part under the random split: 80%, 10%, 10%.

    Args:
        num_ratings: how many.
        seed: of the draw.

    Returns:
        Positions in ``PARTS``, ``[N]``.
    """
    order = np.random.default_rng(seed).permutation(num_ratings)
    tenth = num_ratings // 10
    part_N = np.zeros(num_ratings, np.int64)
    part_N[order[: 2 * tenth]] = 1
    part_N[order[:tenth]] = 2
    return part_N

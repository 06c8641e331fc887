"""The small data pipes of TorchRec's data sets; `recsys.datasets` reads files without them."""

from __future__ import annotations

import csv
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch.utils.data import IterDataPipe, get_worker_info

from recsys.datasets import rows

T = TypeVar("T")
P = ParamSpec("P")


def _identity(index: int) -> int:
    return index


def train_filter(
    key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int
) -> bool:
    """Return whether the sample of a number belongs to the training part.

    Args:
        key_fn: maps the number to what decides.
        train_perc: share of the training part.
        decimal_places: of the share: 10 to this power samples in a row make it up.
        idx: the number.

    Example:
        >>> [train_filter(int, 0.5, 1, i) for i in (0, 4, 5, 10)]
        [True, True, False, True]
    """
    whole: int = 10**decimal_places
    return key_fn(idx) % whole < round(train_perc * whole)


def val_filter(
    key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int
) -> bool:
    """Return whether the sample of a number does not belong to the training part."""
    return not train_filter(key_fn, train_perc, decimal_places, idx)


class _Chosen(IterDataPipe[Any]):
    """The members of a pipe that a new filter for each pass takes by number."""

    def __init__(self, datapipe: Iterable[Any], make: Callable[[], Callable[[int], bool]]) -> None:
        self.datapipe, self.make = datapipe, make

    def __iter__(self) -> Iterator[Any]:
        takes = self.make()
        for number, member in enumerate(self.datapipe):
            if takes(number):
                yield member


def _check_share(train_perc: float) -> None:
    if not 0.0 < train_perc < 1.0:
        raise ValueError(f"train_perc must be between 0 and 1; received {train_perc}.")


def idx_split_train_val(
    datapipe: IterDataPipe[Any],
    train_perc: float,
    decimal_places: int = 2,
    key_fn: Callable[[int], int] = _identity,
) -> tuple[IterDataPipe[Any], IterDataPipe[Any]]:
    """Split a pipe into parts to train and to validate on, by the samples' numbers.

    Args:
        datapipe: of samples.
        train_perc: share of the training part, between 0 and 1.
        decimal_places: see `train_filter`.
        key_fn: see `train_filter`.

    Raises:
        ValueError: the share is out of its range.
    """
    _check_share(train_perc)
    given = key_fn, train_perc, decimal_places
    return (
        _Chosen(datapipe, lambda: lambda number: train_filter(*given, number)),
        _Chosen(datapipe, lambda: lambda number: val_filter(*given, number)),
    )


def rand_split_train_val(
    datapipe: IterDataPipe[Any], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe[Any], IterDataPipe[Any]]:
    """Split a pipe into parts to train and to validate on, by chance; the same in every pass.

    Args:
        datapipe: of samples.
        train_perc: share of the training part, between 0 and 1.
        random_seed: of the draws.

    Raises:
        ValueError: the share is out of its range.
    """
    _check_share(train_perc)

    def draws(is_train: bool) -> Callable[[], Callable[[int], bool]]:
        def make() -> Callable[[int], bool]:
            generator = random.Random(random_seed)
            return lambda _: (generator.random() < train_perc) is is_train

        return make

    return _Chosen(datapipe, draws(True)), _Chosen(datapipe, draws(False))


def safe_cast(val: T, dest_type: Callable[[T], T], default: T) -> T:
    """Return a value converted by a function, or another where it raises ValueError."""
    try:
        return dest_type(val)
    except ValueError:
        return default


class Limit(IterDataPipe[Any]):
    """The first members of a pipe; no more of it is read.

    Args:
        datapipe: of anything.
        limit: how many.
    """

    def __init__(self, datapipe: IterDataPipe[Any], limit: int) -> None:
        self.datapipe, self.limit = datapipe, limit

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.datapipe), self.limit)


class LoadFiles(IterDataPipe[tuple[str, Any]]):
    """Open local files, and give each with its path.

    Args:
        datapipe: paths.
        mode: of `open`.
        length: what `len` says; -1 if unknown.
        path_manager_key: Ignored; files are local.
        **open_kw: of `open`.
    """

    def __init__(
        self,
        datapipe: Iterable[str],
        mode: str = "b",
        length: int = -1,
        path_manager_key: str = "torchrec",
        **open_kw: Any,
    ) -> None:
        self.datapipe, self.length, self.open_kw = datapipe, length, open_kw
        self.mode = f"r{mode}" if mode in {"b", "t"} else mode

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for path in self.datapipe:
            with open(path, self.mode, **self.open_kw) as file:
                yield path, file

    def __len__(self) -> int:
        if self.length < 0:
            raise NotImplementedError
        return self.length


class ReadLinesFromCSV(IterDataPipe[list[str]]):
    """The rows of files.

    Args:
        datapipe: paths and files, open as text.
        skip_first_line: whether a file begins with names.
        **kw: of `csv.reader`.
    """

    def __init__(
        self, datapipe: IterDataPipe[tuple[str, Any]], skip_first_line: bool = False, **kw: Any
    ) -> None:
        self.datapipe, self.skip_first_line, self.kw = datapipe, skip_first_line, kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.datapipe:
            yield from islice(csv.reader(file, **self.kw), int(self.skip_first_line), None)


def _of_this_worker(datapipes: Sequence[IterDataPipe[Any]]) -> Sequence[IterDataPipe[Any]]:
    worker = get_worker_info()
    return datapipes if worker is None else datapipes[worker.id :: worker.num_workers]


class ParallelReadConcat(IterDataPipe[Any]):
    """One pipe after the other; workers of a DataLoader share the pipes.

    Args:
        *datapipes: of anything.
        dp_selector: which of the pipes this process reads.
    """

    def __init__(
        self,
        *datapipes: IterDataPipe[Any],
        dp_selector: Callable[
            [Sequence[IterDataPipe[Any]]], Sequence[IterDataPipe[Any]]
        ] = _of_this_worker,
    ) -> None:
        self.datapipes, self.dp_selector = datapipes, dp_selector

    def __iter__(self) -> Iterator[Any]:
        for datapipe in self.dp_selector(self.datapipes):
            yield from datapipe


class _Rows(IterDataPipe[Any]):
    """The rows of a data set, as a pipe: with `batch`, `map` and so on."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


class CriteoIterDataPipe(_Rows):
    """What `criteo_terabyte` returns, as a class; it takes the same.

    Example:
        >>> sum(1 for row in CriteoIterDataPipe([]).batch(10))
        0
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        *,
        row_mapper: rows.RowMapper | None = rows.criteo_row,
        **open_kw: Any,
    ) -> None:
        super().__init__(rows.criteo_terabyte(paths, row_mapper=row_mapper, **open_kw))


def _as_pipe(read: Callable[P, Iterable[Any]]) -> Callable[P, IterDataPipe[Any]]:
    @functools.wraps(read)
    def made(*args: P.args, **kwargs: P.kwargs) -> IterDataPipe[Any]:
        return _Rows(read(*args, **kwargs))

    return made


criteo_kaggle = _as_pipe(rows.criteo_kaggle)
criteo_terabyte = _as_pipe(rows.criteo_terabyte)
movielens_20m = _as_pipe(rows.movielens_20m)
movielens_25m = _as_pipe(rows.movielens_25m)

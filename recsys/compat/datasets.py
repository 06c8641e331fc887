"""Data pipes of TorchRec's data sets. `recsys.datasets` reads files without them."""

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
    """Return whether a sample belongs to the training part.

    Args:
        key_fn: Maps the sample's number to a key. Samples with small keys, modulo
            `10**decimal_places`, are for training.
        train_perc: Share of the training part.
        decimal_places: Decimal places to which the share is rounded.
        idx: Number of the sample.

    Example:
        >>> [train_filter(int, 0.5, 1, i) for i in (0, 4, 5, 10)]
        [True, True, False, True]
    """
    whole: int = 10**decimal_places
    return key_fn(idx) % whole < round(train_perc * whole)


def val_filter(
    key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int
) -> bool:
    """Return whether a sample belongs to the validation part; see `train_filter`."""
    return not train_filter(key_fn, train_perc, decimal_places, idx)


class _Chosen(IterDataPipe[Any]):
    """Members of a pipe whose numbers pass a filter; each pass creates a new filter."""

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
    """Split a pipe into a training and a validation part by the samples' numbers.

    Args:
        datapipe: Pipe of samples.
        train_perc: Share of the training part, between 0 and 1.
        decimal_places: See `train_filter`.
        key_fn: See `train_filter`.

    Raises:
        ValueError: The share is out of range.
    """
    _check_share(train_perc)
    settings = key_fn, train_perc, decimal_places
    return (
        _Chosen(datapipe, lambda: lambda number: train_filter(*settings, number)),
        _Chosen(datapipe, lambda: lambda number: val_filter(*settings, number)),
    )


def rand_split_train_val(
    datapipe: IterDataPipe[Any], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe[Any], IterDataPipe[Any]]:
    """Split a pipe randomly into a training and a validation part; all passes split equally.

    Args:
        datapipe: Pipe of samples.
        train_perc: Share of the training part, between 0 and 1.
        random_seed: Seed of the random numbers.

    Raises:
        ValueError: The share is out of range.
    """
    _check_share(train_perc)

    def draws(is_train: bool) -> Callable[[], Callable[[int], bool]]:
        def make() -> Callable[[int], bool]:
            generator = random.Random(random_seed)
            return lambda _: (generator.random() < train_perc) is is_train

        return make

    return _Chosen(datapipe, draws(True)), _Chosen(datapipe, draws(False))


def safe_cast(val: T, dest_type: Callable[[T], T], default: T) -> T:
    """Return a value converted by a function, or the default if that raises ValueError."""
    try:
        return dest_type(val)
    except ValueError:
        return default


class Limit(IterDataPipe[Any]):
    """First members of a pipe; the rest is not read.

    Args:
        datapipe: Pipe.
        limit: Maximum number of members.
    """

    def __init__(self, datapipe: IterDataPipe[Any], limit: int) -> None:
        self.datapipe, self.limit = datapipe, limit

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.datapipe), self.limit)


class LoadFiles(IterDataPipe[tuple[str, Any]]):
    """Pairs of a path and the open local file.

    Args:
        datapipe: Paths.
        mode: Argument of `open`; "b" and "t" open for reading.
        length: Number of files, returned by `len`; -1 if unknown.
        path_manager_key: Ignored; files are local.
        **open_kw: Arguments of `open`.
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
    """Rows of CSV files.

    Args:
        datapipe: Pairs of a path and a file that is open as text.
        skip_first_line: Whether the first line of a file is a header.
        **kw: Arguments of `csv.reader`.
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
    """Concatenation of pipes. DataLoader workers divide the pipes among themselves.

    Args:
        *datapipes: Pipes.
        dp_selector: Returns the pipes that this process reads.
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
    """Rows of a data set as a pipe, with `batch`, `map` and the other methods of pipes."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


_ALL_ROWS = {"rank": 0, "world_size": 1}
"""Arguments of readers: the pipes of TorchRec do not divide rows among ranks."""


class CriteoIterDataPipe(_Rows):
    """Class with the arguments of `criteo_terabyte` and the rows that it returns.

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
        all_rows: Any = _ALL_ROWS | open_kw
        super().__init__(rows.criteo_terabyte(paths, row_mapper=row_mapper, **all_rows))


def _as_pipe(read: Callable[P, Iterable[Any]]) -> Callable[P, IterDataPipe[Any]]:
    @functools.wraps(read)
    def made(*args: P.args, **kwargs: P.kwargs) -> IterDataPipe[Any]:
        all_rows: Any = {
            "rank": 0,
            "world_size": 1,
        } | kwargs  # as TorchRec, which has no ranks here
        return _Rows(read(*args, **all_rows))

    return made


criteo_kaggle = _as_pipe(rows.criteo_kaggle)
criteo_terabyte = _as_pipe(rows.criteo_terabyte)
movielens_20m = _as_pipe(rows.movielens_20m)
movielens_25m = _as_pipe(rows.movielens_25m)

"""Rows of public data sets, as dicts: for inspection and preprocessing.

`CriteoDataset` yields batches and is faster for training. Ranks and DataLoader workers take the
rows in turn, so each row is read once per epoch.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from torch.utils.data import IterableDataset

from recsys.base.arguments import path_of
from recsys.base.checked import checked
from recsys.datasets.criteo import (
    DEFAULT_CAT_NAMES,
    DEFAULT_COLUMN_NAMES,
    DEFAULT_LABEL_NAME,
)
from recsys.datasets.utils import check_rank, of_worker, rank_in_job

RowMapper = Callable[[list[str]], Any]
"""Function that converts the fields of a line to a row."""

DEFAULT_RATINGS_COLUMN_NAMES: list[str] = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES: list[str] = ["movieId", "title", "genres"]

_MOVIELENS_COLUMNS = [*DEFAULT_RATINGS_COLUMN_NAMES, *DEFAULT_MOVIES_COLUMN_NAMES[1:]]
_MOST = 2**63 - 1
_INTEGER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,19}(\.[0-9]*)?", re.ASCII)


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text) or abs(int(text)) > _MOST:
        raise ValueError(f"received {text[:40]!r} for a whole number of 64 bits")
    return int(text)


def _id(text: str) -> int:
    number = _integer(text)
    if number < 0:
        raise ValueError(f"received {text!r} for an id, which is not negative")
    return number


def _rating(text: str) -> float:
    if not _DECIMAL.fullmatch(text) or float(text) > 5:
        raise ValueError(f"received {text[:40]!r} for a rating from 0 to 5")
    return float(text)


def _label(text: str) -> int:
    if text not in ("0", "1"):
        raise ValueError(f"received {text[:40]!r} for a label, 0 or 1")
    return int(text)


_MOVIELENS_TYPES: dict[str, Callable[[str], Any]] = {
    "userId": _id,
    "movieId": _id,
    "rating": _rating,
    "timestamp": _integer,
}


def criteo_row(fields: list[str]) -> dict[str, int | str]:
    """Return the fields of a line by name; a missing count is 0, a missing category ''."""
    has_label = len(fields) == len(DEFAULT_COLUMN_NAMES)
    names = DEFAULT_COLUMN_NAMES if has_label else DEFAULT_COLUMN_NAMES[1:]
    row: dict[str, int | str] = {}
    for name, field in zip(names, fields, strict=True):
        if name == DEFAULT_LABEL_NAME:
            row[name] = _label(field)
        else:
            row[name] = field if name in DEFAULT_CAT_NAMES else _integer(field or "0")
    return row


def _movielens_row(fields: list[str]) -> dict[str, float | int | str]:
    names = _MOVIELENS_COLUMNS[: len(fields)]
    if len(fields) not in (len(DEFAULT_RATINGS_COLUMN_NAMES), len(_MOVIELENS_COLUMNS)):
        raise ValueError(f"received {len(fields)} fields")
    return {
        name: _MOVIELENS_TYPES.get(name, str)(field)
        for name, field in zip(names, fields, strict=True)
    }


@final
class _Rows(IterableDataset[Any]):
    """Iterable that calls a reader function and maps each line.

    Ranks, and DataLoader workers within a rank, take the lines in turn.
    """

    def __init__(
        self,
        read: Callable[[], Iterator[tuple[str, list[str]]]],
        row_mapper: RowMapper | None,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        super().__init__()
        rank, world_size = rank_in_job(rank, world_size)
        check_rank(rank, world_size, batch_size=1)
        self._read = read
        self._row_mapper = row_mapper
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        lines = itertools.islice(self._read(), self._rank, None, self._world_size)
        for where, fields in of_worker(lines):
            if self._row_mapper is None:
                yield fields
                continue
            try:
                row = self._row_mapper(fields)
            except ValueError as error:
                raise ValueError(
                    f"{where}: must be a complete line of the data set; received "
                    f"{' | '.join(fields)[:80]!r}: {error}. The file is damaged or truncated, or "
                    "row_mapper does not match the data set."
                ) from error
            yield row


def _lines(path: str | Path, delimiter: str, open_kw: Any) -> Iterator[tuple[str, list[str]]]:
    settings = {"newline": "", **open_kw}
    opened: Any = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt", **settings) as file:
        for number, fields in enumerate(csv.reader(file, delimiter=delimiter), 1):
            yield f"{path}, line {number}", fields


def _read_criteo(
    paths: Sequence[str | Path], is_checked: bool, open_kw: Any
) -> Iterator[tuple[str, list[str]]]:
    for path in paths:
        num_fields = None
        for where, fields in _lines(path, "\t", open_kw):
            if num_fields is None:  # files without labels have one field less
                num_fields = len(fields)
            if is_checked and len(fields) != num_fields:
                raise ValueError(
                    f"{where}: must have {num_fields} fields as the first line of the file; "
                    f"received {len(fields)} fields. The file is damaged or truncated."
                )
            yield where, fields


@checked
def criteo_terabyte(
    paths: Iterable[str | Path],
    *,
    row_mapper: RowMapper | None = criteo_row,
    rank: int | None = None,
    world_size: int | None = None,
    **open_kw: Any,
) -> IterableDataset[Any]:
    r"""Read the Criteo terabyte release, row by row.

    Args:
        paths: Text files of the release, plain or `.gz`.
        row_mapper: Function that converts the 40 strings of a line to a row. By default a row is a
            dict by `DEFAULT_COLUMN_NAMES`: label and counts are integers (0 if missing), categories
            strings. Files without labels yield no label. With None a row is the list of strings.
        rank: Rank of this process, which reads every `world_size`-th row; None: its rank in the
            process group, if there is one, else 0.
        world_size: Number of processes that share the rows; None: as for `rank`, else 1.
        open_kw: Further arguments of `open`.

    Returns:
        Iterable over the rows of all files, which reads the files again in each epoch.

    Raises:
        ValueError: `rank` is not in [0, `world_size`).
        FileNotFoundError: While iterating, a file is missing.
        ValueError: While iterating, a line is truncated or damaged.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w+", suffix=".tsv") as file:
        ...     _ = file.write("\t".join(["1", *["7"] * 13, *["0a"] * 26]) + "\n")
        ...     _ = file.seek(0)
        ...     (row,) = criteo_terabyte([file.name])
        >>> row["label"], row["int_0"], row["cat_25"]
        (1, 7, '0a')
    """
    is_checked = row_mapper is criteo_row
    checked_paths = [
        path_of(f"criteo_terabyte.paths[{place}]", path) for place, path in enumerate(paths)
    ]
    read = partial(_read_criteo, checked_paths, is_checked, open_kw)
    return _Rows(read, row_mapper, rank, world_size)


@checked
def criteo_kaggle(
    path: str | Path,
    *,
    row_mapper: RowMapper | None = criteo_row,
    rank: int | None = None,
    world_size: int | None = None,
    **open_kw: Any,
) -> IterableDataset[Any]:
    """Read one file of the Criteo Kaggle release, row by row.

    Args:
        path: A text file of the release, plain or `.gz`.
        row_mapper: As for `criteo_terabyte`.
        rank: As for `criteo_terabyte`.
        world_size: As for `criteo_terabyte`.
        open_kw: Further arguments of `open`.

    Returns:
        Iterable over the rows, which reads the file again in each epoch.

    Raises:
        ValueError: `rank` is not in [0, `world_size`).
        FileNotFoundError: While iterating, the file is missing.
        ValueError: While iterating, a line is truncated or damaged.
    """
    return criteo_terabyte(
        [path], row_mapper=row_mapper, rank=rank, world_size=world_size, **open_kw
    )


def _read_movielens(
    root: str | Path, include_movies_data: bool, open_kw: Any
) -> Iterator[tuple[str, list[str]]]:
    movies: dict[str, list[str]] = {}
    if include_movies_data:
        lines = _lines(Path(root) / "movies.csv", ",", open_kw)
        movies = {fields[0]: fields[1:] for _, fields in lines if fields}
    for number, (where, fields) in enumerate(_lines(Path(root) / "ratings.csv", ",", open_kw)):
        if number == 0 and _is_header(fields):
            continue
        if include_movies_data and (len(fields) < 2 or fields[1] not in movies):
            raise ValueError(
                f"{where}: must rate a film of movies.csv; received {fields}. Use two files of the "
                "same release."
            )
        yield where, fields + movies[fields[1]] if include_movies_data else fields


def _is_header(fields: list[str]) -> bool:
    names = [field.strip().lstrip("\ufeff").lower() for field in fields]
    return names == [name.lower() for name in DEFAULT_RATINGS_COLUMN_NAMES]


@checked
def movielens_20m(
    root: str | Path,
    *,
    include_movies_data: bool = False,
    row_mapper: RowMapper | None = _movielens_row,
    rank: int | None = None,
    world_size: int | None = None,
    **open_kw: Any,
) -> IterableDataset[Any]:
    r"""Read the ratings of MovieLens 20M, row by row.

    Args:
        root: Folder of `movies.csv` and `ratings.csv`, whose header line is optional.
        include_movies_data: Add the title and genres of the film.
        row_mapper: Function that converts the strings of a line to a row. By default a row is a
            dict by column name, with numbers converted. With None a row is the list of strings.
        rank: As for `criteo_terabyte`.
        world_size: As for `criteo_terabyte`.
        open_kw: Further arguments of `open`.

    Returns:
        Iterable over the rows, which reads the files again in each epoch.

    Raises:
        ValueError: `rank` is not in [0, `world_size`).
        FileNotFoundError: While iterating, a file is missing.
        ValueError: While iterating, a line is truncated or damaged, rates an unknown film, or has a
            rating that is not from 0 to 5 or an id that is negative or not below 2**63.

    Example:
        >>> import tempfile
        >>> root = tempfile.mkdtemp()
        >>> text = "userId,movieId,rating,timestamp\n1,2,3.5,4\n"
        >>> _ = (Path(root) / "ratings.csv").write_text(text)
        >>> list(movielens_20m(root))
        [{'userId': 1, 'movieId': 2, 'rating': 3.5, 'timestamp': 4}]
    """
    read = partial(_read_movielens, root, include_movies_data, {"encoding": "utf-8", **open_kw})
    return _Rows(read, row_mapper, rank, world_size)


movielens_25m = movielens_20m
"""Reader of the ratings of MovieLens 25M, whose files have the format of MovieLens 20M."""

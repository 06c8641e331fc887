"""Read the files of MovieLens in each of the layouts it is published in.

Shapes: ``N`` ratings, ``U`` users, ``I`` items.
"""

import csv
import io
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, final

import numpy as np
from numpy.typing import NDArray

GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip
"""The order of the 19 flags of ``u.item``."""

_NO_GENRE = {"", "unknown", "unkonwn", "(no genres listed)"}
_YEAR = re.compile(r"\((\d{4})\)\s*$")


@final
@dataclass(frozen=True, slots=True)
class User:
    """A user; fields that the layout lacks are empty or 0."""

    age: int = 0
    gender: str = ""
    occupation: str = ""
    zip_code: str = ""


@final
@dataclass(frozen=True, slots=True)
class Item:
    """A film; an unknown ``year`` is 0, unknown genres are empty."""

    year: int = 0
    genres: tuple[str, ...] = ()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MovieLensFiles:
    """The files' content, ids as they stand in them, ratings in the files' order."""

    user_N: NDArray[np.int64]
    item_N: NDArray[np.int64]
    rating_N: NDArray[np.float32]
    timestamp_N: NDArray[np.int64]
    users: dict[int, User]
    items: dict[int, Item]


def read_movielens(folder: str | Path) -> MovieLensFiles:
    """Read MovieLens from a folder, of any release.

    Args:
        folder: holds ``u.data`` (100K), ``ratings.dat`` (1M, 10M), ``ratings.csv`` (20M, 25M and
            later) or ``ml-100k.inter`` (100K as packed by RecBole), with their companions.

    Returns:
        The ratings, users and items.

    Raises:
        FileNotFoundError: no known layout is there, or a companion file is missing.
        ValueError: a file is truncated or damaged; the message names file, line and the
            expected content. Or ratings refer to users or items missing in companion files.
    """
    folder = Path(folder)
    for ratings, (reader, users, items) in _LAYOUTS.items():
        if (folder / ratings).is_file():
            users_path = folder / users if users else None
            files = reader(folder / ratings, users_path, folder / items)
            if users_path is not None and files.users:  # the 10M release has none
                _check_known("user", files.user_N, files.users, folder / ratings, users_path)
            _check_known("item", files.item_N, files.items, folder / ratings, folder / items)
            return files
    raise FileNotFoundError(
        f"folder must hold MovieLens ratings in one of the files {', '.join(_LAYOUTS)}; received "
        f"{folder}. Unpack a release of https://grouplens.org/datasets/movielens/ and name the "
        "folder that its ratings file is in."
    )


def _check_known(
    kind: str, rated_N: NDArray[np.int64], known: Collection[int], ratings: Path, listed: Path
) -> None:
    rated = np.unique(rated_N)
    missing = rated[~np.isin(rated, np.fromiter(known, np.int64, len(known)))]
    if missing.size:
        raise ValueError(
            f"{ratings} has ratings of {missing.size} {kind}s that are not in {listed}, such as "
            f"{kind} {missing[0]}. Both files must be of one release: download it again."
        )


def _bad_line(path: Path, line: int, due: str, text: str) -> NoReturn:
    raise ValueError(
        f"{path}, line {line}: must be {due}; received {text[:80]!r}. "
        "The file is damaged or truncated: download it again."
    )


def _read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a whole file, refusing one whose last line is not ended: a download was truncated."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} must be beside the ratings; it is missing. Unpack the whole release."
        )
    text = path.read_bytes().decode(encoding)
    if not text.endswith("\n"):
        last = text.rsplit("\n", 1)[-1]
        _bad_line(path, text.count("\n") + 1, "a whole line ended by a newline", last)
    return text


def _rows(
    path: Path, separator: str, columns: str, encoding: str, header: bool
) -> Iterator[tuple[int, Sequence[str]]]:
    """Give the number and the fields of every line, each checked for its number of fields."""
    names = columns.split()
    text = _read_text(path, encoding)
    lines = csv.reader(io.StringIO(text)) if separator == "," else None
    for number, line in enumerate(text.splitlines() if lines is None else lines, 1):
        fields = line.split(separator) if isinstance(line, str) else line
        if header and number == 1:
            continue
        if len(fields) != len(names):
            due = f"the {len(names)} fields {columns} between {separator!r}"
            _bad_line(path, number, due, separator.join(fields))
        yield number, fields


def _integer(path: Path, line: int, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        _bad_line(path, line, f"a line with an integer {name}", text)


_RATING = np.dtype([("user", "i8"), ("item", "i8"), ("rating", "f4"), ("timestamp", "i8")])


def _read_ratings(path: Path, separator: str, header: str | None) -> NDArray[np.void]:
    """Parse the ratings in C, straight from the file; on failure find the line to blame."""
    size_bytes = path.stat().st_size
    if not size_bytes:
        _bad_line(path, 1, "a rating", "")
    with open(path, "rb") as file:
        file.seek(size_bytes - 1)
        whole = file.read() == b"\n"
    if header is not None:
        with open(path, encoding="utf-8", errors="replace") as lines:
            first = lines.readline()
        if first.strip() != header:
            _bad_line(path, 1, f"the header {header!r}", first)
    skipped = 0 if header is None else 1
    try:
        with open(path, encoding="utf-8") as lines:
            ratings: NDArray[np.void] = np.loadtxt(
                # loadtxt splits at single characters only.
                (line.replace("::", "\t") for line in lines) if separator == "::" else lines,
                _RATING,
                delimiter="\t" if separator == "::" else separator,
                skiprows=skipped,
                comments=None,
                ndmin=1,
            )
    except ValueError as error:
        _blame_rating(path, separator, skipped, str(error))
    if not whole or not ratings.size:
        line = len(ratings) + skipped
        _bad_line(path, line, "a whole rating ended by a newline", str(ratings[-1:]))
    outside = np.flatnonzero(~((ratings["rating"] >= 0) & (ratings["rating"] <= 5)))
    if outside.size:
        line = int(outside[0]) + 1 + skipped
        _bad_line(path, line, "a rating from 0 to 5", str(ratings["rating"][outside[0]]))
    return ratings


def _blame_rating(path: Path, separator: str, skipped: int, error: str) -> NoReturn:
    kinds: tuple[Callable[[str], object], ...] = (int, int, float, int)
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if number <= skipped:
                continue
            try:
                for kind, field in zip(kinds, line.split(separator), strict=True):
                    kind(field)
            except ValueError:
                _bad_line(path, number, "the four numbers user, item, rating, timestamp", line)
    raise ValueError(f"{path}: must hold four numbers a line; received: {error}.")


def _files(
    ratings: NDArray[np.void], users: dict[int, User], items: dict[int, Item]
) -> MovieLensFiles:
    return MovieLensFiles(
        user_N=ratings["user"],
        item_N=ratings["item"],
        rating_N=ratings["rating"],
        timestamp_N=ratings["timestamp"],
        users=users,
        items=items,
    )


def _genres(names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _NO_GENRE)


def _titled_item(title: str, genres: str) -> Item:
    """Build an item from ``Title (1995)`` and ``Comedy|Drama``."""
    year = _YEAR.search(title)
    return Item(int(year.group(1)) if year else 0, _genres(genres.split("|")))


def _read_100k(ratings: Path, users_path: Path | None, items_path: Path) -> MovieLensFiles:
    assert users_path is not None
    users = {}
    for line, f in _rows(users_path, "|", "user age gender occupation zip", "latin-1", False):
        key = _integer(users_path, line, "user", f[0])
        users[key] = User(_integer(users_path, line, "age", f[1]), f[2], f[3], f[4])
    items = {}
    columns = "item title date video-date url " + " ".join(f"genre{k}" for k in range(19))
    for line, f in _rows(items_path, "|", columns, "latin-1", False):
        year = int(f[2][-4:]) if f[2][-4:].isdigit() else 0
        flagged = [name for name, flag in zip(GENRES_100K, f[5:], strict=True) if flag == "1"]
        items[_integer(items_path, line, "item", f[0])] = Item(year, _genres(flagged))
    return _files(_read_ratings(ratings, "\t", header=None), users, items)


def _read_1m(ratings: Path, users_path: Path | None, items_path: Path) -> MovieLensFiles:
    users = {}
    if users_path is not None and users_path.is_file():  # The 10M release has none.
        for line, f in _rows(users_path, "::", "user gender age occupation zip", "latin-1", False):
            key = _integer(users_path, line, "user", f[0])
            users[key] = User(_integer(users_path, line, "age", f[2]), f[1], f[3], f[4])
    items = {}
    for line, f in _rows(items_path, "::", "item title genres", "latin-1", False):
        items[_integer(items_path, line, "item", f[0])] = _titled_item(f[1], f[2])
    return _files(_read_ratings(ratings, "::", header=None), users, items)


def _read_csv(ratings: Path, users_path: Path | None, items_path: Path) -> MovieLensFiles:
    del users_path  # These releases have no data about users.
    items = {}
    for line, f in _rows(items_path, ",", "movieId title genres", "utf-8", True):
        items[_integer(items_path, line, "movieId", f[0])] = _titled_item(f[1], f[2])
    header = "userId,movieId,rating,timestamp"
    return _files(_read_ratings(ratings, ",", header), {}, items)


def _read_recbole(ratings: Path, users_path: Path | None, items_path: Path) -> MovieLensFiles:
    assert users_path is not None
    users = {}
    for line, f in _rows(users_path, "\t", "user age gender occupation zip", "utf-8", True):
        key = _integer(users_path, line, "user", f[0])
        users[key] = User(_integer(users_path, line, "age", f[1]), f[2], f[3], f[4])
    items = {}
    for line, f in _rows(items_path, "\t", "item title year genres", "utf-8", True):
        year = int(f[2]) if f[2].isdigit() else 0
        items[_integer(items_path, line, "item", f[0])] = Item(year, _genres(f[3].split(" ")))
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    return _files(_read_ratings(ratings, "\t", header), users, items)


_LAYOUTS: dict[str, tuple[Callable[[Path, Path | None, Path], MovieLensFiles], str | None, str]] = {
    "ml-100k.inter": (_read_recbole, "ml-100k.user", "ml-100k.item"),
    "u.data": (_read_100k, "u.user", "u.item"),
    "ratings.dat": (_read_1m, "users.dat", "movies.dat"),
    "ratings.csv": (_read_csv, None, "movies.csv"),
}
"""Ratings file -> its reader, its users file and its items file."""

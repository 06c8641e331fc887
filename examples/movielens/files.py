"""Read the files of MovieLens, in each of the layouts it is published in, as one Arrow table."""

from pathlib import Path
from typing import NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

_GENRES_100K = (
    None, "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip
"""The order of the 19 flags of `u.item`; the first is for films of unknown genre."""
_NO_GENRE = r"^(|unknown|unkonwn|\(no genres listed\))$"
_TYPES = {
    "user_id": pa.int64(), "item_id": pa.int64(), "rating": pa.float32(), "timestamp": pa.int64(),
    "age": pa.int64(),
}  # fmt: skip
"""Types of columns; other columns are texts."""
_USER = ("age", "gender", "occupation", "zip")


class _Text(NamedTuple):
    """A text file."""

    name: str
    columns: str
    delimiter: str = "\t"
    header: str | None = None
    """The first line, or its beginning; None: the file has no header."""
    encoding: str = "utf-8"


class _Layout(NamedTuple):
    ratings: _Text
    users: _Text | None
    items: _Text
    year: tuple[str, str]
    """Column of the items with the year, and a pattern of the year."""
    genres: str
    """Text between genres; empty: the genres are flags."""


_RATING = "user_id item_id rating timestamp"
_ITEM = "item_id title genres"
_IN_TITLE = ("title", r"\((?P<year>\d{4})\)\s*$")
_FLAGS = [f"flag{k}" for k in range(19)]
_LAYOUTS = (
    _Layout(
        _Text(
            "ml-100k.inter",
            _RATING,
            header="user_id:token\titem_id:token\trating:float\ttimestamp:float",
        ),
        _Text("ml-100k.user", "user_id age gender occupation zip", header="user_id:token"),
        _Text("ml-100k.item", "item_id title year genres", header="item_id:token"),
        ("year", r"^(?P<year>\d{4})$"),
        " ",
    ),
    _Layout(
        _Text("u.data", _RATING),
        _Text("u.user", "user_id age gender occupation zip", "|", encoding="latin-1"),
        _Text(
            "u.item",
            " ".join(["item_id", "title", "date", "video", "url", *_FLAGS]),
            "|",
            encoding="latin-1",
        ),
        ("date", r"(?P<year>\d{4})$"),
        "",
    ),
    _Layout(
        _Text("ratings.dat", _RATING, "::"),
        _Text("users.dat", "user_id gender age occupation zip", "::", encoding="latin-1"),
        _Text("movies.dat", _ITEM, "::", encoding="latin-1"),
        _IN_TITLE,
        "|",
    ),
    _Layout(
        _Text("ratings.csv", _RATING, ",", "userId,movieId,rating,timestamp"),
        None,
        _Text("movies.csv", _ITEM, ",", "movieId,title,genres"),
        _IN_TITLE,
        "|",
    ),
)


def is_movielens(folder: str | Path) -> bool:
    """Return whether a folder contains a release of MovieLens."""
    return any((Path(folder) / layout.ratings.name).is_file() for layout in _LAYOUTS)


def read_movielens(folder: str | Path) -> pa.Table:
    """Read MovieLens from a folder, of any release.

    Args:
        folder: holds `u.data` (100K), `ratings.dat` (1M, 10M), `ratings.csv` (20M, 25M and later)
            or `ml-100k.inter` (100K as packed by RecBole), with their companions.

    Returns:
        The ratings, in the order of the file: `user_id`, `item_id`, `rating`, `timestamp`; of the
        user `age`, `gender`, `occupation` and `zip`; of the film `year` and the list `genres`.
        Values that the release does not have are null.

    Raises:
        FileNotFoundError: no known layout is there, or a companion file is missing.
        ValueError: a file is truncated or damaged, or ratings refer to users or items that are
            missing in companion files. The message names the file, and the line if there is one.
    """
    folder = Path(folder)
    for layout in _LAYOUTS:
        path = folder / layout.ratings.name
        if not path.is_file():
            continue
        ratings = _read(path, layout.ratings)
        rating = ratings["rating"]
        if not pc.all(pc.and_(pc.greater_equal(rating, 0), pc.less_equal(rating, 5))).as_py():
            _damaged(path, f"ratings must be from 0 to 5; received {pc.min_max(rating)}")
        items = _read(folder / layout.items.name, layout.items)
        ratings = _joined(ratings, _with_year_and_genres(items, layout), path, layout.items)
        users = layout.users
        if users is None or (path.suffix == ".dat" and not (folder / users.name).is_file()):
            for name in _USER:  # the 10M release and those after 1M have no data about users
                ratings = ratings.append_column(name, pa.nulls(len(ratings), _TYPES.get(name)))
            return ratings
        return _joined(ratings, _read(folder / users.name, users), path, users)
    raise FileNotFoundError(
        "folder must hold MovieLens ratings in one of the files "
        f"{', '.join(layout.ratings.name for layout in _LAYOUTS)}; received {folder}. Unpack a "
        "release of https://grouplens.org/datasets/movielens/ and name the folder that its ratings "
        "file is in."
    )


def _read(path: Path, text: _Text) -> pa.Table:
    """Read a text file; damage raises an error with the line."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} must be beside the ratings; it is missing. Unpack the whole release."
        )
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        *whole, last = data.split(b"\n")
        _damaged(path, f"line {len(whole) + 1} must end in a newline; received {last!r}")
    if text.header is not None and not data.startswith(text.header.encode()):
        first = data.split(b"\n", 1)[0]
        _damaged(path, f"line 1 must be the header {text.header!r}; received {first!r}")
    names = text.columns.split()
    try:
        return csv.read_csv(
            pa.BufferReader(data.replace(b"::", b"\t") if text.delimiter == "::" else data),
            csv.ReadOptions(
                use_threads=False,  # errors have line numbers
                column_names=names,
                skip_rows=int(text.header is not None),
                encoding=text.encoding,
            ),
            csv.ParseOptions(
                delimiter=text.delimiter.replace("::", "\t"),
                quote_char='"' if text.delimiter == "," else False,
            ),
            csv.ConvertOptions(
                column_types={name: _TYPES.get(name, pa.string()) for name in names},
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        _damaged(path, str(error))


def _damaged(path: Path, problem: str) -> NoReturn:
    raise ValueError(f"{path}: {problem}. The file is damaged or truncated: download it again.")


def _with_year_and_genres(items: pa.Table, layout: _Layout) -> pa.Table:
    column, pattern = layout.year
    year = pc.struct_field(pc.extract_regex(items[column], pattern), "year").cast(pa.int64())
    if layout.genres:
        text = items["genres"]
    else:
        named = zip(_GENRES_100K, _FLAGS, strict=True)
        words = [pc.if_else(pc.equal(items[flag], "1"), f"{n}|", "") for n, flag in named if n]
        text = pc.utf8_rtrim(pc.binary_join_element_wise(*words, ""), "|")
    text = pc.if_else(pc.match_substring_regex(text, _NO_GENRE), None, text)
    genres = pc.split_pattern(text, layout.genres or "|")
    return pa.table({"item_id": items["item_id"], "year": year, "genres": genres})


def _joined(ratings: pa.Table, known: pa.Table, path: Path, text: _Text) -> pa.Table:
    """Add the columns of each rating's user or item."""
    key = known.column_names[0]
    places = pc.index_in(ratings[key], known[key].combine_chunks())
    if places.null_count:
        missing = ratings[key].filter(places.is_null()).unique()
        raise ValueError(
            f"{path} has ratings of {len(missing)} {key}s that are not in "
            f"{path.parent / text.name}, such as {missing[0]}. Both files must be of one release: "
            "download it again."
        )
    for name in known.column_names[1:]:
        ratings = ratings.append_column(name, known[name].take(places))
    return ratings

"""Data of clicks: three parts of a table and the description of its columns.

They are MovieLens, or a folder with a file for each part:

- `train.csv`, `valid.csv` and `test.csv`, or the same as `.parquet`: a column `label` of 0 and 1;
  all other columns are categories, in a CSV file texts;
- `NAME.train.libfm`, `NAME.validation.libfm` and `NAME.test.libfm`, as of Frappe: lines such as
  `-1 451:1 4149:1`, a label and one feature with the value 1 for each column.
"""

from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from movielens.data import build_movielens, fetch_movielens_100k, load_movielens
from movielens.features import past_lists
from movielens.files import is_movielens, read_movielens
from pyarrow import csv

from recsys.features import Categorical, FeatureSpec, Ids, Label

PARTS = {
    "train": ("train.csv", "train.parquet", "*.train.libfm"),
    "validation": ("valid.csv", "valid.parquet", "*.validation.libfm"),
    "test": ("test.csv", "test.parquet", "*.test.libfm"),
}
RATED = (
    Categorical("item_id"),
    Categorical("rated", is_list=True, table="item_id"),
    Categorical("half_stars", is_list=True),
    Ids("times", rows=2**62, is_list=True),
    Ids("timestamp", rows=2**62),
    Label("liked"),
)
"""Columns of `load_rated`."""


class Data(NamedTuple):
    """A table in three parts, and the `FeatureSpec` that was fitted to the training part."""

    spec: FeatureSpec
    parts: dict[str, pa.Table]
    label: str


def load(folder: Path | None) -> Data:
    """Read a folder, or fetch MovieLens 100K; MovieLens has the label `liked`."""
    if folder is None or is_movielens(folder):
        spec, *parts = load_movielens(folder)
        return Data(spec, dict(zip(PARTS, parts, strict=True)), "liked")
    tables = {part: _read(path) for part, path in _find_parts(folder).items()}
    names = [name for name in tables["train"].column_names if name != "label"]
    spec = FeatureSpec([*map(Categorical, names), Label("label")])
    return Data(spec.fit(tables["train"]), tables, "label")


def load_rated(folder: Path | None, length: int) -> Data:
    """Read MovieLens with each user's last `length` ratings of strictly earlier seconds."""
    ratings = read_movielens(fetch_movielens_100k() if folder is None else folder)
    names = ("user_id", "item_id", "timestamp")
    user_N, item_N, time_N = (ratings[name].to_numpy() for name in names)
    half_stars_N = np.rint(2 * ratings["rating"].to_numpy()).astype(np.int64)
    _, user_N = np.unique(user_N, return_inverse=True)
    columns = (item_N, half_stars_N, time_N)
    all_N = np.ones(len(user_N), np.bool_)
    lists = past_lists(user_N, item_N, time_N, all_N, length, *columns)
    for name, column in zip(("rated", "half_stars", "times"), lists, strict=True):
        ratings = ratings.append_column(name, column)
    _, *parts = build_movielens(ratings, split="time")
    return Data(FeatureSpec(RATED).fit(parts[0]), dict(zip(PARTS, parts, strict=True)), "liked")


def _find_parts(folder: Path) -> dict[str, Path]:
    found = {
        part: [path for name in names for path in folder.glob(name)]
        for part, names in PARTS.items()
    }
    if any(len(paths) != 1 for paths in found.values()):
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no folder"
        raise SystemExit(
            f"--data {folder} must be a folder with one file for each part: train.csv, valid.csv "
            "and test.csv; the same as .parquet; or NAME.train.libfm, NAME.validation.libfm and "
            f"NAME.test.libfm; or a release of MovieLens. Received {names}. Use a published split: "
            "a file without negative samples, such as frappe.csv, is not enough."
        )
    return {part: path for part, (path,) in found.items()}


def _read(path: Path) -> pa.Table:
    """Read a part; its labels are 0 and 1, of any type of numbers."""
    try:
        if path.suffix == ".libfm":
            table = _read_libfm(path)
        elif path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            with csv.open_csv(path) as reader:  # only for the names
                types = dict.fromkeys(reader.schema.names, pa.string())
            options = csv.ConvertOptions(
                column_types=types | {"label": pa.float32()},
                null_values=[""],
                strings_can_be_null=True,
            )
            table = csv.read_csv(path, convert_options=options)
    except pa.ArrowInvalid as error:
        _refuse(path, f"must be a table; received an error: {error}")
    if "label" not in table.column_names:
        _refuse(path, f"must have a column 'label'; received {table.column_names}")
    labels = pc.unique(table["label"]).to_pylist()
    if not {*labels} <= {0, 1}:
        _refuse(path, f"labels must be 0 or 1; received {sorted(labels, key=str)[:5]}")
    return table


def _read_libfm(path: Path) -> pa.Table:
    """Read labels and features; a label of -1 becomes 0."""
    table = csv.read_csv(
        path,
        csv.ReadOptions(autogenerate_column_names=True),
        csv.ParseOptions(delimiter=" "),
    )
    columns = {
        f"column {k}": table.column(k).cast(pa.string()) for k in range(1, len(table.schema))
    }
    for name, values in columns.items():
        is_one = pc.ends_with(values, ":1")
        if not pc.all(is_one).as_py():
            (other,) = values.filter(pc.invert(is_one)).slice(0, 1).to_pylist()
            _refuse(path, f"features must have the value 1, such as 43:1; {name} has {other!r}")
    labels = table.column(0)
    return pa.table({"label": pc.if_else(pc.equal(labels, -1), 0, labels), **columns})


def _refuse(path: Path, problem: str) -> NoReturn:
    raise SystemExit(f"{path}: {problem}. Convert the file.")

"""Partition columns of paths, compared with pandas and plain dicts."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from recsys import datasets
from recsys.datasets import Split, TimeSplit, readers, sources
from recsys.datasets.partitions import file_name
from recsys.datasets.selection import PARTS
from recsys.datasets.tables import files_of
from recsys.features import Categorical, FeatureSpec, Ids, Label, Numeric, Timestamp
from recsys.inference import score
from recsys.prepare import prepare

COUNTRIES = ["no", "se", "a/b", "æ ø=å", "100%", None]
DAYS = ["2026-11-28", "2026-11-29", "2026-12-01"]


def _frame(count: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "row": range(count),
            "age": draw.integers(0, 90, count).astype(float),
            "country": [COUNTRIES[i] for i in draw.integers(0, len(COUNTRIES), count)],
            "dt": [DAYS[i] for i in draw.integers(0, 3, count)],
            "hour": draw.choice([0, 11, 22], count),
            "ok": draw.integers(0, 2, count),
        }
    )


def _write(frame: pd.DataFrame, folder: Path, kind: str, names: Any) -> None:
    """Write partitions: Parquet by pandas, and CSV as Spark names folders."""
    if kind == "parquet":
        frame.to_parquet(folder, partition_cols=list(names), index=False)
        return
    for values, part in frame.groupby(list(names), dropna=False):
        path = folder
        for name, value in zip(names, values, strict=True):
            text = "__HIVE_DEFAULT_PARTITION__" if pd.isna(value) else quote(str(value), safe="")
            path = path / f"{name}={text}"
        path.mkdir(parents=True)
        part.drop(columns=list(names)).to_csv(path / "part-0.csv", index=False)


def _spec() -> FeatureSpec:
    return FeatureSpec(
        [
            Ids("row", rows=1000),
            Categorical("country"),
            Timestamp("dt", parts=("day", "month")),
            Numeric("hour"),
            Label("ok"),
        ]
    )


def _rows(reader: Any) -> list[int]:
    return [i for batch in reader for i in batch.sparse_features["row"].values().tolist()]


@pytest.fixture(params=["parquet", "csv"])
def clicks(request: Any, tmp_path: Path) -> tuple[Path, pd.DataFrame]:
    frame = _frame(120, 0)
    _write(frame, tmp_path / "clicks", request.param, ["dt", "country", "hour"])
    (tmp_path / "clicks/dt=2026-12-24/country=no").mkdir(parents=True)  # no files
    (tmp_path / "clicks/_SUCCESS").touch()
    return tmp_path / "clicks", frame


def _read(path: Any, spec: FeatureSpec, **options: Any) -> Any:
    is_text = str(files_of(path)[0].path).endswith("csv")
    return (readers.csv if is_text else readers.parquet)(path, spec, 64, **options)


def test_columns_of_paths_are_those_of_pandas(clicks: tuple[Path, pd.DataFrame]) -> None:
    folder, frame = clicks
    spec, wanted = _spec().fit(folder), _spec().fit(frame)
    assert spec.fingerprints()["country"] == wanted.fingerprints()["country"]
    assert sorted(spec.fitted.vocabularies["country"].values.to_pylist()) == sorted(
        str(country) for country in COUNTRIES if country is not None
    )
    seen = []
    for batch in _read(folder, spec):
        rows = batch.sparse_features["row"].values().tolist()
        alone = wanted.transform(frame.iloc[rows].reset_index(drop=True))
        for name in ("country", "dt_day", "dt_month"):
            found = batch.sparse_features[name].values()
            assert found.tolist() == alone.sparse_features[name].values().tolist()
        torch.testing.assert_close(batch.dense_features, alone.dense_features)
        seen += rows
    assert sorted(seen) == frame["row"].tolist()
    # a day, by folder and by globs of folders and files
    day = frame[frame["dt"] == DAYS[1]]["row"].tolist()
    for path in ("dt=2026-11-29", "dt=2026-11-29/*/*/*.*"):
        assert sorted(_rows(_read(str(folder / path), spec))) == day
    november = frame[frame["dt"] < "2026-12"]["row"].tolist()
    assert sorted(_rows(_read(str(folder / "dt=2026-11-*"), spec))) == november


@pytest.mark.parametrize("world_size", [1, 2])
def test_splits_and_filters_read_files_of_their_rows(
    clicks: tuple[Path, pd.DataFrame], world_size: int
) -> None:
    folder, frame = clicks
    spec = _spec().fit(folder)
    kept = frame.dropna()
    by_country = Split("country", shares=(0.4, 0.3, 0.3))
    numbers = by_country.parts_of(pa.table({"country": kept["country"]}), "x", kept["row"].values)
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"filter": ds.field("country") == "a/b"}, frame["country"] == "a/b"),
        ({"filter": ds.field("country").is_null()}, frame["country"].isna()),
        (
            {"filter": (ds.field("hour") > 20) & (ds.field("age") < 40)},
            (frame["hour"] > 20) & (frame["age"] < 40),
        ),
        (
            {"filter": (ds.field("hour") > 20) | (ds.field("age") < 40)},
            (frame["hour"] > 20) | (frame["age"] < 40),
        ),
    ]
    for number, part in enumerate(PARTS):
        limits = [("2026-11-29", "2026-12-01"), (date(2026, 11, 29), date(2026, 12, 1))]
        for validation, test in limits:
            split: Any = TimeSplit("dt", validation=validation, test=test)
            is_kept = frame["dt"] == DAYS[number]
            cases.append(({"split": split, "part": part}, is_kept))
        split = TimeSplit("hour", validation=8, test=16)
        hours = frame["hour"] // 8 == number
        cases.append(({"split": split, "part": part}, hours))
        kept_rows = kept["row"][numbers == number]
        options = {"filter": ds.field("country").is_valid(), "split": by_country, "part": part}
        cases.append((options, frame["row"].isin(kept_rows)))
    for options, is_wanted in cases:
        found, names = [], set[str]()
        if options.get("split") == by_country:
            folders = sorted({*kept["dt"]})  # without the missing country, which is an error
            path: Any = [
                str(child) for day in folders for child in (folder / f"dt={day}").iterdir()
                if "HIVE" not in child.name
            ]  # fmt: skip
        else:
            path = folder
        for rank in range(world_size):
            reader = _read(path, spec, rank=rank, world_size=world_size, **options)
            found += _rows(reader)
            chosen = reader.selection
            names |= {chosen.sources[unit.source].path for unit in chosen.units()}
        assert sorted(found) == frame["row"][is_wanted].tolist()
        if "age" not in str(options):  # files of other partitions are not read
            wanted = frame[is_wanted]
            assert len(names) == len(wanted.groupby(["dt", "country", "hour"], dropna=False))


def test_other_files_are_not_opened_by_an_epoch(clicks: tuple[Path, pd.DataFrame]) -> None:
    folder, frame = clicks
    spec = _spec().fit(folder)
    split = TimeSplit("dt", validation="2026-11-29", test="2026-12-01")
    opened = []
    original = sources.File.checked

    def checked(self: Any, *arguments: Any) -> Any:
        opened.append(self.path)
        return original(self, *arguments)

    with mock.patch.object(sources.File, "checked", checked):
        rows = _rows(_read(folder, spec, split=split, part="test"))
    assert sorted(rows) == frame["row"][frame["dt"] == DAYS[2]].tolist()
    assert opened
    assert all("dt=2026-12-01" in path for path in opened)


def test_prepare_and_score(clicks: tuple[Path, pd.DataFrame], tmp_path: Path) -> None:
    folder, frame = clicks
    spec = _spec()
    assert prepare(spec, folder, tmp_path / "ready") == len(frame)
    ready = FeatureSpec.load(tmp_path / "ready/prepared")
    prepared = list(readers.parquet(tmp_path / "ready/*.parquet", ready, 64))
    raw = list(_read(folder, spec))
    assert [batch.sparse_features.values().tolist() for batch in prepared] == [
        batch.sparse_features.values().tolist() for batch in raw
    ]

    class Sum(nn.Module):
        def forward(self, dense: torch.Tensor, ids: Any) -> torch.Tensor:
            return dense[:, 0] + ids["country"].values()

    paths = score(Sum(), folder, tmp_path / "scores", spec=spec, keys=["row", "dt", "country"])
    found = pd.concat(pq.read_table(path).to_pandas() for path in paths).sort_values("row")
    batch = spec.transform(frame)
    output = batch.dense_features[:, 0] + batch.sparse_features["country"].values()
    assert found["output"].tolist() == output.tolist()
    assert found["dt"].tolist() == frame["dt"].tolist()
    assert found["country"].isna().tolist() == frame["country"].isna().tolist()
    assert found["country"].dropna().tolist() == frame["country"].dropna().tolist()


def test_readers_continue(clicks: tuple[Path, pd.DataFrame]) -> None:
    folder, _ = clicks
    spec = _spec().fit(folder)
    split = TimeSplit("dt", validation="2026-11-29", test="2026-12-01")
    options = {"split": split, "part": "train", "shuffle": True, "window_rows": 16}
    reader = _read(folder, spec, **options)
    batches = iter(reader)
    next(batches)
    state = reader.state_dict()
    rest = [batch.sparse_features["row"].values().tolist() for batch in batches]
    again = _read(folder, spec, **options)
    again.load_state_dict(state)
    assert [batch.sparse_features["row"].values().tolist() for batch in again] == rest
    with pytest.raises(ValueError, match="the same"):
        _read(folder, spec, **{**options, "part": "test"}).load_state_dict(state)


def _file(path: Path, columns: dict[str, Any] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"row": [1, 2]} if columns is None else columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        table.to_pandas().to_csv(path, index=False)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["7", "0", "-3"], pa.int64()),
        (["7", "07"], pa.string()),
        (["-0"], pa.string()),
        (["+1"], pa.string()),
        (["1.5"], pa.string()),
        ([str(2**63 - 1), str(-(2**63))], pa.int64()),
        ([str(2**63)], pa.string()),
        (["7", "__HIVE_DEFAULT_PARTITION__"], pa.int64()),
        (["__HIVE_DEFAULT_PARTITION__"], pa.null()),
        (["7", ""], pa.string()),
        (["\N{FULLWIDTH DIGIT TWO}"], pa.string()),
    ],
)
def test_types(tmp_path: Path, values: list[str], kind: Any) -> None:
    for value in values:
        _file(tmp_path / f"day={value}/x.parquet")
    for file in files_of(tmp_path):
        assert file.schema.field("day").type == kind
    spec = FeatureSpec([Categorical("day")]).fit(tmp_path)
    column = sorted(str(v) for v in spec.fitted.vocabularies["day"].values.to_pylist())
    assert column == sorted(value for value in values if "HIVE" not in value)


def test_a_fitted_text_stays_a_text(tmp_path: Path) -> None:
    for hour in ("07", "11"):
        _file(tmp_path / f"hour={hour}/x.parquet")
    spec = FeatureSpec([Categorical("hour"), Ids("row", rows=9)]).fit(tmp_path)
    [batch] = datasets.parquet(tmp_path / "hour=11", spec, 8)
    assert batch.sparse_features["hour"].values().tolist() == [3, 3]
    hours = datasets.parquet(tmp_path / "hour=11", spec, 8, filter=ds.field("hour") == "11")
    assert _rows(hours) == [1, 2]
    [path] = score(_Hours(), tmp_path / "hour=11", tmp_path / "s", spec=spec, keys=["hour"])
    assert pq.read_table(path)["hour"].to_pylist() == ["11", "11"]


class _Hours(nn.Module):
    def forward(self, ids: Any) -> torch.Tensor:
        return ids["hour"].values().float()


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_column_of_file_and_folder_must_be_equal(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"dt=2026-11-28/hour=07/x.{suffix}"
    same: dict[str, Any] = {
        "row": [1, 2],
        "dt": pa.array([date(2026, 11, 28)] * 2),
        "hour": pa.array(["07", "07"]).dictionary_encode() if suffix == "parquet" else [7, 7],
    }
    _file(path, same)
    spec = FeatureSpec([Ids("row", rows=9), Timestamp("dt"), Categorical("hour")]).fit(tmp_path)
    assert _rows(_read(tmp_path, spec)) == [1, 2]
    for name, value in (("dt", date(2026, 11, 27)), ("hour", None)):
        other = {**same, name: pa.array([same[name][0].as_py(), value] if name == "dt" else [7, 8])}
        _file(path, other)
        wrong = r"datetime.date\(2026, 11, 27\)" if name == "dt" else "8"
        rule = (
            rf"^Column '{name}' must have the value of its folder, '.*'; received {wrong} in row 1 "
            rf"of {re.escape(str(path))}\. Rename the folder"
        )
        if name == "hour":
            with pytest.raises(ValueError, match=rule):
                FeatureSpec([Categorical("hour")]).fit(path)
        else:
            with pytest.raises(ValueError, match=rule):
                list(_read(path, FeatureSpec([Timestamp("dt")])))
    # a column that is not read is not compared
    assert _rows(_read(path, FeatureSpec([Ids("row", rows=9)]))) == [1, 2]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (
            ["dt=1/x.parquet", "dt=1/city=a/y.parquet"],
            r"received \['city', 'dt'\] .*y\.parquet .*x\.parquet",
        ),
        (["dt=1/x.parquet", "y.parquet"], r"received \['dt'\] .*none for .*y\.parquet"),
        (["dt=1/dt=2/x.parquet"], r"x\.parquet must .*received two for 'dt'"),
        (["dt=%FF/x.parquet"], r"x\.parquet: folders .*received 'dt=%FF'"),
    ],
)
def test_folders_that_do_not_fit(tmp_path: Path, paths: list[str], message: str) -> None:
    for path in paths:
        _file(tmp_path / path)
    with pytest.raises(ValueError, match=message):
        FeatureSpec([Categorical("dt")]).fit(tmp_path)


def test_missing_and_bad_values_are_named_with_their_file(tmp_path: Path) -> None:
    _file(tmp_path / "dt=2026-11-28/x.parquet")
    _file(tmp_path / "dt=__HIVE_DEFAULT_PARTITION__/x.parquet")
    spec = FeatureSpec([Ids("row", rows=9)])
    split = TimeSplit("dt", validation="2026-11-28", test="2026-11-29")
    rule = r"'dt' must have no missing time.* in row 0 of .*HIVE_DEFAULT"
    with pytest.raises(ValueError, match=rule):
        datasets.parquet(tmp_path, spec, 8, split=split, part="train")
    (tmp_path / "dt=__HIVE_DEFAULT_PARTITION__").rename(tmp_path / "dt=noon")
    rule = "'dt' must have times.*; received string 'noon' in row 0 of .*/dt=noon/x.parquet"
    with pytest.raises(TypeError, match=rule):
        datasets.parquet(tmp_path, spec, 8, split=split, part="train")
    with pytest.raises(TypeError, match=rule):
        list(datasets.parquet(tmp_path, FeatureSpec([Timestamp("dt")]), 8))
    empty = tmp_path / "dt=2026-12-24"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match="dt=2026-12-24 must be a file, or a folder"):
        datasets.parquet(empty, spec, 8)


def test_hidden_folders_are_no_partitions(tmp_path: Path) -> None:
    _file(tmp_path / "_day=1/x.parquet")
    _file(tmp_path / "_temporary/day=1/y.parquet")
    [file] = files_of(tmp_path)
    assert file.partition == {"_day": "1"}


def test_rows_of_equal_file_names_have_parts_of_their_own(tmp_path: Path) -> None:
    """Spark gives the files of all partitions one name."""
    for day in range(200):
        _file(tmp_path / f"day={day}/part-0.parquet", {"row": [day]})
    spec = FeatureSpec([Ids("row", rows=999)])
    sizes = [
        len(_rows(datasets.parquet(tmp_path, spec, 8, split=Split(), part=part))) for part in PARTS
    ]
    assert sum(sizes) == 200
    assert 130 < sizes[0] < 190
    assert file_name("/a/b/part-0.parquet") == "part-0.parquet"


def test_files_of_several_blocks(tmp_path: Path) -> None:
    with mock.patch.object(sources, "_BLOCK_BYTES", 64):
        _file(tmp_path / "day=3/x.csv", {"row": list(range(100)), "age": [5] * 100})
        _file(tmp_path / "day=4/x.csv", {"row": list(range(100, 200)), "age": [5] * 100})
        spec = FeatureSpec([Ids("row", rows=999), Ids("day", rows=9)])
        reader = datasets.csv(tmp_path, spec, 32)
        assert len(reader.selection.units()) > 6
        days = [i for batch in reader for i in batch.sparse_features["day"].values().tolist()]
        assert days == [3] * 100 + [4] * 100
        assert len(_rows(datasets.csv(tmp_path, spec, 32, filter=ds.field("day") == 4))) == 100
        only = datasets.csv(tmp_path, FeatureSpec([Ids("day", rows=9)]), 32)
        assert sum(len(batch.labels) for batch in only) == 200


def test_files_of_several_kinds(tmp_path: Path) -> None:
    _file(tmp_path / "day=3/city=a%2Fb/x.parquet", {"row": [1, 2]})
    _file(tmp_path / "day=4/city=7/y.csv", {"row": [3]})
    _file(tmp_path / "day=4/city=7/z.tsv", {"row": [4, 5]})
    _file(tmp_path / "day=4/city=7/none.parquet", {"row": pa.array([], pa.int64())})
    spec = FeatureSpec([Ids("row", rows=9), Ids("day", rows=9), Categorical("city")]).fit(tmp_path)
    assert spec.values_of("city", [2, 3]).tolist() == ["7", "a/b"]
    [batch] = datasets.csv(tmp_path, spec, 9)
    found = {key: batch.sparse_features[key].values().tolist() for key in ("row", "day", "city")}
    assert found == {"row": [1, 2, 3, 4, 5], "day": [3, 3, 4, 4, 4], "city": [3, 3, 2, 2, 2]}
    assert _rows(datasets.csv(tmp_path, spec, 9, filter=ds.field("city") == "7")) == [3, 4, 5]

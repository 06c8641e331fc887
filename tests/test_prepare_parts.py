"""Parts of prepared tables have the rows of the parts of raw tables, for any split."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from recsys import datasets
from recsys.__main__ import main
from recsys.datasets import Split, TimeSplit, sources
from recsys.datasets.selection import PARTS
from recsys.features import (
    Categorical,
    FeatureSpec,
    Group,
    Hashed,
    Ids,
    Label,
    Numeric,
    Timestamp,
)
from recsys.features.prepared import prepared_spec, prepared_table
from recsys.prepare import prepare


def _frame(count: int, seed: int, first: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "row": range(first, first + count),
            "user": [f"u{i}" for i in draw.integers(0, 40, count)],
            "age": draw.integers(10, 90, count).astype(float),
            "seen": pd.Timestamp("2026-11-01") + pd.to_timedelta(draw.integers(0, 30, count), "D"),
            "session": draw.integers(-9, 9, count),
            "ok": draw.integers(0, 2, count),
        }
    )


def _spec() -> FeatureSpec:
    return FeatureSpec(
        [
            Ids("row", rows=9999),
            Hashed("user", rows=1000),
            Categorical("name", table="names"),
            Numeric("age", standardize=True),
            Timestamp("seen"),
            Group("session"),
            Label("ok"),
        ]
    )


def _write(folder: Path, suffix: str) -> pd.DataFrame:
    frames = []
    for number, country in enumerate(("no", "se")):
        frame = _frame(150, number, 150 * number)
        frame["name"] = frame["user"].str[-1] + "x"
        path = folder / f"country={country}/a.{suffix}"
        path.parent.mkdir(parents=True)
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pandas(frame), path, row_group_size=37)
        else:
            frame.to_csv(path, index=False)
        frames.append(frame.assign(country=country))
    return pd.concat(frames)


def _rows(reader: Any) -> list[int]:
    return [i for batch in reader for i in batch.sparse_features["row"].values().tolist()]


SPLITS = [
    Split("user", shares=(0.5, 0.2, 0.3)),
    Split("session", seed=3),
    Split("country", shares=(0.4, 0.3, 0.3), seed=3),
    Split(shares=(0.5, 0.2, 0.3), seed=1),
    TimeSplit("seen", validation="2026-11-15", test="2026-11-22"),
    TimeSplit("age", validation=40, test=60),
    TimeSplit("row", validation=100, test=100),
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_parts_are_those_of_the_raw_reader(tmp_path: Path, split: Any, suffix: str) -> None:
    with mock.patch.object(sources, "_BLOCK_BYTES", 1000):
        frame = _write(tmp_path / "raw", suffix)
        spec = _spec()
        count = prepare(
            spec, tmp_path / "raw", tmp_path / "ready", split=split, row_group_rows=16, file_rows=64
        )
        assert count == 300
        ready = FeatureSpec.load(tmp_path / "ready/prepared")
        read = datasets.parquet if suffix == "parquet" else datasets.csv
        found = []
        for part in PARTS:
            raw = list(read(tmp_path / "raw", spec, 64, split=split, part=part))
            reader = datasets.parquet(tmp_path / "ready", ready, 64, part=part)
            made = list(reader)
            assert [*map(_content, made)] == [*map(_content, raw)]
            assert reader.num_batches == len(made)
            found += _rows(made)
            ranks = [
                datasets.parquet(tmp_path / "ready", ready, 8, part=part, rank=i, world_size=2,
                                 divide="batches") for i in range(2)
            ]  # fmt: skip
            assert sorted(i for rank in ranks for i in _rows(rank)) == sorted(_rows(made))
            alone = tmp_path / f"ready/part={part}"
            assert bool(made) == alone.exists()
            if made:
                assert _rows(datasets.parquet(alone, ready, 64)) == _rows(made)
        assert sorted(found) == frame["row"].tolist()
        # the spec is fitted on the training part
        train = read(tmp_path / "raw", spec, 999, split=split, part="train")
        rows = [i for batch in train for i in batch.sparse_features["row"].values().tolist()]
        chosen = frame[frame["row"].isin(rows)]
        assert spec.fitted.num_rows == len(chosen)
        assert spec.fitted.means["age"] == pytest.approx(chosen["age"].mean())
        values = spec.fitted.vocabularies["names"].values.to_pylist()
        assert sorted(values) == sorted({*chosen["name"]})


def _content(batch: Any) -> Any:
    return (
        batch.sparse_features.values().tolist(),
        batch.dense_features.tolist(),
        batch.labels.tolist(),
        batch.groups.tolist(),
    )


def test_readers_of_parts_continue(tmp_path: Path) -> None:
    _write(tmp_path / "raw", "parquet")
    prepare(_spec(), tmp_path / "raw", tmp_path / "ready", split=SPLITS[0], row_group_rows=8)
    ready = FeatureSpec.load(tmp_path / "ready/prepared")

    def reader(part: str) -> Any:
        return datasets.parquet(
            tmp_path / "ready", ready, 8, part=part, shuffle=True, window_rows=16
        )

    first = reader("train")
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    again = reader("train")
    again.load_state_dict(state)
    assert [*map(_content, again)] == [*map(_content, batches)]
    with pytest.raises(ValueError, match="must be of a reader with the same"):
        reader("test").load_state_dict(state)
    kept = datasets.parquet(tmp_path / "ready", ready, 8, part="train", filter=ds.field("ok") == 1)
    assert kept.num_batches is None
    assert all(batch.labels.min() == 1 for batch in kept)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split("user"), r"converted values of \['user'\]"),
        (Split("name"), r"converted values of \['name'\]"),
        (Split("ok"), r"converted values of \['ok'\]"),
        (Split(), "rows in other files and places"),
        (TimeSplit("age", validation=40, test=60), r"converted values of \['age'\]"),
        (TimeSplit("seen", validation="2026-11-15", test="2026-11-22"), r"of split, \['seen'\]"),
        (TimeSplit("seen_hour", validation=1, test=2), r"converted values of \['seen_hour'\]"),
        (Split("session"), None),
        (TimeSplit("row", validation=100, test=200), None),
    ],
    ids=str,
)
def test_splits_by_lost_values_are_errors(tmp_path: Path, split: Any, message: str | None) -> None:
    frame = _write(tmp_path / "raw", "parquet")
    spec = _spec()
    prepare(spec, tmp_path / "raw", tmp_path / "ready")
    ready = FeatureSpec.load(tmp_path / "ready/prepared")
    ready = FeatureSpec.from_state_dict(ready.state_dict())
    table = prepared_table(spec, pa.Table.from_pandas(frame, preserve_index=False))
    readers: list[Any] = [
        lambda part: datasets.parquet(tmp_path / "ready", ready, 64, split=split, part=part),
        lambda part: datasets.table(table, prepared_spec(spec), 64, split=split, part=part),
    ]
    for read in readers:
        for part in PARTS:
            if message is not None:
                with pytest.raises((KeyError, ValueError), match=message) as raised:
                    read(part)
                assert "prepare(..., split=...)" in str(raised.value)
                continue
            raw = datasets.parquet(tmp_path / "raw", spec, 64, split=split, part=part)
            assert sorted(_rows(read(part))) == sorted(_rows(raw))


def test_growing_ids_keep_their_values(tmp_path: Path) -> None:
    spec = FeatureSpec([Ids("row", rows=9999), Hashed("user", rows=64, growing=True), Label("ok")])
    for name in ("raw", "numbers"):
        frame = _frame(200, 1)
        if name == "numbers":
            frame["user"] = np.random.default_rng(0).integers(0, 2**64, 200, np.uint64)
        (tmp_path / name).mkdir()
        frame.to_parquet(tmp_path / name / "a.parquet")
        spec = FeatureSpec(spec.columns)
        prepare(spec, tmp_path / name, tmp_path / f"{name} ready")
        ready = FeatureSpec.load(tmp_path / f"{name} ready/prepared")
        for part in PARTS:
            options: Any = {"split": Split("user"), "part": part}
            raw = datasets.parquet(tmp_path / name, spec, 64, **options)
            made = datasets.parquet(tmp_path / f"{name} ready", ready, 64, **options)
            assert _rows(made) == _rows(raw)


def test_a_group_that_is_a_feature_too(tmp_path: Path) -> None:
    """Its prepared column has another name, which a raw table may have, too."""
    spec = FeatureSpec([Hashed("user", rows=9), Group("user"), Label("ok")])
    data = {"user": ["a", "b"], "ok": [0, 1]}
    ready = prepared_spec(spec.fit(data))
    assert ready.converted == ("user", "user_group", "ok")
    table = prepared_table(spec, data)
    with pytest.raises(ValueError, match="converted values"):
        datasets.table(table, ready, 4, split=Split("user_group"), part="train")


def test_part_without_recorded_parts(tmp_path: Path) -> None:
    _write(tmp_path / "raw", "parquet")
    spec = _spec()
    prepare(spec, tmp_path / "raw", tmp_path / "ready")
    ready = FeatureSpec.load(tmp_path / "ready/prepared")
    with pytest.raises(
        TypeError, match=r"split must be a Split .* prepare\(\.\.\., split=\.\.\.\) wr"
    ):
        datasets.parquet(tmp_path / "ready", ready, 8, part="train")
    prepare(spec, tmp_path / "raw", tmp_path / "parts", split=SPLITS[0])
    with pytest.raises(ValueError, match="part must be 'train', 'validation' or 'test'"):
        datasets.parquet(tmp_path / "parts", ready, 8, split=Split("session"), part="dev")
    with pytest.raises(TypeError, match="split must be a Split"):
        datasets.parquet(tmp_path / "parts", ready, 8, part="dev")
    (tmp_path / "parts/part=test").rename(tmp_path / "parts/part=dev")
    rule = r"'part' must have train, validation or test .*; received 'dev' in row 0 of .*/part=dev/"
    with pytest.raises(ValueError, match=rule):
        datasets.parquet(tmp_path / "parts", ready, 8, part="train")
    # new folders, for each day
    for day in (1, 2):
        prepare(spec, tmp_path / "raw", tmp_path / f"days/day={day}", split=SPLITS[0])
    days = datasets.parquet(tmp_path / "days", ready, 64, part="validation")
    one = datasets.parquet(tmp_path / "days/day=1", ready, 64, part="validation")
    assert _rows(days) == 2 * _rows(one)


def test_bad_values_are_named(tmp_path: Path) -> None:
    frame = _frame(100, 0)
    frame.loc[71, "user"] = None
    frame.to_parquet(tmp_path / "a.parquet")
    spec = FeatureSpec([Categorical("user"), Numeric("age")])
    rule = "'user' must have no missing value; received None in row 71 of .*a.parquet"
    with pytest.raises(ValueError, match=rule):
        prepare(spec, tmp_path / "a.parquet", tmp_path / "out", split=Split("user"))
    frame.loc[71, "user"] = "u1"
    frame.loc[83, "age"] = np.inf
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "a.parquet")
    split = TimeSplit("row", validation=90, test=95)
    fresh = FeatureSpec([Categorical("user"), Numeric("age")])
    with pytest.raises(ValueError, match="'age' must have finite numbers; received inf in row 83 "):
        prepare(fresh, tmp_path / "a.parquet", tmp_path / "out", split=split)
    spec = FeatureSpec([Ids("part", rows=9)])
    with pytest.raises(ValueError, match="spec must have no column 'part' with split"):
        prepare(spec, tmp_path / "a.parquet", tmp_path / "out", split=split)
    with pytest.raises(TypeError, match="split must be a Split or TimeSplit"):
        prepare(fresh, tmp_path / "a.parquet", tmp_path / "out", split=3)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


_COMMAND = """
from recsys.features import FeatureSpec, Ids, Label
spec = FeatureSpec([Ids("row", rows=9999), Label("ok")])
"""


@pytest.mark.parametrize(
    ("options", "split"),
    [
        (["--split", "user", "--shares", "0.5,0.2,0.3", "--seed", "3"],
         Split("user", shares=(0.5, 0.2, 0.3), seed=3)),
        (["--split"], Split()),
        (["--time-split", "seen", "2026-11-15", "2026-11-22"], SPLITS[4]),
        (["--time-split", "age", "40", "60.5"], TimeSplit("age", validation=40.0, test=60.5)),
        (["--time-split", "row", "100", "200"], TimeSplit("row", validation=100, test=200)),
    ],
    ids=str,
)  # fmt: skip
def test_command(tmp_path: Path, options: list[str], split: Any) -> None:
    _write(tmp_path / "raw", "csv")
    (tmp_path / "spec.py").write_text(_COMMAND)
    files = ["--spec", str(tmp_path / "spec.py"), "--input", str(tmp_path / "raw")]
    assert main(["prepare", *files, "--output", str(tmp_path / "ready"), *options]) == 0
    ready = FeatureSpec.load(tmp_path / "ready/prepared")
    spec = FeatureSpec.load(tmp_path / "ready/features")
    for part in PARTS:
        raw = datasets.csv(tmp_path / "raw", spec, 64, split=split, part=part)
        assert _rows(datasets.parquet(tmp_path / "ready", ready, 64, part=part)) == _rows(raw)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "user", "--shares", "0.5,0.5"], "--shares must be three numbers"),
        (["--split", "user", "--shares", "1,1,1"], "must be three numbers from 0 that add up"),
        (["--split", "user", "--time-split", "seen", "1", "2"], "exclude each other"),
        (["--time-split", "seen", "2", "1"], "must not be above"),
        (["--split", "nobody"], "must have the columns ['nobody']"),
    ],
)
def test_wrong_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    _write(tmp_path / "raw", "csv")
    (tmp_path / "spec.py").write_text(_COMMAND)
    files = ["--spec", str(tmp_path / "spec.py"), "--input", str(tmp_path / "raw")]
    assert main(["prepare", *files, "--output", str(tmp_path / "ready"), *options]) == 2
    assert message in capsys.readouterr().err

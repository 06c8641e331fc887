"""Columns that a day lacks read as missing values, in each function, and only if asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv
from torch import nn

from recsys import datasets
from recsys.features import (
    Categorical,
    FeatureSpec,
    Hashed,
    Ids,
    Label,
    Numeric,
    Timestamp,
    Vector,
)
from recsys.features.columns import Column
from recsys.inference import score
from recsys.prepare import prepare

COLUMNS: dict[str, Any] = {
    "city": lambda optional: Categorical("city", optional=optional),
    "tags": lambda optional: Categorical("tags", is_list=True, weights="shares", optional=optional),
    "user": lambda optional: Hashed("user", rows=50, optional=optional),
    "film": lambda optional: Ids("film", rows=50, optional=optional),
    "age": lambda optional: Numeric("age", standardize=True, optional=optional),
    "price": lambda optional: Numeric("price", buckets=3, optional=optional),
    "seen": lambda optional: Timestamp("seen", optional=optional),
    "image": lambda optional: Vector("image", dim=2, optional=optional),
}


def _rows(count: int, seed: int) -> Any:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(0, 3, count)
    return pa.table(
        {
            "n": range(count),
            "city": [f"city {i}" for i in draw.integers(0, 9, count)],
            "tags": [[f"tag {i}" for i in range(size)] for size in sizes],
            "shares": [[1.5] * size for size in sizes],
            "user": draw.integers(0, 99, count),
            "film": draw.integers(0, 50, count),
            "age": draw.normal(size=count),
            "price": draw.normal(size=count),
            "seen": draw.integers(0, 2**31, count),
            "image": draw.normal(size=(count, 2)).tolist(),
            "ok": draw.integers(0, 2, count),
        }
    )


def _without(table: Any, name: str) -> Any:
    return table.drop_columns(["tags", "shares"] if name == "tags" else [name])


def _with_nulls(table: Any, name: str) -> Any:
    """Return the table with null in each row of a column, in place of the column."""
    for one in ["tags", "shares"] if name == "tags" else [name]:
        place = table.column_names.index(one)
        kind = table.schema.field(one).type
        table = table.set_column(place, one, pa.nulls(table.num_rows, kind))
    return table


def _spec(name: str, optional: bool = True) -> FeatureSpec:
    columns: list[Column] = [make(optional and one == name) for one, make in COLUMNS.items()]
    return FeatureSpec([*columns, Label("ok")])


def _same(first: Any, second: Any) -> bool:
    pairs = [(first.dense_features, second.dense_features), (first.labels, second.labels)]
    sparse = (first.sparse_features, second.sparse_features)
    pairs += [tuple(one.values() for one in sparse), tuple(one.lengths() for one in sparse)]
    pairs.append(tuple(one.weights() for one in sparse))
    return all(torch.equal(a, b) for a, b in pairs)


class _Model(nn.Module):
    def forward(self, dense: torch.Tensor, ids: Any) -> torch.Tensor:
        sums = torch.segment_reduce(ids.values().double(), "sum", lengths=ids.lengths(), initial=0)
        return dense.sum(1) + sums.view(-1, dense.shape[0]).sum(0).float()


@pytest.mark.parametrize("name", COLUMNS)
def test_a_day_without_the_column(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All functions return the results for a column of nulls."""
    monday, tuesday = _rows(30, 0), _rows(20, 1)
    whole, lacking = [tmp_path / "nulls", tmp_path / "lacking"]
    for folder, change in ((whole, _with_nulls), (lacking, _without)):
        folder.mkdir()
        pq.write_table(monday, folder / "1.parquet")
        pq.write_table(change(tuesday, name), folder / "2.parquet")
    wanted, spec = _spec(name).fit(whole), _spec(name)
    logger = logging.getLogger("recsys")
    logger.addHandler(caplog.handler)
    try:
        spec.fit(lacking)
    finally:
        logger.removeHandler(caplog.handler)
    read = name in spec.fit_column_names()  # others are not read by fit
    assert (f"Column '{name}' is missing in 1 of 2 files" in caplog.text) == read
    assert spec.state_dict()["description"] == wanted.state_dict()["description"]
    assert spec.fingerprints() == wanted.fingerprints()
    in_memory = _spec(name).fit([monday, _without(tuesday, name)])
    assert in_memory.fingerprints() == wanted.fingerprints()
    first = _spec(name).fit(monday)
    extended, report = first.extend(_without(tuesday, name))
    expected, other = first.extend(_with_nulls(tuesday, name))
    assert extended.fingerprints() == expected.fingerprints()
    assert str(report) == str(other)
    if name in report.shifts and name != "tags":  # lists without a value
        assert f"{name}: missing 0.0% -> 100.0%" in str(report)
    batches = [list(datasets.parquet(folder, spec, 8, shuffle=True)) for folder in (whole, lacking)]
    assert all(_same(*pair) for pair in zip(*batches, strict=True))
    [batch] = datasets.table(_without(tuesday, name), spec, 99)
    assert _same(batch, spec.transform(_with_nulls(tuesday, name)))
    for folder in (whole, lacking):
        assert prepare(spec, folder, tmp_path / f"{folder.name}-ready") == 50
    ready = FeatureSpec.load(tmp_path / "lacking-ready/prepared")
    folders = ["nulls-ready", "lacking-ready"]
    batches = [list(datasets.parquet(f"{tmp_path}/{one}/*.parquet", ready, 8)) for one in folders]
    assert all(_same(*pair) for pair in zip(*batches, strict=True))
    outputs = []
    for folder in (whole, lacking):
        files = score(_Model(), folder, tmp_path / f"{folder.name}-scores", spec=spec, keys=["n"],
                      progress=False)  # fmt: skip
        outputs.append([pq.read_table(file).to_pydict() for file in files])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_that_is_not_optional(name: str, tmp_path: Path) -> None:
    lacking = _without(_rows(9, 0), name)
    pq.write_table(lacking, tmp_path / "1.parquet")
    spec = _spec(name, optional=False).fit(_rows(9, 1))
    for act in (
        lambda: datasets.parquet(tmp_path, spec, 8),
        lambda: datasets.table(lacking, spec, 8),
        lambda: prepare(spec, tmp_path, tmp_path / "ready"),
        lambda: score(_Model(), tmp_path, tmp_path / "scores", spec=spec, progress=False),
        lambda: spec.transform(lacking),
    ):
        with pytest.raises(KeyError, match=f"must have (the|a) columns? .*'{name}'"):
            act()


def test_text_files_of_days(tmp_path: Path) -> None:
    """A column that some files lack has the type of the other files: 007 is a text."""
    rows = pa.table({"code": ["007", "x"], "ok": [0, 1]})
    csv.write_csv(rows, tmp_path / "1.csv")
    csv.write_csv(rows.drop_columns(["code"]), tmp_path / "2.csv")
    spec = FeatureSpec([Categorical("code", optional=True), Label("ok")]).fit(tmp_path)
    assert sorted(spec.fitted.vocabularies["code"].values.to_pylist()) == ["007", "x"]
    [batch] = datasets.csv(tmp_path, spec, 9)
    assert batch.sparse_features["code"].values().tolist() == [2, 3, 0, 0]
    [day] = datasets.csv(tmp_path / "2.csv", spec, 9, filter=pa.compute.field("ok") > 0)
    assert day.sparse_features["code"].values().tolist() == [0]


def test_ids_without_their_weights(tmp_path: Path) -> None:
    """Only the ids may be absent: ids need weights."""
    spec = _spec("tags").fit(_rows(9, 0))
    with pytest.raises(ValueError, match="'shares' must have"):
        spec.transform(_rows(9, 0).drop_columns(["shares"]))


def test_specs_keep_the_setting(tmp_path: Path) -> None:
    spec = _spec("city").fit(_rows(9, 0))
    spec.save(tmp_path / "spec")
    assert FeatureSpec.load(tmp_path / "spec").columns == spec.columns
    assert spec.optional_names() == ["city"]
    assert _spec("tags").optional_names() == ["tags", "shares"]
    # a spec that was fitted before takes the setting by its columns
    later = _spec("age")
    later.fitted = spec.fitted
    assert later.fingerprints() == spec.fingerprints()

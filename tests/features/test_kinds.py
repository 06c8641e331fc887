"""Texts and numbers as keys: each way to read a column has the same rows, or the same error."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv

from recsys import datasets
from recsys.features import Categorical, FeatureSpec, Group, Hashed, Label, Numeric
from recsys.inference import Predictor, package, quantize_embeddings, score
from recsys.inference.packages.columns import PackageColumns, raw_request
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.prepare import prepare

TEXTS = ["7", "007", "-12", "1e5", "2024-05-01", "true", "bob"]
DIGITS = ["7", "007", "12", "31", "0", "00"]


def spec_of(*columns: Any) -> FeatureSpec:
    return FeatureSpec([*columns, Numeric("age"), Label("ok")])


def plain_hash(text: str) -> int:
    """FNV-1a of the UTF-8 bytes, as a signed number."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value - 2**64 if value >= 2**63 else value


def table_of(keys: Any) -> pa.Table:
    keys = pa.array(keys)
    return pa.table({"key": keys, "age": [1.0] * len(keys), "ok": [0, 1] * (len(keys) // 2)})


def ids_in(batches: Any) -> list[list[int]]:
    found = []
    for batch in batches:
        bags = batch.sparse_features["key"]
        found += [bag.tolist() for bag in bags.values().split(bags.lengths().tolist())]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_digits_in_a_text_file_are_the_texts_of_the_fitted_spec(tmp_path: Path, seed: int) -> None:
    """The fitted spec decides, not the inference from a file; leading zeros stay."""
    draw = random.Random(seed)
    keys = [draw.choice([*DIGITS, None]) for _ in range(60)]
    for number in range(3):
        some = keys[20 * number : 20 * number + 20]
        lines = [f"{key or ''},1.0,{i % 2}" for i, key in enumerate(some)]
        (tmp_path / f"{number}.csv").write_text("\n".join(["key,age,ok", *lines]) + "\n")
    spec = spec_of(Hashed("key", rows=2**40, growing=True), Group("user"))
    spec.fit({"key": ["a"], "age": [1.0], "user": [None]})
    assert spec.column_kinds() == {"key": "text", "user": None}
    wanted = [[] if key is None else [plain_hash(key)] for key in keys]
    reduced = FeatureSpec([column for column in spec.columns if column.name != "user"])
    reduced.fitted = spec.fitted
    assert ids_in(datasets.csv(tmp_path / "*.csv", reduced, 7)) == wanted
    sevens = datasets.csv(tmp_path / "*.csv", reduced, 7, filter=ds.field("key") == "007")
    assert ids_in(sevens) == [[plain_hash("007")]] * keys.count("007")
    prepare(reduced, tmp_path / "*.csv", tmp_path / "ready")
    ready = FeatureSpec.load(tmp_path / "ready/prepared")
    assert ids_in(datasets.parquet(tmp_path / "ready/*.parquet", ready, 7)) == wanted
    words = FeatureSpec([Categorical("key"), Numeric("age"), Label("ok")]).fit(table_of(TEXTS[:6]))
    rows = {text: i + 2 for i, text in enumerate(sorted(TEXTS[:6]))}
    assert ids_in(datasets.csv(tmp_path / "*.csv", words, 7)) == [
        [0 if key is None else rows.get(key, 1)] for key in keys
    ]


def test_a_column_with_texts_in_one_text_file_is_text_in_all(tmp_path: Path) -> None:
    """The kind holds for all files, like within a file, at the first fit and at each read."""
    (tmp_path / "a.csv").write_text("key,age,ok\n007,1,0\n,1,1\n")
    (tmp_path / "b.csv").write_text("key,age,ok\nbob,1,0\n")
    (tmp_path / "c.csv").write_text("key,age,ok\n2024-05-01,1,0\n")
    keys = ["007", None, "bob", "2024-05-01"]
    spec = spec_of(Hashed("key", rows=2**40, growing=True))
    wanted = [[] if key is None else [plain_hash(key)] for key in keys]
    assert ids_in(datasets.csv(tmp_path, spec_of(*spec.columns[:1]).fit(tmp_path), 9)) == wanted
    for one in ("a.csv", "c.csv"):  # a file alone
        spec = spec_of(*spec.columns[:1]).fit([tmp_path / "b.csv", tmp_path / one])
        assert spec.fitted.kinds == {"key": "text"}
        position = keys.index("007") if one == "a.csv" else 3
        assert ids_in(datasets.csv(tmp_path / one, spec, 9))[0] == wanted[position]
    words = FeatureSpec([Categorical("key")]).fit(tmp_path)
    vocabulary = words.fitted.vocabularies["key"]
    assert vocabulary.values.to_pylist() == ["007", "2024-05-01", "bob"]
    pq.write_table(pa.table({"key": [7], "age": [1.0], "ok": [0]}), tmp_path / "d.parquet")
    for column in (Hashed("key", rows=9), Categorical("key"), Group("key")):
        with pytest.raises(TypeError, match=r"'key' must .*texts in .*numbers in"):
            spec_of(column).fit(tmp_path)


def test_prepare_fits_the_kinds(tmp_path: Path) -> None:
    """Also of a spec without anything else to fit."""
    (tmp_path / "a.csv").write_text("key,user,ok\n007,3,0\n")
    (tmp_path / "b.csv").write_text("key,user,ok\nbob,4,0\n")
    spec = FeatureSpec([Hashed("key", rows=2**40, growing=True), Group("user"), Label("ok")])
    prepare(spec, tmp_path / "*.csv", tmp_path / "ready")
    assert FeatureSpec.load(tmp_path / "ready/features").fitted.kinds == {
        "key": "text",
        "user": "number",
    }
    ready = FeatureSpec.load(tmp_path / "ready/prepared")
    assert ready.column_kinds() == {"key": "number", "user": "number"}
    batches = datasets.parquet(tmp_path / "ready/*.parquet", ready, 7)
    assert ids_in(batches) == [[plain_hash("007")], [plain_hash("bob")]]


CONTAINERS: dict[str, Callable[[pa.Table], Any]] = {
    "arrow": lambda table: table,
    "categories": lambda table: table.set_column(0, "key", table["key"].dictionary_encode()),
    "pandas": lambda table: table.to_pandas(),
    "objects": lambda table: pd.DataFrame(table.to_pydict()),
    "polars": pl.from_arrow,
    "dict": lambda table: {name: table[name].to_pylist() for name in table.column_names},
}


@pytest.mark.parametrize("column", [Hashed("key", rows=9), Group("key"), Categorical("key")])
@pytest.mark.parametrize("kind", ["text", "number"])
def test_the_other_kind_is_an_error(tmp_path: Path, kind: str, column: Any) -> None:
    texts, numbers = table_of(["1", "7", None, "x"]), table_of([1, 7, None, 3])
    if isinstance(column, Group):
        texts, numbers = table_of(["1", "x"]), table_of([1, 3])
    (good, bad), other = (texts, numbers), "number"
    if kind == "number":
        (good, bad), other = (numbers, texts), "text"
    message = f"'key' must have {kind}s, .*received {other}s"
    for name, contain in CONTAINERS.items():
        spec = spec_of(column).fit(contain(good))
        assert spec.column_kinds() == {"key": kind}, name
        for again in (spec, FeatureSpec.load(_saved(spec, tmp_path / name)), _loaded(spec)):
            again.transform(good)
            for convert in CONTAINERS.values():
                with pytest.raises(TypeError, match=message):
                    again.transform(convert(bad))
            pq.write_table(bad, tmp_path / "bad.parquet")
            with pytest.raises(TypeError, match=message):
                list(datasets.parquet(tmp_path / "bad.parquet", again, 2))
            with pytest.raises(TypeError, match=message):
                list(datasets.table(bad, again, 2))
            with pytest.raises(TypeError, match=message):
                prepare(again, tmp_path / "bad.parquet", tmp_path / f"ready-{id(again)}")
        parts = [spec.partial(good), spec.partial(bad)]
        for order in (parts, parts[::-1]):
            with pytest.raises(TypeError, match=r"'key' must have .*after (texts|numbers)"):
                spec_of(column).fit_parts(order)
        with pytest.raises(TypeError, match=r"'key' must have .*after (texts|numbers)"):
            spec_of(column).fit([good, bad])
    if kind == "number":
        csv.write_csv(bad, tmp_path / "bad.csv")
        with pytest.raises(TypeError, match=message):
            list(datasets.csv(tmp_path / "bad.csv", spec, 2))


def _saved(spec: FeatureSpec, folder: Path) -> Path:
    spec.save(folder)
    return folder


def _loaded(spec: FeatureSpec) -> FeatureSpec:
    other = FeatureSpec(spec.columns)
    other.load_state_dict(spec.state_dict())
    return other


def test_missing_values_have_no_kind() -> None:
    column = Hashed("key", rows=9, is_list=True)
    spec = FeatureSpec([column])
    nothing = [pa.nulls(2), pa.nulls(2, pa.list_(pa.float64())), pa.array([[], [None]])]
    for array in nothing:
        assert spec.fit(pa.table({"key": array})).fitted.kinds == {}
    tables = [pa.table({"key": array}) for array in (*nothing, pa.array([["a"], None]), *nothing)]
    assert spec.fit(tables).fitted.kinds == {"key": "text"}
    for table in tables:
        spec.transform(table)
    assert spec.fit({"other": [1], "key": [[2]]}).fitted.kinds == {"key": "number"}
    free = FeatureSpec([column])  # not fitted: both are legal
    for keys in ([["a"]], [[1]]):
        free.transform({"key": keys})
    assert not free.is_fitted


@pytest.mark.parametrize("is_fitted", [True, False])
def test_served_as_trained(tmp_path: Path, is_fitted: bool) -> None:
    """Model, package in Python, and requests of the C++ core; by tables and by files."""
    spec = spec_of(Hashed("key", rows=50))
    whole = table_of(["7", "007", *TEXTS[2:6]])
    spec.fit(whole if is_fitted else whole.select(["age"]))
    assert len(spec.fitted.kinds) == is_fitted
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(tables=spec.tables(4))
    model = quantize_embeddings(DLRM(tables, 1, [4, 4], [4, 1]).eval())
    requests = whole.drop_columns(["ok"])
    version = package(model, tmp_path / "m", requests, spec=spec, programs=["torchscript"])
    served = FeatureSpec.load(version / "spec")
    assert served.fitted.kinds == {"key": "text"}
    batch = served.transform(whole)
    with torch.no_grad():
        wanted = model(batch.dense_features, batch.sparse_features).numpy()[:, 0]
    csv.write_csv(requests[:2], tmp_path / "a.csv", csv.WriteOptions(quoting_style="none"))
    assert csv.read_csv(tmp_path / "a.csv").schema.field("key").type == pa.int64()
    for of in (version, model):
        options = {} if of is version else {"spec": served}
        out = tmp_path / type(of).__name__
        [path] = score(of, tmp_path / "a.csv", out, keys=["key"], **options)
        assert pq.read_table(path)["key"].to_pylist() == ["7", "007"]
        np.testing.assert_allclose(pq.read_table(path)["output"].to_numpy(), wanted[:2], rtol=1e-5)
    csv.write_csv(requests[5:], tmp_path / "b.csv")
    if not is_fitted:  # the files decide together
        paths = score(model, [tmp_path / "b.csv", tmp_path / "a.csv"], tmp_path / "2", spec=spec)
        found = np.concatenate([pq.read_table(path)["output"].to_numpy() for path in paths])
        np.testing.assert_allclose(found, wanted[[5, 0, 1]], rtol=1e-5)
    numbers = requests.set_column(0, "key", pa.array(range(6)))
    with Predictor(version) as predictor:
        np.testing.assert_allclose(predictor(requests)["output"][:, 0], wanted, rtol=1e-5)
        with pytest.raises(TypeError, match="'key' must have texts, as the"):
            predictor(numbers)
        with pytest.raises(TypeError, match="'key' must have texts; received int64"):
            raw_request(predictor.manifest["columns"], numbers)
    missing = requests.set_column(0, "key", pa.nulls(6))
    if is_fitted:
        with pytest.raises(TypeError, match="'key' must have texts, as the"):
            package(model, tmp_path / "wrong", numbers, spec=spec)
        inputs = [{"features": [{"name": "key", "tensor": "key"}]}]
        assert PackageColumns(spec, missing).write(tmp_path, inputs)[0]["type"] == "text"  # of fit
    else:
        with pytest.raises(TypeError, match="'key' of the example table must"):
            package(model, tmp_path / "missing", missing, spec=spec, programs=["torchscript"])

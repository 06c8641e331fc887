"""Kinds of columns that this file alone defines."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import datasets
from recsys.features import Categorical, FeatureSpec, Hashed, Label, Numeric
from recsys.features.arrow import read_keys, read_numbers, read_values
from recsys.features.columns import Column, Feature
from recsys.features.fit import Fitted, PartialFit
from recsys.features.prepared import prepared_spec, prepared_table
from recsys.features.scaling import Moments
from recsys.features.text_hash import hash_rows
from recsys.features.transform import Bags
from recsys.inference import Predictor, package, quantize_embeddings, score
from recsys.inference.packages.columns import raw_request
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.prepare import prepare


@dataclass(frozen=True)
class AboveMean(Column):
    """Comparison of a number with the mean: row 0 if missing, 1 if not above, 2 if above."""

    needs_fit = True

    def features(self, fitted: Fitted) -> list[Feature]:
        return [Feature(self.name, self.name, 3, False, 1)]

    def fit(self, statistics: PartialFit, table: Any) -> None:
        numbers, is_missing = read_numbers(statistics.values(table, self.name, False))
        present = numbers if is_missing is None else numbers[~is_missing]
        moments = statistics.moments[self.name].merged(Moments.of(present))
        statistics.moments[self.name] = moments

    def finish_fit(self, statistics: PartialFit, fitted: Fitted) -> None:
        mean = np.nextafter(statistics.moments[self.name].mean, np.inf)  # an edge is above it
        fitted.edges[self.name] = np.array([mean])

    def check_fitted(self, fitted: Fitted) -> None:
        _ = fitted.edges[self.name]

    def read(self, table: Any, fitted: Fitted) -> list[Bags]:
        numbers, is_missing = read_numbers(read_values(table, self.name, False))
        rows = 1 + (numbers >= fitted.edges[self.name][0]).astype(np.int64)
        return [Bags(rows if is_missing is None else np.where(is_missing, 0, rows), None, None)]

    def describe(
        self, fitted: Fitted, table: Any, tensors: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Return the entry of a column of buckets, which the C++ core has."""
        edges = fitted.edges[self.name].tolist()
        numeric = {"missing": None, "low": None, "high": None, "log1p": False}
        scale = {"standardize": False, "mean": 0.0, "deviation": 1.0}
        place = {"tensor": tensors[self.name], "edges": edges}
        return {"name": self.name, "kind": "buckets", "dtype": "float64"} | numeric | scale | place


@dataclass(frozen=True)
class Cross(Column):
    """The pair of the values of two columns, hashed."""

    _: KW_ONLY
    first: str
    second: str
    rows: int

    def column_names(self) -> list[str]:
        return [self.first, self.second]

    def features(self, fitted: Fitted) -> list[Feature]:
        return [Feature(self.name, self.name, self.rows, False)]

    def read(self, table: Any, fitted: Fitted) -> list[Bags]:
        one, other = (
            read_keys(read_values(table, name, False)).hashed() for name in self.column_names()
        )
        return [Bags(hash_rows(hash_rows(one, 2**40) ^ other, self.rows), None, None)]


ROWS: dict[str, Any] = {
    "city": ["Oslo", "Rome", "Rome", "Bonn"],
    "device": ["tv", "tv", "phone", "tv"],
    "age": [20, None, 40, 30],
    "price": [1.0, 2.0, 3.0, 4.0],
    "ok": [0, 1, 1, 0],
}
COLUMNS = [
    Categorical("city"),
    AboveMean("age"),
    Cross("pair", first="city", second="device", rows=1000),
    Numeric("price"),
    Label("ok"),
]


def same(found: Any, expected: Any) -> None:
    assert found.sparse_features.keys() == expected.sparse_features.keys()
    assert torch.equal(found.sparse_features.values(), expected.sparse_features.values())
    assert torch.equal(found.sparse_features.lengths(), expected.sparse_features.lengths())
    assert torch.equal(found.dense_features, expected.dense_features)
    assert torch.equal(found.labels, expected.labels)


@pytest.fixture
def fitted() -> FeatureSpec:
    return FeatureSpec(COLUMNS).fit(ROWS)


def test_fit_and_transform(fitted: FeatureSpec) -> None:
    ids = fitted.transform(ROWS).sparse_features
    assert ids["age"].values().tolist() == [1, 0, 2, 1]
    pairs = ids["pair"].values().tolist()
    assert len({*pairs}) == 4
    assert (
        fitted.transform(ROWS | {"device": ["tv"] * 4})
        .sparse_features["pair"]
        .values()[[1, 2]]
        .tolist()
        == [pairs[1]] * 2
    )
    assert fitted.column_names() == ["city", "age", "device", "price", "ok"]
    assert [(table.name, table.num_embeddings) for table in fitted.tables(4)] == [
        ("city", 5), ("age", 3), ("pair", 1000),
    ]  # fmt: skip
    halves = [{name: column[i::2] for name, column in ROWS.items()} for i in range(2)]
    parts = [pickle.loads(pickle.dumps(fitted.partial(half))) for half in halves]
    same(FeatureSpec(COLUMNS).fit_parts(parts).transform(ROWS), fitted.transform(ROWS))
    with pytest.raises(RuntimeError, match="must be fitted"):
        FeatureSpec(COLUMNS).transform(ROWS)
    with pytest.raises(ValueError, match=r"must have distinct names; received .*'age'"):
        FeatureSpec([AboveMean("age"), Numeric("age")])
    with pytest.raises(ValueError, match=r"tables of their own; .*'age'"):
        FeatureSpec([AboveMean("age"), Hashed("user", rows=9, table="age")])
    with pytest.raises(TypeError, match=r"AboveMean\.name must be .*received 3"):
        AboveMean(3)  # type: ignore[arg-type]


def test_errors_name_file_and_row(tmp_path: Path) -> None:
    bad = pa.table(ROWS | {"age": [1.0, 2.0, float("nan"), 3.0]})
    pq.write_table(bad, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'age' must .*row 2 of .*a\.parquet"):
        FeatureSpec(COLUMNS).fit(tmp_path / "a.parquet")


def test_save_and_load(fitted: FeatureSpec, tmp_path: Path) -> None:
    fitted.save(tmp_path / "spec")
    again = FeatureSpec.load(tmp_path / "spec")
    assert again.columns == fitted.columns
    same(again.transform(ROWS), fitted.transform(ROWS))
    other = FeatureSpec(COLUMNS)
    other.load_state_dict(fitted.state_dict())
    same(other.transform(ROWS), fitted.transform(ROWS))
    description = json.loads((tmp_path / "spec/features.json").read_text())
    assert description["columns"][1] == {"kind": "AboveMean", "name": "age"}
    code = "import sys; from recsys.features import FeatureSpec; FeatureSpec.load(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path / "spec")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "received 'AboveMean'. Import the module that defines it." in done.stderr


def test_prepared_tables(fitted: FeatureSpec, tmp_path: Path) -> None:
    same(prepared_spec(fitted).transform(prepared_table(fitted, ROWS)), fitted.transform(ROWS))
    pq.write_table(pa.table(ROWS), tmp_path / "a.parquet")
    prepare(FeatureSpec(COLUMNS), tmp_path / "a.parquet", tmp_path / "ready")
    ready = FeatureSpec.load(tmp_path / "ready/prepared")
    (batch,) = datasets.parquet(tmp_path / "ready", ready, 8)
    (raw,) = datasets.parquet(tmp_path / "a.parquet", fitted, 8)
    same(batch, raw)


def test_packages(tmp_path: Path) -> None:
    spec = FeatureSpec([column for column in COLUMNS if column.name != "pair"]).fit(ROWS)
    tables = EmbeddingBagCollection(tables=spec.tables(4))
    model = quantize_embeddings(DLRM(tables, 1, [4, 4], [4, 1]).eval())
    version = package(model, tmp_path / "m", ROWS, spec=spec, programs=["torchscript"])
    batch = spec.transform(ROWS)
    with torch.no_grad():
        expected = model(batch.dense_features, batch.sparse_features).numpy()
    with Predictor(version) as predictor:
        np.testing.assert_allclose(predictor(ROWS)["output"], expected, 1e-5, 1e-6)
        request = raw_request(predictor.manifest["columns"], ROWS)
    assert request["age"].tolist() == [20, 0, 40, 30]  # type: ignore[union-attr]
    pq.write_table(pa.table(ROWS), tmp_path / "a.parquet")
    [result] = score(version, tmp_path / "a.parquet", tmp_path / "out")
    np.testing.assert_allclose(pq.read_table(result)["output"], expected[:, 0], 1e-5, 1e-6)


def test_a_kind_that_packages_do_not_have(fitted: FeatureSpec, tmp_path: Path) -> None:
    tables = EmbeddingBagCollection(tables=fitted.tables(4))
    model = quantize_embeddings(DLRM(tables, 1, [4, 4], [4, 1]).eval())
    with pytest.raises(TypeError, match=r"method describe; received the Cross.*'pair'"):
        package(model, tmp_path / "m", ROWS, spec=fitted, programs=["torchscript"])
    assert not list((tmp_path / "m").glob("[0-9]*"))

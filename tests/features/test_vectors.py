"""Columns of vectors: dense values, missing vectors, bad vectors, files, prepared tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import datasets
from recsys.features import FeatureSpec, Ids, Label, Numeric, Vector
from recsys.features.columns import Column
from recsys.inference import Predictor, inspect, package, quantize_embeddings, score
from recsys.inference.packages.columns import raw_request
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.prepare import prepare

DIM = 5
LISTS = [
    pa.list_(pa.float32()),
    pa.list_(pa.float32(), DIM),
    pa.list_(pa.float16(), DIM),
    pa.large_list(pa.float64()),
    pa.list_view(pa.float32()),
    pa.list_(pa.int8()),
]
COLUMNS: list[Column] = [
    Numeric("age", standardize=True),
    Vector("image", dim=DIM),
    Ids("film", rows=9),
    Label("ok"),
]


def vectors_of(seed: int, count: int) -> list[list[int] | None]:
    random = np.random.default_rng(seed)
    found: list[Any] = random.integers(-99, 99, (count, DIM)).tolist()
    return [None if random.random() < 0.2 else vector for vector in found]


def filled(vectors: list[list[int] | None]) -> list[list[float]]:
    return [[0.0] * DIM if vector is None else [*map(float, vector)] for vector in vectors]


def rows_of(seed: int, count: int, kind: Any) -> pa.Table:
    random = np.random.default_rng(seed)
    vectors = pa.array([[*map(kind.value_type.to_pandas_dtype(), vector)] if vector else None
                        for vector in vectors_of(seed, count)], kind)  # fmt: skip
    return pa.table(
        {
            "age": random.integers(0, 99, count),
            "image": vectors,
            "film": random.integers(0, 9, count),
            "ok": random.integers(0, 2, count),
        }
    )


@pytest.mark.parametrize("kind", LISTS, ids=str)
def test_lists_of_all_types(kind: Any) -> None:
    table = rows_of(0, 50, kind)
    batch = FeatureSpec(COLUMNS).fit(table).transform(table)
    assert batch.dense_names == ("age", *(f"image_{i}" for i in range(DIM)))
    assert batch.dense_features.dtype is torch.float32
    assert batch.dense_features[:, 1:].tolist() == filled(vectors_of(0, 50))
    spec = FeatureSpec([Vector("image", dim=DIM)])
    for start, stop in ((7, 20), (3, 3)):  # with an offset, and without rows
        found = spec.transform(table.slice(start, stop - start)).dense_features
        assert found.shape == (stop - start, DIM)
        assert found.tolist() == filled(vectors_of(0, 50)[start:stop])


def test_tables_in_memory() -> None:
    spec = FeatureSpec([Vector("v", dim=2)])
    expected = [[0.5, 1.0], [2.0, -3.0]]
    for data in (expected, np.array(expected), torch.tensor(expected)):
        assert spec.transform({"v": data}).dense_features.tolist() == expected
    frame = pd.DataFrame({"v": [np.array(expected[0]), None]})
    assert spec.transform(frame).dense_features.tolist() == [expected[0], [0.0, 0.0]]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.array(expected))
    assert spec.transform(pa.table({"v": tensors})).dense_features.tolist() == expected
    assert spec.transform({"v": [None, None]}).dense_features.tolist() == [[0.0, 0.0]] * 2
    chunks = pa.chunked_array([[expected[0]], [None, expected[1]]])
    found = spec.transform(pa.table({"v": chunks})).dense_features
    assert found.tolist() == [expected[0], [0.0, 0.0], expected[1]]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([1.0], ValueError, "must have lists of length 2; received 1 in row 2{}. Set dim"),
        ([1.0, 2.0, 3.0], ValueError, "must have lists of length 2; received 3 in row 2{}. "),
        ([], ValueError, "must have lists of length 2; received 0 in row 2{}. Set dim"),
        ([0.0, None], ValueError, "must have no missing number in a vector; received None in row"),
        ([0.0, float("nan")], ValueError, "must have finite numbers; received nan in row 2{}. "
         "Write null for a missing vector."),
        ([0.0, -float("inf")], ValueError, "must have finite numbers; received -inf in row 2{}"),
        ([1e39, 0.0], ValueError, "must have numbers in the range of float32; received 1e+39 in "),
    ],
)  # fmt: skip
def test_bad_vectors_are_named(
    tmp_path: Path, bad: list[Any], error: type[Exception], message: str
) -> None:
    spec = FeatureSpec([Vector("v", dim=2), Label("ok")])
    table = pa.table({"v": [[1.0, 2.0], None, bad], "ok": [0, 1, 1]})
    with pytest.raises(error, match="Column 'v' " + re.escape(message.format(""))):
        spec.transform(table)
    path = tmp_path / "day.parquet"
    pq.write_table(table, path)
    wanted = "Column 'v' " + re.escape(message.format(f" of {path}"))
    with pytest.raises(error, match=wanted):
        list(datasets.parquet(path, spec, 8))
    with pytest.raises(error, match=wanted):
        prepare(spec, path, tmp_path / "ready")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], r"must have .*received double\. Describe"),
        ([["a", "b"]], r"must have .*received string\. Cast it\.$"),
        ([[[1.0], [2.0]]], r"must have .*received .*\. Flatten"),
        ([{"a": 1}], r"must have lists; received struct<a: int64>\.$"),
    ],
)
def test_other_types_are_named(values: list[Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"Column 'v' {message}"):
        FeatureSpec([Vector("v", dim=2)]).transform({"v": values})


def test_names_are_distinct() -> None:
    with pytest.raises(ValueError, match=r"must have distinct names; received \['v_1'\] twice"):
        FeatureSpec([Vector("v", dim=2), Numeric("v_1")])
    with pytest.raises(KeyError, match="must have a column 'v'"):
        FeatureSpec([Vector("v", dim=2)]).transform({"w": [[1.0, 2.0]]})


def test_files_and_saved_specs(tmp_path: Path) -> None:
    """Raw and prepared tables have equal batches; a saved spec has the size of the vectors."""
    for number, kind in enumerate(LISTS[:2]):
        pq.write_table(rows_of(number, 30, kind), tmp_path / f"{number}.parquet", row_group_size=7)
    paths = f"{tmp_path}/*.parquet"
    spec = FeatureSpec(COLUMNS)
    prepare(spec, paths, tmp_path / "ready")
    spec.save(tmp_path / "spec")
    loaded = FeatureSpec.load(tmp_path / "spec")
    assert loaded.columns == tuple(COLUMNS)
    other = FeatureSpec(COLUMNS)
    other.load_state_dict(spec.state_dict())
    ready = FeatureSpec.load(tmp_path / "ready/prepared")
    assert ready.dense_names == spec.dense_names
    raw, again, prepared = (
        torch.cat([batch.dense_features for batch in datasets.parquet(path, one, 8)])
        for path, one in ((paths, loaded), (paths, other), (tmp_path / "ready", ready))
    )
    assert raw[:, 1:].tolist() == filled(vectors_of(0, 30) + vectors_of(1, 30))
    assert torch.equal(raw, again)
    assert torch.equal(raw, prepared)


def test_packages(tmp_path: Path) -> None:
    """A package has the scores of the model; a missing vector is a list of length 0 in the core."""
    table = rows_of(0, 30, LISTS[1])
    spec = FeatureSpec(COLUMNS).fit(table)
    tables = EmbeddingBagCollection(tables=spec.tables(4))
    model = quantize_embeddings(DLRM(tables, 1 + DIM, [4, 4], [4, 1]).eval())
    version = package(model, tmp_path / "m", table, spec=spec, programs=["torchscript"])
    batch = spec.transform(table)
    with torch.no_grad():
        expected = model(batch.dense_features, batch.sparse_features).numpy()
    with Predictor(version) as predictor:
        np.testing.assert_allclose(predictor(table)["output"], expected, 1e-5, 1e-6)
        request = raw_request(predictor.manifest["columns"], table)
        rows = {"age": [1], "film": [2]}
        for image, message in (
            ([[1.0]], "lists of length 5; received 1 in row 0. Send vectors of this length."),
            ([1.0], "must have lists; received double. Send a list for each row."),
        ):
            with pytest.raises((TypeError, ValueError), match=re.escape(message)):
                predictor(rows | {"image": image})
            with pytest.raises((TypeError, ValueError), match=re.escape(message)):
                raw_request(predictor.manifest["columns"], rows | {"image": image})
    vectors = vectors_of(0, 30)
    lengths, numbers = request["image.lengths"], request["image"]
    assert isinstance(lengths, torch.Tensor)
    assert isinstance(numbers, torch.Tensor)
    assert lengths.tolist() == [DIM if vector else 0 for vector in vectors]
    assert numbers.tolist() == [number for vector in vectors for number in vector or []]
    assert "column image: lists of float32, vector" in inspect(version).splitlines()
    pq.write_table(table, tmp_path / "a.parquet")
    [result] = score(version, tmp_path / "a.parquet", tmp_path / "out")
    np.testing.assert_allclose(pq.read_table(result)["output"], expected[:, 0], 1e-5, 1e-6)

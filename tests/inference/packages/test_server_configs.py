"""Configuration files of servers."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from recsys.inference.packages.server_configs import config_pbtxt, kserve

DENSE = {
    "name": "age", "kind": "dense", "dtype": "float32", "shape": [-1, 2], "default": None,
}  # fmt: skip
OUTPUT = {"name": "score", "kind": "rows", "dtype": "float32", "shape": [-1, 1]}


def manifest_of(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], device: str) -> Any:
    return {
        "programs": [{"device": device}],
        "inputs": inputs,
        "outputs": outputs,
        "columns": [],
    }


def jagged(weighted: bool) -> dict[str, Any]:
    features = [{"name": "film", "tensor": "sparse.film", "rows": 10}]
    return {"name": "sparse", "kind": "jagged", "weighted": weighted, "features": features}


def tensor_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("input", "output"))]


def test_requests_have_raw_columns() -> None:
    manifest = manifest_of([DENSE, jagged(True)], [], "cpu")
    tags = {"name": "tags", "dtype": "text", "is_list": True, "weights": "share"}
    manifest["columns"] = [tags, {"name": "age", "dtype": "float64"}]
    assert tensor_lines(config_pbtxt(manifest, "movies")) == [
        'input { name: "tags" data_type: TYPE_STRING dims: [-1] optional: true }',
        'input { name: "tags.missing" data_type: TYPE_BOOL dims: [-1] optional: true }',
        'input { name: "tags.lengths" data_type: TYPE_INT64 dims: [-1] optional: true }',
        'input { name: "share" data_type: TYPE_FP32 dims: [-1] optional: true }',
        'input { name: "age" data_type: TYPE_FP64 dims: [-1] optional: true }',
        'input { name: "age.missing" data_type: TYPE_BOOL dims: [-1] optional: true }',
    ]


def test_requests_have_the_tensors_of_the_manifest() -> None:
    by_default = DENSE | {"name": "size", "dtype": "float64", "shape": [-1], "default": 0.5}
    text = config_pbtxt(manifest_of([DENSE, by_default, jagged(True)], [OUTPUT], "cpu"), "movies")
    assert tensor_lines(text) == [
        'input { name: "age" data_type: TYPE_FP32 dims: [-1, 2] }',
        'input { name: "size" data_type: TYPE_FP64 dims: [-1] optional: true }',
        'input { name: "sparse.film" data_type: TYPE_INT64 dims: [-1] optional: true }',
        'input { name: "sparse.film.lengths" data_type: TYPE_INT64 dims: [-1] optional: true }',
        'input { name: "sparse.film.weights" data_type: TYPE_FP32 dims: [-1] optional: true }',
        'output { name: "score" data_type: TYPE_FP32 dims: [-1, 1] }',
    ]
    assert "weights" not in config_pbtxt(manifest_of([jagged(False)], [OUTPUT], "cpu"), "movies")


@pytest.mark.parametrize(("dtype", "kind"), [("text", "TYPE_STRING"), ("int64", "TYPE_INT64")])
def test_values_of_recommended_rows_are_outputs(dtype: str, kind: str) -> None:
    output = OUTPUT | {"name": "1", "dtype": "int64", "shape": [-1, 5], "vocabulary": "items"}
    manifest = manifest_of([], [output], "cpu")
    other = {"name": "age", "dtype": "float64", "kind": "numeric"}
    items = {"name": "seen", "dtype": dtype, "kind": "categorical", "table": "items"}
    manifest["columns"] = [other, items | {"table": "others", "dtype": "bool"}, items]
    assert tensor_lines(config_pbtxt(manifest, "movies"))[-3:] == [
        'output { name: "1" data_type: TYPE_INT64 dims: [-1, 5] }',
        f'output {{ name: "values" data_type: {kind} dims: [-1, 5] }}',
        'output { name: "values.missing" data_type: TYPE_BOOL dims: [-1, 5] }',
    ]


@pytest.mark.parametrize(("name", "prefix"), [("film", "film."), ("", "")])
def test_jagged_outputs_are_several_tensors(name: str, prefix: str) -> None:
    output = {
        "name": name, "kind": "jagged", "dtype": "float16", "shape": [-1, 4],
        "lengths_dtype": "int32", "weights_dtype": "float32",
    }  # fmt: skip
    text = config_pbtxt(manifest_of([DENSE], [output], "cpu"), "movies")
    assert tensor_lines(text)[1:] == [
        f'output {{ name: "{prefix}values" data_type: TYPE_FP16 dims: [-1, 4] }}',
        f'output {{ name: "{prefix}lengths" data_type: TYPE_INT32 dims: [-1] }}',
        f'output {{ name: "{prefix}weights" data_type: TYPE_FP32 dims: [-1] }}',
    ]


@pytest.mark.parametrize(("device", "kind"), [("cpu", "KIND_CPU"), ("cuda", "KIND_GPU")])
def test_instances_are_on_the_device_of_the_program(device: str, kind: str) -> None:
    text = config_pbtxt(manifest_of([DENSE], [OUTPUT], device), "movies")
    assert f"instance_group {{ kind: {kind} count: 1 }}" in text


def test_quotes_in_names_are_escaped() -> None:
    quoted = DENSE | {"name": 'a"b\\c é'}
    text = config_pbtxt(manifest_of([quoted], [OUTPUT], "cpu"), "movies")
    assert 'name: "a\\"b\\\\c é"' in text


@pytest.mark.parametrize(
    ("name", "service"),
    [("movies", "movies"), ("My_Films.v2", "my-films-v2"), ("a" * 80, "a" * 63)],
)
def test_the_service_has_a_name_that_kubernetes_accepts(name: str, service: str) -> None:
    document = yaml.safe_load(kserve(name, "pvc://claim/models"))
    assert document["kind"] == "InferenceService"
    assert document["metadata"] == {"name": service}
    model = document["spec"]["predictor"]["model"]
    assert model["storageUri"] == "pvc://claim/models"
    assert model["modelFormat"] == {"name": "triton"}


def test_values_of_yaml_are_quoted() -> None:
    uri = "s3://models/a: b #c"
    document = yaml.safe_load(kserve("123", uri))
    assert document["spec"]["predictor"]["model"]["storageUri"] == uri
    assert document["metadata"] == {"name": "123"}


@pytest.mark.parametrize(
    ("name", "uri", "message"),
    [
        ("movies", "/models", "uri must .*received '/models'"),
        ("__", "s3://models", "name must .*received '__'"),
    ],
)
def test_bad_names_and_addresses_are_refused(name: str, uri: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kserve(name, uri)

"""Configuration files of servers: Triton's `config.pbtxt` and KServe's `InferenceService`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recsys.base.checked import checked

__all__ = ["config_pbtxt", "kserve"]

BACKEND = "recsys"
"""Triton's name of the backend: the folder of its library `libtriton_recsys.so`."""

_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "text": "TYPE_STRING",
}

_PARAMETERS = {"num_threads": "1", "poll_ms": "100", "verify_tables": "1"}
"""Options of the predictor; see `recsys_options` in `recsys_predictor.h`."""


@checked
def config_pbtxt(manifest: Mapping[str, Any], name: str) -> str:
    """Return Triton's configuration of a package.

    Requests have the tensors of the manifest, without a batch dim in front: `max_batch_size` is 0,
    and the backend merges requests up to `max_rows` of the manifest. Absent features, dense inputs
    with a default and raw columns are optional. The values of recommended rows are outputs, too.

    Args:
        manifest: The content of `manifest.json`.
        name: Name of the model, which is the name of the package's folder.

    Returns:
        The text of `config.pbtxt`.

    Raises:
        TypeError: An argument has another type.
        KeyError: The manifest lacks a field.

    Example:
        >>> manifest = {
        ...     "programs": [{"device": "cpu"}],
        ...     "inputs": [{"name": "age", "kind": "dense", "dtype": "float32",
        ...                 "shape": [-1, 1], "default": None}],
        ...     "columns": [],
        ...     "outputs": [{"name": "score", "kind": "rows", "dtype": "float32",
        ...                  "shape": [-1, 1]}],
        ... }
        >>> print(config_pbtxt(manifest, "movies"))
        name: "movies"
        backend: "recsys"
        max_batch_size: 0
        input { name: "age" data_type: TYPE_FP32 dims: [-1, 1] }
        output { name: "score" data_type: TYPE_FP32 dims: [-1, 1] }
        instance_group { kind: KIND_CPU count: 1 }
        parameters { key: "num_threads" value { string_value: "1" } }
        parameters { key: "poll_ms" value { string_value: "100" } }
        parameters { key: "verify_tables" value { string_value: "1" } }
        <BLANKLINE>
    """
    kind = "KIND_GPU" if manifest["programs"][0]["device"] == "cuda" else "KIND_CPU"
    lines = [
        f"name: {_quoted(name)}",
        f"backend: {_quoted(BACKEND)}",
        "max_batch_size: 0",
        *_request_lines(manifest),
        *(line for output in manifest["outputs"] for line in _output_lines(output)),
        *_value_lines(manifest),
        f"instance_group {{ kind: {kind} count: 1 }}",
        *(
            f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
            for key, value in _PARAMETERS.items()
        ),
    ]
    return "\n".join(lines) + "\n"


@checked
def kserve(name: str, uri: str) -> str:
    """Return a manifest of a KServe `InferenceService` that serves a package by Triton.

    The service runs the image `recsys-triton`, which holds Triton and the backend; the guide to
    serving has its Dockerfile. Replace the image's name by the name in your registry.

    Args:
        name: Name of the model. The service has it in lower case, with `-` for other characters.
        uri: Address of the folder that contains the package, such as `s3://models` for
            `s3://models/movies`.

    Returns:
        The text of a YAML file for `kubectl apply`.

    Raises:
        TypeError: An argument is not a string.
        ValueError: The name has neither a letter nor a digit, or the address has no scheme.

    Example:
        >>> print(kserve("movies", "s3://models"))
        apiVersion: serving.kserve.io/v1beta1
        kind: InferenceService
        metadata:
          name: movies
        spec:
          predictor:
            model:
              modelFormat:
                name: triton
              protocolVersion: v2
              storageUri: s3://models
              image: recsys-triton:latest
        <BLANKLINE>
    """
    import yaml  # not everybody needs it

    service = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
    if not service:
        raise ValueError(
            f"name must have a letter or a digit; received {name!r}. Rename the package."
        )
    if not re.match(r"[a-z][a-z0-9+.-]*://.", uri):
        raise ValueError(
            f"uri must be an address with a scheme; received {uri!r}. Name the folder that "
            "contains the package, such as 's3://models' or 'pvc://claim/models'."
        )
    document = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": service},
        "spec": {
            "predictor": {
                "model": {
                    "modelFormat": {"name": "triton"},
                    "protocolVersion": "v2",
                    "storageUri": uri,
                    "image": "recsys-triton:latest",
                }
            }
        },
    }
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _tensor_line(
    field: str, name: str, dtype: str, shape: Sequence[int], is_optional: bool = False
) -> str:
    optional = " optional: true" if is_optional else ""
    dims = ", ".join(map(str, shape))
    return (
        f"{field} {{ name: {_quoted(name)} data_type: {_TYPES[dtype]} dims: [{dims}]{optional} }}"
    )


def _input_lines(one: Mapping[str, Any]) -> Iterator[str]:
    if one["kind"] == "dense":
        is_optional = one["default"] is not None
        yield _tensor_line("input", one["name"], one["dtype"], one["shape"], is_optional)
        return
    for feature in one["features"]:
        tensor = feature["tensor"]
        yield _tensor_line("input", tensor, "int64", [-1], is_optional=True)
        yield _tensor_line("input", f"{tensor}.lengths", "int64", [-1], is_optional=True)
        if one["weighted"]:
            yield _tensor_line("input", f"{tensor}.weights", "float32", [-1], is_optional=True)


def _request_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of raw columns, or of the model's inputs if the package has no columns."""
    if not manifest["columns"]:
        for entry in manifest["inputs"]:
            yield from _input_lines(entry)
    weights: set[str] = set()  # columns may share them
    for column in manifest["columns"]:
        name = column["name"]
        yield _tensor_line("input", name, column["dtype"], [-1], is_optional=True)
        yield _tensor_line("input", f"{name}.missing", "bool", [-1], is_optional=True)
        if column.get("is_list"):
            yield _tensor_line("input", f"{name}.lengths", "int64", [-1], is_optional=True)
        if column.get("weights") and column["weights"] not in weights:
            weights.add(column["weights"])
            yield _tensor_line("input", column["weights"], "float32", [-1], is_optional=True)


def _output_lines(one: Mapping[str, Any]) -> Iterator[str]:
    if one["kind"] == "rows":
        yield _tensor_line("output", one["name"], one["dtype"], one["shape"])
        return
    prefix = f"{one['name']}." if one["name"] else ""
    yield _tensor_line("output", f"{prefix}values", one["dtype"], one["shape"])
    yield _tensor_line("output", f"{prefix}lengths", one["lengths_dtype"], [-1])
    if one["weights_dtype"] is not None:
        yield _tensor_line("output", f"{prefix}weights", one["weights_dtype"], [-1])


def _value_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the values of recommended rows."""
    for output in manifest["outputs"]:
        if output.get("vocabulary") is not None:
            dtype = next(
                column["dtype"] for column in manifest["columns"]
                if column["kind"] == "categorical" and column["table"] == output["vocabulary"]
            )  # fmt: skip
            yield _tensor_line("output", "values", dtype, output["shape"])
            yield _tensor_line("output", "values.missing", "bool", output["shape"])

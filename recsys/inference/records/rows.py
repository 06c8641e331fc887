"""Rows of a record: requests and answers as Arrow tables.

Shapes: `B` rows, `N` ids.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from recsys.datasets.memory import table_of

__all__ = [
    "PREDICTION",
    "RECORD",
    "SHADOW",
    "column_of_output",
    "copied",
    "joined_requests",
    "outputs_of",
    "request_columns",
]

PREDICTION: Final = "prediction_"
SHADOW: Final = "shadow_"
RECORD: Final = "record_"

_Columns: TypeAlias = dict[str, Any]


def copied(data: Any) -> Any:
    """Return a copy of a request, or of an answer, that its owner may change later."""
    if isinstance(data, pa.Table | pa.RecordBatch):
        return data  # never changes
    if isinstance(data, Mapping):
        return {name: _copied_column(data[name]) for name in data}
    return copy.deepcopy(data)


def _copied_column(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().clone()
    if isinstance(values, list):
        return [list(value) if isinstance(value, list) else value for value in values]
    return values if isinstance(values, pa.Array | pa.ChunkedArray) else copy.copy(values)


def joined_requests(requests: list[Any]) -> Any:
    """Return requests as one.

    Args:
        requests: Copies of requests with the same columns: dicts of lists, arrays or tensors, or
            tables.

    Raises:
        TypeError: A column has values of several types.
        ValueError: Requests have other columns.
    """
    if len(requests) == 1:
        return requests[0]
    first = requests[0]
    if not isinstance(first, dict):
        tables = [table_of(request) for request in requests]
        return pa.concat_tables(tables, promote_options="permissive")
    if any(not isinstance(r, dict) or r.keys() != first.keys() for r in requests):
        raise ValueError("Requests must have the same columns.")
    joined: dict[str, Any] = {}
    for name, values in first.items():
        parts = [request[name] for request in requests]
        if isinstance(values, torch.Tensor):
            joined[name] = torch.cat(parts)
        elif isinstance(values, np.ndarray):
            joined[name] = np.concatenate(parts)
        else:
            joined[name] = [value for part in parts for value in part]
    return joined


def request_columns(manifest: Mapping[str, Any], names: list[str], request: Any) -> _Columns:
    """Return the columns of a request.

    Args:
        manifest: The manifest of the package.
        names: The columns to take of a table; a column that the request lacks is left out.
        request: A table of raw columns; or tensors, as for `Predictor`.

    Raises:
        TypeError: It is not a table.
        ValueError: Columns have different numbers of rows.
    """
    if manifest["columns"]:
        table = table_of(request)
        return {name: _plain(table[name]) for name in names if name in table.column_names}
    columns: _Columns = {}
    for entry in manifest["inputs"]:
        if entry["kind"] == "dense":
            if entry["name"] in request:
                columns[entry["name"]] = column_of_output(np.asarray(request[entry["name"]]))
            continue
        for feature in entry["features"]:
            name = feature["tensor"]
            if name not in request:
                continue
            ids = np.asarray(request[name]).astype(np.int64)
            lengths = np.asarray(request.get(f"{name}.lengths", np.ones(len(ids), np.int64)))
            columns[name] = _lists(ids, lengths)
            if f"{name}.weights" in request:
                columns[f"{name}.weights"] = _lists(np.asarray(request[f"{name}.weights"]), lengths)
    for name in set(names) & set(request):
        columns[name] = _plain(pa.chunked_array([pa.array(_as_list(request[name]))]))
    return columns


def _as_list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def column_of_output(values: np.ndarray[Any, Any]) -> Any:
    """Return an output [B], [B, 1] or [B, D] as an Arrow column of numbers or of lists."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    kind = None
    if values.dtype == object:  # values of a vocabulary, or None
        has_numbers = any(isinstance(value, int) for value in values.flat)
        kind = pa.int64() if has_numbers else pa.string()
    if values.ndim == 1:
        return pa.array(values, kind)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), kind)
    return pa.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))


def outputs_of(prefix: str, response: Mapping[str, Any]) -> _Columns:
    """Return the columns of an answer.

    Args:
        prefix: `PREDICTION` or `SHADOW`.
        response: Arrays by name, [B], [B, 1] or [B, D].
    """
    return {f"{prefix}{name}": column_of_output(values) for name, values in response.items()}


def _lists(values: Any, lengths: Any) -> Any:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def _plain(column: Any) -> Any:
    """Return a column of the widest type of its kind, so that all requests have one type."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    wide = _widest(array.type)
    return array if wide == array.type else array.cast(wide)


def _widest(kind: Any) -> Any:
    types = pa.types
    if types.is_string(kind) or types.is_string_view(kind):
        return pa.large_string()
    if types.is_boolean(kind) or (types.is_integer(kind) and kind != pa.uint64()):
        return pa.int64()
    if types.is_floating(kind):
        return pa.float64()
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    if any(test(kind) for test in (*lists, types.is_list_view, types.is_large_list_view)):
        return pa.large_list(_widest(kind.value_type))
    return kind

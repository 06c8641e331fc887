"""Raw columns of a serving package: the `FeatureSpec`, and requests with its columns.

docs/serving_rules.md lists the rules of conversion, which the C++ core shares
(`recsys/inference/cpp/columns.cpp`).

Shapes: `B` rows, `N` values, `V` values of a vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from recsys.base.arguments import repeated
from recsys.datasets.memory import table_of
from recsys.datasets.utils import Batch
from recsys.features.arrow import (
    Values,
    numbers_of,
    read_integers,
    read_keys,
    read_numbers,
    read_values,
)
from recsys.features.id_columns import read_id_weights
from recsys.features.save import save_folder
from recsys.features.spec import FeatureSpec
from recsys.features.text_hash import text_buffers
from recsys.features.times import read_seconds
from recsys.features.vectors import read_vectors
from recsys.features.vocabulary import Vocabulary
from recsys.inference.packages.safetensors import write_tensors

__all__ = [
    "FOLDER",
    "PackageColumns",
    "Texts",
    "arguments_of",
    "load_spec",
    "model_request",
    "names_of",
    "raw_request",
]

_Array: TypeAlias = np.ndarray[Any, Any]
_REMEDIES: Final = {
    "Set separator to split texts, such as '|'. Set is_list=False.": "Send a list for each row.",
    "Set is_list=False.": "Send a list for each row.",
    "Set is_list=True.": "Send one value for each row, not a list.",
    "Set rows to the size of the table.": "Send row numbers of the table.",
    "Describe it by Categorical or Hashed.": "Send whole numbers.",
    "Describe it by Numeric.": "Send a list for each row.",
    "Set dim of the Vector.": "Send vectors of this length.",
    "Set unit.": "Send times in the unit of the package.",
    "Correct the text, and write no spaces.": "Send numbers between separators.",
    "Choose another unit of the Timestamp.": "Send a time nearer to 1970.",
    "Convert the column.": "Send values of one type.",
    "Cast it.": "Send values of this type.",
}
"""Remedies of a request, by the remedies for data of training in the same errors."""
FOLDER = "spec"
"""Folder of the spec in a version."""


@final
class Texts(NamedTuple):
    """Texts of a raw column."""

    views: _Array
    """[N, 2] int64, the address and the size of each text; 0 and 0 if it is missing."""
    owner: object
    """Keeps the memory alive."""


@final
class PackageColumns:
    """The raw columns of a package that is written; each has one use.

    Args:
        spec: A fitted spec.
        table: Two rows or more, for example values and for the types of the columns.

    Raises:
        KeyError: The table does not have a column.
        TypeError: A column has a type that requests cannot have.
    """

    def __init__(self, spec: FeatureSpec, table: Any) -> None:
        self._spec = spec
        self._table = table_of(table)
        self._batch = spec.transform(self._table, labels=False)

    def arguments(self) -> list[object]:
        """Return the arguments of the model."""
        return arguments_of(self._spec, self._batch)

    def vocabulary_of(self, feature: str | None) -> str | None:
        """Return the table of a `Categorical` feature; None for another feature."""
        tables = {entry.name: entry.table for entry in self._spec.features()}
        table = None if feature is None else tables.get(feature)
        return table if table in self._spec.fitted.vocabularies else None

    def write(self, part: Path, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Write the spec and its vocabularies; return the manifest's entries of the columns.

        Args:
            part: The folder of the version.
            inputs: The manifest's entries of the model's inputs.
        """
        fitted = self._spec.fitted
        vocabularies: dict[str, Tensor] = {}
        for table, vocabulary in fitted.vocabularies.items():
            vocabularies |= _sorted_by_hash(table, vocabulary)
        write_tensors(part / "columns.safetensors", vocabularies)
        tensors = {
            feature["name"]: feature["tensor"]
            for model_input in inputs
            for feature in model_input.get("features", [])
        }
        entries = []
        for model_input in self._spec.columns:
            described = model_input.describe(fitted, self._table, tensors)
            if described is not None:
                entries.append(described | ({"optional": True} if model_input.optional else {}))
        weights = {column["weights"] for column in entries if column.get("weights")}
        if twice := repeated([*(column["name"] for column in entries), *weights]):
            raise ValueError(
                f"A raw column of a package must have one use; received several of {twice}. Copy "
                "the column under another name."
            )
        kinds = {column["name"]: column["type"] for column in entries if column["kind"] == "hashed"}
        fitted = fitted._replace(kinds={**fitted.kinds, **kinds})
        save_folder(part / FOLDER, self._spec.columns, fitted)
        return entries


def _sorted_by_hash(table: str, vocabulary: Vocabulary) -> dict[str, Tensor]:
    hashes, rows = vocabulary.by_hash()
    ordered = {
        f"{table}.hashes": torch.from_numpy(hashes.copy()),
        f"{table}.rows": torch.from_numpy(rows.copy()),
    }
    if vocabulary.kind == "text" and len(rows):
        texts = vocabulary.values.take(pa.array(rows - rows.min()))
        offsets, data = text_buffers(texts)
        ordered[f"{table}.offsets"] = torch.from_numpy(offsets - offsets[0])
        ordered[f"{table}.bytes"] = torch.from_numpy(data[offsets[0] : offsets[-1]].copy())
    return ordered


def arguments_of(spec: FeatureSpec, batch: Batch) -> list[object]:
    """Return the arguments of a model: dense features, if the spec has any, and ids.

    Args:
        spec: The spec of the batch.
        batch: The batch.
    """
    dense = [batch.dense_features] if spec.dense_names else []
    return [*dense, batch.sparse_features]


def load_spec(version: Path) -> FeatureSpec:
    """Read the `FeatureSpec` in the folder of a package version.

    Raises:
        FileNotFoundError: The version has no spec.
        ValueError: A file is damaged.
    """
    return FeatureSpec.load(version / FOLDER)


def model_request(
    spec: FeatureSpec, inputs: Sequence[Mapping[str, Any]], data: Any
) -> dict[str, Tensor]:
    """Convert a table to a request with the tensors of the model.

    Args:
        spec: The spec of the package.
        inputs: The manifest's entries of the model's inputs.
        data: A table of raw columns, as for `FeatureSpec.transform`.

    Raises:
        KeyError: The table does not have a column.
        TypeError: A column has values of another type.
        ValueError: A value is out of its range.
    """
    with _remedies():
        return _model_request(spec, inputs, data)


def _model_request(
    spec: FeatureSpec, inputs: Sequence[Mapping[str, Any]], data: Any
) -> dict[str, Tensor]:
    batch = spec.transform(table_of(data), labels=False)
    parts: dict[str, Tensor] = {}
    known = batch.sparse_features.keys()
    for entry in inputs:
        if entry["kind"] == "dense":
            parts[entry["name"]] = batch.dense_features
            continue
        for feature in entry["features"]:
            if feature["name"] not in known:
                raise ValueError(
                    f"The features of the package must be in its spec, {known}; received "
                    f"{feature['name']!r} in its manifest. Copy the package again."
                )
            bags, tensor = batch.sparse_features[feature["name"]], feature["tensor"]
            parts[tensor], parts[f"{tensor}.lengths"] = bags.values(), bags.lengths()
            if entry["weighted"]:
                parts[f"{tensor}.weights"] = bags.weights()
    return parts


def raw_request(columns: Sequence[Mapping[str, Any]], data: Any) -> dict[str, Tensor | Texts]:
    """Convert a table to a request with raw columns, for the C++ core.

    Args:
        columns: The manifest's entries of the columns.
        data: A table. Further columns are ignored; an optional column, and one that states the
            value of missing numbers, may be absent.

    Raises:
        KeyError: The table does not have a column.
        TypeError: A column has values of another type.
        ValueError: A number is not finite.
    """
    with _remedies():
        return _raw_request(columns, data)


@contextlib.contextmanager
def _remedies() -> Iterator[None]:
    """Replace the remedies of errors by remedies that the sender of a request has."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        for of_training, of_request in _REMEDIES.items():
            if text.endswith(of_training):
                raise type(error)(text.removesuffix(of_training) + of_request) from error
        raise


def _raw_request(columns: Sequence[Mapping[str, Any]], data: Any) -> dict[str, Tensor | Texts]:
    table = table_of(data)
    parts: dict[str, Tensor | Texts] = {}
    for column in columns:
        name, is_list = column["name"], bool(column.get("is_list"))
        if name not in table.column_names and is_optional(column):
            continue
        if column["kind"] == "vector":  # a missing one has length 0
            vectors, no_vector = read_vectors(table, name, column["dim"])
            parts[f"{name}.lengths"] = torch.from_numpy(np.where(no_vector, 0, column["dim"]))
            parts[name] = torch.from_numpy(vectors[~no_vector].reshape(-1))
            continue
        separator = column.get("separator")
        values = read_values(table, name, is_list, separator=separator)
        if separator is not None and column["dtype"] == "int64":
            values = numbers_of(values, pa.int64())
        if values.lengths is not None:
            parts[f"{name}.lengths"] = torch.from_numpy(values.lengths.copy())
        if column["kind"] == "time":
            seconds, is_missing = read_seconds(values, column["per_second"])
            far = np.abs(seconds) > (2**63 - 1) // column["per_second"]
            rule = f"must have times that fit into 64 bits of 1/{column['per_second']} s"
            values.reject(ValueError, rule, far, "Choose another unit of the Timestamp.")
            parts[name] = torch.from_numpy(seconds * column["per_second"])
        elif column["dtype"] == "text":
            parts[name], is_missing = _texts_of(values), None
        elif column["dtype"] == "int64":
            numbers, is_missing = read_integers(values, unsigned=column["kind"] == "hashed")
            parts[name] = torch.from_numpy(numbers.copy())
        else:
            numbers, is_missing = read_numbers(values)
            parts[name] = torch.from_numpy(numbers.copy())
        if is_missing is not None:
            parts[f"{name}.missing"] = torch.from_numpy(is_missing.copy())
        if column.get("weights"):
            places = values.array.is_null().to_numpy(zero_copy_only=False)
            weights = read_id_weights(table, column["weights"], values, places, separator)
            parts[column["weights"]] = torch.from_numpy(weights)
    return parts


def is_optional(column: Mapping[str, Any]) -> bool:
    """Return whether requests may lack a column.

    Args:
        column: The manifest's entry of the column.
    """
    return column.get("missing") is not None or bool(column.get("optional"))


def names_of(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the columns that requests may have.

    Args:
        columns: The manifest's entries of the columns.
    """
    names = [column["name"] for column in columns]
    return names + [column["weights"] for column in columns if column.get("weights")]


def _texts_of(values: Values) -> Texts:
    keys = read_keys(values)
    if not len(keys.numbers) or (keys.is_missing is not None and keys.is_missing.all()):
        return Texts(np.zeros((len(keys.numbers), 2), np.int64), None)
    if keys.texts is None:
        raise TypeError(f"Column {values.name!r} must have texts; received {values.array.type}.")
    array = keys.texts.take(pa.array(keys.numbers))
    offsets, data = text_buffers(array)
    views = np.empty((len(array), 2), np.int64)
    # an empty text has an address, too
    address = data.ctypes.data if data.size else _EMPTY.ctypes.data
    views[:, 0], views[:, 1] = address + offsets[:-1], np.diff(offsets)
    if keys.is_missing is not None:
        views[keys.is_missing] = 0
    return Texts(views, (array, data))


_EMPTY = np.zeros(1, np.uint8)

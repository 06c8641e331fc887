"""A serving package whose program is tests/inference/cpp/fake_program.cpp, or `FakeProgram`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.numpy import save, save_file
from torch import Tensor

from recsys.features import Categorical, Hashed, Ids, Numeric, Vector
from recsys.features.columns import Column
from recsys.features.fit import Fitted
from recsys.features.save import save_folder
from recsys.features.vocabulary import Vocabulary
from recsys.inference.packages.columns import FOLDER
from recsys.inference.packages.indexes import empty_index, open_index
from recsys.inference.packages.load import OpenProgram, map_buffers, program_of
from recsys.inference.packages.manifest import check_machine
from recsys.kernels.hashed.twin import locate

ROWS, ROW_BYTES = 5, 8
TABLE = np.repeat(np.arange(ROWS, dtype=np.uint8)[:, None], ROW_BYTES, axis=1)
HASHED_ROWS = 64
HASHED = {10: 7, 11: -1, 12: -(2**63), 60: 2**63 - 1}
"""Hashed ids by row of table `h`."""
_INDEX = {
    "ids": "tables/h.ids", "digests": "tables/h.digests", "regions": 1, "seed": 3,
    "unknown": "zero",
}  # fmt: skip

SAMPLE = {
    "request.dense": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
    "request.a": np.array([1, 2, 4], np.int64),
    "request.a.lengths": np.array([2, 1], np.int64),
    "request.b": np.array([5, 6], np.int64),
    "request.w": np.array([7], np.int64),
    "request.w.lengths": np.array([0, 1], np.int64),
    "request.w.weights": np.array([0.5], np.float32),
    "response.score": np.array([[3 + 3 + 15.0], [7 + 4 + 18 + 3.5]], np.float32),
    "response.rows.values": TABLE[[1, 2, 4]],
    "response.rows.lengths": np.array([2, 1], np.int64),
    "response.items": np.array([[-1, -1, -1, -1], [7, -1, -1, -1]], np.int64),
}


def manifest(**changed: Any) -> dict[str, Any]:
    """Return the manifest without files, with changed entries."""
    feature = {"name": "a", "tensor": "a", "rows": ROWS, "index": None}
    jagged = {"kind": "jagged", "dtype": "int64", "lengths_dtype": "int64"}
    return {
        "format": 1,
        "recsys": "0.1.0",
        "torch": "2.13.0",
        "fbgemm": "1.8.0",
        "machine": "any",
        "instruction_set": "",
        "programs": [
            {"kind": "fake", "file": "program.fake", "device": "cpu", "constants": ["t.rows"]}
        ],
        "inputs": [
            {"name": "dense", "kind": "dense", "dtype": "float32", "shape": [-1, 2], "default": 0},
            {
                **jagged,
                "name": "ids",
                "weighted": False,
                "features": [
                    feature,
                    {"name": "b", "tensor": "b", "rows": None, "index": None},
                    {"name": "h", "tensor": "h", "rows": None, "index": "h"},
                ],
            },
            {
                **jagged,
                "name": "weighted",
                "weighted": True,
                "features": [{"name": "w", "tensor": "w", "rows": 100, "index": None}],
            },
        ],
        "outputs": [
            {"name": "score", "kind": "rows", "dtype": "float32", "shape": [-1, 1]},
            {
                "name": "rows",
                "kind": "jagged",
                "dtype": "uint8",
                "shape": [-1, ROW_BYTES],
                "lengths_dtype": "int64",
                "weights_dtype": None,
            },
        ],
        "tables": [
            {
                "name": "t",
                "rows": ROWS,
                "dim": ROW_BYTES,
                "dtype": "int8",
                "row_bytes": ROW_BYTES,
                "file": "tables/t.rows",
                "buffer": "t.rows",
                "offset": 0,
                "features": ["a"],
                "index": None,
            },
            {
                "name": "h",
                "rows": HASHED_ROWS,
                "dim": ROW_BYTES,
                "dtype": "int8",
                "row_bytes": ROW_BYTES,
                "file": "tables/h.rows",
                "buffer": "t.rows",
                "offset": 65536,
                "features": ["h"],
                "index": _INDEX,
            },
        ],
        "buffers": [{"name": "t.rows", "bytes": 2 * 65536}],
        "limits": {"max_rows": 64},
        "columns": [],
        **changed,
    }


CITIES = ["Oslo", "Zürich", ""]
"""The vocabulary of the raw column `city`; the first has row 2."""
_IDS = {"weights": None, "rows": None, "is_list": True, "table": ""}
_NUMBER = {"low": None, "high": None, "log1p": False, "standardize": False, "dtype": "float64"}
COLUMNS: list[dict[str, Any]] = [
    {
        **_NUMBER, "name": "age", "kind": "numeric", "missing": None, "low": -3.0, "high": 4.0,
        "standardize": True, "mean": 1.5, "deviation": 2.0,
    },
    {
        **_NUMBER, "name": "pay", "kind": "numeric", "missing": 7.0, "log1p": True, "mean": 0.0,
        "deviation": 1.0,
    },
    {
        **_IDS, "name": "city", "kind": "categorical", "type": "text", "dtype": "text",
        "tensor": "a", "table": "cities",
    },
    {
        **_IDS, "name": "code", "kind": "hashed", "type": "number", "dtype": "int64", "rows": 5,
        "is_list": False, "tensor": "b",
    },
    {**_IDS, "name": "any", "kind": "hashed", "type": "text", "dtype": "text", "tensor": "h"},
    {
        **_IDS, "name": "who", "kind": "ids", "type": "number", "dtype": "int64", "tensor": "w",
        "weights": "share",
    },
]  # fmt: skip
"""Descriptions of raw columns, one for each tensor of the program."""
_SPEC: list[Column] = [
    Numeric("age", clip=(-3.0, 4.0), standardize=True),
    Numeric("pay", missing=7.0, log1p=True),
    Categorical("city", is_list=True, table="cities"),
    Hashed("code", rows=5),
    Hashed("any", rows=HASHED_ROWS, growing=True, is_list=True),
    Ids("who", rows=100, is_list=True, weights="share"),
]
"""The columns of `COLUMNS` in Python."""


def write_raw(version: Path, **changed: np.ndarray) -> Path:
    """Write a version of the package whose requests have raw columns, with changed vocabularies."""
    _write_vocabularies(version, CITIES, changed)
    return write(version, columns=COLUMNS, inputs=_raw_inputs())


def write_vectors(version: Path) -> Path:
    """Write a version whose dense numbers are of one raw column `image` of vectors."""
    _write_vocabularies(version, CITIES, {}, [Vector("image", dim=2), *_SPEC[2:]])
    vector = {"name": "image", "kind": "vector", "dtype": "float32", "is_list": True, "dim": 2}
    return write(version, columns=[vector, *COLUMNS[2:]], inputs=_raw_inputs())


def write_separated(version: Path) -> Path:
    """Write a version whose columns `city` and `any` are lists in texts."""
    names = ("city", "any")
    spec = [replace(one, separator=", ") if one.name in names else one for one in _SPEC]
    _write_vocabularies(version, CITIES, {}, spec)
    columns = [{**one, "separator": ", "} if one["name"] in names else one for one in COLUMNS]
    return write(version, columns=columns, inputs=_raw_inputs())


def write_optional(version: Path) -> Path:
    """Write a version whose requests may lack each raw column but `who`."""
    spec = [one if one.name == "who" else replace(one, optional=True) for one in _SPEC]
    _write_vocabularies(version, CITIES, {}, spec)
    columns = [one if one["name"] == "who" else {**one, "optional": True} for one in COLUMNS]
    return write(version, columns=columns, inputs=_raw_inputs())


def _raw_inputs() -> list[dict[str, Any]]:
    """Return the inputs, whose features have the names of raw columns."""
    names = {column["tensor"]: column["name"] for column in COLUMNS if "tensor" in column}
    inputs: list[dict[str, Any]] = manifest()["inputs"]
    for entry in inputs:
        for feature in entry.get("features", []):
            feature["name"] = names[feature["tensor"]]
    return inputs


def write_recommender(version: Path, values: list[Any], **changed: np.ndarray) -> Path:
    """Write a version with raw columns that recommends rows of a vocabulary of values.

    Its further output `items` `[B, 4]` has the ids of the column `who`, then -1.

    Args:
        version: The folder.
        values: Texts or whole numbers, from row 2.
        changed: Changed tensors of the vocabulary.
    """
    _write_vocabularies(version, values, changed)
    kind = ("text", "text") if isinstance(values[0], str) else ("number", "int64")
    types = dict(zip(("type", "dtype"), kind, strict=True))
    items = {
        "name": "items", "kind": "rows", "dtype": "int64", "shape": [-1, 4], "vocabulary": "cities",
    }  # fmt: skip
    columns = [{**one, **(types if one["name"] == "city" else {})} for one in COLUMNS]
    outputs = [*manifest()["outputs"], items]
    return write(version, columns=columns, inputs=_raw_inputs(), outputs=outputs)


def _write_vocabularies(
    version: Path,
    values: list[Any],
    changed: Mapping[str, np.ndarray],
    spec: Sequence[Column] = _SPEC,
) -> None:
    """Write the files of raw columns: the vocabularies of the core, and the spec of Python."""
    version.mkdir(parents=True)
    save_file({**_vocabulary(values), **changed}, version / "columns.safetensors")
    kind = pa.large_string() if isinstance(values[0], str) else pa.int64()
    fitted = Fitted(
        num_rows=4,
        vocabularies={"cities": Vocabulary(pa.array(values, kind))},
        means={"age": 1.5, "pay": 0.0},
        deviations={"age": 2.0, "pay": 1.0},
        edges={},
        kinds={"code": "number", "any": "text"},
    )
    save_folder(version / FOLDER, spec, fitted)


def _vocabulary(values: list[Any]) -> dict[str, np.ndarray]:
    is_text = isinstance(values[0], str)
    found = {text_hash(one) if is_text else one: i for i, one in enumerate(values)}
    vocabulary = {
        "cities.hashes": np.array(sorted(found), np.int64),
        "cities.rows": np.array([found[one] + 2 for one in sorted(found)], np.int64),
    }
    if is_text:
        texts = [values[found[one]].encode() for one in sorted(found)]
        vocabulary["cities.offsets"] = np.cumsum([0, *map(len, texts)]).astype(np.int64)
        vocabulary["cities.bytes"] = np.frombuffer(b"".join(texts), np.uint8)
    return vocabulary


def text_hash(text: str) -> int:
    """Return the FNV-1a hash of a text as a signed number."""
    found = 0xCBF29CE484222325
    for byte in text.encode():
        found = (found ^ byte) * 0x100000001B3 % 2**64
    return found - (found >> 63 << 64)


def write(version: Path, **changed: Any) -> Path:
    """Write a version of the package, with changed entries of its manifest."""
    (version / "tables").mkdir(parents=True)
    (version / "deltas").mkdir()
    (version / "program.fake").write_bytes(b"program")
    TABLE.tofile(version / "tables" / "t.rows")
    np.zeros((HASHED_ROWS, ROW_BYTES), np.uint8).tofile(version / "tables" / "h.rows")
    ids, digests = np.zeros(HASHED_ROWS, np.int64), np.zeros(HASHED_ROWS, np.uint8)
    ids[list(HASHED)] = list(HASHED.values())
    digests[list(HASHED)] = digests_of(*HASHED.values())
    ids.tofile(version / "tables" / "h.ids")
    digests.tofile(version / "tables" / "h.digests")
    save_file(SAMPLE, version / "sample.safetensors")
    files = {
        str(file.relative_to(version)): {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted(version.rglob("*"))
        if file.is_file()
    }
    text = json.dumps({**manifest(), "files": files, **changed}, indent=1)
    (version / "manifest.json").write_text(text)
    return version


def digests_of(*ids: int) -> np.ndarray:
    """Return the digests of hashed ids of table `h`."""
    places = locate(empty_index(HASHED_ROWS, _INDEX), torch.tensor(ids, dtype=torch.int64))
    return places.digests.numpy()


def delta(
    version: Path,
    sequence: int,
    rows: dict[int, int],
    hashed: dict[int, int] | None = None,
    lacks: str = "",
    **changed: str,
) -> Path:
    """Write a delta that fills rows of `t` with one byte each, and gives rows of `h` to ids."""
    base = hashlib.sha256((version / "manifest.json").read_bytes()).hexdigest()
    metadata = {
        "format": "recsys.delta/1",
        "sequence": str(sequence),
        "base": base,
        "checksum": "0" * 64,
        **changed,
    }
    filled = np.repeat(np.array(list(rows.values()), np.uint8)[:, None], ROW_BYTES, axis=1)
    tensors = {"t.ids": np.array(list(rows), np.int64), "t.rows": filled}
    if hashed is not None:
        tensors |= {
            "h.ids": np.array(list(hashed), np.int64),
            "h.rows": np.zeros((len(hashed), ROW_BYTES), np.uint8),
            "h.hashed_ids": np.array(list(hashed.values()), np.int64),
            "h.digests": digests_of(*hashed.values()),
        }
    tensors = {name: tensor for name, tensor in tensors.items() if name not in lacks.split()}
    contents = save(tensors, metadata)
    checksum = hashlib.sha256(contents).hexdigest().encode()
    path = version / "deltas" / f"{sequence:012}.delta"
    # as the publisher does: a reader of the folder sees whole files only
    part = path.with_suffix(".part")
    part.write_bytes(contents.replace(b"0" * 64, checksum))
    return part.rename(path)


class FakeProgram:
    """The program of `fake_program.cpp` in Python.

    Args:
        rows: Rows of table `t`, uint8 `[ROWS, ROW_BYTES]`.
        has_items: Return the third output.
    """

    def __init__(self, rows: Tensor, has_items: bool) -> None:
        self._rows = rows
        self._has_items = has_items

    def boxed_run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Score a batch."""
        dense, ids, lengths, who, who_lengths, weights = inputs
        if bool((dense[:, 0] == 666).any()):
            raise RuntimeError("The dense value is 666.")
        num_rows = len(dense)
        of_feature = lengths.view(3, num_rows)
        a, b, h = ids.split(of_feature.sum(1).tolist())
        scores = dense.sum(1)
        parts = (self._rows[a, 0], 3 * b, 5 * h, who * weights)
        for part, of_part in zip(parts, (*of_feature, who_lengths), strict=True):
            scores.index_add_(0, torch.arange(num_rows).repeat_interleave(of_part), part.float())
        outputs = [scores.unsqueeze(1), self._rows[a], of_feature[0].clone()]
        if self._has_items:
            items = torch.full((num_rows, 4), -1)
            for row, rows in enumerate(who.split(who_lengths.tolist())):
                items[row, : len(rows)] = rows[:4]
            outputs.append(items)
        return outputs


def open_fake(version: Path, manifest: Mapping[str, Any], kind: str = "") -> OpenProgram:
    """Open the program of a version in Python, in place of `open_program`."""
    check_machine(manifest, program_of(manifest, kind)["kind"])
    buffers = map_buffers(version, manifest)
    table, *_ = manifest["tables"]
    rows = buffers[table["buffer"]][: table["rows"] * ROW_BYTES].view(-1, ROW_BYTES)
    indexes = {t["name"]: open_index(version, t) for t in manifest["tables"] if t["index"]}
    program = FakeProgram(rows, len(manifest["outputs"]) == 3)
    return OpenProgram(program, torch.device("cpu"), buffers, indexes)

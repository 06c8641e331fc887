"""A serving package whose program is tests/inference/cpp/fake_program.cpp."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save, save_file

from recsys.inference.packages.indexes import empty_index
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


def write_raw(version: Path, **changed: np.ndarray) -> Path:
    """Write a version of the package whose requests have raw columns, with changed vocabularies."""
    version.mkdir(parents=True)
    save_file({**_vocabulary(CITIES), **changed}, version / "columns.safetensors")
    return write(version, columns=COLUMNS)


def write_recommender(version: Path, values: list[Any], **changed: np.ndarray) -> Path:
    """Write a version with raw columns that recommends rows of a vocabulary of values.

    Its further output `items` `[B, 4]` has the ids of the column `who`, then -1.

    Args:
        version: The folder.
        values: Texts or whole numbers, from row 2.
        changed: Changed tensors of the vocabulary.
    """
    version.mkdir(parents=True)
    save_file({**_vocabulary(values), **changed}, version / "columns.safetensors")
    kind = ("text", "text") if isinstance(values[0], str) else ("number", "int64")
    types = dict(zip(("type", "dtype"), kind, strict=True))
    items = {
        "name": "items", "kind": "rows", "dtype": "int64", "shape": [-1, 4], "vocabulary": "cities",
    }  # fmt: skip
    columns = [{**one, **(types if one["name"] == "city" else {})} for one in COLUMNS]
    return write(version, columns=columns, outputs=[*manifest()["outputs"], items])


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

"""A serving package whose program is tests/inference/cpp/fake_program.cpp."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save, save_file

ROWS, ROW_BYTES = 5, 8
TABLE = np.repeat(np.arange(ROWS, dtype=np.uint8)[:, None], ROW_BYTES, axis=1)

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
}


def manifest(**changed: Any) -> dict[str, Any]:
    """Return the manifest without files, with changed entries."""
    feature = {"name": "a", "tensor": "a", "rows": ROWS}
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
                "features": [feature, {"name": "b", "tensor": "b", "rows": None}],
            },
            {
                **jagged,
                "name": "weighted",
                "weighted": True,
                "features": [{"name": "w", "tensor": "w", "rows": 100}],
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
            }
        ],
        "buffers": [{"name": "t.rows", "bytes": 65536}],
        "limits": {"max_rows": 64},
        "columns": [],
        **changed,
    }


def write(version: Path, **changed: Any) -> Path:
    """Write a version of the package, with changed entries of its manifest."""
    (version / "tables").mkdir(parents=True)
    (version / "deltas").mkdir()
    (version / "program.fake").write_bytes(b"program")
    TABLE.tofile(version / "tables" / "t.rows")
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


def delta(version: Path, sequence: int, rows: dict[int, int], **changed: str) -> Path:
    """Write a delta that fills rows of the table with one byte each."""
    base = hashlib.sha256((version / "manifest.json").read_bytes()).hexdigest()
    metadata = {
        "format": "recsys.delta/1",
        "sequence": str(sequence),
        "base": base,
        "checksum": "0" * 64,
        **changed,
    }
    filled = np.repeat(np.array(list(rows.values()), np.uint8)[:, None], ROW_BYTES, axis=1)
    contents = save({"t.ids": np.array(list(rows), np.int64), "t.rows": filled}, metadata)
    checksum = hashlib.sha256(contents).hexdigest().encode()
    path = version / "deltas" / f"{sequence:012}.delta"
    path.write_bytes(contents.replace(b"0" * 64, checksum))
    return path

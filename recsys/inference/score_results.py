"""Results of `score`: the names of their columns, and their origin.

The origin is the model, the settings and the input. It is in the metadata of the Parquet file of a
result, and a result of another origin is computed again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from recsys.datasets.files import File
from recsys.features.spec import FeatureSpec
from recsys.inference.packages.manifest import sha256_of
from recsys.inference.packages.predictor import Predictor

__all__ = [
    "METADATA",
    "Origin",
    "difference",
    "input_of",
    "model_of",
    "named_outputs",
    "package_of",
]

METADATA = b"recsys.score"
"""Key of the origin in the metadata of a result."""

Origin: TypeAlias = dict[str, Any]
"""JSON values: `model`, `settings` and `input`."""

_WORDS = {"model": "the model", "settings": "the settings", "input": "the input"}


def package_of(version: Path, predictor: Predictor) -> Origin:
    """Return the origin's part of a package: the checksum of its manifest, and its last delta."""
    return {"manifest": sha256_of(version / "manifest.json"), "delta": predictor.sequence}


def model_of(model: nn.Module, spec: FeatureSpec) -> Origin:
    """Return the origin's part of a module: a checksum of its weights, settings and spec."""
    digest = hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", str(model)).encode())
    parts: dict[str, Any] = {**dict(model.named_buffers()), **model.state_dict()}
    for name, value in sorted(parts.items()):
        digest.update(f"{name} {getattr(value, 'dtype', '')}".encode())
        shards = getattr(value, "local_shards", None)
        for tensor in [value] if shards is None else [shard.tensor for shard in shards()]:
            digest.update(
                _bytes_of(tensor) if isinstance(tensor, Tensor) else repr(tensor).encode()
            )
    state = spec.state_dict()
    digest.update(state["description"].encode())
    for name, data in sorted(state["vocabularies"].items()):
        digest.update(name.encode())
        digest.update(_bytes_of(data))
    return {"weights": digest.hexdigest()}


def _bytes_of(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def input_of(file: File, columns: Sequence[str]) -> Origin:
    """Return the origin's part of an input: its size, its time, and the types that are read."""
    [info] = file.fragment.filesystem.get_file_info([file.fragment.path])
    types = {name: str(file.schema.field(name).type) for name in columns}
    return {"bytes": info.size, "mtime_ns": info.mtime_ns, "types": types}


def difference(result: Path, origin: Mapping[str, Any]) -> str | None:
    """Return how a result's origin differs, in words; None: it does not.

    Args:
        result: A file of an earlier call.
        origin: The origin of a result of this call.
    """
    try:
        metadata = pq.read_schema(result).metadata or {}
        saved = json.loads(metadata[METADATA])
        changed = [word for key, word in _WORDS.items() if saved[key] != origin[key]]
    except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError):
        return "a file without its origin"
    return f"another version of {' and '.join(changed)}" if changed else None


def named_outputs(
    outputs: Mapping[str, np.ndarray[Any, Any]], tasks: Sequence[str], has_probabilities: bool
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the outputs by the names of a result's columns.

    Args:
        outputs: The outputs of the model by name.
        tasks: The labels of the spec. The only output of a model with a column for each of several
            labels is split into these columns.
        has_probabilities: Add the probability of each logit.

    Raises:
        ValueError: No output is known to be a logit.
    """
    named = dict(outputs)
    only = next(iter(named.values())) if len(named) == 1 else None
    if only is not None and len(tasks) > 1 and only.shape[1:] == (len(tasks),):
        named = dict(zip(tasks, only.T, strict=True))
    if not has_probabilities:
        return named
    added = {}
    for name, values in named.items():
        added[name] = values
        is_number = values.dtype.kind == "f" and values.size == len(values)
        if is_number and (name in tasks or len(named) == 1):
            key = "probability" if name == "output" else f"{name}_probability"
            with np.errstate(over="ignore"):  # exp of a large number: the probability is 0
                added[key] = (1 / (1 + np.exp(-values.astype(np.float64)))).astype(np.float32)
    if len(added) == len(named):
        shapes = {name: list(values.shape) for name, values in named.items()}
        raise ValueError(
            f"probabilities must be of a model with one logit, or with outputs named by the labels "
            f"{list(tasks)}; received the outputs {shapes}. Leave out probabilities."
        )
    return added

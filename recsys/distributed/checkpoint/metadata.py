"""Reads the metadata of `torch.distributed.checkpoint`, a pickle, without running what it names.

It knows the classes that metadata consists of, and refuses all else.
"""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.plain import KnownUnpickler

_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
    # where it was saved, which nothing here reads; pathlib._local in Python 3.13
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


def decode_metadata(name: str, data: bytes) -> Metadata:
    """Return the metadata that a file holds.

    Args:
        name: of the file, for errors.
        data: its bytes.

    Raises:
        CheckpointError: if it holds anything else.
    """
    try:
        refusal = "it names {}, which no metadata consists of"
        found = KnownUnpickler(data, _CLASSES, refusal).load()
    except Exception as error:
        raise CheckpointError(
            f"{name} is not the metadata of a checkpoint: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Metadata):
        raise CheckpointError(
            f"{name} is not the metadata of a checkpoint: it holds a {type(found).__name__}"
        )
    return found

"""Writes the weights of a checkpoint as one file of safetensors, by unsharded names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recsys.base.checked import checked
from recsys.base.checksums import new_file
from recsys.distributed.checkpoint import versions
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.read import SavedValues

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@checked
def export_safetensors(path: str | Path, file: str | Path) -> None:
    """Write the weights of a checkpoint as one file, which the `safetensors` library reads.

    It needs neither that library, nor a model or a process group. Tables are copied by blocks of
    rows of 64 MiB. The file appears once it is complete; a file of that name is replaced. Its
    SHA-256 is written to `<file>.sha256`, such as `film.safetensors.sha256`: see
    `recsys.inference.verify_checksum`.

    Args:
        path: As for `read_checkpoint`.
        file: File to write, such as `film.safetensors`; its folder is created.

    Raises:
        CheckpointError: The checkpoint cannot be read, has values of a dtype that such files do not
            support, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> from recsys.distributed.checkpoint import save_checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder, torch.nn.Linear(2, 1))
        ...     export_safetensors(folder, f"{folder}/linear.safetensors")
        ...     Path(f"{folder}/linear.safetensors").stat().st_size
        188
    """
    write_safetensors(SavedValues.find(Path(path)), Path(file))


def write_safetensors(saved: SavedValues, file: Path) -> None:
    """Write the tensors of a checkpoint, without its other values.

    Args:
        saved: The checkpoint.
        file: File to write.

    Raises:
        CheckpointError: As for `export_safetensors`.
    """
    saved.refuse_logs("A checkpoint to export")
    tensors = {
        name: value
        for name, value in saved.values.items()
        if isinstance(value, TensorStorageMetadata)
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # wide dtypes first, so that each tensor starts at a multiple of its element size
    for name in sorted(tensors, key=lambda name: -tensors[name].properties.dtype.itemsize):
        dtype, size = tensors[name].properties.dtype, tensors[name].size
        if dtype not in _NAMES:
            raise CheckpointError(
                f"safetensors must be of one of {[*_NAMES.values()]}; received {name!r} of {dtype}."
            )
        start, end = end, end + size.numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": [*size], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        with new_file(file) as temporary, temporary.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in [*header][1:]:
                for rows in saved.row_ranges(name):
                    values = saved.read({name: rows})[name]
                    out.write(values.view(-1).view(torch.uint8).numpy())
        versions.sync_folder(file.parent)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error}") from error

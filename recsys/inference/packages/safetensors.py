"""Writing and reading of small safetensors files.

The format: the size of the header (8 bytes, little-endian), the header as JSON with dtype, shape
and data_offsets of each tensor, then the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["read_tensors", "write_tensors"]

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 64


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, each at a multiple of 64 bytes of the file's data.

    Raises:
        ValueError: A dtype is not supported.
    """
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0

    def add(name: str, dtype: str, shape: list[int], data: bytes) -> None:
        nonlocal end
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)

    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"Tensor {name!r} must have one of the dtypes {[*_NAMES]}; received {tensor.dtype}."
            )
        flat = tensor.detach().cpu().contiguous().flatten()
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        add(name, _NAMES[tensor.dtype], list(tensor.shape), data)
        if padding := -end % _ALIGNMENT:  # the format allows no holes
            add(f"__padding_{len(parts)}", "U8", [padding], bytes(padding))
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a safetensors file.
    """
    data = bytearray(path.read_bytes())
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        tensors = {}
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__" and not name.startswith("__padding_"):
                first, end = entry["data_offsets"]
                raw = torch.frombuffer(data, dtype=torch.uint8)[start + first : start + end]
                dtype = _DTYPES[entry["dtype"]]
                tensors[name] = raw.clone().view(dtype).view(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} must be a safetensors file; {error}.") from error
    return tensors

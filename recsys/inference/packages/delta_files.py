"""The file format of deltas: safetensors with a checksum of the whole file in its metadata.

Shapes: `R` updated rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

__all__ = ["DeltaHeader", "Rows", "Update", "header_of", "parse"]

Rows = tuple[Tensor, ...]
"""Changed rows of a table: row numbers, int64 `[R]`, ascending; and rows, uint8 `[R, row bytes]`.
For a table with hashed ids also the id of each row, int64 `[R]`, and its digest, uint8 `[R]`, which
is 0 for a row without an id."""

_FORMAT = "recsys.delta/1"
_NO_CHECKSUM = "0" * 64
_MARK = b'"checksum": "'
_DTYPES = {"I64": torch.int64, "U8": torch.uint8}


@final
class Update(NamedTuple):
    """Changed rows of a table."""

    table: str
    ids: Tensor
    """int64 `[R]`, ascending."""
    hashed: Mapping[str, Tensor]
    """`hashed_ids`, int64 `[R]`, and `digests`, uint8 `[R]`; {} without hashed ids."""
    row_bytes: int
    blocks: Callable[[], Iterator[Tensor]]
    """Returns the rows of the ids in blocks, uint8 `[.., row_bytes]`."""


@final
class DeltaHeader(NamedTuple):
    """The header of a delta."""

    sequence: int
    base: str
    text: bytes
    """The JSON text, with a checksum of zeros."""
    updates: Sequence[Update]

    @property
    def checksum_at(self) -> int:
        """The position of the checksum in the file."""
        return 8 + self.text.index(_MARK) + len(_MARK)

    def data(self) -> Iterator[bytes]:
        """Yield the content of the file, with a checksum of zeros."""
        yield len(self.text).to_bytes(8, "little") + self.text
        for update in self.updates:
            for _, tensor in _words(update):
                yield tensor.numpy().tobytes()
        for update in self.updates:
            for rows in update.blocks():
                yield rows.numpy().tobytes()
            if update.hashed:
                yield update.hashed["digests"].numpy().tobytes()


def header_of(sequence: int, base: str, updates: Sequence[Update]) -> DeltaHeader:
    """Return the header of a delta.

    Args:
        sequence: The number of the delta.
        base: SHA-256 of the version's manifest, as hexadecimal digits.
        updates: The changed rows by table.
    """
    metadata = {
        "checksum": _NO_CHECKSUM,
        "format": _FORMAT,
        "sequence": str(sequence),
        "base": base,
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0

    def add(name: str, dtype: str, shape: list[int], num_bytes: int) -> None:
        nonlocal end
        offsets = [end, end + num_bytes]
        end += num_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}

    for update in updates:  # all words first: they start at multiples of 8 bytes
        for name, tensor in _words(update):
            add(f"{update.table}.{name}", "I64", [len(tensor)], 8 * len(tensor))
    for update in updates:
        count, size = len(update.ids), update.row_bytes
        add(f"{update.table}.rows", "U8", [count, size], count * size)
        if update.hashed:
            add(f"{update.table}.digests", "U8", [count], count)
    text = json.dumps(header).encode()
    return DeltaHeader(sequence, base, text + b" " * (-len(text) % 8), updates)


def _words(update: Update) -> list[tuple[str, Tensor]]:
    """Return the int64 tensors of a table by name."""
    hashed = [("hashed_ids", update.hashed["hashed_ids"])] if update.hashed else []
    return [("ids", update.ids), *hashed]


def parse(file: Path) -> tuple[DeltaHeader, dict[str, Rows]]:
    """Read a delta and verify its checksum and structure.

    Returns:
        The header, without updates; and the changed rows by table.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or of another format.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} must be a delta; there is no such file.")
    data = bytearray(file.read_bytes())
    try:
        return _parsed(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}. Copy it again.") from None


def _parsed(data: bytearray) -> tuple[DeltaHeader, dict[str, Rows]]:
    first = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or first > len(data):
        raise ValueError("its header is longer than the file")
    text = bytes(data[8:first])
    header = json.loads(text)
    metadata = header.pop("__metadata__")
    if metadata["format"] != _FORMAT:
        raise ValueError(f"its format must be {_FORMAT!r}; received {metadata['format']!r}")
    digest = metadata["checksum"]
    start = 8 + text.index(f'{digest}"'.encode())
    data[start : start + 64] = _NO_CHECKSUM.encode()
    if len(digest) != 64 or hashlib.sha256(data).hexdigest() != digest:
        raise ValueError("its checksum does not match its content")
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        start, end = (first + offset for offset in entry["data_offsets"])
        if not first <= start <= end <= len(data):
            raise ValueError(f"the tensor {name!r} ends beyond the file")
        dtype = _DTYPES[entry["dtype"]]
        is_empty = start == end  # frombuffer does not accept it
        tensor = torch.frombuffer(data[start:end] or bytearray(8), dtype=dtype)
        tensors[name] = tensor[: 0 if is_empty else None].view(entry["shape"])
    tables: dict[str, Rows] = {}
    for name in sorted({name.rpartition(".")[0] for name in tensors}):
        ids, rows = tensors.pop(f"{name}.ids"), tensors.pop(f"{name}.rows")
        is_right = ids.dtype is torch.int64 and rows.dtype is torch.uint8
        if not is_right or ids.dim() != 1 or rows.dim() != 2 or len(ids) != len(rows):
            raise ValueError(f"table {name!r} must have a row of bytes for each id")
        tables[name] = ids, rows
        if f"{name}.hashed_ids" in tensors:
            hashed_ids, digests = tensors.pop(f"{name}.hashed_ids"), tensors.pop(f"{name}.digests")
            is_right = hashed_ids.dtype is torch.int64 and digests.dtype is torch.uint8
            if not is_right or not hashed_ids.shape == digests.shape == ids.shape:
                raise ValueError(f"table {name!r} must have a hashed id and a digest for each row")
            tables[name] = ids, rows, hashed_ids, digests
    if tensors:
        raise ValueError(f"it has the unknown tensors {sorted(tensors)}")
    return DeltaHeader(int(metadata["sequence"]), metadata["base"], text, ()), tables

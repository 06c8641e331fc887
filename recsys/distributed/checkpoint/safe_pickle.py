"""Pickles of plain data and of metadata, read without running code that a file names."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from recsys.distributed.checkpoint.errors import CheckpointError

_LEAVES = (bool, int, float, str, bytes, type(None), torch.Size, torch.dtype)


def check_plain(name: str, value: object, parents: frozenset[int] = frozenset()) -> None:
    """Raise unless a value can be saved and read back without running code.

    Args:
        name: Name of the value in errors, such as `extra`.
        value: None, numbers, text, bytes, dense tensors, and lists, tuples and dicts of these. Keys
            are text or whole numbers.
        parents: Addresses of the containers around the value.

    Raises:
        CheckpointError: A member is not plain data. The error names its path and its type.

    Example:
        >>> check_plain("extra", {"epoch": 3, "best": [0.5, torch.ones(2)]})
        >>> check_plain("extra", {"best": {1, 2}})
        Traceback (most recent call last):
        recsys.distributed.checkpoint.errors.CheckpointError: extra['best'] must be plain data ...
    """
    kind = type(value)
    if kind in _LEAVES or (
        kind in (Tensor, torch.nn.Parameter)
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not value.is_meta  # type: ignore[attr-defined]
    ):
        return
    if kind not in (list, tuple, dict, collections.OrderedDict):
        raise CheckpointError(
            f"{name} must be plain data to be saved: None, numbers, text, dense tensors, and "
            f"lists, tuples and dicts of those; received {kind.__module__}.{kind.__qualname__}. "
            "Convert it, for example by .item(), .tolist() or .state_dict()."
        )
    if id(value) in parents:
        raise CheckpointError(f"{name} contains itself, and so cannot be saved. Leave it out.")
    parents |= {id(value)}
    members = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    for key, member in members:
        if type(key) not in (str, int):
            raise CheckpointError(
                f"The keys of {name} must be text or whole numbers to be saved; received "
                f"{key!r} of type {type(key).__qualname__}."
            )
        check_plain(f"{name}[{key!r}]", member, parents)


def encode(values: Mapping[str, Any]) -> bytes:
    """Return plain data as bytes, the same for equal data.

    Example:
        >>> name = "".join(["a", "b"])  # equal to "ab", and another object
        >>> encode({"ab": ["ab"]}) == encode({"ab": [name]})
        True
    """
    buffer = io.BytesIO()
    torch.save(_with_shared_text(dict(values)), buffer)
    return buffer.getvalue()


def _with_shared_text(value: Any) -> Any:
    """Return a copy in which equal texts are one object, which a pickle stores once."""
    kind = type(value)
    if kind in (dict, collections.OrderedDict):
        members = value.items()
        return kind((_with_shared_text(key), _with_shared_text(item)) for key, item in members)
    if kind in (list, tuple):
        return kind(map(_with_shared_text, value))
    return sys.intern(value) if kind is str else value


def decode(name: str, data: bytes | io.BytesIO) -> Any:
    """Return the plain data in bytes, with tensors on the CPU.

    Raises:
        CheckpointError: The bytes contain something else.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{name} cannot be read as plain data, and other data could run code: "
            f"{type(error).__name__}: {error}"
        ) from error


def decode_pickle(name: str, data: bytes) -> Any:
    """Return the pickled `extra` of a checkpoint without versions.

    Raises:
        CheckpointError: It is not plain data.
    """
    try:
        return KnownUnpickler(data, _PLAIN, "{} is not plain data").load()
    except Exception as error:
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def decode_metadata(name: str, data: bytes) -> Metadata:
    """Return the metadata of `torch.distributed.checkpoint` in a file.

    Args:
        name: Name of the file in errors.
        data: Content of the file, a pickle.

    Raises:
        CheckpointError: The file contains anything else.
    """
    try:
        refusal = "it names {}, which no metadata consists of"
        metadata = KnownUnpickler(data, _METADATA, refusal).load()
    except Exception as error:
        raise CheckpointError(
            f"{name} is not the metadata of a checkpoint: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"{name} is not the metadata of a checkpoint: it holds a {type(metadata).__name__}"
        )
    return metadata


class KnownUnpickler(pickle.Unpickler):
    """Unpickler that loads known classes and functions, and torch's dtypes, and rejects all others.

    A pickle may name any function, and a plain unpickler calls it.

    Args:
        data: The pickle.
        known: Known objects by module and name.
        refusal: Message for an unknown name, with a placeholder for it.
    """

    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], refusal: str) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._refusal = refusal

    def find_class(self, module: str, name: str) -> Any:
        """Return the known object with this module and name."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(self._refusal.format(f"{module}.{name}"))
        return self._known[module, name]


_COMMON: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
}
_PLAIN = _COMMON | {
    ("torch.storage", "_load_from_bytes"): lambda data: torch.load(
        io.BytesIO(data), weights_only=True
    ),
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
}
_METADATA = _COMMON | {
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
    # the folder of the save, which is not used; pathlib._local in Python 3.13
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}

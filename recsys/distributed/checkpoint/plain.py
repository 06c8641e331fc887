"""Plain data: what a checkpoint may hold besides the state's own tensors.

Nothing but numbers, texts, containers and tensors, so that reading it back runs no code that a
file names.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recsys.distributed.checkpoint.errors import CheckpointError

_LEAVES = (bool, int, float, str, bytes, type(None), torch.Size, torch.dtype)


def check_plain(name: str, value: object) -> None:
    """Raise unless a value can be saved and read back without running code.

    Args:
        name: how errors call the value, such as `extra`.
        value: None, numbers, text, bytes, dense tensors, and lists, tuples and dicts of those; keys
            are text or whole numbers.

    Raises:
        CheckpointError: naming the path to what cannot be saved, and its type.

    Example:
        >>> check_plain("extra", {"epoch": 3, "best": [0.5, torch.ones(2)]})
        >>> check_plain("extra", {"best": {1, 2}})
        Traceback (most recent call last):
        recsys.distributed.checkpoint.errors.CheckpointError: extra['best'] must be plain data ...
    """
    _check(name, value, set())


def _check(name: str, value: object, around: set[int]) -> None:
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
            "Convert it, such as by .item(), .tolist() or .state_dict()."
        )
    if id(value) in around:
        raise CheckpointError(f"{name} contains itself, and so cannot be saved. Leave it out.")
    around = around | {id(value)}
    if isinstance(value, dict):
        for key, member in value.items():
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"The keys of {name} must be text or whole numbers to be saved; received "
                    f"{key!r} of type {type(key).__qualname__}."
                )
            _check(f"{name}[{key!r}]", member, around)
    elif isinstance(value, list | tuple):
        for index, member in enumerate(value):
            _check(f"{name}[{index}]", member, around)


def encode(values: Mapping[str, Any]) -> bytes:
    """Return plain data as bytes."""
    buffer = io.BytesIO()
    torch.save(dict(values), buffer)
    return buffer.getvalue()


def decode(name: str, data: bytes | io.BytesIO) -> Any:
    """Return the plain data that bytes hold; tensors come to the CPU.

    Raises:
        CheckpointError: if they hold something else.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{name} cannot be read as plain data, and other data may run anything: "
            f"{type(error).__name__}: {error}"
        ) from error


def decode_pickle(name: str, data: bytes) -> Any:
    """Return the `extra` of a checkpoint without versions, which was pickled.

    Raises:
        CheckpointError: if it is more than plain data.
    """
    try:
        return KnownUnpickler(data, _PLAIN, "{} is not plain data").load()
    except Exception as error:
        raise CheckpointError(f"{name} are not read: {type(error).__name__}: {error}") from error


class KnownUnpickler(pickle.Unpickler):
    """Knows some classes and functions, and torch's dtypes, and refuses what else a pickle names.

    A pickle may name any function, and an unpickler calls it.

    Args:
        data: the pickle.
        known: by module and name.
        refusal: what errors say of a name that is not known.
    """

    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], refusal: str) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._refusal = refusal

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names, if it is known."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(self._refusal.format(f"{module}.{name}"))
        return self._known[module, name]


_PLAIN = {
    ("torch.storage", "_load_from_bytes"): lambda data: torch.load(
        io.BytesIO(data), weights_only=True
    ),
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
}

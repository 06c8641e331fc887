"""The C++ core by ctypes: `librecsys_predictor.so`, which `make predictor` builds."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:  # needs pyarrow
    from recsys.inference.packages.columns import Texts

__all__ = ["Library"]

_DTYPES = (
    torch.bool, torch.uint8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
"""In the order of `recsys_dtype`."""

_TEXT = 8
_OTHER_DTYPE = -1
"""Refused by the library."""

_BAD_REQUEST, _BAD_PACKAGE, _BAD_DELTA = 1, 2, 3
_Sizes = ctypes.POINTER(ctypes.c_int64)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("shape", _Sizes),
        ("strides", _Sizes),
        ("data", ctypes.c_void_p),
    )


class _Text(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_int64))


class _Request(ctypes.Structure):
    _fields_ = (("tensors", ctypes.POINTER(_Tensor)), ("num_tensors", ctypes.c_int32))


class _Options(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("device", "num_runners", "num_threads")),
        *((name, ctypes.c_int32) for name in ("verify_tables", "poll_ms")),
        *((name, ctypes.c_char_p) for name in ("program", "fbgemm")),
    )


@final
class Library:
    """A predictor of the C API.

    Args:
        path: The library.
        version: The folder of a version.
        options: Options of `recsys_options` by name.

    Raises:
        OSError: The library cannot be loaded.
        ValueError: The version cannot be opened, or the library is of an earlier release.
    """

    def __init__(self, path: Path, version: Path, options: Mapping[str, Any]) -> None:
        self._library = ctypes.CDLL(str(path))
        if not hasattr(self._library, "recsys_response_values"):
            raise ValueError(
                f"library must be of this release; received {path} without recsys_response_values. "
                "Build it again by `make predictor`."
            )
        for name in ("last_error", "response_message", "manifest", "delta_error"):
            getattr(self._library, f"recsys_{name}").restype = ctypes.c_char_p
        self._library.recsys_sequence.restype = ctypes.c_int64
        c_options = _Options()
        self._library.recsys_default_options(ctypes.byref(c_options))
        for name, value in options.items():
            setattr(c_options, name, value.encode() or None if isinstance(value, str) else value)
        self._predictor = ctypes.c_void_p()
        self._call("open", str(version).encode(), ctypes.byref(c_options), _by(self._predictor))

    def run(
        self, requests: Sequence[Mapping[str, Tensor | Texts]]
    ) -> list[dict[str, Any] | Exception]:
        """Run requests in one batch; the entry of a bad request is its error.

        The outputs are tensors. The package of a recommender with raw columns has the further
        output `values`, an array of objects, as of `Predictor`.
        """
        views = [_views(request) for request in requests]
        c_requests = (_Request * len(views))(*(_Request(view, len(view)) for view in views))
        responses = ctypes.c_void_p()
        self._call("run", self._predictor, c_requests, len(views), _by(responses))
        try:
            return [self._response(responses, i) for i in range(len(views))]
        finally:
            self._library.recsys_responses_free(responses)

    def manifest(self) -> str:
        """Return the manifest of the current version."""
        text: bytes = self._library.recsys_manifest(self._predictor)
        return text.decode()

    def swap(self, version: Path) -> None:
        """Open another version in place of the current one."""
        self._call("swap", self._predictor, str(version).encode())

    def update(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """Write rows of a table, uint8 `[rows, row bytes]`, contiguous."""
        pointers = ctypes.c_void_p(ids.data_ptr()), ctypes.c_void_p(rows.data_ptr())
        count, size = ctypes.c_int64(len(ids)), ctypes.c_int64(rows.shape[1])
        self._call("update", self._predictor, table.encode(), pointers[0], count, pointers[1], size)

    def apply(self, file: Path) -> None:
        """Apply a delta."""
        self._call("apply", self._predictor, str(file).encode())

    def sequence(self) -> int:
        """Return the number of the last applied delta; 0: none."""
        number: int = self._library.recsys_sequence(self._predictor)
        return number

    def delta_error(self) -> str:
        """Return the message of the last refused delta that polling found; "": none."""
        text: bytes = self._library.recsys_delta_error(self._predictor)
        return text.decode()

    def close(self) -> None:
        """Free the predictor."""
        self._library.recsys_close(self._predictor)
        self._predictor = ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, f"recsys_{name}")(*arguments)
        if code:
            raise _error(code, self._library.recsys_last_error().decode())

    def _response(self, responses: ctypes.c_void_p, i: int) -> dict[str, Any] | Exception:
        code = self._library.recsys_response_code(responses, i)
        if code:
            return _error(code, self._library.recsys_response_message(responses, i).decode())
        outputs = ctypes.POINTER(_Tensor)()
        count = self._library.recsys_response_outputs(responses, i, _by(outputs))
        response: dict[str, Any] = {
            outputs[j].name.decode(): _copy(outputs[j]) for j in range(count)
        }
        views, num_views = ctypes.POINTER(_Tensor)(), ctypes.c_int32()
        try:
            self._call("response_values", responses, i, _by(views), _by(num_views))
        except RuntimeError as error:  # of the rows of this request
            return error
        return response | (
            {"values": _objects(*views[: num_views.value])} if num_views.value else {}
        )


def _by(value: Any) -> Any:
    return ctypes.byref(value)


def _error(code: int, message: str) -> Exception:
    known = (_BAD_REQUEST, _BAD_PACKAGE, _BAD_DELTA)
    return ValueError(message) if code in known else RuntimeError(message)


def _views(request: Mapping[str, Tensor | Texts]) -> Any:
    """Return the tensors of a request for the C API, which refers to their memory."""
    views = (_Tensor * len(request))()
    for view, (name, tensor) in zip(views, request.items(), strict=True):
        view.name = name.encode()
        if not isinstance(tensor, Tensor):
            view.dtype, view.num_dims = _TEXT, 1
            view.shape = (ctypes.c_int64 * 1)(len(tensor.views))
            view.data = tensor.views.ctypes.data
            continue
        view.dtype = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else _OTHER_DTYPE
        view.num_dims = tensor.dim()
        view.shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        view.data = tensor.data_ptr() or None
    return views


def _objects(values: _Tensor, missing: _Tensor) -> NDArray[Any]:
    """Return values as objects; None where they are missing."""
    is_missing = _copy(missing).numpy()
    objects = np.empty(is_missing.shape, object)
    if values.dtype != _TEXT:
        objects[:] = _copy(values).numpy()
    elif objects.size:
        texts = ctypes.cast(values.data, ctypes.POINTER(_Text))
        objects.reshape(-1)[:] = [
            ctypes.string_at(texts[i].data or b"", texts[i].size).decode()
            for i in range(objects.size)
        ]
    objects[is_missing] = None
    return objects


def _copy(view: _Tensor) -> Tensor:
    shape = [view.shape[dim] for dim in range(view.num_dims)]
    copied = torch.empty(shape, dtype=_DTYPES[view.dtype])
    if copied.numel():
        ctypes.memmove(copied.data_ptr(), view.data, copied.numel() * copied.element_size())
    return copied

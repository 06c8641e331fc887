"""Calls of `librecsys_predictor.so` by ctypes, for the Python servers of benchmarks/serving.py."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""Names of `recsys_dtype`, by number."""

Arrays = Mapping[str, NDArray[Any]]
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


class _Request(ctypes.Structure):
    _fields_ = (("tensors", ctypes.POINTER(_Tensor)), ("num_tensors", ctypes.c_int32))


class _Options(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("device", "num_runners", "num_threads")),
        *((name, ctypes.c_int32) for name in ("verify_tables", "poll_ms")),
        *((name, ctypes.c_char_p) for name in ("program", "fbgemm")),
    )


class Calls:
    """A predictor of one version of a package."""

    def __init__(self, library: Path, version: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("recsys_last_error", "recsys_response_message"):
            getattr(self._library, name).restype = ctypes.c_char_p
        options = _Options()
        self._library.recsys_default_options(ctypes.byref(options))
        options.num_threads = 1
        self._predictor = ctypes.c_void_p()
        code = self._library.recsys_open(
            str(version).encode(), ctypes.byref(options), ctypes.byref(self._predictor)
        )
        if code != 0:
            raise RuntimeError(self._library.recsys_last_error().decode())

    def run(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the outputs of a request."""
        kept = [(name.encode(), np.ascontiguousarray(array)) for name, array in arrays.items()]
        tensors = (_Tensor * len(kept))()
        for tensor, (name, array) in zip(tensors, kept, strict=True):
            tensor.name = name
            tensor.dtype = DTYPES.index(array.dtype.name)
            tensor.num_dims = array.ndim
            tensor.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
            tensor.data = array.ctypes.data
        request = _Request(tensors, len(kept))
        responses = ctypes.c_void_p()
        code = self._library.recsys_run(
            self._predictor, ctypes.byref(request), 1, ctypes.byref(responses)
        )
        if code != 0:
            raise RuntimeError(self._library.recsys_last_error().decode())
        try:
            if self._library.recsys_response_code(responses, 0) != 0:
                raise ValueError(self._library.recsys_response_message(responses, 0).decode())
            outputs = ctypes.POINTER(_Tensor)()
            count = self._library.recsys_response_outputs(responses, 0, ctypes.byref(outputs))
            return {outputs[i].name.decode(): _copy(outputs[i]) for i in range(count)}
        finally:
            self._library.recsys_responses_free(responses)


def _copy(tensor: _Tensor) -> NDArray[Any]:
    shape = tensor.shape[: tensor.num_dims]
    dtype = np.dtype(DTYPES[tensor.dtype])
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(tensor.data, size), dtype).reshape(shape)

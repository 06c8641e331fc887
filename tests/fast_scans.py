"""Scans of Triton's interpreter by slices; its own take value by value, a hundred times as long."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import numpy as np


def fast_scans() -> contextlib.AbstractContextManager[object]:
    """Lets the interpreter scan by slices."""
    from triton.runtime.interpreter import ScanOps

    return mock.patch.object(ScanOps, "generic_scan", _scan)


def _scan(scan: Any, given: list[Any]) -> list[Any]:
    of_slices = [np.moveaxis(tensor.handle.data, scan.axis, 0) for tensor in given]
    dtypes = [tensor.dtype.scalar for tensor in given]
    found = [np.empty_like(slices) for slices in of_slices]

    def at(place: int, arrays: list[Any]) -> list[Any]:
        return [scan.to_tensor(a[place], d) for a, d in zip(arrays, dtypes, strict=True)]

    for place in range(len(found[0])):
        if place:
            made = scan.combine_fn.fn(*at(place - 1, found), *at(place, of_slices))
            values = [tensor.handle.data for tensor in made]
        else:
            values = [slices[0] for slices in of_slices]
        for array, value in zip(found, values, strict=True):
            array[place] = value
    moved = [np.moveaxis(array, 0, scan.axis) for array in found]
    return [scan.to_tensor(a, d) for a, d in zip(moved, dtypes, strict=True)]

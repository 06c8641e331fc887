"""Lookup of ids in hash indexes on a CPU, by the C file `hash_index.c`."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from recsys.kernels.hashed import twin

if TYPE_CHECKING:
    from recsys.kernels.hashed.index import HashIndex

RESULTS = 5
"""Numbers at the end of the C file's `Table` that it writes; before them is the number of ids."""

EVICTIONS = {"none": 0, "lru": 1, "lfu": 2, "distance_lfu": 3}
ADMISSIONS = {"always": 0, "at_least": 1, "probability": 2}

_ROWS: weakref.WeakKeyDictionary[HashIndex, tuple[tuple[int, ...], bytes]] = (
    weakref.WeakKeyDictionary()
)
"""Addresses of the arrays of an index, and its `Table`."""


def map_tables(
    library: ctypes.CDLL,
    indexes: Sequence[HashIndex],
    ids: Tensor,
    sizes: Sequence[int],
    step: int,
    pin: int,
    is_training: bool,
) -> twin.Found:
    """Map ids to rows; see `index.map_ids`.

    Args:
        library: The C file's library.
        indexes: The shards.
        ids: Contiguous int64 [ids].
        sizes: Number of ids of each table.
        step: Training step.
        pin: The first step whose rows keep their ids.
        is_training: Whether to record the use of rows and to place new ids.
    """
    tables = np.frombuffer(bytearray().join(map(_table, indexes)), dtype=np.int64)
    tables = tables.reshape(len(indexes), -1) if indexes else np.zeros((0, RESULTS + 1), np.int64)
    tables[:, -RESULTS - 1] = sizes
    rows = torch.empty_like(ids)
    new = torch.empty(2, ids.numel() if is_training else 0, dtype=torch.int64)
    result = library.recsys_map_ids(
        ctypes.c_void_p(tables.ctypes.data),
        ctypes.c_int64(len(indexes)),
        ctypes.c_void_p(ids.data_ptr()),
        ctypes.c_int64(step),
        ctypes.c_int64(pin),
        ctypes.c_int64(is_training),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(new[0].data_ptr()),
        ctypes.c_void_p(new[1].data_ptr()),
    )
    if result < 0:
        raise MemoryError(f"There is no memory to map {ids.numel()} ids. Map smaller batches.")
    if result:
        twin.check_regions(indexes[result - 1], ids.split(list(sizes))[result - 1])
    counts = torch.from_numpy(tables[:, -RESULTS:].copy())
    new_sizes: list[int] = tables[:, 1 - RESULTS].tolist()
    num_new = sum(new_sizes)
    return rows, new[0, :num_new], new[1, :num_new], new_sizes, counts


def _table(index: HashIndex) -> bytes:
    """Return the C file's `Table` of an index."""
    addresses = (
        index.ids.data_ptr(),
        index.last_used.data_ptr(),
        index.seen.data_ptr(),
        index.digests.data_ptr(),
        index.sketch.data_ptr(),
    )
    known = _ROWS.get(index)
    if known is not None and known[0] == addresses:
        return known[1]
    _check_arrays(index)
    settings = index.settings
    numbers = [
        *addresses,
        twin.signed(index.seed),
        index.num_regions.bit_length() - 1,
        index.first_region,
        index.last_region - index.first_region,
        index.lines,
        EVICTIONS[settings.eviction],
        settings.half_life,
        settings.exponent,
        settings.ttl,
        ADMISSIONS[settings.admission],
        settings.admission_value,
        settings.is_shared,
        0,
        *[0] * RESULTS,
    ]
    row = np.array(numbers, dtype=np.int64).tobytes()
    _ROWS[index] = addresses, row
    return row


def _check_arrays(index: HashIndex) -> None:
    """Raise an error if the C file would read or write beside an array."""
    rows = (index.last_region - index.first_region) * index.lines * twin.LINE
    counts = index.settings.eviction in ("lfu", "distance_lfu")
    sketched = index.settings.admission == "at_least"
    for name, dtype, size in (
        ("ids", torch.int64, rows),
        ("last_used", torch.int32, rows),
        ("seen", torch.int32, rows * counts),
        ("digests", torch.uint8, rows),
        ("sketch", torch.uint8, 4 * rows * sketched),
    ):
        array: Tensor = getattr(index, name)
        is_right = array.dtype == dtype and array.shape == (size,)
        if not (is_right and array.device.type == "cpu" and array.is_contiguous()):
            raise ValueError(
                f"{name} must be a contiguous {dtype} tensor [{size}] on the device of the ids, "
                f"the CPU; received {array.dtype} {list(array.shape)} on {array.device}."
            )

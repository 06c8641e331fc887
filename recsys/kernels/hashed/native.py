"""Lookup of ids in hash indexes on a CPU, and initial weights of their rows, by the C files."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from recsys.kernels.hashed import twin

if TYPE_CHECKING:
    from recsys.kernels.hashed.index import IdIndex

RESULTS = 5
"""Numbers at the end of the C file's `Table` that it writes; before them is the number of ids."""

EVICTIONS = {"none": 0, "lru": 1, "lfu": 2, "distance_lfu": 3}
ADMISSIONS = {"always": 0, "at_least": 1, "probability": 2}


@final
class _Group(NamedTuple):
    """Indexes that are mapped together, and the C file's tables."""

    indexes: tuple[weakref.ref[IdIndex], ...]
    addresses: list[int]
    """Addresses of the `ids`: `share_memory` moves all arrays of a module."""
    tables: np.ndarray


_GROUPS: weakref.WeakKeyDictionary[IdIndex, _Group] = weakref.WeakKeyDictionary()
"""The last group that begins with an index."""


def map_tables(
    library: ctypes.CDLL,
    indexes: Sequence[IdIndex],
    ids: Tensor,
    sizes: Sequence[int],
    step: int,
    pin: int,
    is_training: bool,
    returns_old: bool = False,
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
        returns_old: Whether to return the ids that new rows had.
    """
    tables = _tables(indexes)
    tables[:, -RESULTS - 1] = sizes
    rows = torch.empty_like(ids)
    # the C file allocates no results: at most each id gets a new row
    new = torch.empty(2, ids.numel() if is_training else 0, dtype=torch.int64)
    old = torch.empty(new.shape[1] if returns_old else 0, 2, dtype=torch.int64)
    # ctypes would pass plain integers as C's `int`, of 32 bits
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
        ctypes.c_void_p(old.data_ptr() if returns_old else None),
    )
    if result < 0:
        raise MemoryError(f"There is no memory to map {ids.numel()} ids. Map smaller batches.")
    if result:
        # the result is a table with an id of another shard, counted from 1; this call raises
        twin.check_regions(indexes[result - 1], ids.split(list(sizes))[result - 1])
    counts = torch.from_numpy(tables[:, -RESULTS:].copy())
    new_sizes: list[int] = tables[:, 1 - RESULTS].tolist()
    num_new = sum(new_sizes)
    return rows, new[0, :num_new], new[1, :num_new], new_sizes, counts, old[:num_new]


def region_rows(
    library: ctypes.CDLL, ids: Tensor, sizes: Sequence[int], hashes: np.ndarray
) -> Tensor:
    """Return a row of the region of each hashed id, and other ids as they are; int64 [N].

    Args:
        library: The library of the C files.
        ids: int64 [N], ordered by feature.
        sizes: Number of ids of each feature.
        hashes: int64 [F, 3] seed of the hash, log2 of the number of regions, and rows of a region;
            0 rows for features of row numbers.
    """
    features = np.concatenate([np.array(sizes, dtype=np.int64)[:, None], hashes], axis=1)
    ids, rows = ids.contiguous(), torch.empty_like(ids, memory_format=torch.contiguous_format)
    library.recsys_region_rows(
        ctypes.c_void_p(features.ctypes.data),
        ctypes.c_int64(len(features)),
        ctypes.c_void_p(ids.data_ptr()),
        ctypes.c_void_p(rows.data_ptr()),
    )
    return rows


def read_parts(library: ctypes.CDLL | None, file: int, parts: np.ndarray, out: np.ndarray) -> None:
    """Read parts of a file, without Python's lock where there is a library.

    Args:
        library: The library of the C files, or None.
        file: Descriptor of the file.
        parts: int64 [N, 3] position of each part in the file, its bytes, and its place in `out`.
        out: uint8 [bytes].

    Raises:
        OSError: The file cannot be read, or is too short.
    """
    if library is None:
        for position, size, place in parts.tolist():
            if os.preadv(file, [out[place : place + size].data], position) < size:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return
    parts = np.ascontiguousarray(parts)
    number = library.recsys_read_parts(
        ctypes.c_int64(file),
        ctypes.c_void_p(parts.ctypes.data),
        ctypes.c_int64(len(parts)),
        ctypes.c_void_p(out.ctypes.data),
    )
    if number:
        raise OSError(number, os.strerror(number))


def init_rows(
    library: ctypes.CDLL,
    weights: Tensor,
    rows: Tensor,
    ids: Tensor,
    sizes: Sequence[int],
    draws: Sequence[tuple[int, int, float, float]],
) -> None:
    """Write the initial weights of rows that got a new id.

    Args:
        library: The library of the C files.
        weights: Contiguous fp32 [rows, columns] of all tables.
        rows: int64 [K], rows of `weights`, ordered by table.
        ids: int64 [K].
        sizes: Number of rows of each table.
        draws: Of each table the first of its columns that `weights` has, the seed, the lower end
            of the range of values, and the range divided by 2^24.
    """
    tables = np.zeros((len(sizes), 5), dtype=np.int64)
    tables[:, 0] = sizes
    tables[:, 1] = [column for column, *_ in draws]
    tables[:, 2] = [seed for _, seed, *_ in draws]
    # the C file reads the bits of the last two numbers as doubles
    tables[:, 3:].view(np.float64)[:] = [numbers for _, _, *numbers in draws]
    # names keep the copies alive until the call returns
    rows, ids = rows.contiguous(), ids.contiguous()
    library.recsys_init_rows(
        ctypes.c_void_p(tables.ctypes.data),
        ctypes.c_int64(len(sizes)),
        ctypes.c_void_p(weights.data_ptr()),
        ctypes.c_int64(weights.shape[1]),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(ids.data_ptr()),
    )


def _tables(indexes: Sequence[IdIndex]) -> np.ndarray:
    """Return a copy of the C file's tables, [indexes, numbers of a table]."""
    if not indexes:
        return np.zeros((0, RESULTS + 1), np.int64)
    addresses = [index.ids.data_ptr() for index in indexes]
    known = _GROUPS.get(indexes[0])
    is_known = (
        known is not None
        and known.addresses == addresses
        and len(known.indexes) == len(indexes)
        # an address alone may belong to a new index with other settings
        and all(ref() is index for ref, index in zip(known.indexes, indexes, strict=True))
    )
    if not is_known:
        for index in indexes:
            _check_arrays(index)
        tables = np.array(list(map(_numbers, indexes)), dtype=np.int64)
        # weak references: a value that refers to its key would keep the key alive
        known = _Group(tuple(map(weakref.ref, indexes)), addresses, tables)
        _GROUPS[indexes[0]] = known
    assert known is not None
    return known.tables.copy()


def _numbers(index: IdIndex) -> list[int]:
    """Return the C file's `Table` of an index."""
    settings = index.settings
    arrays = index.ids, index.last_used, index.seen, index.digests, index.sketch
    return [
        *(array.data_ptr() for array in arrays),
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


def _check_arrays(index: IdIndex) -> None:
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

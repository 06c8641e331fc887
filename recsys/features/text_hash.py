"""64-bit hash of texts, and rows of hashed numbers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from recsys.sparse.hashing import STEPS

__all__ = ["hash_rows", "hash_texts", "text_buffers"]

_START: Final = 0xCBF29CE484222325
_FACTOR: Final = 0x100000001B3
_FEW: Final = 16  # texts for which a loop over bytes is faster than one over arrays
_MASK: Final = (1 << 64) - 1


def hash_rows(
    ids: np.ndarray[Any, np.dtype[np.int64]], rows: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the rows of `recsys.sparse.hash_ids`, computed in place by NumPy.

    Args:
        ids: [N] int64.
        rows: Number of rows of the table.

    Returns:
        [N] int64 from 0 to `rows` - 1.

    Example:
        >>> hash_rows(np.array([10**18]), 1000).tolist()
        [34]
    """
    mixed = ids.view(np.uint64).copy()
    other = np.empty_like(mixed)
    for shift, factor in STEPS:
        np.right_shift(mixed, np.uint64(shift), out=other)
        mixed ^= other
        mixed *= np.uint64(factor)
    mixed &= np.uint64(_MASK >> 1)
    np.floor_divide(mixed, np.uint64(rows), out=other)  # faster than a remainder
    other *= np.uint64(rows)
    mixed -= other
    return mixed.view(np.int64)


def hash_texts(texts: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the FNV-1a hash of the UTF-8 bytes of each text.

    The hash starts with 14695981039346656037. For each byte it takes the exclusive or of hash and
    byte, then multiplies by 1099511628211, modulo 2^64 (Fowler, Noll and Vo, "The FNV
    Non-Cryptographic Hash Algorithm", IETF draft).

    Args:
        texts: A `large_string` array of Arrow without nulls.

    Returns:
        [N] int64, the 64 bits of the hash.

    Example:
        >>> import pyarrow as pa
        >>> hash_texts(pa.array(["", "a"], pa.large_string())).view(np.uint64).tolist()
        [14695981039346656037, 12638187200555641996]
    """
    num_texts = len(texts)
    hashes = np.full(num_texts, _START, np.uint64)
    if num_texts == 0:
        return hashes.view(np.int64)
    offsets, data = text_buffers(texts)
    if not data.size:
        return hashes.view(np.int64)
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")
    starts, sorted_lengths = offsets[:-1][order], lengths[order]
    # number of texts longer than each position
    longer = num_texts - np.searchsorted(lengths[order[::-1]], np.arange(lengths.max()), "right")
    place = 0
    sums = hashes.copy()
    for place, count in enumerate(longer):
        if count < _FEW:
            break
        sums[:count] ^= data[starts[:count] + place]
        sums[:count] *= np.uint64(_FACTOR)
    else:
        place = len(longer)
    for i in range(int(np.searchsorted(-sorted_lengths, -place, "left"))):
        value = int(sums[i])
        for byte in data[starts[i] + place : starts[i] + sorted_lengths[i]].tobytes():
            value = ((value ^ byte) * _FACTOR) & _MASK
        sums[i] = value
    hashes[order] = sums
    return hashes.view(np.int64)


def text_buffers(texts: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the offsets and the bytes of texts, without a copy.

    Args:
        texts: A `large_string` array of Arrow.

    Returns:
        [N + 1] int64 offsets of the texts in the bytes, and uint8 bytes.
    """
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset :][: len(texts) + 1]
    is_empty = data is None or data.size == 0
    return bounds, np.empty(0, np.uint8) if is_empty else np.frombuffer(data, np.uint8)

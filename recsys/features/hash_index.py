"""Positions of distinct 64-bit numbers.

Shapes: `N` values.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias, final

import numpy as np

__all__ = ["NumberPositions"]

_Array: TypeAlias = np.ndarray[Any, Any]
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_PROBES: Final = 64
"""Slots that may have a number; chosen numbers that have the same ones are searched by halves."""


@final
class NumberPositions:
    """Positions of distinct numbers: a hash table with open addressing, at most half full.

    Numbers are searched together, probe by probe, instead of one by one. Numbers without a free
    slot among their first are in a sorted list.

    Args:
        numbers: [K] int64.

    Raises:
        ValueError: Numbers are not distinct.

    Example:
        >>> NumberPositions(np.array([7, -1])).find(np.array([-1, 3, 7])).tolist()
        [1, -1, 0]
    """

    def __init__(self, numbers: _Array) -> None:
        self._numbers = numbers
        bits = max(1, len(numbers)).bit_length() + 1
        self._shift = np.uint64(64 - bits)
        kind = np.int32 if len(numbers) < 2**31 else np.int64
        self._slots: _Array = np.full(1 << bits, -1, kind)
        waiting, slots = np.arange(len(numbers)), self._first_slots(numbers)
        for _ in range(_PROBES):
            if not len(waiting):
                break
            is_free = self._slots[slots] < 0
            self._slots[slots[is_free]] = waiting[is_free]  # one of those with the same slot
            holder = self._slots[slots]
            lost = holder != waiting
            waiting, slots = waiting[lost], slots[lost]
            if (numbers[holder[lost]] == numbers[waiting]).any():
                raise ValueError("The numbers of an index must be distinct.")
            slots = self._next(slots)
        order = np.argsort(numbers[waiting], kind="stable")
        self._rest: _Array = waiting[order]
        self._rest_numbers: _Array = numbers[self._rest]
        if (self._rest_numbers[1:] == self._rest_numbers[:-1]).any():
            raise ValueError("The numbers of an index must be distinct.")

    def find(self, numbers: _Array) -> _Array:
        """Return [N] int64 positions, -1 for unknown numbers.

        Args:
            numbers: [N] int64.
        """
        if not len(self._numbers):
            return np.full(len(numbers), -1)
        slots = self._first_slots(numbers)
        positions: _Array = self._slots[slots].astype(np.int64)
        # position -1 reads the last number, so that equality may be by chance: it stays -1
        waiting = np.flatnonzero((self._numbers[positions] != numbers) & (positions >= 0))
        slots = slots[waiting]
        for _ in range(_PROBES - 1):
            if not len(waiting):
                return positions
            slots = self._next(slots)
            candidates: _Array = self._slots[slots]
            positions[waiting] = candidates
            again = (self._numbers[candidates] != numbers[waiting]) & (candidates >= 0)
            waiting, slots = waiting[again], slots[again]
        positions[waiting] = -1
        if len(self._rest):
            places = np.searchsorted(self._rest_numbers, numbers[waiting])
            places = np.minimum(places, len(self._rest) - 1)
            is_found = self._rest_numbers[places] == numbers[waiting]
            positions[waiting[is_found]] = self._rest[places[is_found]]
        return positions

    def _first_slots(self, numbers: _Array) -> _Array:
        mixed = numbers.view(np.uint64)
        slots: _Array = ((mixed ^ (mixed >> np.uint64(32))) * _FACTOR) >> self._shift
        return slots.view(np.int64)

    def _next(self, slots: _Array) -> _Array:
        following: _Array = (slots + 1) & (len(self._slots) - 1)
        return following

"""Numbers of ids in memory, for any number of ids: an index that grows and never evicts."""

from __future__ import annotations

import secrets
from typing import final

import torch
from torch import Tensor

from recsys.kernels.hashed.index import LINE, IdIndex, IndexSettings, map_ids

_FIRST_LINES = 16
_MOST_LOAD = 0.5  # above it, a line of 64 rows is likely to be full somewhere

_SETTINGS = IndexSettings(
    eviction="none", half_life=0, exponent=1, ttl=0, admission="always", admission_value=0,
    is_shared=False,
)  # fmt: skip


@final
class IdNumbers:
    """A map from 64-bit ids to numbers, as arrays: from 42 to 84 bytes for each id.

    Example:
        >>> numbers = IdNumbers()
        >>> _ = numbers.put(torch.tensor([-7, 2**62]), torch.tensor([3, 4]))
        >>> _ = numbers.take(torch.tensor([-7]))
        >>> numbers.find(torch.tensor([2**62, -7])).tolist(), len(numbers)
        ([4, -1], 1)
    """

    def __init__(self) -> None:
        self._resize(_FIRST_LINES)

    def __len__(self) -> int:
        return self._count

    def find(self, ids: Tensor) -> Tensor:
        """Return the number of each id, -1 for ids without one; int64 [N]."""
        rows = self._map(ids, is_training=False)
        return torch.where(rows >= 0, self._numbers[rows], -1)

    def put(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Set the numbers of ids.

        Args:
            ids: int64 [N], distinct.
            numbers: int64 [N], not negative.

        Returns:
            int64 [N] the numbers that they had, -1 for ids without one.
        """
        while self._count + ids.numel() > _MOST_LOAD * self._index.ids.numel():
            self._grow()
        rows = self._map(ids, is_training=True)
        is_placed = rows >= 0
        placed = rows[is_placed]
        old = torch.full_like(ids, -1)
        old[is_placed] = self._numbers[placed]
        self._count += int((old[is_placed] < 0).sum())
        self._numbers[placed] = numbers[is_placed]
        if placed.numel() < ids.numel():  # the lines of the others are full
            self._grow()
            old[~is_placed] = self.put(ids[~is_placed], numbers[~is_placed])
        return old

    def take(self, ids: Tensor) -> Tensor:
        """Return the number of each id, -1 for ids without one, and forget the ids.

        Args:
            ids: int64 [N], distinct.
        """
        rows = self._map(ids, is_training=False)
        numbers = torch.where(rows >= 0, self._numbers[rows], -1)
        rows = rows[rows >= 0]
        self._index.last_used[rows] = 0
        self._index.digests[rows] = 0
        self._numbers[rows] = -1
        self._count -= rows.numel()
        return numbers

    def _map(self, ids: Tensor, *, is_training: bool) -> Tensor:
        return map_ids([self._index], ids, [ids.numel()], 1, 1, is_training).rows

    def _grow(self) -> None:
        rows = (self._index.last_used > 0).nonzero().flatten()
        ids, numbers = self._index.ids[rows], self._numbers[rows]
        self._resize(2 * self._index.lines)
        self.put(ids, numbers)

    def _resize(self, lines: int) -> None:
        # the seed is secret: ids that fill one line of a table must not fill one here
        seed = secrets.randbits(64)
        self._index = IdIndex.empty(_SETTINGS, lines * LINE, 1, 0, 1, seed)
        self._numbers = torch.full((lines * LINE,), -1, dtype=torch.int64, device="cpu")
        self._count = 0

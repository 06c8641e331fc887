"""Windows of the last samples: their sums, or their rows.

Shapes: `T` tasks, `K` sums, `N` samples, `E` extra columns, `R` ranks.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import final

import torch

from recsys.base.arguments import whole

MAX_PARTS = 1000
"""Maximum number of parts of a window of sums. A part is a batch, or a thousandth of the window if
that is more."""


@final
class SumWindow:
    """Sums over the last samples, in constant memory.

    It stores one sum for each part of the window. Totals are computed from the parts, so a NaN
    disappears with its batch.

    Args:
        max_samples: Size of the window. The oldest parts are removed while it is exceeded, except
            the last part.

    Example:
        >>> window = SumWindow(max_samples=4)
        >>> for value in (1.0, 2.0, 3.0):
        ...     window.add(torch.tensor([[value]]), 2)
        >>> torch.stack(tuple(window.sums)).sum().item()
        5.0
    """

    def __init__(self, max_samples: int) -> None:
        self.max_samples = whole("max_samples", max_samples)
        self.sums: deque[torch.Tensor] = deque()
        self.counts: deque[int] = deque()
        self._part_size = math.ceil(max_samples / MAX_PARTS)
        self._num_samples = 0

    def add(self, sums_TK: torch.Tensor, num_samples: int) -> None:
        """Add a batch.

        Args:
            sums_TK: `[T, K]` sums of the batch; stored without a copy, never changed.
            num_samples: Number of samples of the batch.
        """
        if self.counts and self.counts[-1] + num_samples <= self._part_size:
            self.sums[-1] = self.sums[-1] + sums_TK
            self.counts[-1] += num_samples
        else:
            self.sums.append(sums_TK)
            self.counts.append(num_samples)
        self._num_samples += num_samples
        while self._num_samples > self.max_samples and len(self.counts) > 1:
            self.sums.popleft()
            self._num_samples -= self.counts.popleft()


@final
class RowWindow:
    """Rows of the last samples.

    Args:
        max_rows: Size of the window. Older rows are removed.

    Example:
        >>> window = RowWindow(max_rows=3)
        >>> window.add(torch.tensor([[0.1, 0.2]]), torch.tensor([[7, 7]]))
        >>> window.add(torch.tensor([[0.3, 0.4]]), torch.tensor([[8, 8]]))
        >>> window.rows()[1]
        tensor([[7, 8, 8]])
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = whole("max_rows", max_rows)
        self._num_kept = 0  # Includes all rows of the oldest batch.
        self._parts: deque[tuple[torch.Tensor, torch.Tensor | None]] = deque()

    @property
    def is_double(self) -> bool:
        """True if any rows are float64."""
        return any(rows.dtype == torch.float64 for rows, _ in self._parts)

    def add(self, rows_TN: torch.Tensor, extra_EN: torch.Tensor | None) -> None:
        """Add a batch.

        Args:
            rows_TN: `[..., N]` values; stored without a copy, never changed.
            extra_EN: `[E, N]` further int64 columns; `None` for all batches or for no batch.
        """
        self._parts.append((rows_TN, extra_EN))
        self._num_kept += rows_TN.size(-1)
        while self._num_kept - self._parts[0][0].size(-1) >= self.max_rows:
            self._num_kept -= self._parts.popleft()[0].size(-1)

    @property
    def num_rows(self) -> int:
        """Number of rows in the window."""
        return min(self._num_kept, self.max_rows)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return all rows, the oldest first.

        Returns:
            `[..., N]` rows, and `[E, N]` further columns or `None`; `None` if the window is empty.
        """
        if not self._parts:
            return None
        if len(self._parts) > 1 or self._num_kept > self.max_rows:
            last = slice(-self.max_rows, None)
            rows = torch.cat([part for part, _ in self._parts], dim=-1)[..., last]
            extras = [extra for _, extra in self._parts if extra is not None]
            extra = torch.cat(extras, dim=-1)[..., last] if extras else None
            self._parts = deque([(rows, extra)])
            self._num_kept = self.num_rows
        return self._parts[0]

    def to(self, device: torch.device) -> None:
        """Move to a device.

        Args:
            device: Target device.
        """
        self._parts = deque(
            (rows.to(device), None if extra is None else extra.to(device))
            for rows, extra in self._parts
        )


def gather_rows(
    mine_N: torch.Tensor,
    sizes: Sequence[int],
    group: "torch.distributed.ProcessGroup | None",
    to_all: bool = True,
) -> torch.Tensor:
    """Gather the rows of all ranks; every rank must call it.

    Args:
        mine_N: `[..., N]` rows of this rank.
        sizes: `N` of each rank.
        group: Process group; `None` for all ranks.
        to_all: Whether all ranks get the rows; otherwise the first rank alone.

    Returns:
        `[..., sum(sizes)]` rows in the order of ranks; `mine_N` on other ranks than the first if
        `to_all` is false.
    """
    import torch.distributed as dist

    padded = mine_N.new_zeros(*mine_N.shape[:-1], max(sizes))
    padded[..., : mine_N.size(-1)] = mine_N
    parts = [torch.empty_like(padded) for _ in sizes]
    if to_all:
        dist.all_gather(parts, padded, group=group)
    else:
        is_first = dist.get_rank(group) == 0
        first = 0 if group is None else dist.get_global_rank(group, 0)
        dist.gather(padded, parts if is_first else None, dst=first, group=group)
        if not is_first:
            return mine_N
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

"""Samples of ids that bags do not have."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.base.arguments import whole
from recsys.base.checked import checked_late
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.ops.bags import bags_of, fail
from recsys.sparse.recorded import recorded
from recsys.sparse.validate import is_readable

__all__ = ["sample_negatives"]


@recorded
@checked_late
def sample_negatives(
    x: JaggedTensor, num_ids: int, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw ids that a bag does not have, each with the same probability.

    Args:
        x: Ids from 0 to `num_ids - 1`, `[N]`; a bag may have an id several times.
        num_ids: Number of ids.
        count: Ids to draw for each bag; one may be drawn several times.
        generator: Generator of the draws, on the device of `x`; None for torch's own.

    Returns:
        int64 `[M, count]`.

    Raises:
        ValueError: On a CPU, an id is out of its range, or a bag has all ids.

    Example:
        >>> x = JaggedTensor(torch.tensor([0, 1, 1]), lengths=torch.tensor([2, 1]))
        >>> negatives = sample_negatives(x, num_ids=3, count=5)
        >>> negatives[0].tolist(), 1 in negatives[1]
        ([2, 2, 2, 2, 2], False)
    """
    whole("sample_negatives: num_ids", num_ids)
    whole("sample_negatives: count", count, 0)
    x = x.trim()
    num_bags, ids = x.lengths().shape[0], x.values().long()
    if is_readable(ids) and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_ids:
        fail(f"ids must be from 0 to {num_ids - 1}; received {int(ids.min())} to {int(ids.max())}")
    keys = (bags_of(x) * num_ids + ids).unique()
    bags, ids = keys // num_ids, keys % num_ids
    sizes = torch.zeros(num_bags, dtype=torch.int64, device=keys.device)
    sizes = sizes.index_add(0, bags, torch.ones_like(bags))
    starts = sizes.cumsum(0) - sizes
    left = num_ids - sizes
    if is_readable(left) and left.numel() and not int(left.min()):
        fail(f"each bag must lack an id; bag {int(left.argmin())} has all {num_ids}")
    # the r-th id that a bag lacks is r plus the number of its ids with as many lacking before them
    draw = torch.rand(num_bags, count, generator=generator, device=keys.device, dtype=torch.float64)
    ranks = (draw * left.unsqueeze(1)).long()
    lacking = ids - (torch.arange(ids.shape[0], device=ids.device) - starts.index_select(0, bags))
    row = torch.arange(num_bags, device=keys.device).unsqueeze(1) * (num_ids + 1)
    before = torch.searchsorted(lacking + bags * (num_ids + 1), ranks + row, right=True)
    return ranks + before - starts.unsqueeze(1)

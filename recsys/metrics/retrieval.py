"""Metrics of retrieval over whole catalogues.

Legend: `B` queries, `K` items that were found, `T` targets of all queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.kernels.arguments import whole
from recsys.kernels.checked import checked

__all__ = ["RetrievalMetrics"]


@final
class RetrievalMetrics:
    """Recall, hit rate, NDCG and reciprocal rank of items that were found, over many batches.

    A query's recall is the share of its targets among the first `k` items; its hit rate is 1 if
    there is any; its NDCG is the sum of `1 / log2(rank + 1)` of the targets among the first `k`,
    divided by the largest possible sum; its reciprocal rank is 1 divided by the rank of its first
    target among the first `k`, or 0. The values are means over the queries that have targets. With
    one target per query and an exact search this is the evaluation over the full catalogue, without
    samples (Krichene and Rendle, "On sampled metrics for item recommendation", KDD 2020).

    Args:
        ks: Numbers of items.
        device: Device of the items.

    Raises:
        ValueError: There is no number, or one is below 1.

    Example:
        >>> metrics = RetrievalMetrics([1, 2], torch.device("cpu"))
        >>> found, targets = torch.tensor([[7, 3], [5, 6]]), torch.tensor([3, 9])
        >>> metrics.update(found, targets, torch.tensor([0, 1, 2]))
        >>> {name: round(value, 4) for name, value in metrics.compute().items() if "2" in name}
        {'recall@2': 0.5, 'hit_rate@2': 0.5, 'ndcg@2': 0.3155, 'mrr@2': 0.25}
    """

    @checked
    def __init__(self, ks: Sequence[int], device: torch.device) -> None:
        if not ks:
            raise ValueError("ks must have numbers of items; received none.")
        self.ks = [whole("ks", k) for k in ks]
        self._sums = torch.zeros(len(self.ks), 4, dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, found: Tensor, targets: Tensor, offsets: Tensor) -> None:
        """Add a batch.

        Args:
            found: `[B, K]` ids of the items, the best first, distinct in each row; K is at least
                the largest of `ks`.
            targets: `[T]` ids of the targets, distinct for each query.
            offsets: `[B + 1]`, the position of the first target of each query, and the end.

        Raises:
            ValueError: Too few items were found, or shapes do not match.
        """
        if found.dim() != 2 or found.shape[1] < max(self.ks):
            raise ValueError(
                f"found must be [queries, at least {max(self.ks)}]; received {list(found.shape)}."
            )
        if offsets.shape != (found.shape[0] + 1,):
            raise ValueError(
                f"offsets must be [{found.shape[0] + 1}]; received {list(offsets.shape)}."
            )
        lengths = offsets.diff()
        rows = torch.arange(found.shape[0], device=found.device)
        known = torch.cat([found.flatten(), targets]).unique()
        keys = rows.unsqueeze(1) * len(known) + torch.searchsorted(known, found)
        of_targets = rows.repeat_interleave(lengths) * len(known)
        is_target = torch.isin(keys, of_targets + torch.searchsorted(known, targets))
        gains = 1 / torch.arange(2, found.shape[1] + 2, device=found.device).double().log2()
        has_targets = lengths > 0
        for row, k in enumerate(self.ks):
            hits = is_target[:, :k].double()
            most = lengths.clamp(max=k)
            ideal = torch.cat([gains.new_zeros(1), gains[:k].cumsum(0)])[most]
            first = (hits * torch.arange(k, 0, -1, device=hits.device)).amax(1)
            values = torch.stack(
                [
                    hits.sum(1) / lengths.clamp(min=1),
                    hits.amax(1),
                    (hits * gains[:k]).sum(1) / ideal.clamp(min=1e-9),
                    torch.where(first > 0, 1 / (k + 1 - first), 0.0),
                ],
                1,
            )
            self._sums[row] += values[has_targets].sum(0)
        self._count += has_targets.sum()

    def sync(self) -> None:
        """Add the state of all ranks; every rank calls it, if there are several."""
        if dist.is_initialized():
            dist.all_reduce(self._sums)
            dist.all_reduce(self._count)

    def compute(self) -> dict[str, float]:
        """Return `recall@k`, `hit_rate@k`, `ndcg@k` and `mrr@k` of each k; NaN without queries."""
        values = (self._sums / self._count).tolist()
        return {
            f"{name}@{k}": value
            for k, row in zip(self.ks, values, strict=True)
            for name, value in zip(("recall", "hit_rate", "ndcg", "mrr"), row, strict=True)
        }

"""Metrics of retrieval over whole catalogues.

Shapes: `B` queries, `K` items that were found, `T` targets of all queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.base.arguments import whole
from recsys.base.checked import checked, checked_late
from recsys.metrics.ranking import chances_of_top, discount_sums, expected_discounts

__all__ = ["RetrievalMetrics"]


@final
class RetrievalMetrics:
    """Recall, hit rate, NDCG and reciprocal rank of the targets of queries, over many batches.

    A query's recall is the share of its targets among the first `k` items; its hit rate is 1 if
    there is any; its NDCG is the sum of `1 / log2(rank + 1)` of the targets among the first `k`,
    divided by the largest possible sum; its reciprocal rank is 1 divided by the rank of its first
    target among the first `k`, or 0. The values are means over the queries that have targets. With
    one target per query and an exact search this is the evaluation over the full catalogue, without
    samples (Krichene and Rendle, "On sampled metrics for item recommendation", KDD 2020).

    Items with equal scores count by the expected value over all their orders (McSherry and Najork,
    "Computing information retrieval performance measures efficiently in the presence of tied
    scores", ECIR 2008). A NaN score of a query makes the metrics NaN.

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

    @checked_late
    def update(
        self, found: Tensor, targets: Tensor, offsets: Tensor, scores: Tensor | None = None
    ) -> None:
        """Add a batch of items that were found.

        Args:
            found: `[B, K]` ids of the items, the best first, distinct in each row; K is at least
                the largest of `ks`, and larger with `scores`.
            targets: `[T]` ids of the targets, distinct for each query.
            offsets: `[B + 1]`, the position of the first target of each query, and the end.
            scores: `[B, K]` scores of the items; -inf where fewer were found. Equal scores have no
                order. If a tie that contains rank `k` continues to the last column, its other items
                are unknown: the metrics at `k` are NaN, unless all targets are before the tie.
                Search more items then, or use `ItemIndex.rank`. None for the order of `found`.

        Raises:
            ValueError: Too few items were found, or shapes do not match.
        """
        least = max(self.ks) + (scores is not None)
        if found.dim() != 2 or found.shape[1] < least:
            rule = "" if scores is None else ", as the scores after the last rank show its ties"
            raise ValueError(
                f"found must be [queries, at least {least}]{rule}; received {list(found.shape)}."
            )
        if scores is not None and scores.shape != found.shape:
            raise ValueError(
                f"scores must have the shape of found, {list(found.shape)}; received "
                f"{list(scores.shape)}."
            )
        _check_offsets(offsets, found.shape[0])
        query_T = _queries_of(targets, offsets)
        is_target_TK = found[query_T] == targets.unsqueeze(1)
        if scores is None:
            first_BK = torch.arange(found.shape[1], device=found.device).expand_as(found)
            tied_BK = torch.ones_like(found)
            first_of_last_B = torch.full_like(offsets[1:], found.shape[1])
        else:
            first_BK, tied_BK = _runs(scores)
            is_target_TK &= (scores > -torch.inf)[query_T]
            is_complete_B = scores[:, -1] == -torch.inf
            first_of_last_B = first_BK[:, -1].masked_fill(is_complete_B, found.shape[1])
        is_found_T, place_T = is_target_TK.any(1), is_target_TK.int().argmax(1, keepdim=True)
        better_T = first_BK[query_T].gather(1, place_T).squeeze(1).double()
        tied_T = tied_BK[query_T].gather(1, place_T).squeeze(1)
        better_T = better_T.masked_fill(~is_found_T, torch.inf)
        if scores is not None:
            better_T = better_T.masked_fill(scores.isnan().any(1)[query_T], torch.nan)
        # A target that was not found may be in the last tie, or after it.
        is_open_T = ~(better_T < first_of_last_B[query_T])
        last_B = torch.full_like(offsets[1:], found.shape[1])
        known_B = last_B.scatter_reduce(
            0, query_T[is_open_T], first_of_last_B[query_T[is_open_T]], "amin"
        )
        self._add(better_T, tied_T, offsets, known_B)

    @checked_late
    def update_ranks(self, better: Tensor, tied: Tensor, offsets: Tensor) -> None:
        """Add a batch of ranks of targets, as of `ItemIndex.rank`.

        Args:
            better: `[T]` numbers of items with a higher score than the target; inf if the target
                cannot be found; NaN makes the metrics NaN.
            tied: `[T]` numbers of items with the score of the target, the target included.
            offsets: `[B + 1]`, the position of the first target of each query, and the end.

        Raises:
            ValueError: Shapes do not match.

        Example:
            >>> metrics = RetrievalMetrics([1], torch.device("cpu"))
            >>> metrics.update_ranks(torch.tensor([0.0]), torch.tensor([4]), torch.tensor([0, 1]))
            >>> metrics.compute()["hit_rate@1"]
            0.25
        """
        if better.dim() != 1 or better.shape != tied.shape:
            raise ValueError(
                f"better and tied must be [targets]; received {list(better.shape)} and "
                f"{list(tied.shape)}."
            )
        if offsets.dim() != 1 or not offsets.shape[0]:
            raise ValueError(f"offsets must be [queries + 1]; received {list(offsets.shape)}.")
        self._add(better.double(), tied, offsets, None)

    def _add(
        self, better_T: Tensor, tied_T: Tensor, offsets: Tensor, known_B: Tensor | None
    ) -> None:
        lengths = offsets.diff()
        query_T = _queries_of(better_T, offsets)
        num_nan = lengths.new_zeros(lengths.shape).index_add_(
            0, query_T, better_T.isnan().to(lengths.dtype)
        )
        better_T = better_T.nan_to_num(torch.inf, posinf=torch.inf)
        most = torch.full_like(lengths, torch.inf, dtype=torch.float64)
        first_B = most.scatter_reduce(0, query_T, better_T, "amin")
        is_first_T = better_T == first_B[query_T]
        zeros_B = torch.zeros_like(most)
        targets_B = zeros_B.index_add(0, query_T, is_first_T.double())
        tied_B = zeros_B.scatter_reduce(0, query_T, tied_T.double() * is_first_T, "amax")
        tied_B = tied_B.clamp(min=1)
        is_counted = lengths > 0
        for row, k in enumerate(self.ks):
            # The chance that the first target has each rank of its tie: none has an earlier one.
            taken_K = torch.arange(k, device=offsets.device)
            left_BK = (tied_B.unsqueeze(1) - taken_K).clamp(min=1)
            others_BK = ((tied_B - targets_B).unsqueeze(1) - taken_K).clamp(min=0)
            missed_BK = (others_BK / left_BK).cumprod(1)
            before_BK = torch.cat([torch.ones_like(missed_BK[:, :1]), missed_BK[:, :-1]], 1)
            rank_BK = first_B.unsqueeze(1) + taken_K + 1
            chance_BK = (before_BK - missed_BK) * (rank_BK <= k)
            in_top_T = chances_of_top(better_T, tied_T, k)
            gains_T = expected_discounts(better_T, tied_T, k)
            ideal = discount_sums(k, offsets.device)[lengths.clamp(max=k)]
            values = torch.stack(
                [
                    zeros_B.index_add(0, query_T, in_top_T) / lengths,
                    chance_BK.sum(1),
                    zeros_B.index_add(0, query_T, gains_T) / ideal,
                    (chance_BK / rank_BK).sum(1),
                ],
                1,
            )
            is_unknown = num_nan > 0
            if known_B is not None:
                is_unknown |= known_B < k
            values = values.masked_fill(is_unknown.unsqueeze(1), torch.nan)
            self._sums[row] += values.where(is_counted.unsqueeze(1), 0.0).sum(0)
        self._count += is_counted.sum()

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


def _check_offsets(offsets: Tensor, num_queries: int) -> None:
    if offsets.shape != (num_queries + 1,):
        raise ValueError(f"offsets must be [{num_queries + 1}]; received {list(offsets.shape)}.")


def _queries_of(targets: Tensor, offsets: Tensor) -> Tensor:
    """Return the query of each target."""
    queries = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return queries.repeat_interleave(offsets.diff(), output_size=targets.shape[0])


def _runs(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first column and the length of the run of equal scores of each column."""
    columns = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    is_start = torch.ones_like(scores, dtype=torch.bool)
    is_start[:, 1:] = scores[:, 1:] != scores[:, :-1]
    first = columns.where(is_start, 0).cummax(1).values
    return first, torch.zeros_like(first).scatter_add(1, first, torch.ones_like(first)).gather(
        1, first
    )

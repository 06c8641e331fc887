"""Losses of retrieval: a target item against other items.

Each returns one loss per query, so that callers can weight them. Scores are dot products of the
vectors; scale the vectors, such as by a temperature, before the call.

Shapes: `N` queries, `K` other items, `I` items of a catalogue, `D` columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from recsys.sparse.validate import is_readable

__all__ = [
    "binary_loss",
    "bpr_loss",
    "full_softmax_loss",
    "in_batch_softmax_loss",
    "sampled_softmax_loss",
]


def bpr_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the loss of Bayesian personalized ranking, `-log sigmoid(positive - negative)`.

    Rendle et al., "BPR: Bayesian personalized ranking from implicit feedback", UAI 2009.

    Args:
        positive: `[N]` scores of the targets.
        negative: `[N]`, or `[N, K]`, scores of other items; the mean over `K` is returned.

    Returns:
        `[N]`.

    Raises:
        ValueError: The numbers of queries differ, or queries have no other items.

    Example:
        >>> bpr_loss(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.0]))
        tensor([0.1269, 0.6931])
    """
    negative = _columns(positive, negative)
    # softplus(-x) is -log(sigmoid(x)) without overflow, or log(0), for scores of any size
    return functional.softplus(negative - positive.unsqueeze(1)).mean(1)


def binary_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the binary cross entropy of targets and other items, as SASRec trains.

    Args:
        positive: `[N]` scores of the targets.
        negative: `[N]`, or `[N, K]`, scores of other items; the mean over `K` is added.

    Returns:
        `[N]`.

    Raises:
        ValueError: The numbers of queries differ, or queries have no other items.

    Example:
        >>> binary_loss(torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([1.3863])
    """
    negative = _columns(positive, negative)
    # -log(1 - sigmoid(x)) is softplus(x)
    return functional.softplus(-positive) + functional.softplus(negative).mean(1)


def full_softmax_loss(queries: Tensor, items: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy over a whole catalogue.

    Args:
        queries: `[N, D]`.
        items: `[I, D]`, the vector of each item, by id.
        targets: int64 `[N]`, ids from 0 to `I - 1`.

    Returns:
        `[N]`.

    Raises:
        ValueError: Shapes do not match, or, on a CPU, an id is out of its range.

    Example:
        >>> full_softmax_loss(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([3]))
        tensor([1.3863])
    """
    if queries.shape[:1] != targets.shape:
        raise ValueError(
            "targets must be one id per query; received "
            f"{list(targets.shape)} and queries {list(queries.shape)}."
        )
    _check_ids(targets, len(items), "items must have a vector for each id")
    return functional.cross_entropy(queries @ items.T, targets, reduction="none")


def sampled_softmax_loss(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    positive_ids: Tensor,
    negative_ids: Tensor,
    log_q: Tensor | None = None,
) -> Tensor:
    """Return the cross entropy of each target among the same sampled items.

    A sampled item that is the target of a query is left out for this query. With `log_q` the score
    of a sampled item is reduced by the logarithm of its expected number of draws. The loss and its
    gradient then approach the full softmax as `K` grows (Bengio and Senécal, "Adaptive importance
    sampling to accelerate training of a neural probabilistic language model", 2008).

    Args:
        queries: `[N, D]`.
        positives: `[N, D]`, vectors of the targets.
        negatives: `[K, D]`, vectors of the sampled items.
        positive_ids: int64 `[N]`.
        negative_ids: int64 `[K]`.
        log_q: `[I]`, logarithm of the probability of each item in a draw, by id; None to leave
            scores as they are.

    Returns:
        `[N]`.

    Raises:
        ValueError: Shapes do not match, or, on a CPU, `log_q` lacks an id.

    Example:
        >>> one = torch.ones(1, 2)
        >>> ids = torch.tensor([0]), torch.tensor([0, 1])
        >>> sampled_softmax_loss(one, one, torch.ones(2, 2), *ids)
        tensor([0.6931])
    """
    _check_vectors("positives", positives, positive_ids)
    _check_vectors("negatives", negatives, negative_ids)
    _check_queries(queries, positives)
    positive = (queries * positives).sum(1)
    negative = queries @ negatives.T
    if log_q is not None and len(negative_ids):
        # K * q draws are expected; the target is always in the sum and needs no correction
        negative = negative - _of_ids(log_q, negative_ids) - math.log(len(negative_ids))
    is_target = positive_ids.unsqueeze(1) == negative_ids
    # exp(-inf) is 0, and the column of the target keeps the sum finite
    negative = negative.masked_fill(is_target, float("-inf"))
    return torch.cat([positive.unsqueeze(1), negative], 1).logsumexp(1) - positive


def in_batch_softmax_loss(
    queries: Tensor, positives: Tensor, ids: Tensor, log_q: Tensor | None = None
) -> Tensor:
    """Return the cross entropy of each target among the targets of all queries.

    Other queries' targets that are the same item are left out. With `log_q`, scores are corrected
    for the frequency of the items (Yi et al., "Sampling-bias-corrected neural modeling for large
    corpus item recommendations", RecSys 2019).

    Args:
        queries: `[N, D]`.
        positives: `[N, D]`, vectors of the targets.
        ids: int64 `[N]`, the targets.
        log_q: `[I]`, logarithm of the share of each item in the data, by id; None to leave scores
            as they are.

    Returns:
        `[N]`.

    Raises:
        ValueError: Shapes do not match, or, on a CPU, `log_q` lacks an id.

    Example:
        >>> vectors = torch.eye(3)
        >>> in_batch_softmax_loss(vectors, vectors, torch.tensor([4, 4, 7]))
        tensor([0.3133, 0.3133, 0.5514])
    """
    _check_vectors("positives", positives, ids)
    _check_queries(queries, positives)
    scores = queries @ positives.T
    if log_q is not None:
        # all columns are samples, the target too: log(N) would cancel
        scores = scores - _of_ids(log_q, ids)
    target_places = torch.arange(ids.shape[0], device=ids.device)
    # a query keeps its own target, on the diagonal
    is_hit = (ids.unsqueeze(1) == ids) & (target_places.unsqueeze(1) != target_places)
    return functional.cross_entropy(
        scores.masked_fill(is_hit, float("-inf")), target_places, reduction="none"
    )


def _check_vectors(name: str, vectors: Tensor, ids: Tensor) -> None:
    if vectors.dim() != 2 or vectors.shape[:1] != ids.shape:
        raise ValueError(
            f"{name} must have a vector for each id; received {list(vectors.shape)} and ids "
            f"{list(ids.shape)}."
        )


def _check_queries(queries: Tensor, positives: Tensor) -> None:
    if queries.shape != positives.shape:
        raise ValueError(
            "positives must have the shape of queries, [N, D]; received "
            f"{list(positives.shape)} and {list(queries.shape)}."
        )


def _of_ids(log_q: Tensor, ids: Tensor) -> Tensor:
    _check_ids(ids, len(log_q), "log_q must have a number for each id")
    return log_q[ids]


def _check_ids(ids: Tensor, count: int, rule: str) -> None:
    """Raise an error if an id on the CPU is out of range; a GPU asserts this itself."""
    # reading ids of a GPU would wait for it
    if is_readable(ids) and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(
            f"{rule}; received {count} for ids from {int(ids.min())} to {int(ids.max())}."
        )


def _columns(positive: Tensor, negative: Tensor) -> Tensor:
    if negative.dim() == 1:
        negative = negative.unsqueeze(1)
    if positive.dim() != 1 or negative.shape[:1] != positive.shape:
        raise ValueError(
            "positive must have a score for each query, [N], and negative [N] or [N, K]; received "
            f"{list(positive.shape)} and {list(negative.shape)}."
        )
    if positive.shape[0] and not negative.shape[1]:
        raise ValueError(
            "negative must have a score of at least one other item for each query; received "
            f"{list(negative.shape)}. Add candidates to the batch."
        )
    return negative

"""Quality of a ranking of samples by scores, as a whole or within groups.

Computed by sorts and sums, without a loop over groups and without waiting for the device. Shapes:
`N` samples, `G` groups; groups beyond the existing ones are empty.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch


@final
@dataclass(frozen=True, slots=True)
class Groups:
    """Partition of samples into groups."""

    index_N: torch.Tensor
    """Group number of each sample, from 0, int64."""
    size_G: torch.Tensor
    """Number of samples of each group, int64; if `G` is 1, all samples are one group."""


def group_samples(keys_N: torch.Tensor) -> Groups:
    """Group samples by their keys.

    Args:
        keys_N: `[N]` keys, equal for samples of one group.

    Returns:
        Groups in the order of the keys.
    """
    order_N = keys_N.argsort(stable=True)
    index_N = torch.empty_like(order_N)
    index_N[order_N] = _number_runs(keys_N[order_N])
    size_G = torch.zeros_like(index_N).index_add_(0, index_N, torch.ones_like(index_N))
    return Groups(index_N, size_G)


def one_group(values_N: torch.Tensor) -> Groups:
    """Put all samples into one group.

    Args:
        values_N: `[N]` any values of the samples.

    Returns:
        A single group.
    """
    index_N = torch.zeros_like(values_N, dtype=torch.int64)
    return Groups(index_N, torch.full((1,), len(values_N), device=values_N.device))


def sum_groups(values_N: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Sum over each group.

    Args:
        values_N: `[N]` values.
        groups: Groups.

    Returns:
        `[G]` sums.
    """
    return values_N.new_zeros(len(groups.size_G)).index_add_(0, groups.index_N, values_N)


@final
@dataclass(eq=False)
class Ranked:
    """Samples to rank by their scores; sorted once for all results."""

    scores: torch.Tensor
    """`[N]` of any float dtype."""
    labels: torch.Tensor
    """`[N]` from 0 to 1, float64."""
    weights: torch.Tensor
    """`[N]` float64."""
    groups: Groups
    """Groups."""

    @cached_property
    def ties(self) -> "_Ties":
        """Runs of equal scores, with the weights of their positives and negatives."""
        return _Ties(self)

    @cached_property
    def positive_G(self) -> torch.Tensor:
        """`[G]` weight of positives: exactly 0 without any, NaN if a value of the group is."""
        return self.ties.sum_groups(self.ties.positive_K)

    @cached_property
    def negative_G(self) -> torch.Tensor:
        """`[G]` weight of negatives: exactly 0 without any, NaN if a value of the group is."""
        return self.ties.sum_groups(self.ties.negative_K)

    @property
    def has_positives_G(self) -> torch.Tensor:
        """`[G]` bool: whether a positive has a weight, or a value is NaN."""
        return self.positive_G != 0

    @property
    def has_both_classes_G(self) -> torch.Tensor:
        """`[G]` bool: whether a sample of each class has a weight, or a value is NaN."""
        return self.has_positives_G & (self.negative_G != 0)


def areas_under_roc(ranked: Ranked) -> torch.Tensor:
    """Compute the area under the ROC curve of each group; ties count one half.

    Args:
        ranked: Samples.

    Returns:
        `[G]` float64; NaN for a group of a single class or with a NaN.
    """
    ties = ranked.ties
    beaten_K = ties.sum_to(ties.negative_K) - 0.5 * ties.negative_K
    # Two divisions: the product of both sums may underflow or overflow.
    beaten_K /= ties.expand(ranked.negative_G)
    return ties.sum_groups(ties.positive_K * beaten_K) / ranked.positive_G


def average_precisions(ranked: Ranked) -> torch.Tensor:
    """Compute the average precision of each group: the area under the precision-recall steps.

    Args:
        ranked: Samples.

    Returns:
        `[G]` float64; NaN for a group without positives or with a NaN.
    """
    ties = ranked.ties
    found_K = ties.sum_from(ties.positive_K)
    precision_K = found_K / (found_K + ties.sum_from(ties.negative_K))
    gained_K = torch.where(ties.positive_K > 0, ties.positive_K * precision_K, 0.0)
    return ties.sum_groups(gained_K) / ranked.positive_G


def inverted_pairs(
    scores_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor, groups: Groups
) -> torch.Tensor:
    """Sum the weights of the pairs of each group whose labels are ordered against their scores.

    Pairs with equal scores or equal labels are not counted. Labels may have any value. The number
    of rounds is the number of bits of the label ranks, which the host reads from the device.

    Args:
        scores_N: `[N]` of any float dtype.
        labels_N: `[N]` float64.
        weights_N: `[N]` float64.
        groups: Groups.

    Returns:
        `[G]` sums of the products of both weights, float64.
    """
    inverted_G = torch.zeros(len(groups.size_G), dtype=torch.float64, device=scores_N.device)
    if not len(scores_N):
        return inverted_G
    # Ascending labels where scores are equal, so that such pairs are never inverted.
    order_N = labels_N.argsort(stable=True)
    ranks_N = torch.empty_like(order_N)
    ranks_N[order_N] = _number_runs(labels_N[order_N])
    order_N = order_N[scores_N[order_N].argsort(stable=True)]
    order_N = order_N[groups.index_N[order_N].argsort(stable=True)]
    ranks_N, weights_N, group_N = ranks_N[order_N], weights_N[order_N], groups.index_N[order_N]
    # From the highest bit of the rank: pairs with equal higher bits are inverted if the first has a
    # one where the second has a zero. A sort by the higher bits makes such pairs adjacent blocks.
    # Sums within a block are differences of running sums. Their rounding error is multiplied by the
    # weight of the later sample, so it is small relative to the sum over all pairs.
    for bit in reversed(range(int(ranks_N.max()).bit_length())):
        block_N = _number_runs(group_N, ranks_N >> (bit + 1))
        is_one_N = (ranks_N >> bit) & 1
        ones_N = (is_one_N * weights_N).cumsum(0)
        before = torch.zeros_like(ones_N)
        before.scatter_reduce_(
            0, block_N, ones_N - is_one_N * weights_N, "amin", include_self=False
        )
        pairs_N = (1 - is_one_N) * weights_N * (ones_N - before[block_N])
        inverted_G.index_add_(0, group_N, pairs_N)
        order_N = (block_N * 2 + is_one_N).argsort(stable=True)
        ranks_N, weights_N, group_N = ranks_N[order_N], weights_N[order_N], group_N[order_N]
    return inverted_G


def equal_pairs(groups: Groups, *columns: torch.Tensor) -> torch.Tensor:
    """Count the pairs of samples of each group that are equal in all columns.

    Args:
        groups: Groups.
        columns: `[N]` values.

    Returns:
        `[G]` float64.
    """
    rows = [groups.index_N, *columns]
    order_N = torch.arange(len(groups.index_N), device=groups.index_N.device)
    for row_N in reversed(rows):
        order_N = order_N[row_N[order_N].argsort(stable=True)]
    starts_N = torch.stack([_starts(row_N[order_N]) for row_N in rows]).any(0)
    # A sample is in a pair with each of the earlier samples of its run.
    earlier_N = _indices_in_runs(starts_N).double()
    return earlier_N.new_zeros(len(groups.size_G)).index_add_(0, groups.index_N[order_N], earlier_N)


def ranks_in_groups(scores_N: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the ranks of each sample in its group, by descending score.

    Args:
        scores_N: `[N]` of any float dtype.
        groups: Groups.

    Returns:
        `[N]` numbers of samples of the group with a higher score, int64; and `[N]` numbers of
        samples of the group with an equal score, the sample included.
    """
    order_N = scores_N.argsort(descending=True, stable=True)
    order_N = order_N[groups.index_N[order_N].argsort(stable=True)]
    new_group_N = _starts(groups.index_N[order_N])
    new_tie_N = new_group_N | _starts(scores_N[order_N])
    better_N, tied_N = torch.empty_like(order_N), torch.empty_like(order_N)
    better_N[order_N] = _indices_in_runs(new_group_N) - _indices_in_runs(new_tie_N)
    run_N = new_tie_N.cumsum(0) - 1
    tied_N[order_N] = torch.zeros_like(run_N).index_add_(0, run_N, torch.ones_like(run_N))[run_N]
    return better_N, tied_N


def chances_of_top(better: torch.Tensor, tied: torch.Tensor, k: int | torch.Tensor) -> torch.Tensor:
    """Compute the probability that a sample is among the first `k`, over all orders of its tie.

    Source: McSherry and Najork, "Computing information retrieval performance measures efficiently
    in the presence of tied scores" (ECIR 2008).

    Args:
        better: Numbers of samples with a higher score, of any shape; may be infinite.
        tied: Numbers of samples with an equal score, the sample included.
        k: Number of ranks, or several numbers, which are broadcast.

    Returns:
        Probabilities, float64.
    """
    return torch.minimum((k - better.double()).clamp(min=0), tied.double()) / tied


def expected_discounts(better: torch.Tensor, tied: torch.Tensor, k: int) -> torch.Tensor:
    """Compute the mean of `1 / log2(rank + 1)` over all orders of a tie; 0 from rank `k + 1` on.

    Args:
        better: Numbers of samples with a higher score, of any shape; may be infinite.
        tied: Numbers of samples with an equal score, the sample included.
        k: Number of ranks that count.

    Returns:
        float64 of the shape of `better`.
    """
    sums = discount_sums(k, better.device)
    first, last = better.clamp(max=k).long(), (better + tied).clamp(max=k).long()
    return (sums[last] - sums[first]) / tied


def discount_sums(k: int, device: torch.device) -> torch.Tensor:
    """Return the sums of the first 0 to `k` discounts `1 / log2(rank + 1)`.

    Args:
        k: Number of ranks.
        device: Device of the sums.

    Returns:
        `[k + 1]` float64.
    """
    ranks = torch.arange(1, k + 1, dtype=torch.float64, device=device)
    return torch.cat([ranks.new_zeros(1), (1 / (ranks + 1).log2()).cumsum(0)])


def weigh_equal_pairs(keys_N: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Sum the products of the weights of pairs of samples with equal keys.

    Args:
        keys_N: `[N]` keys.
        weights_N: `[N]` float64.

    Returns:
        Scalar float64; exactly 0 if no two samples with a weight have equal keys.
    """
    # Not (sum squared minus sum of squares): one large weight would hide the others.
    order_N = keys_N.argsort(stable=True)
    weights_N, starts_N = weights_N[order_N], _starts(keys_N[order_N])
    before_N = torch.zeros_like(weights_N)
    before_N[1:] = weights_N[:-1].where(~starts_N[1:], 0.0)
    return torch.dot(weights_N, _cumsum_of_runs(before_N, starts_N))


class _Ties:
    """Weights of both classes by ascending score within groups; `K` runs of equal scores."""

    def __init__(self, ranked: Ranked) -> None:
        scores_N, weights_N, groups = ranked.scores, ranked.weights, ranked.groups
        self.num_groups = len(groups.size_G)
        order_N = _argsort(scores_N)
        if self.num_groups != 1:
            order_N = order_N[groups.index_N[order_N].argsort(stable=True)]
        starts_N = _starts(scores_N[order_N])
        if self.num_groups != 1:
            group_N = groups.index_N[order_N]
            starts_N |= _starts(group_N)
        run_N = starts_N.cumsum(0) - 1
        # At most N runs; unused runs are empty and in the first group.
        zeros = torch.zeros_like(weights_N)
        weights_N = weights_N.where(~scores_N.isnan(), torch.nan)
        positive_N = ranked.labels * weights_N
        self.positive_K = zeros.index_add(0, run_N, positive_N[order_N])
        self.negative_K = zeros.index_add(0, run_N, (weights_N - positive_N)[order_N])
        if self.num_groups != 1:
            self.group_K = torch.zeros_like(group_N).index_copy_(0, run_N, group_N)

    def sum_groups(self, values_K: torch.Tensor) -> torch.Tensor:
        if self.num_groups == 1:
            return values_K.sum(0, keepdim=True)
        return values_K.new_zeros(self.num_groups).index_add_(0, self.group_K, values_K)

    def expand(self, values_G: torch.Tensor) -> torch.Tensor:
        """Return the value of each run's group."""
        return values_G if self.num_groups == 1 else values_G[self.group_K]

    def sum_to(self, values_K: torch.Tensor) -> torch.Tensor:
        """Sum each run and the earlier runs of its group."""
        if self.num_groups == 1:
            return values_K.cumsum(0)
        return _cumsum_of_runs(values_K, _starts(self.group_K))

    def sum_from(self, values_K: torch.Tensor) -> torch.Tensor:
        """Sum each run and the later runs of its group."""
        # Not (total minus `sum_to`): rounding of large sums would dominate the last runs.
        if self.num_groups == 1:
            return values_K.flip(0).cumsum(0).flip(0)
        return _cumsum_of_runs(values_K.flip(0), _starts(self.group_K.flip(0))).flip(0)


def _cumsum_of_runs(values_N: torch.Tensor, starts_N: torch.Tensor) -> torch.Tensor:
    """Compute running sums that restart at the beginning of each run.

    No sum is a difference of other sums: each is as exact as the values of its run, and exactly 0
    if they are. The number of rounds is the number of bits of the longest run's length, which the
    host reads from the device.
    """
    if not len(values_N):
        return values_N
    rank_N = _indices_in_runs(starts_N)
    step, longest = 1, int(rank_N.max()) + 1
    while step < longest:
        # Each value is the sum of up to `step` values; add the sum of those before them.
        taken_N = values_N[:-step].where(rank_N[step:] >= step, 0.0)
        values_N = torch.cat([values_N[:step], values_N[step:] + taken_N])
        step *= 2
    return values_N


def _indices_in_runs(starts_N: torch.Tensor) -> torch.Tensor:
    """Return the index of each value in its run, from 0."""
    at_N = torch.arange(len(starts_N), device=starts_N.device)
    return at_N - torch.where(starts_N, at_N, 0).cummax(0).values


_BITS = {torch.float64: torch.int64, torch.float32: torch.int32}


def _argsort(scores_N: torch.Tensor) -> torch.Tensor:
    """Sort in ascending order, with NaN at either end."""
    if scores_N.dtype not in _BITS:
        scores_N = scores_N.float()
    # Integers are sorted seven times as fast. The bits of non-negative floats have the order of the
    # floats; without the sign, the bits of negative floats have the reverse order. Adding zero
    # converts -0.0 to 0.0.
    bits_N = (scores_N + 0.0).view(_BITS[scores_N.dtype])
    highest = torch.iinfo(bits_N.dtype).max
    return torch.where(bits_N < 0, bits_N ^ highest, bits_N).argsort()


def _starts(values_N: torch.Tensor) -> torch.Tensor:
    """Mark the first value of each run of equal values."""
    starts_N = torch.ones_like(values_N, dtype=torch.bool)
    starts_N[1:] = values_N[1:] != values_N[:-1]
    return starts_N


def _number_runs(*rows_N: torch.Tensor) -> torch.Tensor:
    """Return the run number of each value, from 0; values of a run are equal in all rows."""
    starts_N = torch.stack([_starts(row_N) for row_N in rows_N]).any(0)
    return starts_N.long().cumsum(0) - 1

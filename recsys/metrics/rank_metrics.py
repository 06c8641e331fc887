"""Metrics of the order of the window's samples: areas under curves, and pairs in the wrong order.

They keep the last samples themselves, `RecMetricDef.window_size` of them over all ranks: 12 bytes
each and task, or 24 with float64 or whole numbers, and 8 for a grouping. Results are over these
alone; there are none over the lifetime. `BinnedAUCMetric` keeps counts instead and has both.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

import torch

from recsys.kernels.arguments import finite, whole
from recsys.metrics.auc import area_under_bins, find_bins
from recsys.metrics.batch import MetricBatch, Quantity
from recsys.metrics.checks import flag
from recsys.metrics.metrics_namespace import MetricName, MetricNamespace
from recsys.metrics.ranking import (
    Ranked,
    areas_under_roc,
    average_precisions,
    inverted_pairs,
    sum_groups,
)
from recsys.metrics.rec_metric import RecMetric, Value
from recsys.metrics.sum_metrics import SumMetric, Sums


class WindowMetric(RecMetric):
    """What metrics of the window's samples have in common."""

    ranks_rows = True
    name: ClassVar[MetricName]
    """Of its result over all samples."""
    grouped_name: ClassVar[MetricName]
    """Of the mean over the groups that have a value; the argument of this name asks for it."""

    def _prepare(self) -> None:
        flag(self.grouped_name.value, self.options[self.grouped_name.value])

    def get_required_inputs(self) -> set[str]:
        """Name the model outputs that are needed."""
        return {"grouping_keys"} if self.options[self.grouped_name.value] else set()

    def scores(self, ranked: Ranked) -> torch.Tensor:
        """Compute the value of each group.

        Args:
            ranked: the samples of a task.

        Returns:
            `[G]` float64.
        """
        raise NotImplementedError

    def is_defined(self, ranked: Ranked) -> torch.Tensor:
        """Find the groups that have a value.

        Args:
            ranked: the samples of a task.

        Returns:
            `[G]` bool; true for a group with a NaN, which then shows.
        """
        raise NotImplementedError

    def window_values(self, rows: MetricBatch) -> Iterator[Value]:
        """Compute the results."""
        of_tasks = [self.scores(ranked) for ranked in rows.ranked(None)]
        yield Value(self.name, torch.cat(of_tasks).float())
        for grouping in self.get_required_inputs():
            means = []
            for ranked in rows.ranked(grouping):
                counts_G = self.is_defined(ranked)
                means.append(self.scores(ranked).where(counts_G, 0.0).sum() / counts_G.sum())
            yield Value(self.grouped_name, torch.stack(means).float())


@final
class AUCMetric(WindowMetric):
    """Area under the ROC curve; equal predictions count one half.

    The argument `grouped_auc=True` adds the mean over the groups of the model output
    `grouping_keys`, such as users. Groups of one class are left out, as in Zhou et al., "Deep
    Interest Network for Click-Through Rate Prediction" (KDD 2018), section 6.2; each of the others
    counts once. The mean is NaN if no group has both classes.
    """

    namespace = MetricNamespace.AUC
    arguments: ClassVar[Mapping[str, Any]] = {"grouped_auc": False}
    name = MetricName.AUC
    grouped_name = MetricName.GROUPED_AUC
    scores = staticmethod(areas_under_roc)

    def is_defined(self, ranked: Ranked) -> torch.Tensor:
        """Find the groups that have both classes."""
        return ranked.has_both_classes_G


@final
class AUPRCMetric(WindowMetric):
    """Average precision: area under the curve of precision over recall.

    The argument `grouped_auprc=True` adds the mean over the groups of the model output
    `grouping_keys`. Groups without positives are left out; the mean is NaN if there are no others.
    """

    namespace = MetricNamespace.AUPRC
    arguments: ClassVar[Mapping[str, Any]] = {"grouped_auprc": False}
    name = MetricName.AUPRC
    grouped_name = MetricName.GROUPED_AUPRC
    scores = staticmethod(average_precisions)

    def is_defined(self, ranked: Ranked) -> torch.Tensor:
        """Find the groups that have positives."""
        return ranked.has_positives_G


@final
class RAUCMetric(WindowMetric):
    """The share of pairs of samples that are not in the wrong order, for labels of any number.

    Weights are not looked at. The argument `grouped_rauc=True` adds the mean over the groups of
    the model output `grouping_keys`. Groups of one sample are left out; the mean is NaN if there
    are no others.
    """

    namespace = MetricNamespace.RAUC
    arguments: ClassVar[Mapping[str, Any]] = {"grouped_rauc": False}
    name = MetricName.RAUC
    grouped_name = MetricName.GROUPED_RAUC

    def scores(self, ranked: Ranked) -> torch.Tensor:
        """Compute the share of each group."""
        ones = torch.ones_like(ranked.weights)
        inverted_G = inverted_pairs(ranked.scores, ranked.labels, ones, ranked.groups)
        size_G = ranked.groups.size_G.double()
        shares_G = 1.0 - inverted_G / (size_G * (size_G - 1.0) / 2.0)
        return shares_G.where(~self._has_nan(ranked), torch.nan)

    def is_defined(self, ranked: Ranked) -> torch.Tensor:
        """Find the groups that have pairs."""
        return (ranked.groups.size_G > 1) | self._has_nan(ranked)

    def _has_nan(self, ranked: Ranked) -> torch.Tensor:
        is_nan_N = ranked.scores.isnan() | ranked.labels.isnan()
        return sum_groups(is_nan_N.double(), ranked.groups) > 0


@final
class BinnedAUCMetric(SumMetric):
    """Area under the ROC curve of probabilities from counts in bins, in constant memory.

    The error is at most half the chance that a positive and a negative share a bin. The argument
    `num_bins` says how many there are, equal ones from 0 to 1. A window keeps the counts of its
    1,000 parts: 16 kB for each part and task with 1,000 bins.
    """

    namespace = MetricNamespace.BINNED_AUC
    arguments: ClassVar[Mapping[str, Any]] = {"num_bins": 1000}

    def _prepare(self) -> None:
        whole("num_bins", self.options["num_bins"], least=2)

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""
        num_bins = self.options["num_bins"]

        def in_bins(batch: MetricBatch) -> torch.Tensor:
            return _count(batch, find_bins(batch.predictions, num_bins), num_bins)

        return (Quantity(f"bins_{num_bins}", in_bins, width=2 * num_bins),)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        negative_TK, positive_TK = sums[self.quantities()[0].name].chunk(2, dim=1)
        yield Value(MetricName.BINNED_AUC, area_under_bins(positive_TK, negative_TK))


THRESHOLDS = 1000
"""Thresholds from 0 to 1, among which `HindsightTargetPRMetric` chooses."""


@final
class HindsightTargetPRMetric(SumMetric):
    """What threshold would have reached a precision, and with what recall.

    Results: `hindsight_target_pr`, the least of 1,000 equally spaced thresholds from 0 to 1 at
    which the predictions of at least it have the precision of the argument `target_precision`,
    and there `hindsight_target_precision` and `hindsight_target_recall`. They are NaN if no
    threshold reaches it. A window keeps counts as `BinnedAUCMetric` does.
    """

    namespace = MetricNamespace.HINDSIGHT_TARGET_PR
    gives_scalars = True
    arguments: ClassVar[Mapping[str, Any]] = {"target_precision": 0.5}

    def _prepare(self) -> None:
        target = finite("target_precision", self.options["target_precision"], least=0.0)
        if target > 1.0:
            raise ValueError(f"target_precision must be at most 1; received {target}.")

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""

        def in_bins(batch: MetricBatch) -> torch.Tensor:
            thresholds = _thresholds(batch.predictions)
            # Bin 0 has what is below all thresholds.
            bin_TN = torch.bucketize(batch.predictions, thresholds, right=True)
            return _count(batch, bin_TN, THRESHOLDS + 1)

        return (Quantity("thresholds", in_bins, width=2 * (THRESHOLDS + 1)),)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        # [T, 2, K]: negatives and positives at or above each threshold, and below the first.
        above = sums["thresholds"].unflatten(1, (2, -1)).flip(2).cumsum(2).flip(2)
        negative_TK, positive_TK = above[:, :, 1:].unbind(1)
        precision_TK = positive_TK / (positive_TK + negative_TK)
        recall_TK = positive_TK / above[:, 1, :1]
        reaches_TK = precision_TK >= self.options["target_precision"]
        # A NaN below a threshold is part of the search for it.
        reaches_TK &= ~above[:, :, :1].sum(1).isnan()
        first_T1 = reaches_TK.int().argmax(1, keepdim=True)
        for name, values_TK in (
            (MetricName.HINDSIGHT_TARGET_PR, _thresholds(recall_TK).expand_as(recall_TK)),
            (MetricName.HINDSIGHT_TARGET_PRECISION, precision_TK),
            (MetricName.HINDSIGHT_TARGET_RECALL, recall_TK),
        ):
            found_T = values_TK.gather(1, first_T1).squeeze(1)
            yield Value(name, found_T.where(reaches_TK.any(1), torch.nan))


def _thresholds(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.0, 1.0, THRESHOLDS, dtype=torch.float64, device=like.device)


def _count(batch: MetricBatch, bin_TN: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Sum the weights of negatives, then of positives, in each bin; a NaN shows in its bin."""
    positive_TN = batch.labels * batch.weights_or_nan
    sums = positive_TN.new_zeros(len(bin_TN), 2 * num_bins)
    sums.scatter_add_(1, bin_TN, batch.weights_or_nan - positive_TN)
    return sums.scatter_add_(1, bin_TN + num_bins, positive_TN)

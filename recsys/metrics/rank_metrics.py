"""Metrics of the order of the samples: areas under curves, and pairs in the wrong order.

They keep the last samples, `RecMetricDef.window_size` of all ranks: 12 bytes per sample and task,
or 24 with float64 or whole numbers, and 8 for a grouping. Results are over the window alone, not
over the lifetime. `BinnedAUCMetric` keeps counts instead and has both spans.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from recsys.base.arguments import finite, whole
from recsys.metrics.auc import area_under_bins, find_bins
from recsys.metrics.batch import MetricBatch, Quantity
from recsys.metrics.metrics_config import RecMetricEnum
from recsys.metrics.metrics_namespace import MetricName
from recsys.metrics.ranking import (
    Ranked,
    areas_under_roc,
    average_precisions,
    equal_pairs,
    inverted_pairs,
    sum_groups,
)
from recsys.metrics.rec_metric import RecMetric, Value
from recsys.metrics.sum_metrics import SumMetric, Sums


class WindowMetric(RecMetric):
    """Base class of metrics of the rows of the window.

    The class statement of a metric has the arguments `scores`, the function that computes the
    value of each group `[G]`, and `is_defined`, the function that finds the groups with a value
    `[G]`. A group with a NaN counts as defined, so that the NaN shows in the result.
    """

    ranks_rows = True
    _scores: ClassVar[Callable[..., torch.Tensor]]
    _is_defined: ClassVar[Callable[..., torch.Tensor]]

    def __init_subclass__(
        cls,
        scores: Callable[[Ranked], torch.Tensor] | None = None,
        is_defined: Callable[[Ranked], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        if scores is not None and is_defined is not None:
            cls._scores, cls._is_defined = staticmethod(scores), staticmethod(is_defined)
            cls.arguments = {f"grouped_{cls.name}": False}

    def get_required_inputs(self) -> set[str]:
        """List the model outputs that are needed."""
        return {"grouping_keys"} if self.options[f"grouped_{self.name}"] else set()

    def window_values(self, rows: MetricBatch) -> Iterator[Value]:
        """Compute the results."""
        scores = [self._scores(ranked) for ranked in rows.ranked(None)]
        yield Value(self.name, torch.cat(scores).float())
        for grouping in self.get_required_inputs():
            means = []
            for ranked in rows.ranked(grouping):
                counts_G = self._is_defined(ranked)
                means.append(self._scores(ranked).where(counts_G, 0.0).sum() / counts_G.sum())
            yield Value(MetricName(f"grouped_{self.name}"), torch.stack(means).float())


class AUCMetric(
    WindowMetric,
    metric=RecMetricEnum.AUC,
    scores=areas_under_roc,
    is_defined=lambda ranked: ranked.has_both_classes_G,
):
    """Area under the ROC curve; equal predictions count one half.

    The argument `grouped_auc=True` adds the mean over the groups of the model output
    `grouping_keys`, such as users. Groups of a single class are left out, as in Zhou et al., "Deep
    Interest Network for Click-Through Rate Prediction" (KDD 2018), section 6.2; the other groups
    have equal weights. The mean is NaN if no group has both classes.
    """


class AUPRCMetric(
    WindowMetric,
    metric=RecMetricEnum.AUPRC,
    scores=average_precisions,
    is_defined=lambda ranked: ranked.has_positives_G,
):
    """Average precision: area under the precision-recall curve.

    The argument `grouped_auprc=True` adds the mean over the groups of the model output
    `grouping_keys`. Groups without positives are left out; the mean is NaN if no group is left.
    """


def _groups_with_nan(ranked: Ranked) -> torch.Tensor:
    is_nan_N = ranked.scores.isnan() | ranked.labels.isnan()
    return sum_groups(is_nan_N.double(), ranked.groups) > 0


def _shares_in_order(ranked: Ranked) -> torch.Tensor:
    ones = torch.ones_like(ranked.weights)
    inverted_G = inverted_pairs(ranked.scores, ranked.labels, ones, ranked.groups)
    # Half of the pairs with equal scores, without those with equal labels.
    inverted_G += 0.5 * equal_pairs(ranked.groups, ranked.scores)
    inverted_G -= 0.5 * equal_pairs(ranked.groups, ranked.scores, ranked.labels)
    size_G = ranked.groups.size_G.double()
    shares_G = 1.0 - inverted_G / (size_G * (size_G - 1.0) / 2.0)
    return shares_G.where(~_groups_with_nan(ranked), torch.nan)


class RAUCMetric(
    WindowMetric,
    metric=RecMetricEnum.RAUC,
    scores=_shares_in_order,
    is_defined=lambda ranked: (ranked.groups.size_G > 1) | _groups_with_nan(ranked),
):
    """Share of pairs of samples that are not in the wrong order, for labels of any value.

    A pair of equal predictions and different labels counts one half. Weights are ignored. The
    argument `grouped_rauc=True` adds the mean over the groups of the model output `grouping_keys`.
    Groups of one sample are left out; the mean is NaN if no group is left.
    """


def _bins(metric: RecMetric) -> Quantity:
    num_bins = metric.options["num_bins"]

    def compute(batch: MetricBatch) -> torch.Tensor:
        return _count(batch, find_bins(batch.predictions, num_bins), num_bins)

    return Quantity(f"bins_{num_bins}", compute, width=2 * num_bins)


class BinnedAUCMetric(
    SumMetric,
    metric=RecMetricEnum.BINNED_AUC,
    sums=[_bins],
    formula=lambda sums: area_under_bins(*sums.chunk(2, dim=1)[::-1]),
):
    """Area under the ROC curve of probabilities from counts in bins, in constant memory.

    The error is at most half the probability that a positive and a negative share a bin. The
    argument `num_bins` is the number of equal bins from 0 to 1. A window keeps counts of 1,000
    parts: 16 kB for each part and task with 1,000 bins.
    """

    arguments: ClassVar[Mapping[str, Any]] = {"num_bins": 1000}

    def _prepare(self) -> None:
        whole("num_bins", self.options["num_bins"], least=2)


THRESHOLDS = 1000
"""Number of thresholds from 0 to 1 that `HindsightTargetPRMetric` tries."""


def _count_above_thresholds(batch: MetricBatch) -> torch.Tensor:
    # Bin 0 has the samples below all thresholds.
    bin_TN = torch.bucketize(batch.predictions, _thresholds(batch.predictions), right=True)
    return _count(batch, bin_TN, THRESHOLDS + 1)


class HindsightTargetPRMetric(
    SumMetric,
    metric=RecMetricEnum.HINDSIGHT_TARGET_PR,
    sums=[Quantity("thresholds", _count_above_thresholds, width=2 * (THRESHOLDS + 1))],
):
    """Threshold that would have reached a target precision, and its recall.

    Results: `hindsight_target_pr`, the lowest of 1,000 equally spaced thresholds from 0 to 1 whose
    predictions have at least the precision of the argument `target_precision`, and
    `hindsight_target_precision` and `hindsight_target_recall` at this threshold. They are NaN if no
    threshold reaches the target. A window keeps counts as `BinnedAUCMetric` does.
    """

    gives_scalars = True
    arguments: ClassVar[Mapping[str, Any]] = {"target_precision": 0.5}

    def _prepare(self) -> None:
        target = finite("target_precision", self.options["target_precision"], least=0.0)
        if target > 1.0:
            raise ValueError(f"target_precision must be at most 1; received {target}.")

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        # [T, 2, K + 1]: negatives and positives; all, then those at or above each threshold.
        above = sums["thresholds"].unflatten(1, (2, -1)).flip(2).cumsum(2).flip(2)
        negative_TK, positive_TK = above[:, :, 1:].unbind(1)
        precision_TK = positive_TK / (positive_TK + negative_TK)
        recall_TK = positive_TK / above[:, 1, :1]
        reaches_TK = precision_TK >= self.options["target_precision"]
        # A NaN hides which threshold is the first.
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
    """Sum the weights of negatives, then of positives, in each bin; a NaN makes its bin NaN."""
    positive_TN = batch.labels * batch.weights_or_nan
    sums = positive_TN.new_zeros(len(bin_TN), 2 * num_bins)
    sums.scatter_add_(1, bin_TN, batch.weights_or_nan - positive_TN)
    return sums.scatter_add_(1, bin_TN + num_bins, positive_TN)

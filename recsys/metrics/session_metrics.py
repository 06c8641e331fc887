"""Metrics of sessions: groups of samples of a batch that are ranked against each other.

A batch contributes sums over its sessions, so results are over windows and the lifetime. A session
that is spread over batches or ranks counts as several sessions.
"""

import abc
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from recsys.base.arguments import whole
from recsys.metrics.batch import MetricBatch, Quantity
from recsys.metrics.metrics_config import RecMetricEnum, RecTaskInfo, SessionMetricDef
from recsys.metrics.metrics_namespace import MetricName
from recsys.metrics.ranking import (
    Groups,
    Ranked,
    areas_under_roc,
    chances_of_top,
    expected_discounts,
    group_samples,
    inverted_pairs,
    one_group,
    ranks_in_groups,
    sum_groups,
    weigh_equal_pairs,
)
from recsys.metrics.rec_metric import Value
from recsys.metrics.sum_metrics import SumMetric, Sums


def _session_sums(metric: Any) -> Quantity:
    name = "_".join(map(str, (metric.name, *metric.options.values())))
    return Quantity(name, metric.measure_all, width=2)


class SessionMetric(SumMetric, sums=[_session_sums], formula=lambda sums: sums[:, 0] / sums[:, 1]):
    """Base class of metrics that divide the first of two sums over sessions by the second."""

    @abc.abstractmethod
    def measure(self, batch: MetricBatch, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the contribution of a batch to the two sums.

        Args:
            batch: Batch.
            index: Index of the task.

        Returns:
            Two scalars, float64.
        """

    def measure_all(self, batch: MetricBatch) -> torch.Tensor:
        """Compute the contribution of a batch for all tasks.

        Args:
            batch: Batch.

        Returns:
            `[T, 2]` float64.
        """
        measured = [self.measure(batch, index) for index in range(len(batch.tasks))]
        return torch.stack([torch.stack(pair) for pair in measured])


class NDCGMetric(SessionMetric, metric=RecMetricEnum.NDCG):
    """Normalized discounted cumulative gain (NDCG), or one minus it.

    The discounted gain of a session is the sum of `gain / log2(rank + 2)`, with ranks from 0 in
    the order of the predictions. It is divided by the same sum in the order of the labels; the
    NDCG is 0 without gains. Equal predictions count by the mean over all their orders. A result is
    the mean over sessions, each multiplied by its largest weight. Source: Järvelin and Kekäläinen,
    "Cumulated gain-based evaluation of IR techniques" (ACM TOIS, 2002).

    Arguments: `session_key` names the model output with the sessions. `exponential_gain` uses the
    gain `2 ** label - 1` instead of the label. `k` is the number of ranks that count (-1: all).
    `report_ndcg_as_decreasing_curve` reports one minus the NDCG. `remove_single_length_sessions`
    leaves out sessions of one sample. `scale_by_weights_tensor` multiplies predictions and labels
    by the weights, instead of sessions.
    """

    arguments: ClassVar[Mapping[str, Any]] = {
        "exponential_gain": False,
        "session_key": "session_id",
        "k": -1,
        "report_ndcg_as_decreasing_curve": True,
        "remove_single_length_sessions": False,
        "scale_by_weights_tensor": False,
    }

    def _prepare(self) -> None:
        whole("k", self.options["k"], least=-1)
        negative = [task.name for task in self.tasks if task.is_negative_task]
        if negative:
            raise ValueError(
                f"tasks of NDCGMetric must not be negative; received {negative}. Negate their "
                "predictions and labels."
            )

    def get_required_inputs(self) -> set[str]:
        """List the model outputs that are needed."""
        return {self.options["session_key"]}

    def measure(self, batch: MetricBatch, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the contribution of a batch."""
        sessions = group_samples(batch.input(self.options["session_key"]).long())
        scores_N, gains_N = batch.predictions[index], batch.labels[index]
        weights_N = batch.weights_or_nan[index]
        if self.options["scale_by_weights_tensor"]:
            scores_N, gains_N = scores_N * weights_N, gains_N * weights_N
            weights_N = batch.ones[index].masked_fill(weights_N.isnan(), torch.nan)
        if self.options["exponential_gain"]:
            gains_N = gains_N.exp2() - 1.0
        found_G = self._discount(gains_N, scores_N, sessions)
        best_G = self._discount(gains_N, gains_N, sessions)
        ndcg_G = torch.where(best_G == 0, 0.0, found_G / best_G)
        if self.options["report_ndcg_as_decreasing_curve"]:
            ndcg_G = 1.0 - ndcg_G
        weight_G = torch.zeros_like(ndcg_G)
        weight_G.scatter_reduce_(0, sessions.index_N, weights_N, "amax", include_self=False)
        least = 2 if self.options["remove_single_length_sessions"] else 1
        counts_G = sessions.size_G >= least
        return (ndcg_G * weight_G).where(counts_G, 0.0).sum(), counts_G.sum().double()

    def _discount(
        self, gains_N: torch.Tensor, scores_N: torch.Tensor, sessions: Groups
    ) -> torch.Tensor:
        k = len(scores_N) if self.options["k"] < 0 else self.options["k"]
        ranks = ranks_in_groups(scores_N, sessions)
        return sum_groups(gains_N * expected_discounts(*ranks, k), sessions)


class TopOfSessionMetric(SessionMetric):
    """Base class of metrics of decisions for the best samples of each session.

    `RecTaskInfo.session_metric_def` defines the sessions and the number `top_threshold` of samples
    that are predicted positive. Equal predictions at the threshold count by their probability to be
    among these, over all their orders. Labels of 1 are positive; with `run_ranking_of_labels`, the
    `top_threshold` highest labels are, in the same way.
    """

    is_recall: ClassVar[bool]
    """True: divide by the positives; False: by the predicted positives."""

    def _prepare(self) -> None:
        for task in self.tasks:
            if task.session_metric_def is None or task.session_metric_def.top_threshold is None:
                raise ValueError(
                    f"tasks of {type(self).__name__} must have a session_metric_def with a "
                    f"top_threshold; received {task.session_metric_def} for '{task.name}'."
                )

    def get_required_inputs(self) -> set[str]:
        """List the model outputs that are needed."""
        return {_session_of(task).session_var_name for task in self.tasks}

    def measure(self, batch: MetricBatch, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the contribution of a batch."""
        session = _session_of(batch.tasks[index])
        groups = group_samples(batch.input(session.session_var_name).long())
        limit, weights_N = session.top_threshold or 0, batch.weights_or_nan[index]
        predicted_N = chances_of_top(*ranks_in_groups(batch.predictions[index], groups), limit)
        positive_N = batch.labels[index]
        if session.run_ranking_of_labels:
            positive_N = chances_of_top(*ranks_in_groups(positive_N, groups), limit)
        whole_N = positive_N if self.is_recall else predicted_N
        return (predicted_N * positive_N * weights_N).sum(), (whole_N * weights_N).sum()


class RecallSessionMetric(TopOfSessionMetric, metric=RecMetricEnum.RECALL_SESSION_LEVEL):
    """Share of the positives that are among the best of their session."""

    is_recall = True


class PrecisionSessionMetric(TopOfSessionMetric, metric=RecMetricEnum.PRECISION_SESSION_LEVEL):
    """Share of positives among the best of each session."""

    is_recall = False


class GAUCMetric(SessionMetric, metric=RecMetricEnum.GAUC):
    """Mean over sessions of the area under the ROC curve; equal predictions count one half.

    The model output `num_candidates` has the sizes of the sessions, whose samples are consecutive.
    Sessions of a single class are left out of the sum and of the number of sessions, as in Zhou et
    al., "Deep Interest Network for Click-Through Rate Prediction" (KDD 2018), section 6.2. A class
    is present if one of its samples has a weight. All other sessions have equal weights.

    Results: `gauc`, which is NaN if no session has both classes, and `gauc_num_samples`, the number
    of sessions with both classes. On a GPU each update waits for the device.
    """

    def get_required_inputs(self) -> set[str]:
        """List the model outputs that are needed."""
        return {"num_candidates"}

    def measure(self, batch: MetricBatch, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the contribution of a batch."""
        sizes = batch.input("num_candidates", per_sample=False).long()
        num_samples = batch.labels.size(1)
        if int(sizes.sum()) != num_samples:
            raise ValueError(
                f"num_candidates must add up to the samples, {num_samples}; received "
                f"{int(sizes.sum())}."
            )
        if int(sizes.min()) < 0:
            raise ValueError(f"num_candidates must not be negative; received {sizes.tolist()}.")
        numbers = torch.arange(len(sizes), device=sizes.device)
        sessions = Groups(numbers.repeat_interleave(sizes, output_size=num_samples), sizes)
        rows = (batch.predictions[index], batch.labels[index], batch.weights[index])
        ranked = Ranked(*rows, sessions)
        counts_G = ranked.has_both_classes_G
        areas_G = areas_under_roc(ranked).where(counts_G, 0.0)
        # A NaN hides whether its session has both classes, so the count is NaN as well.
        ones_G = torch.ones_like(areas_G).masked_fill(areas_G.isnan(), torch.nan)
        return areas_G.sum(), ones_G.where(counts_G, 0.0).sum()

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        yield from super().values(sums)
        yield Value(MetricName.GAUC_NUM_SAMPLES, self.ordered(sums)[0][:, 1])


class XAUCMetric(SessionMetric, metric=RecMetricEnum.XAUC):
    """Weighted share of sample pairs that predictions and labels rank the same way.

    Pairs of equal predictions count if their labels are equal, and one half otherwise. Labels may
    have any value. On a GPU each update waits for the device.
    """

    def measure(self, batch: MetricBatch, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the contribution of a batch."""
        scores_N, labels_N = batch.predictions[index], batch.labels[index]
        weights_N = batch.weights_or_nan[index]
        in_order = inverted_pairs(scores_N, -labels_N, weights_N, one_group(labels_N)).sum()
        label, score = group_samples(labels_N).index_N, group_samples(scores_N).index_N
        key = label * len(score) + score
        # Half of the pairs with equal predictions, and half of those with equal labels, too.
        for keys_N in (score, key):
            in_order = in_order + 0.5 * weigh_equal_pairs(keys_N, weights_N)
        return in_order, torch.dot(weights_N[1:], weights_N.cumsum(0)[:-1])


def _session_of(task: RecTaskInfo) -> SessionMetricDef:
    assert task.session_metric_def is not None
    return task.session_metric_def

"""Sums that depend on the options or the tasks of a metric.

A function of a metric returns the `Quantity` for its options. Shapes: `T` tasks, `N` samples, `C`
classes, `L` labels of a sample.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from recsys.metrics.batch import MetricBatch, Quantity
from recsys.metrics.ranking import chances_of_top

OptionSum = Callable[[Any], Quantity]
"""Function that returns the sum of a metric."""


def recalibrated(
    name: str, values_of: Callable[[torch.Tensor, MetricBatch], torch.Tensor], metric: Any
) -> Quantity:
    """Return a sum over recalibrated predictions.

    Args:
        name: Name of the sum without recalibration.
        values_of: Computes `[T, N]` values from the recalibrated predictions and the batch.
        metric: Metric with the option `recalibration_coefficient`.

    Returns:
        Sum.
    """
    rate = metric.options["recalibration_coefficient"]

    def compute(batch: MetricBatch) -> torch.Tensor:
        scaled = batch.predictions * rate
        # `scaled + 1 - p` would round: the result for p = 1 would not be 1.
        return values_of(scaled / (scaled + (1.0 - batch.predictions)), batch)

    return Quantity(f"{name}_recalibrated_{rate}", compute)


def by_segment(of: Quantity, metric: Any) -> Quantity:
    """Return a sum for each segment.

    Args:
        of: Sum over all samples.
        metric: Metric with the options `grouping_keys` and `num_groups`.

    Returns:
        Sum of width `num_groups`.
    """
    key, num_groups = metric.options["grouping_keys"], metric.options["num_groups"]

    def compute(batch: MetricBatch) -> torch.Tensor:
        number_N = batch.input(key).long()
        # Samples of no segment are summed into an extra column, which is dropped.
        number_N = number_N.where((number_N >= 0) & (number_N < num_groups), num_groups)
        values_TN = of.of(batch) * batch.weights if of.is_weighted else of.of(batch)
        sums = values_TN.new_zeros(len(values_TN), num_groups + 1)
        return sums.index_add_(1, number_N, values_TN)[:, :num_groups]

    return Quantity(f"{of.name}_by_{key}_{num_groups}", compute, width=num_groups)


def _at_threshold(
    name: str, values_of: Callable[[MetricBatch, float], torch.Tensor], metric: Any
) -> Quantity:
    threshold = metric.options["threshold"]
    return Quantity(f"{name}_{threshold}", lambda batch: values_of(batch, threshold))


def _is_right(batch: MetricBatch, threshold: float) -> torch.Tensor:
    labels = batch.rows[1]
    # Directly into floats, without a tensor of bools.
    return torch.eq(batch.decisions(threshold), labels, out=torch.empty_like(labels))


HITS = partial(_at_threshold, "hit", lambda batch, limit: batch.rows[1] * batch.decisions(limit))
"""Positives that are predicted positive."""
DECIDED = partial(_at_threshold, "decided", MetricBatch.decisions)
"""Samples that are predicted positive."""
RIGHT = partial(_at_threshold, "right", _is_right)
"""Samples whose decision equals the label."""


def within(metric: Any) -> Quantity:
    """Return the weight of samples whose class is among the k best, for each k."""

    def compute(batch: MetricBatch) -> torch.Tensor:
        assert batch.classes is not None
        num_classes = batch.classes.shape[2]
        label_TN1 = batch.labels.unsqueeze(2)
        class_TN1 = label_TN1.nan_to_num().clamp(0, num_classes - 1).long()
        score_TN1 = batch.classes.gather(2, class_TN1)
        # A label that is not the number of a class is after all classes.
        better_TN1 = (batch.classes > score_TN1).sum(2, keepdim=True)
        better_TN1 = better_TN1.where(class_TN1 == label_TN1, num_classes)
        tied_TN1 = (batch.classes == score_TN1).sum(2, keepdim=True)
        ks_C = torch.arange(1, num_classes + 1, device=better_TN1.device)
        found_TNC = chances_of_top(better_TN1, tied_TN1, ks_C)
        return torch.einsum("tnc,tn->tc", found_TNC, batch.weights_or_nan)

    return Quantity(f"within_{metric.num_classes}", compute, width=metric.num_classes)


def _decided_labels(name: str, only_right: bool, metric: Any) -> Quantity:
    num_labels = metric.options["num_labels"]

    def compute(batch: MetricBatch) -> torch.Tensor:
        given_TN = batch.predictions.long()
        given_TN = given_TN & batch.labels.long() if only_right else given_TN
        bits_L1 = torch.arange(num_labels, device=given_TN.device).unsqueeze(1)
        given_TLN = (given_TN.unsqueeze(1) >> bits_L1) & 1
        return torch.einsum("tln,tn->tl", given_TLN.double(), batch.weights_or_nan)

    return Quantity(f"{name}_{num_labels}", compute, width=num_labels)


RIGHT_LABELS = partial(_decided_labels, "right_of", True)
DECIDED_LABELS = partial(_decided_labels, "decided_of", False)


def _task_weights(batch: MetricBatch) -> torch.Tensor:
    flags = enumerate(task.weighted for task in batch.tasks)
    return torch.stack([(batch.weights if weighted else batch.ones)[i] for i, weighted in flags])


def _sum_tensors(batch: MetricBatch) -> torch.Tensor:
    tensors = torch.stack([batch.input(str(task.tensor_name)) for task in batch.tasks])
    return (tensors * _task_weights(batch)).sum(1, keepdim=True)


def _sum_task_weights(batch: MetricBatch) -> torch.Tensor:
    return _task_weights(batch).sum(1, keepdim=True)


TENSOR = Quantity("tensor", _sum_tensors, width=1)
TENSOR_WEIGHT = Quantity("tensor_weight", _sum_task_weights, width=1)

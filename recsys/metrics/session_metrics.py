"""Metrics of sessions: samples that are ranked against each other, and whole within a batch.

What a batch adds is sums over its sessions, so these are over windows and the lifetime, and travel
between ranks as all sums do. A session that is spread over batches or ranks counts as several.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

import torch

from recsys.kernels.arguments import whole
from recsys.metrics.batch import MetricBatch, Quantity
from recsys.metrics.checks import flag, text
from recsys.metrics.metrics_config import RecTaskInfo, SessionMetricDef
from recsys.metrics.metrics_namespace import MetricName, MetricNamespace
from recsys.metrics.ranking import (
    Groups,
    Ranked,
    areas_under_roc,
    group_samples,
    inverted_pairs,
    one_group,
    places,
    sum_groups,
    weigh_equal_pairs,
)
from recsys.metrics.rec_metric import Value
from recsys.metrics.sum_metrics import SumMetric, Sums


class SessionMetric(SumMetric):
    """What metrics have in common whose result is the ratio of two sums over sessions."""

    name: ClassVar[MetricName]
    """Of its result."""

    @abc.abstractmethod
    def measure(self, batch: MetricBatch, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what a batch adds to the two sums.

        Args:
            batch: the batch.
            place: the task's.

        Returns:
            Two scalars, float64.
        """

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""

        def measure_all(batch: MetricBatch) -> torch.Tensor:
            of_tasks = [self.measure(batch, place) for place in range(len(batch.tasks))]
            return torch.stack([torch.stack(of_task) for of_task in of_tasks])

        options = "_".join(str(value) for value in self.options.values())
        return (Quantity(f"{self.name}_{options}".rstrip("_"), measure_all, width=2),)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        part_T, whole_T = sums[self.quantities()[0].name].unbind(1)
        yield Value(self.name, part_T / whole_T)


@final
class NDCGMetric(SessionMetric):
    """Normalized discounted cumulative gain, or one less it.

    A session's is the sum of gains, each divided by `log2(place + 2)` where the predictions put
    it, over the same sum where the labels put it; 0 without gains. Equal predictions keep their
    order. A result is the mean over sessions, each times its largest weight. Source: Järvelin and
    Kekäläinen, "Cumulated gain-based evaluation of IR techniques" (ACM TOIS, 2002).

    Arguments: `session_key` names the model output with the sessions; `exponential_gain` makes
    a gain `2 ** label - 1` in place of the label; `k` is how many places count (-1: all);
    `report_ndcg_as_decreasing_curve` gives one less the value (times the weight);
    `remove_single_length_sessions` leaves out sessions of one sample; `scale_by_weights_tensor`
    multiplies predictions and labels by the weights, in place of sessions.
    """

    namespace = MetricNamespace.NDCG
    name = MetricName.NDCG
    arguments: ClassVar[Mapping[str, Any]] = {
        "exponential_gain": False,
        "session_key": "session_id",
        "k": -1,
        "report_ndcg_as_decreasing_curve": True,
        "remove_single_length_sessions": False,
        "scale_by_weights_tensor": False,
    }

    def _prepare(self) -> None:
        text("session_key", self.options["session_key"])
        whole("k", self.options["k"], least=-1)
        for name in self.options.keys() - {"session_key", "k"}:
            flag(name, self.options[name])
        negative = [task.name for task in self.tasks if task.is_negative_task]
        if negative:
            raise ValueError(
                f"tasks of NDCGMetric must not be negative; received {negative}. Negate their "
                "predictions and labels."
            )

    def get_required_inputs(self) -> set[str]:
        """Name the model outputs that are needed."""
        return {self.options["session_key"]}

    def measure(self, batch: MetricBatch, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what a batch adds."""
        sessions = group_samples(batch.input(self.options["session_key"]).long())
        scores_N, gains_N = batch.predictions[place], batch.labels[place]
        weights_N = batch.weights_or_nan[place]
        if self.options["scale_by_weights_tensor"]:
            scores_N, gains_N = scores_N * weights_N, gains_N * weights_N
            weights_N = batch.ones[place].masked_fill(weights_N.isnan(), torch.nan)
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
        place_N, _ = places(scores_N, sessions)
        gains_N = gains_N / (place_N + 2.0).double().log2()
        if self.options["k"] >= 0:
            gains_N = gains_N.where(place_N < self.options["k"], 0.0)
        return sum_groups(gains_N, sessions)


class TopOfSessionMetric(SessionMetric):
    """What metrics have in common of decisions for the best of each session.

    `RecTaskInfo.session_metric_def` says which samples are one session and how many of it are
    predicted positive: those with less than so many better ones. Positive are labels of 1, or as
    many highest labels if `run_ranking_of_labels`.
    """

    def _prepare(self) -> None:
        for task in self.tasks:
            if task.session_metric_def is None or task.session_metric_def.top_threshold is None:
                raise ValueError(
                    f"tasks of {type(self).__name__} must have a session_metric_def with a "
                    f"top_threshold; received {task.session_metric_def} for '{task.name}'."
                )

    def get_required_inputs(self) -> set[str]:
        """Name the model outputs that are needed."""
        return {_session_of(task).session_var_name for task in self.tasks}

    def decide(
        self, batch: MetricBatch, place: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tell what is predicted positive, and what is.

        Args:
            batch: the batch.
            place: the task's.

        Returns:
            `[N]` weights of true positives, of what is predicted positive, and of positives.
        """
        session = _session_of(batch.tasks[place])
        groups = group_samples(batch.input(session.session_var_name).long())
        limit, weights_N = session.top_threshold or 0, batch.weights_or_nan[place]
        predicted_N = (places(batch.predictions[place], groups)[1] < limit).double()
        positive_N = batch.labels[place]
        if session.run_ranking_of_labels:
            positive_N = (places(positive_N, groups)[1] < limit).double()
        return predicted_N * positive_N * weights_N, predicted_N * weights_N, positive_N * weights_N


@final
class RecallSessionMetric(TopOfSessionMetric):
    """The share of positives that are among the best of their session."""

    namespace = MetricNamespace.RECALL_SESSION_LEVEL
    name = MetricName.RECALL_SESSION_LEVEL

    def measure(self, batch: MetricBatch, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what a batch adds."""
        hits_N, _, positive_N = self.decide(batch, place)
        return hits_N.sum(), positive_N.sum()


@final
class PrecisionSessionMetric(TopOfSessionMetric):
    """The share of positives among the best of each session."""

    namespace = MetricNamespace.PRECISION_SESSION_LEVEL
    name = MetricName.PRECISION_SESSION_LEVEL

    def measure(self, batch: MetricBatch, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what a batch adds."""
        hits_N, predicted_N, _ = self.decide(batch, place)
        return hits_N.sum(), predicted_N.sum()


@final
class GAUCMetric(SessionMetric):
    """Mean over sessions of the area under the ROC curve; equal predictions count one half.

    The model output `num_candidates` has the sizes of the sessions, whose samples follow one
    another. Sessions of one class are left out, as in Zhou et al., "Deep Interest Network for
    Click-Through Rate Prediction" (KDD 2018), section 6.2: they count neither for the sum nor for
    the number of sessions. A class counts only if a sample of it has a weight. Each of the other
    sessions counts once, whatever its size and weights. Results: `gauc`, which is NaN if no
    session has both classes, and `gauc_num_samples`, the number of sessions that have both. On a
    GPU each update waits for the device.
    """

    namespace = MetricNamespace.GAUC
    name = MetricName.GAUC

    def get_required_inputs(self) -> set[str]:
        """Name the model outputs that are needed."""
        return {"num_candidates"}

    def measure(self, batch: MetricBatch, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what a batch adds."""
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
        rows = (batch.predictions[place], batch.labels[place], batch.weights[place])
        ranked = Ranked(*rows, sessions)
        counts_G = ranked.has_both_classes_G
        areas_G = areas_under_roc(ranked).where(counts_G, 0.0)
        # A NaN hides whether its session has both classes: the count is NaN, too.
        ones_G = torch.ones_like(areas_G).masked_fill(areas_G.isnan(), torch.nan)
        return areas_G.sum(), ones_G.where(counts_G, 0.0).sum()

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        yield from super().values(sums)
        yield Value(MetricName.GAUC_NUM_SAMPLES, sums[self.quantities()[0].name][:, 1])


@final
class XAUCMetric(SessionMetric):
    """The weighted share of pairs of a batch whose predictions are ordered as their labels.

    Equal predictions are right for equal labels only. Labels may be any numbers. On a GPU each
    update waits for the device.
    """

    namespace = MetricNamespace.XAUC
    name = MetricName.XAUC

    def measure(self, batch: MetricBatch, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what a batch adds."""
        scores_N, labels_N = batch.predictions[place], batch.labels[place]
        weights_N = batch.weights_or_nan[place]
        in_order = inverted_pairs(scores_N, -labels_N, weights_N, one_group(labels_N)).sum()
        label, score = group_samples(labels_N).index_N, group_samples(scores_N).index_N
        alike = label * len(score) + score
        in_order = in_order + weigh_equal_pairs(alike, weights_N)
        return in_order, torch.dot(weights_N[1:], weights_N.cumsum(0)[:-1])


def _session_of(task: RecTaskInfo) -> SessionMetricDef:
    assert task.session_metric_def is not None
    return task.session_metric_def

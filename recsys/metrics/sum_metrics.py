"""Metrics that are formulas of sums over samples, one class statement each.

A sum is over values times weights, unless its description differs. An undefined result is NaN or
infinite, as the division returns it: a ratio to no positives, an entropy of a single class.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import torch

from recsys.base.arguments import instance, names, whole
from recsys.metrics import option_sums as by_option
from recsys.metrics.batch import Quantity
from recsys.metrics.entropy import (
    EPSILON,
    cross_entropy,
    normalize_by_mean,
    normalize_entropy,
    positive_cross_entropy,
)
from recsys.metrics.metrics_config import RecMetricEnum as Metric
from recsys.metrics.metrics_namespace import MetricName, MetricNameBase
from recsys.metrics.option_sums import OptionSum
from recsys.metrics.rec_metric import RecMetric, Value, total_examples

Sums = Mapping[str, torch.Tensor]
"""`[T]` by name, or `[T, width]` for a quantity of some width."""

WEIGHT = Quantity("weight", lambda b: b.weights, is_weighted=False)
LABEL = Quantity("label", lambda b: b.labels)
NEGATIVE = Quantity("negative", lambda b: 1.0 - b.rows[1])
"""Weight of the negatives; exactly 0 without any, unlike the rounded `WEIGHT` minus `LABEL`."""
PREDICTION = Quantity("prediction", lambda b: b.rows[0])
PREDICTED_NEGATIVE = Quantity("predicted_negative", lambda b: 1.0 - b.rows[0])
LOG_LOSS = Quantity("log_loss", lambda b: b.log_loss)
LOG_LOSS_POSITIVE = Quantity(
    "log_loss_positive", lambda b: positive_cross_entropy(b.predictions, b.labels)
)
SQUARED_ERROR = Quantity("squared_error", lambda b: b.errors.square())
ABSOLUTE_ERROR = Quantity("absolute_error", lambda b: b.errors.abs())
SQUARED_LABEL = Quantity("squared_label", lambda b: b.labels.square())
SQUARED_ERROR_OF_ONES = Quantity("squared_error_of_ones", lambda b: (1.0 - b.labels).square())
SAMPLES = Quantity("samples", lambda b: b.ones, is_weighted=False)
WEIGHTED_SAMPLES = Quantity(
    "weighted_samples", lambda b: (b.weights != 0).double(), is_weighted=False
)
LABEL_UNWEIGHTED = Quantity("label_unweighted", lambda b: b.labels, is_weighted=False)
NEGATIVE_UNWEIGHTED = Quantity("negative_unweighted", lambda b: 1.0 - b.labels, is_weighted=False)
LOG_LOSS_UNWEIGHTED = Quantity("log_loss_unweighted", lambda b: b.log_loss, is_weighted=False)
LABEL_PRESENT = Quantity("label_present", lambda b: b.labels.nan_to_num(0.0))
LABEL_MISSING = Quantity("label_missing", lambda b: b.labels.isnan().double())

NOISE = 1e-14
"""Largest difference of two sums, relative to them, that counts as rounding."""


class SumMetric(RecMetric):
    """Base class of metrics that are formulas of sums; derive from it for formulas of your own.

    The class statement of a metric with a single result may have the arguments `sums` and
    `formula`, which computes the result `name` from these sums in this order.

    Example:
        >>> class BaseRateMetric(SumMetric):
        ...     namespace = MetricName.DEFAULT
        ...     sums = (LABEL, WEIGHT)
        ...     results = {MetricName.DEFAULT: lambda s: s["label"] / s["weight"]}
    """

    sums: ClassVar[Sequence[Quantity | OptionSum]] = ()
    """Sums, or functions that create a sum for a metric with its options."""
    results: ClassVar[Mapping[MetricNameBase, Callable[[Sums], torch.Tensor]]] = {}
    """Formulas of results, by name."""
    _formula: ClassVar[Callable[..., torch.Tensor] | None] = None

    def __init_subclass__(
        cls,
        sums: Sequence[Quantity | OptionSum] | None = None,
        formula: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        if sums is not None:
            cls.sums = sums
        if formula is not None:
            cls._formula = staticmethod(formula)

    @cached_property
    def _quantities(self) -> Sequence[Quantity]:
        return [each if isinstance(each, Quantity) else each(self) for each in self.sums]

    def quantities(self) -> Sequence[Quantity]:
        """List the sums."""
        return self._quantities

    def ordered(self, sums: Sums) -> list[torch.Tensor]:
        """Return the values of `sums` in their order.

        Args:
            sums: Values of these and of other sums, by name.

        Returns:
            Values.
        """
        return [sums[quantity.name] for quantity in self._quantities]

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        for name, formula in self.results.items():
            yield Value(name, formula(sums))
        if self._formula is not None:
            yield Value(self.name, self._formula(*self.ordered(sums)))


class RatioMetric(SumMetric, formula=operator.truediv):
    """Base class of metrics that divide the first of two sums by the second."""


class CTRMetric(RatioMetric, metric=Metric.CTR, sums=(LABEL, WEIGHT)):
    """Share of positives: click-through rate."""


class LogLossMetric(RatioMetric, metric=Metric.LOG_LOSS, sums=(LOG_LOSS, WEIGHT)):
    """Mean binary cross entropy, in nats."""


class MAEMetric(RatioMetric, metric=Metric.MAE, sums=(ABSOLUTE_ERROR, WEIGHT)):
    """Mean absolute error."""


class ScalarMetric(RatioMetric, metric=Metric.SCALAR, sums=(LABEL_UNWEIGHTED, SAMPLES)):
    """Unweighted mean of the labels, for any number that the model returns as a label."""


class WeightedAvgMetric(RatioMetric, metric=Metric.WEIGHTED_AVG, sums=(PREDICTION, WEIGHT)):
    """Mean of the predictions."""


class TotalMetric(SumMetric, formula=lambda total: total):
    """Base class of metrics that report a sum itself."""


class SumWeightsMetric(TotalMetric, metric=Metric.SUM_WEIGHTS, sums=[WEIGHT]):
    """Sum of the weights."""


class WeightedSumPredictionsMetric(
    TotalMetric, metric=Metric.WEIGHTED_SUM_PREDICTIONS, sums=[PREDICTION]
):
    """Weighted sum of the predictions."""


class NumPositiveSamplesMetric(
    TotalMetric, metric=Metric.NUM_POSITIVE_SAMPLES, sums=[LABEL_PRESENT]
):
    """Weight of the positives; NaN labels are skipped."""


class NumMissingLabelsMetric(TotalMetric, metric=Metric.NUM_MISSING_LABELS, sums=[LABEL_MISSING]):
    """Weight of the samples with a NaN label."""


class AverageMetric(SumMetric, metric=Metric.AVERAGE, sums=(LABEL, PREDICTION, WEIGHT)):
    """Means of labels and of predictions: `label_average`, `prediction_average`."""

    results: ClassVar = {
        MetricName.LABEL_AVERAGE: lambda s: s["label"] / s["weight"],
        MetricName.PREDICTION_AVERAGE: lambda s: s["prediction"] / s["weight"],
    }


class NMSEMetric(RatioMetric, metric=Metric.NMSE, sums=(SQUARED_ERROR, SQUARED_ERROR_OF_ONES)):
    """Squared error divided by the error of always predicting 1: `nmse`, and its root: `nrmse`."""

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        for value in super().values(sums):
            yield value
            yield Value(MetricName.NRMSE, value.values_T.sqrt())


class MSEMetric(SumMetric, metric=Metric.MSE, sums=(SQUARED_ERROR, WEIGHT, LABEL, SQUARED_LABEL)):
    """Mean squared error and its root: `mse`, `rmse`.

    The argument `include_r_squared=True` adds `r_squared`: one minus the squared error divided by
    the squared error of the mean label. It is minus infinity for equal labels. Labels that differ
    by less than a ten-millionth of their size count as equal.
    """

    arguments: ClassVar[Mapping[str, Any]] = {"include_r_squared": False}

    @cached_property
    def _quantities(self) -> Sequence[Quantity]:
        return super()._quantities[: None if self.options["include_r_squared"] else 2]

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        squared_error, weight, *label_sums = self.ordered(sums)
        mse = squared_error / weight
        yield Value(MetricName.MSE, mse)
        yield Value(MetricName.RMSE, mse.sqrt())
        if label_sums:
            label, squared_label = label_sums
            around_mean = squared_label - label.square() / weight
            around_mean = around_mean.masked_fill(around_mean <= NOISE * squared_label, 0.0)
            yield Value(MetricName.R_SQUARED, 1.0 - squared_error / around_mean)


class TensorWeightedAvgMetric(
    SumMetric,
    metric=Metric.TENSOR_WEIGHTED_AVG,
    sums=(by_option.TENSOR, by_option.TENSOR_WEIGHT),
    formula=lambda tensor, weight: (tensor / weight).squeeze(1),
):
    """Mean of the model output `RecTaskInfo.tensor_name`.

    The mean is weighted if `RecTaskInfo.weighted` is true. The argument `description` is appended
    to the name of the result.
    """

    namespace = MetricName.WEIGHTED_AVG
    arguments: ClassVar[Mapping[str, Any]] = {"description": None}

    def _prepare(self) -> None:
        if self.options["description"] is not None:
            instance("description", self.options["description"], str, "text")
        if nameless := [task.name for task in self.tasks if task.tensor_name is None]:
            raise ValueError(
                f"tasks of {type(self).__name__} must have a tensor_name; received {nameless} "
                "without one."
            )

    def get_required_inputs(self) -> set[str]:
        """List the model outputs that are needed."""
        return {str(task.tensor_name) for task in self.tasks}

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the result."""
        for value in super().values(sums):
            yield Value(value.name, value.values_T, self.options["description"] or "")


class RecalibratedMetric(SumMetric):
    """Base class of metrics of recalibrated predictions."""

    arguments: ClassVar[Mapping[str, Any]] = {"recalibration_coefficient": 1.0}

    def _prepare(self) -> None:
        rate = self.options["recalibration_coefficient"]
        if rate <= 0.0:
            raise ValueError(f"recalibration_coefficient must be positive; received {rate}.")


class ServingMetric(SumMetric):
    """Base class of metrics that report the number of samples with a weight, over the lifetime."""

    def quantities(self) -> Sequence[Quantity]:
        """List the sums."""
        return [*self._quantities, WEIGHTED_SAMPLES]

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        yield from super().values(sums)
        yield total_examples(sums[WEIGHTED_SAMPLES.name])


class CalibrationMetric(RatioMetric, metric=Metric.CALIBRATION, sums=(PREDICTION, LABEL)):
    """Sum of the predictions divided by the sum of the labels."""


class ServingCalibrationMetric(ServingMetric, CalibrationMetric, metric=Metric.SERVING_CALIBRATION):
    """Calibration, and the number of samples with a weight: `total_examples`."""


class RecalibratedCalibrationMetric(
    RecalibratedMetric,
    CalibrationMetric,
    metric=Metric.RECALIBRATED_CALIBRATION,
    sums=(
        partial(by_option.recalibrated, "prediction", lambda predictions, _: predictions),
        LABEL,
    ),
):
    """Calibration of predictions recalibrated as in `RecalibratedNEMetric`."""


class EntropyMetric(SumMetric, formula=normalize_entropy):
    """Base class of normalized entropies.

    With the argument `allow_missing_label_with_zero_weight=True`, the result is 1e-12 while all
    weights are zero; otherwise it is NaN.
    """

    arguments: ClassVar[Mapping[str, Any]] = {"allow_missing_label_with_zero_weight": False}

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        loss, label, negative, *_ = self.ordered(sums)
        weight = label + negative
        for value in super().values(sums):
            ne_T = value.values_T
            if self.options["allow_missing_label_with_zero_weight"]:
                ne_T = ne_T.masked_fill(weight == 0, EPSILON)
            yield Value(value.name, ne_T)
        if self.options.get("include_logloss"):
            yield Value(MetricName.LOG_LOSS, loss / weight / math.log(2.0))


class NEMetric(EntropyMetric, metric=Metric.NE, sums=(LOG_LOSS, LABEL, NEGATIVE)):
    """Normalized entropy: log loss divided by the entropy of the base rate of the labels.

    Results: `ne`, and with the argument `include_logloss=True` `logloss`, which is in bits
    (`LogLossMetric` is in nats). Source: see `recsys.metrics.normalized_entropy`.
    """

    arguments: ClassVar[Mapping[str, Any]] = {"include_logloss": False}


class ServingNEMetric(ServingMetric, NEMetric, metric=Metric.SERVING_NE):
    """Normalized entropy, and the number of samples with a weight: `total_examples`."""


class RecalibratedNEMetric(
    RecalibratedMetric,
    NEMetric,
    metric=Metric.RECALIBRATED_NE,
    sums=(
        partial(by_option.recalibrated, "log_loss", lambda p, b: cross_entropy(p, b.labels)),
        LABEL,
        NEGATIVE,
    ),
):
    """Normalized entropy of predictions corrected for the sampling of negatives.

    A prediction p becomes `c p / (c p + 1 - p)`, where c is the argument
    `recalibration_coefficient`; He et al. (2014), section 6.3.
    """


class NEPositiveMetric(
    EntropyMetric, metric=Metric.NE_POSITIVE, sums=(LOG_LOSS_POSITIVE, LABEL, NEGATIVE)
):
    """Part of the normalized entropy that the log loss of positives contributes."""


class UnweightedNEMetric(
    EntropyMetric,
    metric=Metric.UNWEIGHTED_NE,
    sums=(LOG_LOSS_UNWEIGHTED, LABEL_UNWEIGHTED, NEGATIVE_UNWEIGHTED),
):
    """Normalized entropy with all weights one."""


class CaliFreeNEMetric(
    EntropyMetric,
    metric=Metric.CALI_FREE_NE,
    sums=(LOG_LOSS, LABEL, NEGATIVE, PREDICTION, PREDICTED_NEGATIVE),
    formula=normalize_by_mean,
):
    """Log loss divided by the log loss of always predicting the mean of the predictions.

    This is the normalized entropy divided by the normalized entropy of the mean prediction. Wrong
    calibration increases both. Source: see `recsys.metrics.normalized_entropy`.
    """


class SegmentedNEMetric(
    SumMetric,
    metric=Metric.SEGMENTED_NE,
    sums=[partial(by_option.by_segment, quantity) for quantity in (LOG_LOSS, LABEL, NEGATIVE)],
):
    """Normalized entropy of each segment of the samples: `segmented_ne_0`, ...

    Arguments: `num_groups` is the number of segments; `grouping_keys` names the model output with
    the segment of each sample, from 0; `include_logloss` adds `logloss_0`, ... in bits. Samples
    with other numbers are left out. `cast_keys_to_int` is ignored: fractions are truncated.
    """

    gives_scalars = True
    arguments: ClassVar[Mapping[str, Any]] = {
        "include_logloss": False,
        "num_groups": 1,
        "grouping_keys": "grouping_keys",
        "cast_keys_to_int": False,
    }

    def _prepare(self) -> None:
        whole("num_groups", self.options["num_groups"])

    def get_required_inputs(self) -> set[str]:
        """List the model outputs that are needed."""
        return {self.options["grouping_keys"]}

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        log_loss, label, negative = self.ordered(sums)
        entropies, weight = normalize_entropy(log_loss, label, negative), label + negative
        for segment in range(self.options["num_groups"]):
            yield Value(self.name, entropies[:, segment].float(), f"_{segment}")
            if self.options["include_logloss"]:
                bits = log_loss[:, segment] / weight[:, segment] / math.log(2.0)
                yield Value(MetricName.LOG_LOSS, bits, f"_{segment}")


def _share(
    part: torch.Tensor, whole: torch.Tensor, prediction: torch.Tensor, label: torch.Tensor
) -> torch.Tensor:
    # Comparisons with NaN are false, but the sums of the compared values are NaN.
    return (part / whole).masked_fill((prediction + label).isnan(), torch.nan)


class ThresholdMetric(SumMetric, formula=_share):
    """Base class of metrics of decisions: predictions of at least the argument `threshold`."""

    arguments: ClassVar[Mapping[str, Any]] = {"threshold": 0.5}


class AccuracyMetric(
    ThresholdMetric, metric=Metric.ACCURACY, sums=(by_option.RIGHT, WEIGHT, PREDICTION, LABEL)
):
    """Share of samples whose decision equals the label."""


class PrecisionMetric(
    ThresholdMetric,
    metric=Metric.PRECISION,
    sums=(by_option.HITS, by_option.DECIDED, PREDICTION, LABEL),
):
    """Share of positives among the samples predicted positive."""


class RecallMetric(
    ThresholdMetric, metric=Metric.RECALL, sums=(by_option.HITS, LABEL, PREDICTION, LABEL)
):
    """Share of the positives that are predicted positive."""


class MulticlassRecallMetric(
    SumMetric,
    metric=Metric.MULTICLASS_RECALL,
    sums=(by_option.within, WEIGHT),
    formula=lambda hits, weight: hits / weight.unsqueeze(1),
):
    """Share of samples whose class is among the k best, for each k.

    The argument `number_of_classes` (required) is the number of predictions per sample; labels are
    class numbers. A result has one value per k, from k = 1.
    """

    arguments: ClassVar[Mapping[str, Any]] = {"number_of_classes": None}

    def _prepare(self) -> None:
        if self.options["number_of_classes"] is None:
            raise ValueError(
                "MulticlassRecallMetric needs the argument number_of_classes; received None."
            )
        whole("number_of_classes", self.options["number_of_classes"], least=2)

    @property
    def num_classes(self) -> int:
        """Number of predictions per sample."""
        return int(self.options["number_of_classes"])


class MultiLabelPrecisionMetric(
    SumMetric,
    metric=Metric.MULTI_LABEL_PRECISION,
    sums=(by_option.RIGHT_LABELS, by_option.DECIDED_LABELS),
):
    """Precision of each label of samples with several labels.

    The bits of a prediction are the predicted labels of a sample, and the bits of its label are the
    true labels; bit 0 is the first label. Floats hold up to 24 labels, whole numbers up to
    52. Arguments: `num_labels`, and `label_names`, which are appended to the name of the result
    instead of `label_0`, `label_1`, ...
    """

    arguments: ClassVar[Mapping[str, Any]] = {"num_labels": 1, "label_names": None}

    def _prepare(self) -> None:
        num_labels, label_names = self.options["num_labels"], self.options["label_names"]
        whole("num_labels", num_labels, most=52)
        if label_names is not None and len(names("label_names", label_names)) != num_labels:
            raise ValueError(
                f"label_names must have a name for each label, {num_labels}; received "
                f"{label_names}."
            )

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        right_TL, decided_TL = self.ordered(sums)
        label_names = self.options["label_names"] or [f"label_{i}" for i in range(right_TL.size(1))]
        for name, precision_T in zip(label_names, (right_TL / decided_TL).unbind(1), strict=True):
            yield Value(self.name, precision_T, name)

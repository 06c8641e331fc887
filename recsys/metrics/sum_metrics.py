"""Metrics that are a formula of sums over samples: one class each.

A result that is not defined is what the division says, NaN or infinite: a ratio to no positives, an
entropy of one class. A sum is of a sample's value times its weight, unless it says otherwise.
"""

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

import torch

from recsys.kernels.arguments import finite, names, whole
from recsys.metrics.batch import MetricBatch, Quantity
from recsys.metrics.checks import flag, text
from recsys.metrics.entropy import (
    EPSILON,
    cross_entropy,
    normalize_by_mean,
    normalize_entropy,
    positive_cross_entropy,
)
from recsys.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
    MetricNamespaceBase,
    MetricPrefix,
)
from recsys.metrics.rec_metric import RecMetric, Value

Sums = Mapping[str, torch.Tensor]
"""`[T]` by name, or `[T, width]` for a quantity of some width."""

WEIGHT = Quantity("weight", lambda batch: batch.weights, is_weighted=False)
LABEL = Quantity("label", lambda batch: batch.labels)
NEGATIVE = Quantity("negative", lambda batch: 1.0 - batch.rows[1])
"""Weight of the negatives; exactly 0 without any, unlike the rounded `WEIGHT` less `LABEL`."""
PREDICTION = Quantity("prediction", lambda batch: batch.rows[0])
PREDICTED_NEGATIVE = Quantity("predicted_negative", lambda batch: 1.0 - batch.rows[0])
LOG_LOSS = Quantity("log_loss", lambda batch: batch.log_loss)
LOG_LOSS_POSITIVE = Quantity(
    "log_loss_positive", lambda batch: positive_cross_entropy(batch.predictions, batch.labels)
)
SQUARED_ERROR = Quantity("squared_error", lambda batch: batch.errors.square())
ABSOLUTE_ERROR = Quantity("absolute_error", lambda batch: batch.errors.abs())
SQUARED_LABEL = Quantity("squared_label", lambda batch: batch.labels.square())
SQUARED_ERROR_OF_ONES = Quantity(
    "squared_error_of_ones", lambda batch: (1.0 - batch.labels).square()
)
SAMPLES = Quantity("samples", lambda batch: batch.ones, is_weighted=False)
WEIGHTED_SAMPLES = Quantity(
    "weighted_samples", lambda batch: (batch.weights != 0).double(), is_weighted=False
)
LABEL_UNWEIGHTED = Quantity("label_unweighted", lambda batch: batch.labels, is_weighted=False)
NEGATIVE_UNWEIGHTED = Quantity(
    "negative_unweighted", lambda batch: 1.0 - batch.labels, is_weighted=False
)
LOG_LOSS_UNWEIGHTED = Quantity(
    "log_loss_unweighted", lambda batch: batch.log_loss, is_weighted=False
)

NOISE = 1e-14
"""A difference of two sums is rounding if it is not larger than this share of them."""


class SumMetric(RecMetric):
    """What metrics of sums have in common; derive from it for formulas of your own.

    Example:
        >>> class BaseRateMetric(SumMetric):
        ...     namespace = MetricNamespace.DEFAULT
        ...     sums = (LABEL, WEIGHT)
        ...     results = {MetricName.DEFAULT: lambda s: s["label"] / s["weight"]}
    """

    sums: ClassVar[Sequence[Quantity]] = ()
    """What is summed."""
    results: ClassVar[Mapping[MetricNameBase, Callable[[Sums], torch.Tensor]]] = {}
    """What is computed from the sums."""

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""
        return self.sums

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        for name, formula in self.results.items():
            yield Value(name, formula(sums))


ALLOW_MISSING: Mapping[str, Any] = {"allow_missing_label_with_zero_weight": False}
"""Argument of normalized entropies."""


def check_missing(options: Mapping[str, Any]) -> None:
    """Raise unless the options of `ALLOW_MISSING` are booleans."""
    for name in ALLOW_MISSING:
        flag(name, options[name])


def fill_missing(
    ne_T: torch.Tensor, weight_T: torch.Tensor, options: Mapping[str, Any]
) -> torch.Tensor:
    """Replace results of tasks without weights if `ALLOW_MISSING` asks for it."""
    is_allowed = options["allow_missing_label_with_zero_weight"]
    return ne_T.masked_fill(weight_T == 0, EPSILON) if is_allowed else ne_T


class NEMetric(SumMetric):
    """Normalized entropy: log loss divided by the entropy of the labels' base rate.

    Results: `ne`, and with the argument `include_logloss=True` `logloss`, which is in bits
    (`LogLossMetric` gives nats). With `allow_missing_label_with_zero_weight=True`, `ne` is 1e-12
    while all weights are zero, otherwise NaN. The source is that of
    `recsys.metrics.normalized_entropy`.
    """

    namespace: ClassVar[MetricNamespaceBase] = MetricNamespace.NE
    arguments: ClassVar[Mapping[str, Any]] = {"include_logloss": False, **ALLOW_MISSING}
    sums: ClassVar[Sequence[Quantity]] = (LOG_LOSS, LABEL, NEGATIVE)

    def _prepare(self) -> None:
        flag("include_logloss", self.options["include_logloss"])
        check_missing(self.options)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        log_loss, label, negative = (sums[quantity.name] for quantity in self.quantities()[:3])
        ne = normalize_entropy(log_loss, label, negative)
        yield Value(MetricName.NE, fill_missing(ne, label + negative, self.options))
        if self.options["include_logloss"]:
            yield Value(MetricName.LOG_LOSS, log_loss / (label + negative) / math.log(2.0))


@final
class ServingNEMetric(NEMetric):
    """Normalized entropy, and the number of samples with a weight: `total_examples`."""

    namespace = MetricNamespace.SERVING_NE
    sums = (LOG_LOSS, LABEL, NEGATIVE, WEIGHTED_SAMPLES)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        yield from super().values(sums)
        yield total_examples(sums[WEIGHTED_SAMPLES.name])


@final
class RecalibratedNEMetric(NEMetric):
    """Normalized entropy of predictions whose sampling of negatives is undone.

    A prediction p counts as `c p / (c p + 1 - p)`, where c is the argument
    `recalibration_coefficient`; He et al. (2014), section 6.3.
    """

    namespace = MetricNamespace.RECALIBRATED_NE
    arguments: ClassVar[Mapping[str, Any]] = {
        **NEMetric.arguments,
        "recalibration_coefficient": 1.0,
    }

    def _prepare(self) -> None:
        super()._prepare()
        _check_rate(self.options)

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""
        rate = self.options["recalibration_coefficient"]
        return (
            Quantity(
                f"log_loss_recalibrated_{rate}",
                lambda batch: cross_entropy(_recalibrate(batch, rate), batch.labels),
            ),
            LABEL,
            NEGATIVE,
        )


class OtherNEMetric(SumMetric):
    """What metrics of normalized entropy with one result have in common.

    With the argument `allow_missing_label_with_zero_weight=True`, the result is 1e-12 while all
    weights are zero, otherwise NaN.
    """

    arguments: ClassVar[Mapping[str, Any]] = ALLOW_MISSING

    def _prepare(self) -> None:
        check_missing(self.options)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the result."""
        _, label, negative = (sums[quantity.name] for quantity in self.quantities()[:3])
        for value in super().values(sums):
            filled = fill_missing(value.values_T, label + negative, self.options)
            yield Value(value.name, filled)


@final
class NEPositiveMetric(OtherNEMetric):
    """The positives' share of normalized entropy: their log loss alone, divided as that is."""

    namespace = MetricNamespace.NE_POSITIVE
    sums = (LOG_LOSS_POSITIVE, LABEL, NEGATIVE)
    results: ClassVar = {
        MetricName.NE_POSITIVE: lambda s: normalize_entropy(
            s["log_loss_positive"], s["label"], s["negative"]
        )
    }


@final
class UnweightedNEMetric(OtherNEMetric):
    """Normalized entropy with all weights one."""

    namespace = MetricNamespace.UNWEIGHTED_NE
    sums = (LOG_LOSS_UNWEIGHTED, LABEL_UNWEIGHTED, NEGATIVE_UNWEIGHTED)
    results: ClassVar = {
        MetricName.UNWEIGHTED_NE: lambda s: normalize_entropy(
            s["log_loss_unweighted"], s["label_unweighted"], s["negative_unweighted"]
        )
    }


@final
class CaliFreeNEMetric(OtherNEMetric):
    """Log loss divided by that of always predicting the mean of the predictions.

    That is the normalized entropy divided by the one that is left if nothing but the calibration is
    kept: predictions that are too high or too low on the whole make both worse. The source of
    normalized entropy is that of `recsys.metrics.normalized_entropy`.
    """

    namespace = MetricNamespace.CALI_FREE_NE
    sums = (LOG_LOSS, LABEL, NEGATIVE, PREDICTION, PREDICTED_NEGATIVE)
    results: ClassVar = {
        MetricName.CALI_FREE_NE: lambda s: normalize_by_mean(
            *(s[quantity.name] for quantity in CaliFreeNEMetric.sums)
        )
    }


@final
class SegmentedNEMetric(SumMetric):
    """Normalized entropy of each segment of the samples: `segmented_ne_0`, ...

    Arguments: `num_groups` segments, numbered from 0 by the model output `grouping_keys` (the
    argument names it), and `include_logloss` for `logloss_0`, ... in bits. A number that is
    none of a segment leaves its sample out. `cast_keys_to_int` has no effect: fractions are cut.
    """

    namespace = MetricNamespace.SEGMENTED_NE
    gives_scalars = True
    arguments: ClassVar[Mapping[str, Any]] = {
        "include_logloss": False,
        "num_groups": 1,
        "grouping_keys": "grouping_keys",
        "cast_keys_to_int": False,
    }

    def _prepare(self) -> None:
        flag("include_logloss", self.options["include_logloss"])
        whole("num_groups", self.options["num_groups"])
        text("grouping_keys", self.options["grouping_keys"])
        flag("cast_keys_to_int", self.options["cast_keys_to_int"])

    def get_required_inputs(self) -> set[str]:
        """Name the model outputs that are needed."""
        return {self.options["grouping_keys"]}

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""
        key, num_groups = self.options["grouping_keys"], self.options["num_groups"]

        def by_segment(of: Quantity) -> Quantity:
            def sum_segments(batch: MetricBatch) -> torch.Tensor:
                number_N = batch.input(key).long()
                # Others are summed into a column of their own, which is dropped.
                number_N = number_N.where((number_N >= 0) & (number_N < num_groups), num_groups)
                values_TN = of.of(batch) * batch.weights if of.is_weighted else of.of(batch)
                sums = values_TN.new_zeros(len(values_TN), num_groups + 1)
                return sums.index_add_(1, number_N, values_TN)[:, :num_groups]

            return Quantity(f"{of.name}_by_{key}_{num_groups}", sum_segments, width=num_groups)

        return [by_segment(quantity) for quantity in (LOG_LOSS, LABEL, NEGATIVE)]

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        log_loss, label, negative = (sums[quantity.name] for quantity in self.quantities())
        entropies, weight = normalize_entropy(log_loss, label, negative), label + negative
        for place in range(self.options["num_groups"]):
            yield Value(MetricName.SEGMENTED_NE, entropies[:, place].float(), f"_{place}")
            if self.options["include_logloss"]:
                bits = log_loss[:, place] / weight[:, place] / math.log(2.0)
                yield Value(MetricName.LOG_LOSS, bits, f"_{place}")


@final
class LogLossMetric(SumMetric):
    """Mean binary cross entropy, in nats."""

    namespace = MetricNamespace.LOG_LOSS
    sums = (LOG_LOSS, WEIGHT)
    results: ClassVar = {MetricName.LOG_LOSS: lambda s: s["log_loss"] / s["weight"]}


class CalibrationMetric(SumMetric):
    """Sum of the predictions divided by that of the labels."""

    namespace: ClassVar[MetricNamespaceBase] = MetricNamespace.CALIBRATION
    sums: ClassVar[Sequence[Quantity]] = (PREDICTION, LABEL)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        prediction, label = (sums[quantity.name] for quantity in self.quantities()[:2])
        yield Value(MetricName.CALIBRATION, prediction / label)


@final
class ServingCalibrationMetric(CalibrationMetric):
    """Calibration, and the number of samples with a weight: `total_examples`."""

    namespace = MetricNamespace.SERVING_CALIBRATION
    sums = (PREDICTION, LABEL, WEIGHTED_SAMPLES)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        yield from super().values(sums)
        yield total_examples(sums[WEIGHTED_SAMPLES.name])


@final
class RecalibratedCalibrationMetric(CalibrationMetric):
    """Calibration of predictions recalibrated as `RecalibratedNEMetric` does."""

    namespace = MetricNamespace.RECALIBRATED_CALIBRATION
    arguments: ClassVar[Mapping[str, Any]] = {"recalibration_coefficient": 1.0}

    def _prepare(self) -> None:
        _check_rate(self.options)

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""
        rate = self.options["recalibration_coefficient"]
        return (
            Quantity(f"prediction_recalibrated_{rate}", lambda batch: _recalibrate(batch, rate)),
            LABEL,
        )


@final
class CTRMetric(SumMetric):
    """The share of positives: click-through rate."""

    namespace = MetricNamespace.CTR
    sums = (LABEL, WEIGHT)
    results: ClassVar = {MetricName.CTR: lambda s: s["label"] / s["weight"]}


@final
class AverageMetric(SumMetric):
    """Means of labels and of predictions."""

    namespace = MetricNamespace.AVERAGE
    sums = (LABEL, PREDICTION, WEIGHT)
    results: ClassVar = {
        MetricName.LABEL_AVERAGE: lambda s: s["label"] / s["weight"],
        MetricName.PREDICTION_AVERAGE: lambda s: s["prediction"] / s["weight"],
    }


@final
class WeightedAvgMetric(SumMetric):
    """Mean of the predictions."""

    namespace = MetricNamespace.WEIGHTED_AVG
    sums = (PREDICTION, WEIGHT)
    results: ClassVar = {MetricName.WEIGHTED_AVG: lambda s: s["prediction"] / s["weight"]}


@final
class ScalarMetric(SumMetric):
    """Mean of the labels with all weights one: any number that the model gives as a label."""

    namespace = MetricNamespace.SCALAR
    sums = (LABEL_UNWEIGHTED, SAMPLES)
    results: ClassVar = {MetricName.SCALAR: lambda s: s["label_unweighted"] / s["samples"]}


@final
class TensorWeightedAvgMetric(SumMetric):
    """Mean of the model output that `RecTaskInfo.tensor_name` names.

    `RecTaskInfo.weighted` says whether with weights. The argument `description` is appended to
    the result's name.
    """

    namespace = MetricNamespace.WEIGHTED_AVG
    arguments: ClassVar[Mapping[str, Any]] = {"description": None}

    def _prepare(self) -> None:
        if self.options["description"] is not None:
            text("description", self.options["description"])
        nameless = [task.name for task in self.tasks if task.tensor_name is None]
        if nameless:
            raise ValueError(
                f"tasks of {type(self).__name__} must have a tensor_name; received {nameless} "
                "without one."
            )

    def get_required_inputs(self) -> set[str]:
        """Name the model outputs that are needed."""
        return {str(task.tensor_name) for task in self.tasks}

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""

        def weights(batch: MetricBatch) -> torch.Tensor:
            places = enumerate(task.weighted for task in batch.tasks)
            return torch.stack([(batch.weights if w else batch.ones)[i] for i, w in places])

        def tensors(batch: MetricBatch) -> torch.Tensor:
            return torch.stack([batch.input(str(task.tensor_name)) for task in batch.tasks])

        return (
            Quantity("tensor", lambda b: (tensors(b) * weights(b)).sum(1, keepdim=True), width=1),
            Quantity("tensor_weight", lambda b: weights(b).sum(1, keepdim=True), width=1),
        )

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        mean = sums["tensor"] / sums["tensor_weight"]
        yield Value(MetricName.WEIGHTED_AVG, mean.squeeze(1), self.options["description"] or "")


@final
class MSEMetric(SumMetric):
    """Mean squared error and its root.

    The argument `include_r_squared=True` adds `r_squared`: one less the squared error divided
    by that of the labels' mean. It is minus infinity for labels that are all equal, which labels
    count as that differ by less than a ten-millionth of their size.
    """

    namespace = MetricNamespace.MSE
    arguments: ClassVar[Mapping[str, Any]] = {"include_r_squared": False}

    def _prepare(self) -> None:
        flag("include_r_squared", self.options["include_r_squared"])

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""
        needed = (SQUARED_ERROR, WEIGHT)
        return (*needed, LABEL, SQUARED_LABEL) if self.options["include_r_squared"] else needed

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        mse = sums["squared_error"] / sums["weight"]
        yield Value(MetricName.MSE, mse)
        yield Value(MetricName.RMSE, mse.sqrt())
        if self.options["include_r_squared"]:
            of_labels = sums["squared_label"]
            around_mean = of_labels - sums["label"].square() / sums["weight"]
            around_mean = around_mean.masked_fill(around_mean <= NOISE * of_labels, 0.0)
            yield Value(MetricName.R_SQUARED, 1.0 - sums["squared_error"] / around_mean)


@final
class NMSEMetric(SumMetric):
    """Squared error divided by that of always predicting 1, and the root of it."""

    namespace = MetricNamespace.NMSE
    sums = (SQUARED_ERROR, SQUARED_ERROR_OF_ONES)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        nmse = sums["squared_error"] / sums["squared_error_of_ones"]
        yield Value(MetricName.NMSE, nmse)
        yield Value(MetricName.NRMSE, nmse.sqrt())


@final
class MAEMetric(SumMetric):
    """Mean absolute error."""

    namespace = MetricNamespace.MAE
    sums = (ABSOLUTE_ERROR, WEIGHT)
    results: ClassVar = {MetricName.MAE: lambda s: s["absolute_error"] / s["weight"]}


class ThresholdMetric(SumMetric):
    """What metrics of a decision have in common.

    A prediction of at least the argument `threshold` counts as positive.
    """

    arguments: ClassVar[Mapping[str, Any]] = {"threshold": 0.5}
    name: ClassVar[MetricName]
    """Of its result."""

    def _prepare(self) -> None:
        finite("threshold", self.options["threshold"])

    @abc.abstractmethod
    def decisions(self) -> tuple[Quantity, Quantity]:
        """Name the two sums whose ratio is the result."""

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""
        return (*self.decisions(), PREDICTION, LABEL)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        part, whole = self.decisions()
        # Comparisons with NaN are false; the sums of what is compared are NaN.
        has_nan_T = (sums[PREDICTION.name] + sums[LABEL.name]).isnan()
        share_T = sums[part.name] / sums[whole.name]
        yield Value(self.name, share_T.masked_fill(has_nan_T, torch.nan))

    def _hits(self) -> Quantity:
        threshold = self.options["threshold"]
        return Quantity(f"hit_{threshold}", lambda b: b.rows[1] * b.decisions(threshold))


@final
class AccuracyMetric(ThresholdMetric):
    """The share of samples whose label is what was decided."""

    namespace = MetricNamespace.ACCURACY
    name = MetricName.ACCURACY

    def decisions(self) -> tuple[Quantity, Quantity]:
        """Name the sums."""
        threshold = self.options["threshold"]

        def is_right(batch: MetricBatch) -> torch.Tensor:
            decided, labels = batch.decisions(threshold), batch.rows[1]
            return torch.eq(decided, labels, out=torch.empty_like(labels))  # without a bool between

        return Quantity(f"right_{threshold}", is_right), WEIGHT


@final
class PrecisionMetric(ThresholdMetric):
    """The share of positives among what was decided to be one."""

    namespace = MetricNamespace.PRECISION
    name = MetricName.PRECISION

    def decisions(self) -> tuple[Quantity, Quantity]:
        """Name the sums."""
        threshold = self.options["threshold"]
        return self._hits(), Quantity(f"decided_{threshold}", lambda b: b.decisions(threshold))


@final
class RecallMetric(ThresholdMetric):
    """The share of positives that were decided to be one."""

    namespace = MetricNamespace.RECALL
    name = MetricName.RECALL

    def decisions(self) -> tuple[Quantity, Quantity]:
        """Name the sums."""
        return self._hits(), LABEL


@final
class MulticlassRecallMetric(SumMetric):
    """The share of samples whose class is among the k best, for each k.

    The argument `number_of_classes` (required) says how many predictions a sample has; labels are
    numbers of classes. A result has as many values: k is 1 in the first.
    """

    namespace = MetricNamespace.MULTICLASS_RECALL
    arguments: ClassVar[Mapping[str, Any]] = {"number_of_classes": None}

    def _prepare(self) -> None:
        if self.options["number_of_classes"] is None:
            raise ValueError(
                "MulticlassRecallMetric needs the argument number_of_classes; received None."
            )
        whole("number_of_classes", self.options["number_of_classes"], least=2)

    @property
    def num_classes(self) -> int:
        """Prediction per sample."""
        number: int = self.options["number_of_classes"]
        return number

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""

        def within(batch: MetricBatch) -> torch.Tensor:
            assert batch.classes is not None
            places_TNC = batch.classes.argsort(dim=2, descending=True)
            found_TNC = places_TNC == batch.labels.unsqueeze(2)
            return torch.einsum("tnc,tn->tc", found_TNC.double(), batch.weights_or_nan).cumsum(1)

        return Quantity(f"within_{self.num_classes}", within, width=self.num_classes), WEIGHT

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        recalls = sums[f"within_{self.num_classes}"] / sums["weight"].unsqueeze(1)
        yield Value(MetricName.MULTICLASS_RECALL, recalls)


@final
class MultiLabelPrecisionMetric(SumMetric):
    """The share of right decisions among those for a label, for each label of a sample.

    Predictions and labels are whole numbers, whose bits say which labels a sample was given and
    which it has: bit 0 is the first. Floats hold them up to 24 labels, whole numbers up to 52.
    Arguments: `num_labels`, and `label_names`, which are appended to the result's name in place
    of `label_0`, `label_1`, ...
    """

    namespace = MetricNamespace.MULTI_LABEL_PRECISION
    arguments: ClassVar[Mapping[str, Any]] = {"num_labels": 1, "label_names": None}

    def _prepare(self) -> None:
        num_labels, label_names = self.options["num_labels"], self.options["label_names"]
        whole("num_labels", num_labels, most=52)
        if label_names is not None and len(names("label_names", label_names)) != num_labels:
            raise ValueError(
                f"label_names must have a name for each label, {num_labels}; received "
                f"{label_names}."
            )

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""
        num_labels = self.options["num_labels"]

        def count(batch: MetricBatch, only_right: bool) -> torch.Tensor:
            given_TN = batch.predictions.long()
            given_TN = given_TN & batch.labels.long() if only_right else given_TN
            bits_L1 = torch.arange(num_labels, device=given_TN.device).unsqueeze(1)
            given_TLN = (given_TN.unsqueeze(1) >> bits_L1) & 1
            return torch.einsum("tln,tn->tl", given_TLN.double(), batch.weights_or_nan)

        return (
            Quantity(f"right_of_{num_labels}", lambda b: count(b, True), width=num_labels),
            Quantity(f"decided_of_{num_labels}", lambda b: count(b, False), width=num_labels),
        )

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        right_TL, decided_TL = (sums[quantity.name] for quantity in self.quantities())
        numbered = [f"label_{place}" for place in range(self.options["num_labels"])]
        label_names = self.options["label_names"] or numbered
        for name, precision_T in zip(label_names, (right_TL / decided_TL).unbind(1), strict=True):
            yield Value(MetricName.MULTI_LABEL_PRECISION, precision_T, name)


@final
class SumWeightsMetric(SumMetric):
    """Sum of the weights."""

    namespace = MetricNamespace.SUM_WEIGHTS
    sums = (WEIGHT,)
    results: ClassVar = {MetricName.SUM_WEIGHTS: lambda s: s["weight"]}


@final
class WeightedSumPredictionsMetric(SumMetric):
    """Weighted sum of the predictions."""

    namespace = MetricNamespace.WEIGHTED_SUM_PREDICTIONS
    sums = (PREDICTION,)
    results: ClassVar = {MetricName.WEIGHTED_SUM_PREDICTIONS: lambda s: s["prediction"]}


@final
class NumPositiveSamplesMetric(SumMetric):
    """Weight of the positives; labels that are NaN count as none."""

    namespace = MetricNamespace.NUM_POSITIVE_SAMPLES
    sums = (Quantity("label_present", lambda batch: batch.labels.nan_to_num(0.0)),)
    results: ClassVar = {MetricName.NUM_POSITIVE_SAMPLES: lambda s: s["label_present"]}


@final
class NumMissingLabelsMetric(SumMetric):
    """Weight of the samples whose label is NaN."""

    namespace = MetricNamespace.NUM_MISSING_LABELS
    sums = (Quantity("label_missing", lambda batch: batch.labels.isnan().double()),)
    results: ClassVar = {MetricName.NUM_MISSING_LABELS: lambda s: s["label_missing"]}


def total_examples(count_T: torch.Tensor) -> Value:
    """Report a number of samples, over the lifetime alone.

    Args:
        count_T: `[T]`.

    Returns:
        The result, int64.
    """
    return Value(MetricName.TOTAL_EXAMPLES, count_T.long(), prefix=MetricPrefix.DEFAULT)


def _check_rate(options: Mapping[str, Any]) -> None:
    rate = finite("recalibration_coefficient", options["recalibration_coefficient"], least=0.0)
    if rate == 0.0:
        raise ValueError(f"recalibration_coefficient must be positive; received {rate}.")


def _recalibrate(batch: MetricBatch, rate: float) -> torch.Tensor:
    scaled = batch.predictions * rate
    # `scaled + 1 - p` would round: the result for p = 1 would not be 1.
    return scaled / (scaled + (1.0 - batch.predictions))

"""Functions and constants of TorchRec's metric modules, as data.

A row of `FUNCTIONS` is a function with its arguments, and the formula that computes it. Sums are
over the last dimension, from `[T, N]` to `[T]`. Unlike metrics, these functions return TorchRec's
values of undefined ratios. Shapes: `T` tasks, `N` samples, `G` groups, `C` classes.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recsys.metrics.metrics_config import StateMetricEnum
from recsys.metrics.metrics_namespace import MetricNamespace
from recsys.metrics.ranking import (
    Groups,
    Ranked,
    areas_under_roc,
    average_precisions,
    group_samples,
    inverted_pairs,
    one_group,
    places,
)

Formula = Callable[..., Any]


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole == 0, 0.0, part / whole).double()


def _share(hits: Tensor, others: Tensor) -> Tensor:
    return _ratio(hits, hits + others)


def _narrow_share(hits: Tensor, others: Tensor) -> Tensor:
    return _share(hits, others).to(hits.dtype)


def _r_squared(error: Tensor, weight: Tensor, label: Tensor, squared_label: Tensor) -> Tensor:
    around_mean = (squared_label - label.square() / weight).double()
    return 1.0 - error / around_mean


def _sum(value: Formula) -> Formula:
    """Sum `value(labels, predictions, ...)` times the weights."""

    def weighted_sum(labels: Tensor, predictions: Tensor, weights: Tensor, *more: Any) -> Tensor:
        result: Tensor = (value(labels, predictions, *more) * weights).sum(-1)
        return result

    return weighted_sum


def _entropy(labels: Tensor, predictions: Tensor, weights: Tensor, eta: float) -> Tensor:
    return _positive_entropy(labels, predictions, weights, eta) + _positive_entropy(
        1.0 - labels, 1.0 - predictions.double(), weights, eta
    )


def _positive_entropy(labels: Tensor, predictions: Tensor, weights: Tensor, eta: float) -> Tensor:
    return -weights * labels * predictions.double().clamp(eta, 1.0).log2()


def _logloss(entropy: Tensor, positive: Tensor, negative: Tensor, eta: float) -> Tensor:
    return entropy / (positive + negative).clamp(min=eta)


def _label_entropy(weight: Tensor, positive: Tensor, negative: Tensor, eta: float) -> Tensor:
    mean = (positive / weight).double().clamp(eta, 1.0 - eta)
    return -(positive * mean.log2() + negative * (1.0 - mean).log2())


def _ne(
    entropy: Tensor, weight: Tensor, positive: Tensor, negative: Tensor, eta: float,
    allow_missing: bool = False,
) -> Tensor:  # fmt: skip
    ne = entropy / _label_entropy(weight, positive, negative, eta)
    return ne.masked_fill(weight == 0, eta) if allow_missing else ne


def _cali_free_ne(
    entropy: Tensor, weight: Tensor, positive: Tensor, negative: Tensor, predicted: Tensor,
    eta: float, allow_missing: bool = False,
) -> Tensor:  # fmt: skip
    mean = (predicted / weight).clamp(eta, 1.0 - eta)
    of_mean = -(positive * mean.log2() + negative * (1.0 - mean).log2())
    ne = _ne(entropy, weight, positive, negative, eta, allow_missing)
    return (ne / of_mean).masked_fill((weight == 0) & allow_missing, eta)


def _segmented_ne(*sums: Any) -> Tensor:
    return _ne(*sums[:4], sums[-1]).float()


def _states(**formulas: Formula) -> Formula:
    """Compute sums by name."""

    def compute(labels: Tensor, predictions: Tensor, weights: Tensor | None, *more: Any) -> Any:
        weights = torch.ones_like(predictions) if weights is None else weights
        return {name: of(labels, predictions, weights, *more) for name, of in formulas.items()}

    return compute


def _in_groups(of: Formula) -> Formula:
    """Sum `of(labels, predictions, weights, eta)` `[..., N]` over each group."""

    def compute(
        labels: Tensor, predictions: Tensor, weights: Tensor, keys: Tensor, eta: float, size: int,
        *_: int,
    ) -> Tensor:  # fmt: skip
        values = of(labels, predictions, weights, eta)
        values = values.double() if values.dim() > 1 else values.float()
        return values.new_zeros(*values.shape[:-1], size).index_add_(-1, keys.long(), values)

    return compute


def _in_order(ranked: Ranked) -> Tensor:
    size_G = ranked.groups.size_G.double()
    ones_N = torch.ones_like(ranked.weights)
    inverted_G = inverted_pairs(ranked.scores, ranked.labels, ones_N, ranked.groups)
    return 1.0 - inverted_G / (size_G * (size_G - 1.0) / 2.0)


def _mean_of_groups(score: Callable[[Ranked], Tensor], undefined: float) -> Formula:
    """Compute each task's mean of the scores of groups; `undefined` stands for NaN."""

    def compute(_: int, *tensors: Any, keys: Tensor | None = None) -> Tensor:
        rows = [torch.cat(list(t), -1) if isinstance(t, Sequence) else t for t in tensors]
        groups = one_group(rows[0][0]) if keys is None else group_samples(keys.reshape(-1))
        tasks = zip(rows[0], rows[1].double(), rows[2].double(), strict=True)
        scores = [score(Ranked(*task, groups)).nan_to_num(undefined) for task in tasks]
        return torch.stack(scores)[:, groups.size_G > 0].mean(1).float()

    return compute


def _auc_states(labels: Tensor, predictions: Tensor, weights: Tensor, sizes: Tensor) -> Any:
    groups = Groups(torch.arange(len(sizes)).to(sizes).repeat_interleave(sizes), sizes)
    tasks = zip(predictions, labels.double(), weights.double(), strict=True)
    areas = torch.stack([areas_under_roc(Ranked(*task, groups)) for task in tasks])
    return {"auc_sum": areas.nansum(1).float(), "num_samples": (~areas.isnan()).sum(1)}


def _ordered_pairs(labels: Tensor, predictions: Tensor, weights: Tensor) -> Tensor:
    of_labels, of_predictions = (
        (values.unsqueeze(-1) - values.unsqueeze(-2)).sign() for values in (labels, predictions)
    )
    right = (of_labels == of_predictions).double() * weights.unsqueeze(-1) * weights.unsqueeze(-2)
    return right.triu(1).sum((-1, -2))


def _pairs(weights: Tensor) -> Tensor:
    return (weights.sum(-1).square() - weights.square().sum(-1)) / 2.0


def _found_at_k(predictions: Tensor, labels: Tensor, weights: Tensor, _: int) -> Tensor:
    places_ = predictions.argsort(dim=-1, descending=True)
    found = (places_ == labels.unsqueeze(-1)).to(weights) * weights.unsqueeze(-1)
    return found.sum(-2).cumsum(-1)


def _at_thresholds(is_hit: Formula) -> Formula:
    def compute(labels: Tensor, predictions: Tensor, weights: Tensor) -> Tensor:
        thresholds = torch.linspace(0.0, 1.0, 1000).to(predictions).unsqueeze(-1)
        return (is_hit(labels, predictions, thresholds) * weights).sum(-1).double()

    return compute


def _first_threshold(hits: Tensor, others: Tensor, target: float) -> int:
    reached = (_share(hits, others) >= target).nonzero()
    return int(reached[0]) if len(reached) else 999


def _hit(labels: Tensor, predictions: Tensor, threshold: Any = 0.5) -> Tensor:
    return labels * (predictions.double() >= threshold)


def _false_hit(labels: Tensor, predictions: Tensor, threshold: Any = 0.5) -> Tensor:
    return (1.0 - labels) * (predictions.double() >= threshold)


def _miss(labels: Tensor, predictions: Tensor, threshold: Any = 0.5) -> Tensor:
    return labels * (predictions.double() <= threshold)


_RIGHT = _sum(lambda labels, predictions, limit=0.5: (predictions.double() >= limit) == labels)
_WEIGHT = _sum(lambda labels, *_: torch.ones_like(labels))
_LABEL = _sum(lambda labels, *_: labels)
_NEGATIVE = _sum(lambda labels, *_: 1.0 - labels)
_PREDICTION = _sum(lambda labels, predictions, *_: predictions)
_SQUARED_LABEL = _sum(lambda labels, *_: labels.square())
_ERROR = _sum(lambda labels, predictions: (predictions.double() - labels).abs())
_SQUARED_ERROR = _sum(lambda labels, predictions: (predictions.double() - labels).square())
_ERROR_OF_ONES = _sum(lambda labels, _: (1.0 - labels.double()).square())
_MISSING = _sum(lambda labels, _: labels.isnan())
_PRESENT = _sum(lambda labels, _: labels.nan_to_num(0.0))
_MSE = {
    "error_sum": _SQUARED_ERROR, "weighted_num_samples": _WEIGHT, "label_sum": _LABEL,
    "label_squared_sum": _SQUARED_LABEL,
}  # fmt: skip
_NE = {
    "cross_entropy_sum": lambda *batch: _entropy(*batch).sum(-1), "weighted_num_samples": _WEIGHT,
    "pos_labels": _LABEL, "neg_labels": _NEGATIVE,
}  # fmt: skip
_NE_POSITIVE = {
    "cross_entropy_positive_sum": lambda *batch: _positive_entropy(*batch).sum(-1), **_NE
}  # fmt: skip
del _NE_POSITIVE["cross_entropy_sum"]
_SEGMENTED = {
    "cross_entropy_sum": _in_groups(_entropy),
    "weighted_num_samples": _in_groups(lambda labels, _, weights, eta: weights),
    "pos_labels": _in_groups(lambda labels, _, weights, eta: labels * weights),
    "neg_labels": _in_groups(lambda labels, _, weights, eta: (1.0 - labels) * weights),
}
_AUC, _AUPRC, _RAUC = (
    _mean_of_groups(areas_under_roc, 0.5),
    _mean_of_groups(average_precisions, 0.0),
    _mean_of_groups(_in_order, 1.0),
)
_ROWS, _ROWS_ETA = "labels, predictions, weights", "labels, predictions, weights, eta"
_ROWS_LIMIT = "labels, predictions, weights, threshold=0.5"
_TASKS = "n_tasks, predictions, labels, weights"
_NE_SUMS = "weighted_num_samples, pos_labels, neg_labels"
_ALLOW = "eta, allow_missing_label_with_zero_weight=False"

FUNCTIONS: dict[str, Formula] = {
    "compute_accuracy(accuracy_sum, weighted_num_samples)": _ratio,
    f"compute_accuracy_sum({_ROWS_LIMIT})": _RIGHT,
    f"get_accuracy_states({_ROWS_LIMIT})": _states(
        accuracy_sum=_RIGHT, weighted_num_samples=_WEIGHT
    ),
    f"compute_auc({_TASKS}, apply_bin=False)": lambda *rows: _AUC(*rows[:4]),
    f"compute_auc_per_group({_TASKS}, grouping_keys)": lambda *r: _AUC(*r[:4], keys=r[4]),
    f"compute_auprc({_TASKS})": _AUPRC,
    f"compute_auprc_per_group({_TASKS}, grouping_keys)": lambda *r: _AUPRC(*r[:4], keys=r[4]),
    f"compute_rauc({_TASKS})": _RAUC,
    f"compute_rauc_per_group({_TASKS}, grouping_keys)": lambda *r: _RAUC(*r[:4], keys=r[4]),
    f"get_auc_states({_ROWS}, num_candidates)": _auc_states,
    "compute_window_auc(auc, num_samples)": lambda auc, num: {
        "gauc": torch.where(num == 0, 0.5, auc / num), "num_samples": num
    },
    "compute_average(weighted_sum, weighted_num_samples)": _ratio,
    f"get_average_states({_ROWS})": _states(
        label_sum=_LABEL, prediction_sum=_PREDICTION, weighted_num_samples=_WEIGHT
    ),
    "compute_calibration(calibration_num, calibration_denom)": _ratio,
    f"get_calibration_states({_ROWS})": _states(
        calibration_num=_PREDICTION, calibration_denom=_LABEL
    ),
    "compute_ctr(ctr_num, ctr_denom)": _ratio,
    f"get_ctr_states({_ROWS})": _states(ctr_num=_LABEL, ctr_denom=_WEIGHT),
    "compute_mae(error_sum, weighted_num_samples)": _ratio,
    f"absolute_error_sum({_ROWS})": _ERROR,
    f"get_mae_states({_ROWS})": _states(error_sum=_ERROR, weighted_num_samples=_WEIGHT),
    "compute_mse(error_sum, weighted_num_samples)": _ratio,
    "compute_rmse(error_sum, weighted_num_samples)": lambda *sums: _ratio(*sums).sqrt(),
    "compute_r_squared(error_sum, weighted_num_samples, label_sum, label_squared_sum)": _r_squared,
    f"squared_error_sum({_ROWS})": _SQUARED_ERROR,
    f"get_mse_states({_ROWS})": _states(**_MSE),
    "compute_norm(model_error_sum, baseline_error_sum)": _ratio,
    f"get_norm_mse_states({_ROWS})": _states(**_MSE, const_pred_error_sum=_ERROR_OF_ONES),
    "compute_precision(num_true_positives, num_false_positives)": _share,
    "compute_recall(num_true_positives, num_false_negitives)": _narrow_share,
    "compute_multi_label_precision(num_true_positives, num_false_positives)": _narrow_share,
    f"compute_true_pos_sum({_ROWS_LIMIT})": _sum(_hit),
    f"compute_false_pos_sum({_ROWS_LIMIT})": _sum(_false_hit),
    f"compute_false_neg_sum({_ROWS_LIMIT})": _sum(_miss),
    f"get_precision_states({_ROWS_LIMIT})": _states(
        true_pos_sum=_sum(_hit), false_pos_sum=_sum(_false_hit)
    ),
    f"get_recall_states({_ROWS_LIMIT})": _states(
        true_pos_sum=_sum(_hit), false_neg_sum=_sum(_miss)
    ),
    f"true_pos_sums({_ROWS})": _at_thresholds(_hit),
    f"false_pos_sums({_ROWS})": _at_thresholds(_false_hit),
    f"false_neg_sums({_ROWS})": _at_thresholds(_miss),
    f"get_pr_states({_ROWS})": _states(
        true_pos_sum=_at_thresholds(_hit),
        false_pos_sum=_at_thresholds(_false_hit),
        false_neg_sum=_at_thresholds(_miss),
    ),
    "compute_threshold_idx(num_true_positives, num_false_positives, target_precision)": (
        _first_threshold
    ),
    "compute_multiclass_recall_at_k(tp_at_k, total_weights)": lambda hits, weight: (
        hits / weight.unsqueeze(-1)
    ),
    "compute_true_positives_at_k(predictions, labels, weights, n_classes)": _found_at_k,
    "get_multiclass_recall_states(predictions, labels, weights, n_classes)": lambda *batch: {
        "tp_at_k": _found_at_k(*batch), "total_weights": batch[2].sum(-1)
    },
    f"compute_cross_entropy({_ROWS_ETA})": _entropy,
    "compute_logloss(ce_sum, pos_labels, neg_labels, eta)": _logloss,
    f"compute_ne(ce_sum, {_NE_SUMS}, {_ALLOW})": _ne,
    f"get_ne_states({_ROWS_ETA})": _states(**_NE),
    f"get_unweighted_ne_states({_ROWS_ETA})": lambda labels, predictions, _, eta: (
        _states(**_NE)(labels, predictions, None, eta)
    ),
    f"compute_cross_entropy_positive({_ROWS_ETA})": _positive_entropy,
    f"compute_ne_positive(ce_positive_sum, {_NE_SUMS}, {_ALLOW})": _ne,
    f"get_ne_positive_states({_ROWS_ETA})": _states(**_NE_POSITIVE),
    f"compute_cali_free_ne(ce_sum, {_NE_SUMS}, weighted_sum_predictions, {_ALLOW})": _cali_free_ne,
    f"get_cali_free_ne_states({_ROWS_ETA})": _states(**_NE, weighted_sum_predictions=_PREDICTION),
    f"segmented_ne(ce_sum, {_NE_SUMS}, num_groups, eta)": _segmented_ne,
    f"compute_ne_fused(ce_sum, {_NE_SUMS}, num_groups, n_tasks, eta)": _segmented_ne,
    f"compute_ne_helper(ce_sum, {_NE_SUMS}, eta)": _ne,
    f"get_segemented_ne_states({_ROWS}, grouping_keys, eta, num_groups)": _states(**_SEGMENTED),
    f"get_segemented_ne_states_fused({_ROWS}, grouping_keys, eta, num_groups, n_tasks)": _states(
        **_SEGMENTED
    ),
    f"compute_missing_label_sum({_ROWS})": _MISSING,
    f"get_num_missing_labels_states({_ROWS})": _states(missing_label_sum=_MISSING),
    f"compute_weighted_pos_sum({_ROWS})": _PRESENT,
    f"get_num_positive_sample_states({_ROWS})": _states(weighted_pos_sum=_PRESENT),
    f"compute_weighted_sum({_ROWS})": _WEIGHT,
    f"get_weighted_sum_states({_ROWS})": _states(weighted_sum=_WEIGHT),
    f"compute_weighted_predictions_sum({_ROWS})": _PREDICTION,
    f"get_weighted_sum_prediction_states({_ROWS})": _states(weighted_predictions_sum=_PREDICTION),
    "get_mean(value_sum, num_samples)": lambda value, num: value / num,
    f"ordered_pairs_sum({_ROWS})": _ordered_pairs,
    "compute_weighted_num_pairs(weights)": _pairs,
    "compute_xauc(error_sum, weighted_num_pairs)": _ratio,
    f"get_xauc_states({_ROWS})": _states(
        error_sum=_ordered_pairs, weighted_num_pairs=lambda _l, _p, weights: _pairs(weights)
    ),
    "ranking_within_session(predictions, session)": lambda predictions, session: (
        places(-predictions, group_samples(session))[1]
    ),
}  # fmt: skip
"""Formulas of TorchRec's functions; those of one name and several meanings are renamed here."""


def _function(row: str, formula: Formula) -> Formula:
    name, _, arguments = row.removesuffix(")").partition("(")
    parameters = []
    for argument in arguments.split(", "):
        key, _, default = argument.partition("=")
        value = ast.literal_eval(default) if default else inspect.Parameter.empty
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(key, kind, default=value))
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return formula(*bound.args)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Compute what TorchRec's function of these arguments does: {arguments}."
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


globals().update({row.partition("(")[0]: _function(row, of) for row, of in FUNCTIONS.items()})

CONSTANTS = (
    "CALIBRATION_DENOM CALIBRATION_NUM CONST_PRED_ERROR_SUM CTR_DENOM CTR_NUM ERROR_SUM "
    "GROUPING_KEYS LABELS LABEL_SQUARED_SUM LABEL_SUM NUM_EXAMPLES NUM_FALSE_POS NUM_SESSIONS "
    "NUM_TRUE_POS PREDICTIONS PREDICTION_SUM REQUIRED_INPUTS SUM_NDCG TARGET_PRECISION THRESHOLD "
    "TIME_LAPSE WARMUP_EXAMPLES WEIGHTED_NUM_PAIRS WEIGHTED_NUM_SAMPLES WEIGHTS"
)
"""Constants whose value is their name in lower case: names of states, arguments and inputs."""

globals().update({name: name.lower() for name in CONSTANTS.split()})

MODEL_METRIC_LABEL = "model"
NUM_FALSE_NEGATIVE = "num_false_neg"
SESSION_KEY = "session_id"
STATE_METRICS_NAMESPACE_MAPPING = {
    kind: MetricNamespace(kind.value) for kind in StateMetricEnum
}  # fmt: skip
THRESHOLD_GRANULARITY = 1000
WARMUP_STEPS = 100

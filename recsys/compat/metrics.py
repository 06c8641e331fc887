"""Functions and constants of TorchRec's metric modules, as tables.

A row of `FUNCTIONS` has the name and the arguments of a function, and its formula. Sums are over
the last dimension, from `[T, N]` to `[T]`. Unlike the metrics of this library, these functions
return TorchRec's values for undefined ratios. Shapes: `T` tasks, `N` samples, `G` groups, `C`
classes.
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
    ranks_in_groups,
)

Formula = Callable[..., Any]

# Metrics computed from their accumulated sums


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole == 0, 0.0, part / whole).double()


def _share(hits: Tensor, others: Tensor) -> Tensor:
    return _ratio(hits, hits + others)


def _narrow_share(hits: Tensor, others: Tensor) -> Tensor:
    return _share(hits, others).to(hits.dtype)


def _r_squared(error: Tensor, weight: Tensor, label: Tensor, squared_label: Tensor) -> Tensor:
    return 1.0 - error / (squared_label - label.square() / weight).double()


def _entropy_of_mean(mean: Tensor, positive: Tensor, negative: Tensor, eta: float) -> Tensor:
    mean = mean.double().clamp(eta, 1.0 - eta)
    return -(positive * mean.log2() + negative * (1.0 - mean).log2())


def _ne(loss: Tensor, weight: Tensor, positive: Tensor, *options: Any) -> Tensor:
    negative, eta, *allows_missing = options
    ne = loss / _entropy_of_mean(positive / weight, positive, negative, eta)
    return ne.masked_fill(weight == 0, eta) if any(allows_missing) else ne


def _cali_free_ne(loss: Tensor, weight: Tensor, positive: Tensor, *options: Any) -> Tensor:
    negative, predicted, eta, allows_missing = options
    ne = _ne(loss, weight, positive, negative, eta)
    ne = ne / _entropy_of_mean(predicted / weight, positive, negative, eta)
    return ne.masked_fill(weight == 0, eta) if allows_missing else ne


def _segmented_ne(*sums: Any) -> Tensor:
    return _ne(*sums[:4], sums[-1]).float()


def _first_threshold(hits: Tensor, others: Tensor, target: float) -> int:
    reached = (_share(hits, others) >= target).nonzero()
    return int(reached[0]) if len(reached) else THRESHOLD_GRANULARITY - 1


# Formulas of batches: labels, predictions, weights and more


def _positive_loss(labels: Tensor, predictions: Tensor, weights: Tensor, eta: float) -> Tensor:
    return -weights * labels * predictions.double().clamp(eta, 1.0).log2()


def _loss(labels: Tensor, predictions: Tensor, weights: Tensor, eta: float) -> Tensor:
    negative = _positive_loss(1.0 - labels, 1.0 - predictions.double(), weights, eta)
    return negative + _positive_loss(labels, predictions, weights, eta)


def _sum(value: Formula) -> Formula:
    """Return a function that sums `value(labels, predictions, ...)` times the weights."""
    return lambda labels, predictions, weights, *more: (
        value(labels, predictions, *more) * weights
    ).sum(-1)


def _at_thresholds(value: Formula) -> Formula:
    def compute(labels: Tensor, predictions: Tensor, weights: Tensor) -> Any:
        limits = torch.linspace(0.0, 1.0, THRESHOLD_GRANULARITY).to(predictions).unsqueeze(-1)
        return _sum(value)(labels, predictions, weights, limits).double()

    return compute


def _in_groups(of: Formula) -> Formula:
    """Return a function that sums `of(labels, predictions, weights, eta)` over each group."""

    def compute(labels: Tensor, *batch: Any) -> Tensor:
        predictions, weights, keys, eta, num_groups, *_ = batch
        values = of(labels, predictions, weights, eta)
        values = values.double() if values.dim() > 1 else values.float()
        sums: Tensor = values.new_zeros(*values.shape[:-1], num_groups)
        return sums.index_add_(-1, keys.long(), values)

    return compute


def _states(row: str) -> Formula:
    """Return a function that computes sums by name, from `name` or `name=formula` words."""
    pairs = [name.partition("=") for name in row.split()]
    formulas = {name: SUMS[formula or name] for name, _, formula in pairs}

    def compute(labels: Tensor, predictions: Tensor, weights: Tensor | None, *more: Any) -> Any:
        weights = torch.ones_like(predictions) if weights is None else weights
        return {name: of(labels, predictions, weights, *more) for name, of in formulas.items()}

    return compute


def _mean_of_groups(score: Callable[[Ranked], Tensor], undefined: float) -> Formula:
    """Return a function that averages the scores of the groups of each task, with NaN replaced."""

    def compute(_: int, *tensors: Any) -> Tensor:
        rows = [torch.cat(list(t), -1) if isinstance(t, Sequence) else t for t in tensors[:3]]
        keys = tensors[3:]
        groups = group_samples(keys[0].reshape(-1)) if keys else one_group(rows[0][0])
        tasks = zip(rows[0], rows[1].double(), rows[2].double(), strict=True)
        scores = [score(Ranked(*task, groups)).nan_to_num(undefined) for task in tasks]
        return torch.stack(scores)[:, groups.size_G > 0].mean(1).float()

    return compute


def _in_order(ranked: Ranked) -> Tensor:
    size_G, ones_N = ranked.groups.size_G.double(), torch.ones_like(ranked.weights)
    inverted_G = inverted_pairs(ranked.scores, ranked.labels, ones_N, ranked.groups)
    return 1.0 - inverted_G / (size_G * (size_G - 1.0) / 2.0)


def _auc_states(labels: Tensor, predictions: Tensor, weights: Tensor, sizes: Tensor) -> Any:
    groups = Groups(torch.arange(len(sizes)).to(sizes).repeat_interleave(sizes), sizes)
    tasks = zip(predictions, labels.double(), weights.double(), strict=True)
    areas = torch.stack([areas_under_roc(Ranked(*task, groups)) for task in tasks])
    return {"auc_sum": areas.nansum(1).float(), "num_samples": (~areas.isnan()).sum(1)}


def _ordered_pairs(labels: Tensor, predictions: Tensor, weights: Tensor) -> Any:
    signs = [(values[..., None] - values[..., None, :]).sign() for values in (labels, predictions)]
    weights_of_pairs = weights[..., None] * weights[..., None, :]
    return ((signs[0] == signs[1]).double() * weights_of_pairs).triu(1).sum((-1, -2))


def _found_at_k(predictions: Tensor, labels: Tensor, weights: Tensor, _: int) -> Any:
    is_found = predictions.argsort(dim=-1, descending=True) == labels.unsqueeze(-1)
    return (is_found.to(weights) * weights.unsqueeze(-1)).sum(-2).cumsum(-1)


def _hit(labels: Tensor, predictions: Tensor, limit: Any = 0.5) -> Any:
    return labels * (predictions.double() >= limit)


def _false_hit(labels: Tensor, predictions: Tensor, limit: Any = 0.5) -> Any:
    return _hit(1.0 - labels, predictions, limit)


def _miss(labels: Tensor, predictions: Tensor, limit: Any = 0.5) -> Any:
    return labels * (predictions.double() <= limit)


THRESHOLD_GRANULARITY = 1000

SUMS: dict[str, Formula] = {
    "absolute_error_sum": _sum(lambda labels, guesses: (guesses.double() - labels).abs()),
    "accuracy_sum": _sum(lambda labels, guesses, limit=0.5: (guesses.double() >= limit) == labels),
    "const_pred_error_sum": _sum(lambda labels, _: (1.0 - labels.double()).square()),
    "cross_entropy_positive_sum": lambda *batch: _positive_loss(*batch).sum(-1),
    "cross_entropy_sum": lambda *batch: _loss(*batch).sum(-1),
    "false_neg_sum": _sum(_miss),
    "false_neg_sums": _at_thresholds(_miss),
    "false_pos_sum": _sum(_false_hit),
    "false_pos_sums": _at_thresholds(_false_hit),
    "group_labels": _in_groups(lambda labels, _, weights, eta: labels * weights),
    "group_loss": _in_groups(_loss),
    "group_negatives": _in_groups(lambda labels, _, weights, eta: (1.0 - labels) * weights),
    "group_weights": _in_groups(lambda labels, _, weights, eta: weights),
    "label_squared_sum": _sum(lambda labels, _: labels.square()),
    "label_sum": _sum(lambda labels, *_: labels),
    "missing_label_sum": _sum(lambda labels, _: labels.isnan()),
    "neg_labels": _sum(lambda labels, *_: 1.0 - labels),
    "ordered_pairs_sum": _ordered_pairs,
    "prediction_sum": _sum(lambda _, predictions, *more: predictions),
    "squared_error_sum": _sum(lambda labels, guesses: (guesses.double() - labels).square()),
    "true_pos_sum": _sum(_hit),
    "true_pos_sums": _at_thresholds(_hit),
    "weighted_num_pairs": lambda labels, predictions, weights: _pairs(weights),
    "weighted_num_samples": _sum(lambda labels, *_: torch.ones_like(labels)),
    "weighted_pos_sum": _sum(lambda labels, _: labels.nan_to_num(0.0)),
}
"""Sums over a batch, `[T, N]` to `[T]`."""


def _pairs(weights: Tensor) -> Any:
    return (weights.sum(-1).square() - weights.square().sum(-1)) / 2.0


_AUC = _mean_of_groups(areas_under_roc, 0.5)
_AUPRC = _mean_of_groups(average_precisions, 0.0)
_RAUC = _mean_of_groups(_in_order, 1.0)
_NE_STATES = "cross_entropy_sum weighted_num_samples pos_labels=label_sum neg_labels"
_MSE_STATES = "error_sum=squared_error_sum weighted_num_samples label_sum label_squared_sum"
_SEGMENTED = _states(
    "cross_entropy_sum=group_loss weighted_num_samples=group_weights "
    "pos_labels=group_labels neg_labels=group_negatives"
)
_ROWS, _SUMS = "labels, predictions, weights", "weighted_num_samples, pos_labels, neg_labels"
_LIMIT = f"{_ROWS}, threshold=0.5"
_TASKS = "n_tasks, predictions, labels, weights"
_ALLOW = "eta, allow_missing_label_with_zero_weight=False"

FUNCTIONS: dict[str, Formula] = {
    f"absolute_error_sum({_ROWS})": SUMS["absolute_error_sum"],
    "compute_accuracy(accuracy_sum, weighted_num_samples)": _ratio,
    f"compute_accuracy_sum({_LIMIT})": SUMS["accuracy_sum"],
    f"compute_auc({_TASKS}, apply_bin=False)": lambda *rows: _AUC(*rows[:4]),
    f"compute_auc_per_group({_TASKS}, grouping_keys)": _AUC,
    f"compute_auprc({_TASKS})": _AUPRC,
    f"compute_auprc_per_group({_TASKS}, grouping_keys)": _AUPRC,
    "compute_average(weighted_sum, weighted_num_samples)": _ratio,
    f"compute_cali_free_ne(ce_sum, {_SUMS}, weighted_sum_predictions, {_ALLOW})": _cali_free_ne,
    "compute_calibration(calibration_num, calibration_denom)": _ratio,
    f"compute_cross_entropy({_ROWS}, eta)": _loss,
    f"compute_cross_entropy_positive({_ROWS}, eta)": _positive_loss,
    "compute_ctr(ctr_num, ctr_denom)": _ratio,
    f"compute_false_neg_sum({_LIMIT})": SUMS["false_neg_sum"],
    f"compute_false_pos_sum({_LIMIT})": SUMS["false_pos_sum"],
    "compute_logloss(ce_sum, pos_labels, neg_labels, eta)": (
        lambda loss, positive, negative, eta: loss / (positive + negative).clamp(min=eta)
    ),
    "compute_mae(error_sum, weighted_num_samples)": _ratio,
    f"compute_missing_label_sum({_ROWS})": SUMS["missing_label_sum"],
    "compute_mse(error_sum, weighted_num_samples)": _ratio,
    "compute_multi_label_precision(num_true_positives, num_false_positives)": _narrow_share,
    "compute_multiclass_recall_at_k(tp_at_k, total_weights)": lambda hits, n: hits / n[..., None],
    f"compute_ne(ce_sum, {_SUMS}, {_ALLOW})": _ne,
    f"compute_ne_fused(ce_sum, {_SUMS}, num_groups, n_tasks, eta)": _segmented_ne,
    f"compute_ne_helper(ce_sum, {_SUMS}, eta)": _ne,
    f"compute_ne_positive(ce_positive_sum, {_SUMS}, {_ALLOW})": _ne,
    "compute_norm(model_error_sum, baseline_error_sum)": _ratio,
    "compute_precision(num_true_positives, num_false_positives)": _share,
    "compute_r_squared(error_sum, weighted_num_samples, label_sum, label_squared_sum)": _r_squared,
    f"compute_rauc({_TASKS})": _RAUC,
    f"compute_rauc_per_group({_TASKS}, grouping_keys)": _RAUC,
    "compute_recall(num_true_positives, num_false_negitives)": _narrow_share,
    "compute_rmse(error_sum, weighted_num_samples)": lambda *sums: _ratio(*sums).sqrt(),
    "compute_threshold_idx(num_true_positives, num_false_positives, target_precision)": (
        _first_threshold
    ),
    f"compute_true_pos_sum({_LIMIT})": SUMS["true_pos_sum"],
    "compute_true_positives_at_k(predictions, labels, weights, n_classes)": _found_at_k,
    "compute_weighted_num_pairs(weights)": _pairs,
    f"compute_weighted_pos_sum({_ROWS})": SUMS["weighted_pos_sum"],
    f"compute_weighted_predictions_sum({_ROWS})": SUMS["prediction_sum"],
    f"compute_weighted_sum({_ROWS})": SUMS["weighted_num_samples"],
    "compute_window_auc(auc, num_samples)": (
        lambda auc, n: {"gauc": torch.where(n == 0, 0.5, auc / n), "num_samples": n}
    ),
    "compute_xauc(error_sum, weighted_num_pairs)": _ratio,
    f"false_neg_sums({_ROWS})": SUMS["false_neg_sums"],
    f"false_pos_sums({_ROWS})": SUMS["false_pos_sums"],
    f"get_accuracy_states({_LIMIT})": _states("accuracy_sum weighted_num_samples"),
    f"get_auc_states({_ROWS}, num_candidates)": _auc_states,
    f"get_average_states({_ROWS})": _states("label_sum prediction_sum weighted_num_samples"),
    f"get_cali_free_ne_states({_ROWS}, eta)": _states(
        f"{_NE_STATES} weighted_sum_predictions=prediction_sum"
    ),
    f"get_calibration_states({_ROWS})": _states(
        "calibration_num=prediction_sum calibration_denom=label_sum"
    ),
    f"get_ctr_states({_ROWS})": _states("ctr_num=label_sum ctr_denom=weighted_num_samples"),
    f"get_mae_states({_ROWS})": _states("error_sum=absolute_error_sum weighted_num_samples"),
    "get_mean(value_sum, num_samples)": lambda value, n: value / n,
    f"get_mse_states({_ROWS})": _states(_MSE_STATES),
    "get_multiclass_recall_states(predictions, labels, weights, n_classes)": lambda *batch: (
        {"tp_at_k": _found_at_k(*batch), "total_weights": batch[2].sum(-1)}
    ),
    f"get_ne_positive_states({_ROWS}, eta)": _states(
        _NE_STATES.replace("entropy", "entropy_positive")
    ),
    f"get_ne_states({_ROWS}, eta)": _states(_NE_STATES),
    f"get_norm_mse_states({_ROWS})": _states(f"{_MSE_STATES} const_pred_error_sum"),
    f"get_num_missing_labels_states({_ROWS})": _states("missing_label_sum"),
    f"get_num_positive_sample_states({_ROWS})": _states("weighted_pos_sum"),
    f"get_pr_states({_ROWS})": _states(
        "true_pos_sum=true_pos_sums false_pos_sum=false_pos_sums false_neg_sum=false_neg_sums"
    ),
    f"get_precision_states({_LIMIT})": _states("true_pos_sum false_pos_sum"),
    f"get_recall_states({_LIMIT})": _states("true_pos_sum false_neg_sum"),
    f"get_segemented_ne_states({_ROWS}, grouping_keys, eta, num_groups)": _SEGMENTED,
    f"get_segemented_ne_states_fused({_ROWS}, grouping_keys, eta, num_groups, n_tasks)": _SEGMENTED,
    f"get_unweighted_ne_states({_ROWS}, eta)": (
        lambda labels, predictions, _, eta: _states(_NE_STATES)(labels, predictions, None, eta)
    ),
    f"get_weighted_sum_prediction_states({_ROWS})": _states(
        "weighted_predictions_sum=prediction_sum"
    ),
    f"get_weighted_sum_states({_ROWS})": _states("weighted_sum=weighted_num_samples"),
    f"get_xauc_states({_ROWS})": _states("error_sum=ordered_pairs_sum weighted_num_pairs"),
    f"ordered_pairs_sum({_ROWS})": _ordered_pairs,
    "ranking_within_session(predictions, session)": (
        lambda predictions, session: ranks_in_groups(-predictions, group_samples(session))[0]
    ),
    f"segmented_ne(ce_sum, {_SUMS}, num_groups, eta)": _segmented_ne,
    f"squared_error_sum({_ROWS})": SUMS["squared_error_sum"],
    f"true_pos_sums({_ROWS})": SUMS["true_pos_sums"],
}
"""Formulas of TorchRec's functions. Functions of one name with several meanings are renamed."""


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
    call.__doc__ = f"Equivalent of TorchRec's function with the arguments {arguments}."
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
STATE_METRICS_NAMESPACE_MAPPING = {kind: MetricNamespace(kind.value) for kind in StateMetricEnum}
WARMUP_STEPS = 100

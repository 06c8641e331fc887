"""Reader of the state dicts that TorchRec's metrics save.

TorchRec saves the sums of the lifetime, by metric, task and attribute. Windows are not saved, so
they are empty after a load. Shapes: `T` tasks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from recsys.metrics.metrics_namespace import MetricNamespace as Namespace
from recsys.metrics.metrics_namespace import MetricNamespaceBase

Saved = Mapping[str, torch.Tensor]
"""`[T]` or `[T, ...]` by attribute."""
Formula = Callable[[Saved], torch.Tensor]

PART = "_metrics_computations."
"""What a key of TorchRec has before the number of the task."""


def _sum(*names: str) -> Formula:
    return lambda saved: torch.stack([saved[name] for name in names]).sum(0)


def _nats(name: str) -> Formula:
    return lambda saved: saved[name] * math.log(2.0)


def _columns(*formulas: Formula) -> Formula:
    return lambda saved: torch.stack([formula(saved) for formula in formulas], dim=1)


def _labels(*attributes: str) -> Formula:
    """Sum attributes of each label, `[T, labels]`; their names end with the name of the label."""

    def sum_labels(saved: Saved) -> torch.Tensor:
        parts = []
        for attribute in attributes:
            columns = [values for name, values in saved.items() if name.startswith(attribute)]
            if not columns:
                raise KeyError(attribute)
            parts.append(torch.stack(columns, dim=1))
        return torch.stack(parts).sum(0)

    return sum_labels


def _bins(saved: Saved) -> torch.Tensor:
    """Return sums between thresholds, from sums at or above each threshold."""
    negative_TK, positive_TK, missed_TK = (
        saved[name].reshape(-1, 1000) for name in ("false_pos_sum", "true_pos_sum", "false_neg_sum")
    )
    end_T1 = torch.zeros_like(missed_TK[:, :1])
    parts = []
    for above_TK, below_T1 in ((negative_TK, end_T1), (positive_TK, missed_TK[:, :1])):
        parts += [below_T1, above_TK - torch.cat([above_TK[:, 1:], end_T1], dim=1)]
    return torch.cat(parts, dim=1)


_POSITIVE, _NEGATIVE = _sum("pos_labels"), _sum("neg_labels")
_NUM_SAMPLES = _sum("weighted_num_samples")
_ENTROPY = (_nats("cross_entropy_sum"), _POSITIVE, _NEGATIVE)
_CALIBRATION = (_sum("calibration_num"), _sum("calibration_denom"))
_HITS, _TOP_HITS = _sum("true_pos_sum"), _sum("num_true_pos")

FORMULAS: dict[MetricNamespaceBase, tuple[Formula, ...]] = {
    Namespace.ACCURACY: (_sum("accuracy_sum"), _NUM_SAMPLES),
    Namespace.AVERAGE: (_sum("label_sum"), _sum("prediction_sum"), _NUM_SAMPLES),
    Namespace.CALIBRATION: _CALIBRATION,
    Namespace.CALI_FREE_NE: (
        *_ENTROPY,
        _sum("weighted_sum_predictions"),
        lambda saved: saved["weighted_num_samples"] - saved["weighted_sum_predictions"],
    ),
    Namespace.CTR: (_sum("ctr_num"), _sum("ctr_denom")),
    Namespace.GAUC: (_columns(_sum("auc_sum"), _sum("num_samples")),),
    Namespace.HINDSIGHT_TARGET_PR: (_bins,),
    Namespace.MAE: (_sum("error_sum"), _NUM_SAMPLES),
    Namespace.MSE: (
        _sum("error_sum"),
        _NUM_SAMPLES,
        _sum("label_sum"),
        _sum("label_squared_sum"),
    ),
    Namespace.MULTICLASS_RECALL: (_sum("tp_at_k"), _sum("total_weights")),
    Namespace.MULTI_LABEL_PRECISION: (
        _labels("true_pos_sum_"),
        _labels("true_pos_sum_", "false_pos_sum_"),
    ),
    Namespace.NDCG: (_columns(_sum("sum_ndcg"), _sum("num_sessions")),),
    Namespace.NE: _ENTROPY,
    Namespace.NE_POSITIVE: (_nats("cross_entropy_positive_sum"), _POSITIVE, _NEGATIVE),
    Namespace.NMSE: (_sum("error_sum"), _sum("const_pred_error_sum")),
    Namespace.NUM_MISSING_LABELS: (_sum("missing_label_sum"),),
    Namespace.NUM_POSITIVE_SAMPLES: (_sum("weighted_pos_sum"),),
    Namespace.PRECISION: (_HITS, _sum("true_pos_sum", "false_pos_sum")),
    Namespace.PRECISION_SESSION_LEVEL: (
        _columns(_TOP_HITS, _sum("num_true_pos", "num_false_pos")),
    ),
    Namespace.RECALIBRATED_CALIBRATION: _CALIBRATION,
    Namespace.RECALIBRATED_NE: _ENTROPY,
    Namespace.RECALL: (_HITS, _sum("true_pos_sum", "false_neg_sum")),
    Namespace.RECALL_SESSION_LEVEL: (_columns(_TOP_HITS, _sum("num_true_pos", "num_false_neg")),),
    Namespace.SEGMENTED_NE: _ENTROPY,
    Namespace.SERVING_CALIBRATION: (*_CALIBRATION, _sum("num_examples")),
    Namespace.SERVING_NE: (*_ENTROPY, _sum("num_examples")),
    Namespace.SUM_WEIGHTS: (_sum("weighted_sum"),),
    Namespace.TOWER_QPS: (
        _columns(
            lambda saved: saved["num_examples"] - saved["warmup_examples"], _sum("time_lapse")
        ),
        _sum("num_examples"),
    ),
    Namespace.UNWEIGHTED_NE: _ENTROPY,
    Namespace.WEIGHTED_AVG: (_sum("weighted_sum"), _NUM_SAMPLES),
    Namespace.WEIGHTED_SUM_PREDICTIONS: (_sum("weighted_predictions_sum"),),
    Namespace.XAUC: (_columns(_sum("error_sum"), _sum("weighted_num_pairs")),),
}
"""What each quantity of a metric is in the attributes of TorchRec, in the order of quantities.

Quantities without a formula are zero after a load.
"""


def read_saved_sums(
    module: Any, state_dict: MutableMapping[str, torch.Tensor], prefix: str, *_: object
) -> None:
    """Convert the keys of TorchRec in a state dict to ours, in place; before a load.

    A metric whose keys are incomplete is left out, so its own keys are reported as missing.

    Args:
        module: a metric or a list of metrics.
        state_dict: what is loaded; unchanged if it has no key of TorchRec.
        prefix: of the keys of the module.
    """
    keys = [key for key in state_dict if key.startswith(prefix) and PART in key]
    if not keys:
        return
    found = {key: state_dict.pop(key) for key in keys}
    metrics = list(module._members())
    for group in module._accumulators.groups:
        sums: dict[str, torch.Tensor] = {}
        zeros: set[str] = set()
        for metric in group.metrics:
            formulas, quantities = FORMULAS.get(metric.namespace, ()), metric.quantities()
            zeros |= {quantity.name for quantity in quantities[len(formulas) :]}
            place = "" if metrics == [module] else f"rec_metrics.{metrics.index(metric)}."
            saved = _by_attribute(found, f"{prefix}{place}{PART}")
            with contextlib.suppress(KeyError):
                sums |= {q.name: of(saved) for q, of in zip(quantities, formulas, strict=False)}
        for key, values in group.entries_of(sums, zeros):
            state_dict[f"{prefix}_accumulators.{key}"] = values


def _by_attribute(found: Saved, start: str) -> dict[str, torch.Tensor]:
    """Return `[T, ...]` of each attribute; a key has the number of a task before it."""
    by_name: dict[str, dict[int, torch.Tensor]] = {}
    for key, values in found.items():
        if key.startswith(start):
            number, _, name = key[len(start) :].partition(".")
            by_name.setdefault(name, {})[int(number)] = values.double()
    return {
        name: torch.cat([parts[number] for number in sorted(parts)])
        for name, parts in by_name.items()
    }

"""Conversion of the state dicts of TorchRec's metrics.

TorchRec saves the sums of the lifetime by metric, task and attribute. It does not save windows;
they are empty after a load. Shapes: `T` tasks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from recsys.metrics.metrics_namespace import MetricName as Namespace
from recsys.metrics.metrics_namespace import MetricNameBase

Saved = Mapping[str, torch.Tensor]
"""`[T]` or `[T, ...]` by attribute."""
Formula = Callable[[Saved], torch.Tensor]

PART = "_metrics_computations."
"""Part of a TorchRec key before the number of the task."""


def _parse(row: str) -> tuple[Formula, ...]:
    """Parse formulas of attributes: `a+b`, `a-b`, or `a,b` for two columns."""

    def parse_one(text: str) -> Formula:
        columns = [column.replace("-", "+-").split("+") for column in text.split(",")]

        def compute(saved: Saved) -> torch.Tensor:
            values = [
                sum(-saved[name[1:]] if name[0] == "-" else saved[name] for name in column)
                for column in columns
            ]
            return torch.stack(values, dim=1) if len(values) > 1 else values[0]  # type: ignore[arg-type,return-value]

        return compute

    return tuple(parse_one(text) for text in row.split())


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
    """Convert sums at or above each threshold to sums between thresholds."""
    negative_TK, positive_TK, missed_TK = (
        saved[name].reshape(-1, 1000) for name in ("false_pos_sum", "true_pos_sum", "false_neg_sum")
    )
    end_T1 = torch.zeros_like(missed_TK[:, :1])
    parts = []
    for above_TK, below_T1 in ((negative_TK, end_T1), (positive_TK, missed_TK[:, :1])):
        parts += [below_T1, above_TK - torch.cat([above_TK[:, 1:], end_T1], dim=1)]
    return torch.cat(parts, dim=1)


_CALIBRATION = "calibration_num calibration_denom"
_ENTROPY = "cross_entropy_sum pos_labels neg_labels"
_REST = "weighted_num_samples-weighted_sum_predictions"

FORMULAS: dict[MetricNameBase, tuple[Formula, ...]] = {
    Namespace.ACCURACY: _parse("accuracy_sum weighted_num_samples"),
    Namespace.AVERAGE: _parse("label_sum prediction_sum weighted_num_samples"),
    Namespace.CALIBRATION: _parse(_CALIBRATION),
    Namespace.CALI_FREE_NE: _parse(f"{_ENTROPY} weighted_sum_predictions {_REST}"),
    Namespace.CTR: _parse("ctr_num ctr_denom"),
    Namespace.GAUC: _parse("auc_sum,num_samples"),
    Namespace.HINDSIGHT_TARGET_PR: (_bins,),
    Namespace.MAE: _parse("error_sum weighted_num_samples"),
    Namespace.MSE: _parse("error_sum weighted_num_samples label_sum label_squared_sum"),
    Namespace.MULTICLASS_RECALL: _parse("tp_at_k total_weights"),
    Namespace.MULTI_LABEL_PRECISION: (
        _labels("true_pos_sum_"),
        _labels("true_pos_sum_", "false_pos_sum_"),
    ),
    Namespace.NDCG: _parse("sum_ndcg,num_sessions"),
    Namespace.NE: _parse(_ENTROPY),
    Namespace.NE_POSITIVE: _parse("cross_entropy_positive_sum pos_labels neg_labels"),
    Namespace.NMSE: _parse("error_sum const_pred_error_sum"),
    Namespace.NUM_MISSING_LABELS: _parse("missing_label_sum"),
    Namespace.NUM_POSITIVE_SAMPLES: _parse("weighted_pos_sum"),
    Namespace.PRECISION: _parse("true_pos_sum true_pos_sum+false_pos_sum"),
    Namespace.PRECISION_SESSION_LEVEL: _parse("num_true_pos,num_true_pos+num_false_pos"),
    Namespace.RECALIBRATED_CALIBRATION: _parse(_CALIBRATION),
    Namespace.RECALIBRATED_NE: _parse(_ENTROPY),
    Namespace.RECALL: _parse("true_pos_sum true_pos_sum+false_neg_sum"),
    Namespace.RECALL_SESSION_LEVEL: _parse("num_true_pos,num_true_pos+num_false_neg"),
    Namespace.SEGMENTED_NE: _parse(_ENTROPY),
    Namespace.SERVING_CALIBRATION: _parse(f"{_CALIBRATION} num_examples"),
    Namespace.SERVING_NE: _parse(f"{_ENTROPY} num_examples"),
    Namespace.SUM_WEIGHTS: _parse("weighted_sum"),
    Namespace.TOWER_QPS: _parse("num_examples-warmup_examples,time_lapse num_examples"),
    Namespace.UNWEIGHTED_NE: _parse(_ENTROPY),
    Namespace.WEIGHTED_AVG: _parse("weighted_sum weighted_num_samples"),
    Namespace.WEIGHTED_SUM_PREDICTIONS: _parse("weighted_predictions_sum"),
    Namespace.XAUC: _parse("error_sum,weighted_num_pairs"),
}
"""Quantities of each metric, in their order, as formulas of TorchRec's attributes.

Quantities without a formula are zero after a load.
"""


def read_saved_sums(
    module: Any, state_dict: MutableMapping[str, torch.Tensor], prefix: str, *_: object
) -> None:
    """Convert TorchRec keys of a state dict to keys of this library, in place, before a load.

    A metric with incomplete keys is left out, so its own keys are reported as missing.

    Args:
        module: Metric or list of metrics.
        state_dict: State dict to load; unchanged if it has no TorchRec key.
        prefix: Prefix of the keys of the module.
    """
    keys = [key for key in state_dict if key.startswith(prefix) and PART in key]
    if not keys:
        return
    old_sums = {key: state_dict.pop(key) for key in keys}
    metrics = list(module._members())
    for group in module._accumulators.groups:
        sums: dict[str, torch.Tensor] = {}
        zeros: set[str] = set()
        for metric in group.metrics:
            formulas, quantities = FORMULAS.get(metric.namespace, ()), metric.quantities()
            zeros |= {quantity.name for quantity in quantities[len(formulas) :]}
            path = "" if metrics == [module] else f"rec_metrics.{metrics.index(metric)}."
            saved = _by_attribute(old_sums, f"{prefix}{path}{PART}")
            with contextlib.suppress(KeyError):
                sums |= {q.name: of(saved) for q, of in zip(quantities, formulas, strict=False)}
        for key, values in group.entries_of(sums, zeros):
            state_dict[f"{prefix}_accumulators.{key}"] = values


def _by_attribute(found: Saved, start: str) -> dict[str, torch.Tensor]:
    """Collect `[T, ...]` values of each attribute; a key has the number of a task before it."""
    by_name: dict[str, dict[int, torch.Tensor]] = {}
    for key, values in found.items():
        if key.startswith(start):
            number, _, name = key[len(start) :].partition(".")
            # TorchRec's entropies are in bits.
            unit = math.log(2.0) if name.startswith("cross_entropy") else 1.0
            by_name.setdefault(name, {})[int(number)] = values.double() * unit
    return {
        name: torch.cat([parts[number] for number in sorted(parts)])
        for name, parts in by_name.items()
    }

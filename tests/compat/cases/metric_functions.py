"""Functions and constants of the metric modules."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.compat.answers import raises

ETA = 1e-12


def _module(name: str) -> Any:
    return importlib.import_module(f"torchrec.metrics.{name}")


def _rows(size: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels, predictions and weights of two tasks."""
    return (torch.rand(2, size) > 0.5).float(), torch.rand(2, size), torch.rand(2, size)


def ratios() -> Any:
    parts = torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.tensor([0.0, 0.0, 2.0, 4.0])
    functions = (
        ("accuracy", "compute_accuracy"),
        ("average", "compute_average"),
        ("calibration", "compute_calibration"),
        ("ctr", "compute_ctr"),
        ("mae", "compute_mae"),
        ("mse", "compute_mse"),
        ("mse", "compute_rmse"),
        ("nmse", "compute_norm"),
        ("precision", "compute_precision"),
        ("recall", "compute_recall"),
        ("hindsight_target_pr", "compute_precision"),
        ("hindsight_target_pr", "compute_recall"),
        ("multi_label_precision", "compute_multi_label_precision"),
        ("weighted_avg", "get_mean"),
        ("tensor_weighted_avg", "get_mean"),
        ("xauc", "compute_xauc"),
    )
    return {
        f"{module}.{name}": [
            getattr(_module(module), name)(*(part.to(dtype) for part in parts))
            for dtype in (torch.float32, torch.float64)
        ]
        for module, name in functions
    }


def arguments_by_name() -> Any:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    return [
        _module("mse").compute_mse(error_sum=one, weighted_num_samples=two),
        _module("ctr").compute_ctr(ctr_num=one, ctr_denom=two),
        _module("precision").compute_precision(num_true_positives=one, num_false_positives=two),
        _module("calibration").compute_calibration(calibration_num=one, calibration_denom=two),
        raises(lambda: _module("mse").compute_mse(error_sum=one)),
        raises(lambda: _module("mse").compute_mse(one, two, one)),
    ]


def r_squared() -> Any:
    return _module("mse").compute_r_squared(
        torch.tensor([1.0, 1.0, 0.5]),
        torch.tensor([4.0, 4.0, 3.0]),
        torch.tensor([2.0, 1.0, 1.0]),
        torch.tensor([2.0, 1.0, 0.8]),
    )


def sums_of_batches() -> Any:
    rows = _rows()
    functions = (
        ("accuracy", "compute_accuracy_sum"),
        ("mae", "compute_error_sum"),
        ("mse", "compute_error_sum"),
        ("xauc", "compute_error_sum"),
        ("precision", "compute_true_pos_sum"),
        ("precision", "compute_false_pos_sum"),
        ("recall", "compute_true_pos_sum"),
        ("recall", "compute_false_neg_sum"),
        ("sum_weights", "compute_weighted_sum"),
        ("weighted_sum_predictions", "compute_weighted_predictions_sum"),
        ("num_positive_samples", "compute_weighted_pos_sum"),
        ("num_missing_labels", "compute_missing_label_sum"),
    )
    found = {
        f"{module}.{name}": getattr(_module(module), name)(*rows) for module, name in functions
    }
    return found | {"pairs": _module("xauc").compute_weighted_num_pairs(rows[2])}


def sums_at_a_threshold() -> Any:
    labels = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]])
    predictions = torch.tensor([[0.3, 0.3, 0.7, 0.7, 0.1, 0.9, 0.5, 0.5]])
    rows = labels, predictions, 2.0 ** torch.arange(8).unsqueeze(0)
    functions = (
        ("accuracy", "compute_accuracy_sum"),
        ("precision", "compute_true_pos_sum"),
        ("precision", "compute_false_pos_sum"),
        ("recall", "compute_false_neg_sum"),
    )
    return {
        name: [getattr(_module(module), name)(*rows, limit) for limit in (0.3, 0.5, 0.7)]
        for module, name in functions
    }


def states_of_batches() -> Any:
    rows = _rows()
    functions = (
        ("accuracy", "get_accuracy_states"),
        ("average", "get_average_states"),
        ("calibration", "get_calibration_states"),
        ("ctr", "get_ctr_states"),
        ("mae", "get_mae_states"),
        ("mse", "get_mse_states"),
        ("nmse", "get_norm_mse_states"),
        ("precision", "get_precision_states"),
        ("recall", "get_recall_states"),
        ("sum_weights", "get_weighted_sum_states"),
        ("weighted_sum_predictions", "get_weighted_sum_prediction_states"),
        ("num_positive_samples", "get_num_positive_sample_states"),
        ("num_missing_labels", "get_num_missing_labels_states"),
        ("xauc", "get_xauc_states"),
    )
    return {f"{module}.{name}": getattr(_module(module), name)(*rows) for module, name in functions}


def states_without_weights() -> Any:
    labels, predictions, _ = _rows()
    return [
        _module("accuracy").get_accuracy_states(labels, predictions, None),
        _module("precision").get_precision_states(labels, predictions, None),
        _module("recall").get_recall_states(labels, predictions, None, 0.3),
        _module("sum_weights").get_weighted_sum_states(labels, predictions, None),
    ]


def missing_labels() -> Any:
    labels = torch.tensor([[1.0, float("nan"), 0.0, float("nan")]])
    rows = labels, torch.rand(1, 4), torch.rand(1, 4)
    return [
        _module("num_missing_labels").get_num_missing_labels_states(*rows),
        _module("num_positive_samples").get_num_positive_sample_states(*rows),
    ]


def entropies_of_batches() -> Any:
    rows = _rows()
    edge = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]]), torch.ones(1, 3)
    found: list[Any] = [
        _module(module).compute_cross_entropy(*batch, ETA)
        for module in ("ne", "cali_free_ne", "unweighted_ne", "segmented_ne")
        for batch in (rows, edge)
    ]
    return [*found, _module("ne_positive").compute_cross_entropy_positive(*rows, ETA)]


def states_of_entropies() -> Any:
    rows = _rows()
    return [
        _module("ne").get_ne_states(*rows, ETA),
        _module("unweighted_ne").get_unweighted_ne_states(*rows, ETA),
        _module("ne_positive").get_ne_positive_states(*rows, ETA),
        _module("cali_free_ne").get_cali_free_ne_states(*rows, ETA),
    ]


def _entropy_sums() -> tuple[torch.Tensor, ...]:
    entropy = torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0]).double()
    weight = torch.tensor([2.0, 2.0, 2.0, 0.0, 3.0]).double()
    positive = torch.tensor([1.0, 2.0, 0.0, 0.0, 1.0]).double()
    return entropy, weight, positive, weight - positive


def normalized_entropies() -> Any:
    sums = _entropy_sums()
    predicted = torch.tensor([1.0, 0.5, 0.5, 0.0, 1.0]).double()
    return [
        _module("ne").compute_ne(*sums, ETA),
        _module("ne").compute_ne(*sums, ETA, allow_missing_label_with_zero_weight=True),
        _module("unweighted_ne").compute_ne(*sums, eta=ETA),
        _module("ne_positive").compute_ne_positive(*sums, ETA),
        _module("cali_free_ne").compute_cali_free_ne(*sums, predicted, ETA),
        _module("ne").compute_logloss(sums[0], sums[2], sums[3], ETA),
        _module("segmented_ne").compute_logloss(sums[0], sums[2], sums[3], ETA),
    ]


def segmented_entropies() -> Any:
    segmented, sums, (labels, predictions, weights) = (
        _module("segmented_ne"),
        _entropy_sums(),
        _rows(),
    )
    keys = torch.arange(8) % 3
    one = labels[0], predictions[0], weights[0]
    return [
        segmented.get_segemented_ne_states(*one, keys, ETA, 4),
        segmented.get_segemented_ne_states_fused(labels, predictions, weights, keys, ETA, 4, 2),
        segmented.compute_ne(*sums, 5, ETA),
        segmented.compute_ne_fused(*(part[:4].view(2, 2) for part in sums), 2, 2, ETA),
        segmented.compute_ne_helper(*sums, ETA),
    ]


def areas() -> Any:
    labels, predictions, weights = _rows()
    lists = (
        [predictions[:, :3], predictions[:, 3:]],
        [labels[:, :3], labels[:, 3:]],
        [weights[:, :3], weights[:, 3:]],
    )
    return [
        _module("auc").compute_auc(2, *lists),
        _module("auprc").compute_auprc(2, predictions, labels, weights),
        _module("rauc").compute_rauc(2, *lists),
        _module("auc").compute_auc(2, [predictions], [torch.ones(2, 8)], [weights]),
        _module("auprc").compute_auprc(2, predictions, torch.zeros(2, 8), weights),
    ]


def areas_of_groups() -> Any:
    labels, predictions, weights = _rows()
    keys = torch.tensor([5, 5, 5, 9, 9, 9, 9, 5])
    lists = [predictions], [labels], [weights]
    return [
        _module("auc").compute_auc_per_group(2, *lists, keys),
        _module("auprc").compute_auprc_per_group(2, predictions, labels, weights, keys),
        _module("rauc").compute_rauc_per_group(2, *lists, keys),
    ]


def areas_of_sessions() -> Any:
    rows = _rows()
    states = _module("gauc").get_auc_states(*rows, torch.tensor([3, 5]))
    return [states, _module("gauc").compute_window_auc(states["auc_sum"], states["num_samples"])]


def classes_of_a_sample() -> Any:
    recall = _module("multiclass_recall")
    batch = torch.rand(2, 6, 3), torch.randint(0, 3, (2, 6)), torch.rand(2, 6)
    return [
        recall.compute_true_positives_at_k(*batch, 3),
        recall.get_multiclass_recall_states(*batch, 3),
        recall.compute_multiclass_recall_at_k(
            torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([4.0, 0.0])
        ),
    ]


def thresholds_of_a_precision() -> Any:
    hindsight, rows = _module("hindsight_target_pr"), [part[:1] for part in _rows(40)]
    states = hindsight.get_pr_states(*rows)
    hits, others = states["true_pos_sum"], states["false_pos_sum"]
    return [
        {name: values[::50] for name, values in states.items()},
        hindsight.compute_true_pos_sum(*rows)[::50],
        hindsight.compute_false_pos_sum(*rows)[::50],
        hindsight.compute_false_neg_sum(*rows)[::50],
        [hindsight.compute_threshold_idx(hits, others, target) for target in (0.1, 0.55, 0.7)],
    ]


def places_in_sessions() -> Any:
    rank = _module("recall_session").ranking_within_session
    sessions = torch.tensor([1, 1, 0, 0, 0])
    return [
        rank(torch.tensor([0.1, 0.9, 0.5, 0.3, 0.3]), sessions),
        rank(torch.tensor([0.5, 0.5, 0.5, 0.3, 0.7]), torch.ones(5, dtype=torch.int64)),
    ]


def constants() -> Any:
    names = {
        "accuracy": "THRESHOLD",
        "auc": "GROUPING_KEYS LABELS PREDICTIONS REQUIRED_INPUTS WEIGHTS",
        "average": "LABEL_SUM PREDICTION_SUM WEIGHTED_NUM_SAMPLES",
        "calibration": "CALIBRATION_DENOM CALIBRATION_NUM",
        "calibration_with_recalibration": "CALIBRATION_DENOM CALIBRATION_NUM",
        "ctr": "CTR_DENOM CTR_NUM",
        "hindsight_target_pr": "TARGET_PRECISION THRESHOLD_GRANULARITY",
        "mae": "ERROR_SUM WEIGHTED_NUM_SAMPLES",
        "metric_module": "MODEL_METRIC_LABEL",
        "mse": "ERROR_SUM LABEL_SQUARED_SUM LABEL_SUM WEIGHTED_NUM_SAMPLES",
        "ndcg": "NUM_SESSIONS REQUIRED_INPUTS SESSION_KEY SUM_NDCG",
        "nmse": "CONST_PRED_ERROR_SUM ERROR_SUM WEIGHTED_NUM_SAMPLES",
        "precision_session": "NUM_FALSE_POS NUM_TRUE_POS",
        "recall_session": "NUM_FALSE_NEGATIVE NUM_TRUE_POS",
        "serving_ne": "NUM_EXAMPLES",
        "tower_qps": "NUM_EXAMPLES TIME_LAPSE WARMUP_EXAMPLES WARMUP_STEPS",
        "xauc": "ERROR_SUM WEIGHTED_NUM_PAIRS",
    }
    found = {
        f"{module}.{name}": getattr(_module(module), name)
        for module, of_module in names.items()
        for name in of_module.split()
    }
    mapping = _module("metric_module").STATE_METRICS_NAMESPACE_MAPPING
    return [found, {str(kind): str(namespace) for kind, namespace in mapping.items()}]


def outputs_of_a_model() -> Any:
    parse = _module("model_utils").parse_model_outputs
    out = {
        "label": torch.ones(3, 1),
        "prediction": torch.rand(3),
        "weight": torch.rand(1, 3),
        "short": torch.rand(2),
        "one": torch.tensor(2.0),
        "classes": torch.rand(3, 2),
    }
    return [
        parse("label", "prediction", "weight", out),
        parse("label", "", "", out),
        parse("one", "one", "one", out),
        parse("label", "classes", "weight", out),
        raises(lambda: parse("missing", "prediction", "weight", out)),
        raises(lambda: parse("label", "missing", "weight", out)),
        raises(lambda: parse("label", "prediction", "missing", out)),
        raises(lambda: parse("label", "short", "weight", out)),
    ]


def outputs_of_tasks() -> Any:
    from torchrec.metrics.metrics_config import RecTaskInfo

    parse = _module("model_utils").parse_task_model_outputs
    tasks = [RecTaskInfo(name, f"l_{name}", f"p_{name}", f"w_{name}") for name in ("a", "b")]
    out = {f"{kind}_{name}": torch.rand(3, 1) for kind in "lpw" for name in "ab"}
    out["ids"] = torch.arange(6)
    empty = out | {f"{kind}_b": torch.empty(0) for kind in "lpw"}
    zero = out | {"w_b": torch.zeros(3)}
    without = {name: values for name, values in out.items() if name != "w_b"}
    return [
        parse(tasks, out),
        parse(tasks, out, ["ids"]),
        parse(tasks, empty),
        parse(tasks, zero),
        raises(lambda: parse(tasks, without)),
        raises(lambda: parse(tasks, out, ["missing"])),
    ]


def required_inputs() -> Any:
    utils = _module("model_utils")

    def build() -> dict[str, Any]:
        return {"ids": torch.tensor([[3], [4]]), "names": ["x", "x", "y", "x"]}

    return [
        utils.parse_required_inputs(build(), ["ids"]),
        utils.parse_required_inputs(build(), ["ids", "names"], ndcg_transform_input=True),
        utils.session_ids_to_tensor(["b", "b", "a", "c", "c", "a"]),
        raises(lambda: utils.parse_required_inputs(build(), ["missing"])),
        raises(lambda: utils.parse_required_inputs(build(), ["names"])),
        utils.is_empty_signals(torch.empty(0), torch.empty(0), torch.empty(0)),
        utils.is_empty_signals(torch.empty(0), torch.rand(2), torch.rand(2)),
    ]

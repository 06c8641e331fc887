"""Metrics of tasks: results with their shapes and dtypes, windows, inputs, errors, saved sums."""

from __future__ import annotations

from typing import Any

import torch

from tests.compat.answers import raises

NAMES = ("a", "b")


def _batch(size: int = 12) -> dict[str, dict[str, torch.Tensor]]:
    draws = {
        "predictions": lambda: torch.rand(size),
        "labels": lambda: (torch.rand(size) > 0.5).float(),
        "weights": lambda: torch.rand(size) + 0.1,
    }
    return {kind: {name: draw() for name in NAMES} for kind, draw in draws.items()}


def _build(module: str, kind: str, is_fused: bool = False, **options: Any) -> Any:
    import importlib

    from torchrec.metrics.metrics_config import RecComputeMode, RecTaskInfo, SessionMetricDef

    tasks = [
        RecTaskInfo(
            name,
            session_metric_def=SessionMetricDef("session", top_threshold=2),
            tensor_name="tensor",
        )
        for name in NAMES
    ]
    modes = (
        RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        RecComputeMode.FUSED_TASKS_COMPUTATION,
    )
    arguments = {"world_size": 1, "my_rank": 0, "batch_size": 4, "tasks": tasks}
    arguments |= {"window_size": 100, "compute_mode": modes[is_fused]}
    kinds = importlib.import_module(f"torchrec.metrics.{module}")
    return getattr(kinds, kind)(**{**arguments, **options})


def _results(module: str, kind: str, num_batches: int = 2, **options: Any) -> Any:
    """Results of two batches with groups and sessions."""
    metric = _build(module, kind, **options)
    for _ in range(num_batches):
        batch: dict[str, Any] = _batch()
        keys = torch.arange(12) // 4
        outputs = {"grouping_keys": keys, "session_id": keys, "session": keys}
        outputs |= {"tensor": torch.rand(12)}
        needed = metric.get_required_inputs()
        inputs = {name: values for name, values in outputs.items() if name in needed}
        metric.update(**batch, **({"required_inputs": inputs} if inputs else {}))
    return metric.compute()


def normalized_entropies() -> Any:
    return [
        _results("ne", "NEMetric", include_logloss=True),
        _results("ne_positive", "NEPositiveMetric"),
        _results("unweighted_ne", "UnweightedNEMetric"),
        _results("ne_with_recalibration", "RecalibratedNEMetric", recalibration_coefficient=0.3),
        _results("serving_ne", "ServingNEMetric"),
    ]


def normalized_entropies_of_fused_tasks() -> Any:
    return [
        _results("ne", "NEMetric", is_fused=True, include_logloss=True),
        _results("ne_positive", "NEPositiveMetric", is_fused=True),
        _results("unweighted_ne", "UnweightedNEMetric", is_fused=True),
        _results("serving_ne", "ServingNEMetric", is_fused=True),
    ]


def errors() -> Any:
    return [
        _results("mse", "MSEMetric", is_fused=is_fused, include_r_squared=True)
        | _results("mae", "MAEMetric", is_fused=is_fused)
        | _results("nmse", "NMSEMetric", is_fused=is_fused)
        for is_fused in (False, True)
    ]


def decisions() -> Any:
    return [
        _results("accuracy", "AccuracyMetric", is_fused=is_fused, threshold=0.4)
        | _results("precision", "PrecisionMetric", is_fused=is_fused, threshold=0.4)
        | _results("recall", "RecallMetric", is_fused=is_fused, threshold=0.4)
        for is_fused in (False, True)
    ]


def calibrations() -> Any:
    return [
        _results("calibration", "CalibrationMetric"),
        _results("calibration", "CalibrationMetric", is_fused=True),
        _results(
            "calibration_with_recalibration",
            "RecalibratedCalibrationMetric",
            recalibration_coefficient=0.3,
        ),
        _results("serving_calibration", "ServingCalibrationMetric"),
        _results("ctr", "CTRMetric"),
        _results("average", "AverageMetric"),
    ]


def sums_of_weights_and_samples() -> Any:
    return [
        _results("sum_weights", "SumWeightsMetric"),
        _results("weighted_sum_predictions", "WeightedSumPredictionsMetric"),
        _results("num_positive_samples", "NumPositiveSamplesMetric"),
        _results("num_missing_labels", "NumMissingLabelsMetric", is_fused=True),
    ]


def weighted_averages() -> Any:
    return [
        _results("weighted_avg", "WeightedAvgMetric", num_batches=1),
        _results("tensor_weighted_avg", "TensorWeightedAvgMetric"),
    ]


def areas() -> Any:
    return [
        _results(module, kind, is_fused=is_fused)[f"{module}-{task}|window_{module}"]
        for module, kind in (("auc", "AUCMetric"), ("auprc", "AUPRCMetric"), ("rauc", "RAUCMetric"))
        for is_fused in (False, True)
        for task in NAMES
    ]


def areas_of_groups() -> Any:
    found = []
    for module, kind in (("auc", "AUCMetric"), ("auprc", "AUPRCMetric"), ("rauc", "RAUCMetric")):
        metric = _build(module, kind, **{f"grouped_{module}": True})
        batch: dict[str, Any] = _batch()
        # Each group has both classes.
        batch["labels"] = {name: (torch.arange(12) % 3 == 0).float() for name in NAMES}
        keys = torch.tensor([3, 3, 3, 3, 7, 7, 7, 7, 3, 3, 7, 7])
        metric.update(**batch, required_inputs={"grouping_keys": keys})
        results = metric.compute()
        found += [sorted(metric.get_required_inputs())]
        found += [results[f"{module}-{task}|window_grouped_{module}"] for task in NAMES]
    return found


def segments() -> Any:
    results = []
    for is_fused in (False, True):
        options = {"num_groups": 2, "include_logloss": True, "cast_keys_to_int": is_fused}
        metric = _build("segmented_ne", "SegmentedNEMetric", is_fused=is_fused, **options)
        batch: dict[str, Any] = _batch()
        batch["labels"] = {name: (torch.arange(12) % 3 == 0).float() for name in NAMES}
        keys = torch.arange(12) // 6
        metric.update(**batch, required_inputs={"grouping_keys": keys})
        results.append(metric.compute())
    return results


def sessions() -> Any:
    return [
        _results("ndcg", "NDCGMetric", exponential_gain=True, session_key="session"),
        _results("ndcg", "NDCGMetric", k=2, report_ndcg_as_decreasing_curve=False),
        _results("ndcg", "NDCGMetric", exponential_gain=True, scale_by_weights_tensor=True),
        _results("recall_session", "RecallSessionMetric"),
        _results("precision_session", "PrecisionSessionMetric"),
        _results("xauc", "XAUCMetric"),
        _results("xauc", "XAUCMetric", is_fused=True),
    ]


def sessions_by_size() -> Any:
    metric = _build("gauc", "GAUCMetric")
    batch = _batch()
    metric.update(**batch, num_candidates=torch.tensor([6, 6]))
    return metric.compute()


def classes_of_a_sample() -> Any:
    found = []
    for is_fused in (False, True):
        metric = _build(
            "multiclass_recall", "MulticlassRecallMetric", is_fused=is_fused, number_of_classes=3
        )
        for _ in range(2):
            batch: dict[str, Any] = _batch(6)
            batch["predictions"] = {name: torch.rand(6, 3) for name in NAMES}
            batch["labels"] = {name: torch.randint(0, 3, (6,)) for name in NAMES}
            metric.update(**batch)
        found.append(metric.compute())
    return found


def labels_of_a_sample() -> Any:
    metric = _build(
        "multi_label_precision",
        "MultiLabelPrecisionMetric",
        num_labels=2,
        label_names=["_x", "_y"],
    )
    batch: dict[str, Any] = _batch()
    batch["predictions"] = {name: torch.randint(0, 4, (12,)).float() for name in NAMES}
    batch["labels"] = {name: torch.randint(0, 4, (12,)).float() for name in NAMES}
    metric.update(**batch)
    return metric.compute()


def windows_and_lifetimes() -> Any:
    found = []
    for module, kind in (("ne", "NEMetric"), ("mse", "MSEMetric"), ("auc", "AUCMetric")):
        metric = _build(module, kind, window_size=24)
        for _ in range(5):
            metric.update(**_batch(8))
        found.append(metric.compute())
    return found


def float64_inputs() -> Any:
    metric = _build("ne", "NEMetric")
    area = _build("auc", "AUCMetric")
    batch = {
        kind: {name: values.double() for name, values in tasks.items()}
        for kind, tasks in _batch().items()
    }
    metric.update(**batch)
    area.update(**batch)
    return metric.compute() | area.compute()


def local_results_and_reset() -> Any:
    metric = _build("mae", "MAEMetric")
    metric.update(**_batch())
    local = metric.local_compute()
    metric.reset()
    metric.update(**_batch())
    return [local, metric.compute()]


def batches_without_weights_are_left_out() -> Any:
    metric = _build("mse", "MSEMetric", should_validate_update=True)
    metric.update(**_batch())
    zeros = {name: torch.zeros(12) for name in NAMES}
    metric.update(**{**_batch(), "weights": zeros})
    return metric.compute()


def lists_of_metrics() -> Any:
    from torchrec.metrics.rec_metric import RecMetricList

    metrics = RecMetricList(
        [
            _build("ne", "NEMetric"),
            _build("auc", "AUCMetric", grouped_auc=True),
            _build("calibration", "CalibrationMetric", is_fused=True),
        ]
    )
    batch: dict[str, Any] = _batch()
    batch["labels"] = {name: (torch.arange(12) % 3 == 0).float() for name in NAMES}
    metrics.update(**batch, required_inputs={"grouping_keys": torch.arange(12) // 6})
    return [
        len(metrics),
        metrics.get_required_inputs(),
        metrics.compute(),
        metrics.local_compute(),
        metrics[2].compute(),
    ]


def results_without_weights() -> Any:
    metric = _build("mse", "MSEMetric")
    metric.update(**{**_batch(), "weights": None})
    return metric.compute()


def namespaces() -> Any:
    from torchrec.metrics.metric_module import REC_METRICS_MAPPING
    from torchrec.metrics.metrics_config import RecMetricEnum

    kinds = {str(name): kind for name, kind in REC_METRICS_MAPPING.items()}
    ours_alone_or_left_out = {"binned_auc", "log_loss", "gauc", "output"}
    names = sorted(kinds.keys() - ours_alone_or_left_out)
    assert RecMetricEnum.NE.value in names
    return {name: str(kinds[name]._namespace) for name in names}


def missing_labels_with_zero_weight() -> Any:
    found = []
    for module, kind in (
        ("ne", "NEMetric"),
        ("unweighted_ne", "UnweightedNEMetric"),
    ):
        metric = _build(module, kind, allow_missing_label_with_zero_weight=True)
        batch = _batch()
        batch["weights"]["a"] = torch.zeros(12)
        metric.update(**batch)
        found.append(metric.compute())
    metric = _build("ne_positive", "NEPositiveMetric", allow_missing_label_with_zero_weight=True)
    metric.update(**batch)
    found.append(metric.compute()["ne_positive-a|lifetime_ne_positive"].double())
    return found


def memory_usage() -> Any:
    metric = _build("auc", "AUCMetric")
    metric.update(**_batch())
    first = metric.get_memory_usage()
    metric.update(**_batch())
    kinds = [isinstance(kept, torch.Tensor) for kept in first]
    return [all(kinds), sum(first.values()), sum(metric.get_memory_usage().values())]


def metric_exceptions() -> Any:
    from torchrec.metrics.rec_metric import RecMetricException

    def is_metric_exception(module: str, kind: str, **options: Any) -> bool:
        batch = options.pop("batch", None)
        try:
            metric = _build(module, kind, **options)
            if batch is not None:
                metric.update(**batch)
        except RecMetricException:
            return True
        return False

    from torchrec.metrics.metrics_config import RecTaskInfo

    batch = _batch()
    plain = [RecTaskInfo("a")]
    return [
        issubclass(RecMetricException, Exception),
        is_metric_exception("recall_session", "RecallSessionMetric", tasks=plain),
        is_metric_exception("tensor_weighted_avg", "TensorWeightedAvgMetric", tasks=plain),
        is_metric_exception("auc", "AUCMetric", grouped_auc=True, batch=batch),
        is_metric_exception("ndcg", "NDCGMetric", batch=batch),
        is_metric_exception("segmented_ne", "SegmentedNEMetric", num_groups=2, batch=batch),
        is_metric_exception("ne", "NEMetric", batch=batch),
    ]


def value_errors() -> Any:
    from torchrec.metrics.metrics_config import MetricsConfig, RecMetricDef, RecMetricEnum

    def is_value_error(**definition: Any) -> bool:
        from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
        from torchrec.metrics.metrics_config import RecTaskInfo

        tasks = [RecTaskInfo("a")]
        if definition.pop("has_tasks", False):
            definition["rec_tasks"] = tasks
        try:
            config = MetricsConfig(
                rec_tasks=tasks, rec_metrics={RecMetricEnum.NE: RecMetricDef(**definition)}
            )
            generate_metric_module(RecMetricModule, config, 4, 1, 0, {}, torch.device("cpu"))
        except ValueError:
            return True
        return False

    return [
        is_value_error(),
        is_value_error(has_tasks=True, rec_task_indices=[0]),
        is_value_error(rec_task_indices=[3]),
        is_value_error(has_tasks=True, window_size=1),
        is_value_error(has_tasks=True, arguments={"unknown": 1}),
        is_value_error(rec_task_indices=[0]),
    ]


def _build_module() -> Any:
    from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
    from torchrec.metrics.metrics_config import (
        MetricsConfig,
        RecMetricDef,
        RecMetricEnum,
        RecTaskInfo,
        ThroughputDef,
    )

    tasks = [RecTaskInfo(name, f"l_{name}", f"p_{name}", f"w_{name}") for name in NAMES]
    config = MetricsConfig(
        rec_tasks=tasks,
        rec_metrics={
            RecMetricEnum.NE: RecMetricDef(rec_tasks=tasks, window_size=100),
            RecMetricEnum.AUC: RecMetricDef(
                rec_task_indices=[1], window_size=100, arguments={"grouped_auc": True}
            ),
            RecMetricEnum.NDCG: RecMetricDef(rec_tasks=tasks, window_size=100),
            RecMetricEnum.CALIBRATION: RecMetricDef(rec_tasks=tasks[:1], window_size=100),
        },
        throughput_metric=ThroughputDef(),
        compute_interval_steps=2,
    )
    return generate_metric_module(RecMetricModule, config, 4, 1, 0, {}, torch.device("cpu"))


def _model_out(size: int = 12) -> dict[str, torch.Tensor]:
    batch = _batch(size)
    out = {
        f"{kind[0]}_{name}": values
        for kind, by_name in batch.items()
        for name, values in by_name.items()
    }
    out["l_b"] = (torch.arange(size) % 3 == 0).float()
    keys = torch.arange(size) // 6
    return out | {"session_id": keys, "grouping_keys": keys, "other": torch.rand(3)}


def module_of_metrics() -> Any:
    module = _build_module()
    is_time = []
    for _ in range(2):
        module.update(_model_out())
        is_time.append(module.should_compute())
    results = module.compute()
    # Without the throughput of this machine.
    steady = {key: value for key, value in results.items() if "_throughput" not in key}
    return [sorted(module.get_required_inputs()), is_time, steady, sorted(module.local_compute())]


def module_with_columns_and_missing_outputs() -> Any:
    module = _build_module()
    module.update({name: values.unsqueeze(1) for name, values in _model_out().items()})
    without = {name: values for name, values in _model_out().items() if name != "l_a"}
    return [
        module.compute()["ne-a|lifetime_ne"],
        raises(lambda: module.update(without)),
        raises(lambda: module.update({**_model_out(), "p_a": torch.rand(5)})),
    ]


def _loaded(module: str, kind: str, saved: dict[str, list[float]], **options: Any) -> Any:
    """Lifetime results after a load of sums, which are given for the first task."""
    metric = _build(module, kind, **options)
    metric.load_state_dict(
        {
            f"_metrics_computations.{place}.{name}": torch.tensor(
                [value * (place + 1) for value in values],
                dtype=torch.int64 if name == "num_examples" else torch.float64,
            )
            for place in range(len(NAMES))
            for name, values in saved.items()
        }
    )
    results = {key: value.clone() for key, value in metric.compute().items()}
    metric.update(**_batch())
    later = metric.compute()
    return {key: [value, later[key]] for key, value in results.items() if "window" not in key}


def saved_entropies() -> Any:
    sums = {
        "cross_entropy_sum": [3.5],
        "weighted_num_samples": [5.0],
        "pos_labels": [2.0],
        "neg_labels": [3.0],
    }
    positive = {**sums, "cross_entropy_positive_sum": [1.5]}
    del positive["cross_entropy_sum"]
    return [
        _loaded("ne", "NEMetric", sums, include_logloss=True),
        _loaded("unweighted_ne", "UnweightedNEMetric", sums),
        _loaded("ne_positive", "NEPositiveMetric", positive),
        _loaded("serving_ne", "ServingNEMetric", {**sums, "num_examples": [7]}),
    ]


def saved_errors_and_decisions() -> Any:
    weight = {"weighted_num_samples": [5.0]}
    squares = {"label_sum": [2.0], "label_squared_sum": [1.8]}
    return [
        _loaded(
            "mse", "MSEMetric", {"error_sum": [1.5], **weight, **squares}, include_r_squared=True
        ),
        _loaded("mae", "MAEMetric", {"error_sum": [1.5], **weight}),
        _loaded(
            "nmse", "NMSEMetric", {"error_sum": [1.0], **weight, "const_pred_error_sum": [4.0]}
        ),
        _loaded("accuracy", "AccuracyMetric", {"accuracy_sum": [3.0], **weight}),
        _loaded("precision", "PrecisionMetric", {"true_pos_sum": [3.0], "false_pos_sum": [1.0]}),
        _loaded("recall", "RecallMetric", {"true_pos_sum": [3.0], "false_neg_sum": [2.0]}),
    ]


def saved_averages() -> Any:
    weight = {"weighted_num_samples": [5.0]}
    calibration = {"calibration_num": [3.0], "calibration_denom": [2.0]}
    return [
        _loaded("calibration", "CalibrationMetric", calibration),
        _loaded(
            "serving_calibration", "ServingCalibrationMetric", {**calibration, "num_examples": [7]}
        ),
        _loaded("ctr", "CTRMetric", {"ctr_num": [2.0], "ctr_denom": [5.0]}),
        _loaded(
            "average", "AverageMetric", {"label_sum": [2.0], "prediction_sum": [3.0], **weight}
        ),
        _loaded("weighted_avg", "WeightedAvgMetric", {"weighted_sum": [2.0], **weight}),
        _loaded("sum_weights", "SumWeightsMetric", {"weighted_sum": [2.5]}),
        _loaded("num_positive_samples", "NumPositiveSamplesMetric", {"weighted_pos_sum": [2.5]}),
        _loaded("xauc", "XAUCMetric", {"error_sum": [2.5], "weighted_num_pairs": [4.0]}),
    ]


def saved_fused_tasks() -> Any:
    metric = _build("ne", "NEMetric", is_fused=True)
    sums = {
        "cross_entropy_sum": [3.5, 2.0],
        "weighted_num_samples": [5.0, 4.0],
        "pos_labels": [2.0, 1.0],
        "neg_labels": [3.0, 3.0],
    }
    metric.load_state_dict(
        {
            f"_metrics_computations.0.{name}": torch.tensor(values).double()
            for name, values in sums.items()
        }
    )
    return [metric.compute()[f"ne-{task}|lifetime_ne"] for task in NAMES]


def saved_module() -> Any:
    state = {
        "throughput_metric.total_examples": torch.tensor(40),
        "throughput_metric.warmup_examples": torch.tensor(8),
        "throughput_metric.time_lapse_after_warmup": torch.tensor(2.0).double(),
    }
    ne = {"cross_entropy_sum": 3.5, "weighted_num_samples": 5.0, "pos_labels": 2.0}
    sums: tuple[tuple[int, int, dict[str, float]], ...] = (
        (0, 0, {**ne, "neg_labels": 3.0}),
        (0, 1, {**ne, "neg_labels": 3.0}),
        (2, 0, {"sum_ndcg": 2.0, "num_sessions": 3.0}),
        (2, 1, {"sum_ndcg": 2.0, "num_sessions": 4.0}),
        (3, 0, {"calibration_num": 3.0, "calibration_denom": 2.0}),
    )
    for metric, task, values in sums:
        start = f"rec_metrics.rec_metrics.{metric}._metrics_computations.{task}."
        state |= {start + key: torch.tensor([value]).double() for key, value in values.items()}
    module = _build_module()
    module.load_state_dict(state)
    module.update(_model_out())
    results = module.compute()
    return {key: value for key, value in results.items() if "lifetime" in key or "total" in key}

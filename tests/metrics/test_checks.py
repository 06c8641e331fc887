"""Every public argument of a wrong type or size raises an error that names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recsys.metrics import (
    AUC,
    BinnedAUC,
    NormalizedEntropy,
    RecMetricModule,
    ThroughputMetric,
    auc,
    generate_metric_module,
    log_loss,
    normalized_entropy,
)
from recsys.metrics.checks import check_ranks
from recsys.metrics.metric_module import REC_METRICS_MAPPING
from recsys.metrics.metrics_config import (
    BatchSizeStage,
    DefaultMetricsConfig,
    MetricsConfig,
    RecComputeMode,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    SessionMetricDef,
    ThroughputDef,
    validate_batch_size_stages,
)
from recsys.metrics.metrics_namespace import (
    MetricName,
    MetricNamespace,
    MetricPrefix,
    compose_customized_metric_key,
    compose_metric_key,
    compose_metric_namespace,
    task_wildcard_metrics_pattern,
)
from recsys.metrics.rec_metric import RecMetric, RecMetricList
from recsys.metrics.windows import RowWindow, SumWindow
from tests.offenders import check_each

HOSTILE = [None, "x", -1, 0, 7, 1.5, math.nan, True, [], ["x"], {}, object(), torch.ones(2)]
Legal = Callable[[Any], bool]


def whole_from(least: int) -> Legal:
    return lambda value: type(value) is int and value >= least


def optional(legal: Legal) -> Legal:
    return lambda value: value is None or legal(value)


def is_a(*kinds: type) -> Legal:
    return lambda value: isinstance(value, kinds)


def number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def flag(value: Any) -> bool:
    return isinstance(value, bool) or (type(value) is int and value in (0, 1))


def is_empty(*kinds: type) -> Legal:
    return lambda value: isinstance(value, kinds) and not value


SIZE, COUNT, FLAG, TEXT = whole_from(1), whole_from(0), flag, is_a(str)
TENSOR, NO_LIST, NO_DICT = is_a(torch.Tensor), is_empty(list), is_empty(dict)
NOTHING: Legal = lambda value: value is None  # noqa: E731
TASK = RecTaskInfo("t", session_metric_def=SessionMetricDef("s", 1), tensor_name="x")
JOB: dict[str, tuple[Any, Legal]] = {
    "world_size": (2, SIZE),
    "my_rank": (1, lambda value: type(value) is int and value in (0, 1)),
    "batch_size": (8, SIZE),
}
METRIC: dict[str, tuple[Any, Legal]] = {
    **JOB,
    "my_rank": (0, lambda value: type(value) is int and value == 0),
    "world_size": (1, lambda value: type(value) is int and value > 0),
    "batch_size": (8, SIZE),
    "tasks": ([TASK], lambda value: False),
    "compute_mode": (RecComputeMode.UNFUSED_TASKS_COMPUTATION, lambda value: False),
    "window_size": (64, lambda value: type(value) is int and value >= 8),
    "fused_update_limit": (0, COUNT),
    "compute_on_all_ranks": (False, FLAG),
    "should_validate_update": (False, FLAG),
    "process_group": (None, NOTHING),
}
MISSING: dict[str, tuple[Any, Legal]] = {"allow_missing_label_with_zero_weight": (True, FLAG)}
OWN: dict[RecMetricEnum, dict[str, tuple[Any, Legal]]] = {
    RecMetricEnum.NE: {"include_logloss": (True, FLAG), **MISSING},
    RecMetricEnum.NE_POSITIVE: MISSING,
    RecMetricEnum.UNWEIGHTED_NE: MISSING,
    RecMetricEnum.CALI_FREE_NE: MISSING,
    RecMetricEnum.SERVING_NE: {"include_logloss": (True, FLAG), **MISSING},
    RecMetricEnum.RECALIBRATED_NE: {
        "include_logloss": (True, FLAG),
        **MISSING,
        "recalibration_coefficient": (0.5, lambda value: number(value) and value > 0),
    },
    RecMetricEnum.RECALIBRATED_CALIBRATION: {
        "recalibration_coefficient": (0.5, lambda value: number(value) and value > 0)
    },
    RecMetricEnum.SEGMENTED_NE: {
        "include_logloss": (True, FLAG),
        "num_groups": (3, SIZE),
        "grouping_keys": ("keys", TEXT),
        "cast_keys_to_int": (True, FLAG),
    },
    RecMetricEnum.TENSOR_WEIGHTED_AVG: {"description": ("d", optional(TEXT))},
    RecMetricEnum.MSE: {"include_r_squared": (True, FLAG)},
    RecMetricEnum.ACCURACY: {"threshold": (0.5, number)},
    RecMetricEnum.PRECISION: {"threshold": (0.5, number)},
    RecMetricEnum.RECALL: {"threshold": (0.5, number)},
    RecMetricEnum.MULTICLASS_RECALL: {"number_of_classes": (3, whole_from(2))},
    RecMetricEnum.MULTI_LABEL_PRECISION: {
        "num_labels": (1, lambda value: type(value) is int and 0 < value <= 52),
        "label_names": (["a"], lambda value: value is None or value == ["x"]),
    },
    RecMetricEnum.BINNED_AUC: {"num_bins": (10, whole_from(2))},
    RecMetricEnum.HINDSIGHT_TARGET_PR: {
        "target_precision": (0.5, lambda value: number(value) and 0 <= value <= 1)
    },
    RecMetricEnum.AUC: {"grouped_auc": (True, FLAG)},
    RecMetricEnum.AUPRC: {"grouped_auprc": (True, FLAG)},
    RecMetricEnum.RAUC: {"grouped_rauc": (True, FLAG)},
    RecMetricEnum.NDCG: {
        "session_key": ("s", TEXT),
        "k": (3, whole_from(-1)),
        "exponential_gain": (True, FLAG),
        "report_ndcg_as_decreasing_curve": (True, FLAG),
        "remove_single_length_sessions": (True, FLAG),
        "scale_by_weights_tensor": (True, FLAG),
    },
    RecMetricEnum.TOWER_QPS: {
        "warmup_steps": (1, COUNT),
        "batch_size_stages": (None, optional(NO_LIST)),
    },
}
SAMPLES: dict[str, tuple[Any, Legal]] = {
    "predictions": (torch.ones(2), TENSOR),
    "labels": (torch.ones(2), TENSOR),
    "weights": (None, optional(TENSOR)),
}


def update_metric(**given: Any) -> None:
    metric = REC_METRICS_MAPPING[RecMetricEnum.TENSOR_WEIGHTED_AVG](
        world_size=1, my_rank=0, batch_size=8, tasks=[TASK], window_size=64
    )
    metric.update(**given)
    metric.compute()


def update_module(model_out: Any) -> None:
    module = generate_metric_module(
        RecMetricModule, DefaultMetricsConfig, 8, 1, 0, {}, torch.device("cpu")
    )
    module.update(model_out)


def update_module_with(prediction: Any, label: Any, weight: Any) -> None:
    update_module({"prediction": prediction, "label": label, "weight": weight})


CALLS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, Legal]]]] = {
    **{
        str(metric): (REC_METRICS_MAPPING[metric], METRIC | OWN.get(metric, {}))
        for metric in RecMetricEnum
    },
    "auc": (auc, SAMPLES),
    "log_loss": (log_loss, SAMPLES),
    "normalized_entropy": (normalized_entropy, SAMPLES),
    "AUC.update": (lambda **given: AUC().update(**given), SAMPLES),
    "BinnedAUC.update": (lambda **given: BinnedAUC().update(**given), SAMPLES),
    "NormalizedEntropy.update": (lambda **given: NormalizedEntropy().update(**given), SAMPLES),
    "BinnedAUC": (BinnedAUC, {"num_bins": (10, whole_from(2))}),
    "AUC.merge": (lambda other: AUC().merge(other), {"other": (AUC(), is_a(AUC))}),
    "BinnedAUC.merge": (
        lambda other: BinnedAUC().merge(other),
        {"other": (BinnedAUC(), is_a(BinnedAUC))},
    ),
    "NormalizedEntropy.merge": (
        lambda other: NormalizedEntropy().merge(other),
        {"other": (NormalizedEntropy(), is_a(NormalizedEntropy))},
    ),
    "RecMetric.update": (
        update_metric,
        {
            "predictions": ({"t": torch.ones(2)}, lambda value: False),
            "labels": ({"t": torch.ones(2)}, lambda value: False),
            "weights": (None, NOTHING),
            "x": (torch.ones(2), TENSOR),
        },
    ),
    "RecMetricModule.update": (
        update_module,
        {"model_out": (dict.fromkeys(("prediction", "label", "weight"), torch.ones(2)), NO_DICT)},
    ),
    "RecMetricModule.update with": (
        update_module_with,
        {name: (torch.ones(2), TENSOR) for name in ("prediction", "label", "weight")},
    ),
    "RecMetricList": (RecMetricList, {"rec_metrics": ([], NO_LIST)}),
    "RecMetricModule": (
        RecMetricModule,
        {
            "batch_size": (8, SIZE),
            "world_size": (1, SIZE),
            "rec_tasks": (None, optional(NO_LIST)),
            "rec_metrics": (None, NOTHING),
            "throughput_metric": (None, NOTHING),
            "state_metrics": (None, optional(NO_DICT)),
            "compute_interval_steps": (100, SIZE),
            "min_compute_interval": (0.0, lambda value: number(value) and value >= 0),
            "max_compute_interval": (10.0, lambda value: number(value) and value >= 0),
        },
    ),
    "generate_metric_module": (
        generate_metric_module,
        {
            **JOB,
            "metric_class": (RecMetricModule, lambda value: False),
            "metrics_config": (DefaultMetricsConfig, lambda value: False),
            "state_metrics_mapping": ({}, NO_DICT),
            "device": (torch.device("cpu"), is_a(int)),  # if there is an accelerator
            "process_group": (None, NOTHING),
            "batch_size_stages": (None, optional(NO_LIST)),
            "module_kwargs": (None, optional(NO_DICT)),
        },
    ),
    "ThroughputMetric": (
        ThroughputMetric,
        {
            "batch_size": (8, SIZE),
            "world_size": (1, SIZE),
            "window_seconds": (10, lambda value: number(value) and value >= 1),
            "warmup_steps": (10, COUNT),
            "batch_size_stages": (None, optional(NO_LIST)),
            "clock": (float, lambda value: False),
        },
    ),
    "ThroughputMetric.set_num_batch": (
        lambda num_batch: ThroughputMetric(
            batch_size=1, world_size=1, window_seconds=1
        ).set_num_batch(num_batch),
        {"num_batch": (1, COUNT)},
    ),
    "validate_batch_size_stages": (
        validate_batch_size_stages,
        {"batch_size_stages": (None, optional(NO_LIST))},
    ),
    "RecTaskInfo": (
        RecTaskInfo,
        {
            "name": ("a", TEXT),
            "label_name": ("a", TEXT),
            "prediction_name": ("a", TEXT),
            "weight_name": ("a", TEXT),
            "session_metric_def": (None, NOTHING),
            "is_negative_task": (False, FLAG),
            "tensor_name": (None, optional(TEXT)),
            "weighted": (False, FLAG),
        },
    ),
    "SessionMetricDef": (
        SessionMetricDef,
        {
            "session_var_name": ("a", TEXT),
            "top_threshold": (1, optional(SIZE)),
            "run_ranking_of_labels": (False, FLAG),
        },
    ),
    "RecMetricDef": (
        RecMetricDef,
        {
            "rec_tasks": ([], NO_LIST),
            "rec_task_indices": ([], lambda value: NO_LIST(value) or NO_DICT(value)),
            "window_size": (10, SIZE),
            "arguments": (None, optional(NO_DICT)),
        },
    ),
    "ThroughputDef": (
        ThroughputDef,
        {
            "window_size": (10, lambda value: number(value) and value >= 1),
            "warmup_steps": (1, COUNT),
        },
    ),
    "BatchSizeStage": (
        BatchSizeStage,
        {"batch_size": (1, COUNT), "max_iters": (1, optional(COUNT))},
    ),
    "MetricsConfig": (
        MetricsConfig,
        {
            "rec_tasks": ([], NO_LIST),
            "rec_metrics": ({}, NO_DICT),
            "throughput_metric": (None, NOTHING),
            "rec_compute_mode": (RecComputeMode.UNFUSED_TASKS_COMPUTATION, lambda value: False),
            "fused_update_limit": (0, COUNT),
            "state_metrics": ([], NO_LIST),
            "compute_interval_steps": (1, SIZE),
            "min_compute_interval": (0.0, lambda value: number(value) and value >= 0),
            "max_compute_interval": (10.0, lambda value: number(value) and value >= 0),
            "compute_on_all_ranks": (False, FLAG),
            "should_validate_update": (False, FLAG),
            "enable_pt2_compile": (False, FLAG),
            "should_clone_update_inputs": (False, FLAG),
            "use_cpu_offloaded_rec_metric_module": (None, optional(FLAG)),
        },
    ),
    "compose_metric_namespace": (
        compose_metric_namespace,
        {"namespace": (MetricNamespace.NE, TEXT), "task_name": ("t", TEXT)},
    ),
    "compose_customized_metric_key": (
        compose_customized_metric_key,
        {
            "namespace": ("a", TEXT),
            "metric_name": ("b", TEXT),
            "description": (None, optional(TEXT)),
        },
    ),
    "compose_metric_key": (
        compose_metric_key,
        {
            "namespace": (MetricNamespace.NE, TEXT),
            "task_name": ("t", TEXT),
            "metric_name": (MetricName.NE, TEXT),
            "metric_prefix": (MetricPrefix.WINDOW, TEXT),
            "description": (None, optional(TEXT)),
        },
    ),
    "task_wildcard_metrics_pattern": (
        task_wildcard_metrics_pattern,
        {
            "namespace": (MetricNamespace.NE, TEXT),
            "metric_name": (MetricName.NE, TEXT),
            "metric_prefix": (MetricPrefix.WINDOW, TEXT),
        },
    ),
    "SumWindow": (SumWindow, {"max_samples": (1, SIZE)}),
    "RowWindow": (RowWindow, {"max_rows": (1, SIZE)}),
    "check_ranks": (check_ranks, JOB),
}


def error_of(call: Callable[..., Any], **given: Any) -> Exception | None:
    try:
        call(**given)
    except Exception as error:
        return error
    return None


def names_the_argument(case: tuple[str, str, int]) -> None:
    name, argument, place = case
    call, arguments = CALLS[name]
    given = {key: value for key, (value, _) in arguments.items()} | {argument: HOSTILE[place]}
    error = error_of(call, **given)
    assert error is not None, "is taken silently"
    assert isinstance(error, TypeError | ValueError), f"{type(error)}: {error}"
    assert argument in str(error)
    assert "received" in str(error)


def passes(name: str) -> None:
    call, arguments = CALLS[name]
    call(**{key: value for key, (value, _) in arguments.items()})


def test_what_is_legal_passes() -> None:
    check_each(passes, CALLS)


def test_what_is_not_is_named() -> None:
    check_each(
        names_the_argument,
        [
            (name, argument, place)
            for name, (_, arguments) in CALLS.items()
            for argument, (_, is_legal) in arguments.items()
            for place, value in enumerate(HOSTILE)
            if not is_legal(value)
        ],
    )


def test_every_metric_and_argument_is_in_the_table() -> None:
    for metric, kind in REC_METRICS_MAPPING.items():
        assert isinstance(metric, RecMetricEnum)
        assert {*OWN.get(metric, {})} == {*kind.arguments}, metric


@pytest.mark.parametrize("my_rank", [-1, 1, 5])
def test_a_rank_that_is_not_there(my_rank: int) -> None:
    """Its results would go to no rank."""
    metric = REC_METRICS_MAPPING[RecMetricEnum.NE]
    with pytest.raises(ValueError, match=rf"my_rank must .*received {my_rank}\."):
        metric(world_size=1, my_rank=my_rank, batch_size=1, tasks=[TASK], window_size=1)


@pytest.mark.parametrize("group", ["x", 1, object()])
def test_what_is_no_group(group: Any) -> None:
    for metric in (AUC(), BinnedAUC(), NormalizedEntropy()):
        with pytest.raises(TypeError, match=r"group must be .*ProcessGroup.*received"):
            metric.sync(group)


def test_a_task_that_is_not_there() -> None:
    config = MetricsConfig(
        rec_tasks=[TASK], rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_task_indices=[1])}
    )
    with pytest.raises(ValueError, match=r"rec_task_indices of .* rec_tasks, 1; .*\[1\]"):
        generate_metric_module(RecMetricModule, config, 1, 1, 0, {}, torch.device("cpu"))


def test_tasks_of_a_tensor() -> None:
    metric: RecMetric = REC_METRICS_MAPPING[RecMetricEnum.NE](
        world_size=1, my_rank=0, batch_size=2, tasks=[RecTaskInfo("a"), RecTaskInfo("b")]
    )
    for rows in (torch.ones(1, 2), torch.ones(3, 2), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"predictions must .*each task, 2; rec"):
            metric.update(predictions=rows, labels=rows, weights=rows)

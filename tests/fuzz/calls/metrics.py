"""Calls of `recsys.metrics`."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from recsys.metrics import (
    AUC,
    BinnedAUC,
    MetricsConfig,
    NormalizedEntropy,
    RecMetricDef,
    RecMetricEnum,
    RecMetricModule,
    RecTaskInfo,
    ThroughputDef,
    ThroughputMetric,
    auc,
    generate_metric_module,
    log_loss,
    normalized_entropy,
)
from recsys.metrics.metrics_config import BatchSizeStage, RecComputeMode, SessionMetricDef
from recsys.metrics.metrics_namespace import (
    MetricName,
    compose_metric_key,
)
from recsys.metrics.retrieval import RetrievalMetrics
from tests.fuzz.argument_kinds import (
    DEVICE,
    Kind,
    flag,
    made,
    many,
    mapping,
    maybe,
    member,
    number,
    subclass,
    tensor,
    text,
    whole,
    wholes,
)
from tests.fuzz.calls.call import Call, method


def _config() -> MetricsConfig:
    return MetricsConfig(
        rec_tasks=[RecTaskInfo("t")],
        rec_metrics={RecMetricEnum.NE: RecMetricDef([RecTaskInfo("t")], window_size=10)},
        throughput_metric=None,
    )


def _module() -> Any:
    return generate_metric_module(RecMetricModule, _config(), 2, 1, 0, {}, torch.device("cpu"))


FLAT = tensor(lambda: torch.tensor([0.25, 0.5]))
BATCH = {
    "predictions": FLAT, "labels": tensor(lambda: torch.tensor([0.0, 1.0])), "weights": maybe(FLAT),
}  # fmt: skip
TASKS = many(lambda: [RecTaskInfo("t")], made(RecTaskInfo))
RANKS = {"batch_size": whole(2), "world_size": whole(1)}
STAGES = maybe(many(lambda: [BatchSizeStage(2, None)], made(lambda: BatchSizeStage(2, None))))
MEMORY = {
    "compute_interval_steps": whole(5), "min_compute_interval": number(0.0, 0),
    "max_compute_interval": number(9.0, 0, is_finite=False),
}  # fmt: skip

IDS = tensor(lambda: torch.tensor([1]))
OFFSETS = tensor(lambda: torch.tensor([0, 1]))


def _retrieval() -> RetrievalMetrics:
    return RetrievalMetrics([1], torch.device("cpu"))


NAME = Kind(lambda: MetricName.NE, lambda value: None if isinstance(value, str | Enum) else False)

CALLS = [
    *(Call(f.__name__, f, BATCH) for f in (auc, log_loss, normalized_entropy)),
    *(
        Call(f"{kind.__name__}.update", method(kind, "update"), BATCH)
        for kind in (AUC, BinnedAUC, NormalizedEntropy)
    ),
    Call("RetrievalMetrics.update", method(_retrieval, "update"), {
        "found": tensor(lambda: torch.tensor([[1, 2]])), "targets": IDS, "offsets": OFFSETS,
        "scores": maybe(tensor(lambda: torch.ones(1, 2))),
    }),
    Call("RetrievalMetrics.update_ranks", method(_retrieval, "update_ranks"), {
        "better": IDS, "tied": IDS, "offsets": OFFSETS,
    }),
    Call("AUC.merge", method(AUC, "merge"), {"other": made(AUC)}),
    Call("BinnedAUC", BinnedAUC, {"num_bins": whole(10), "device": maybe(DEVICE)}),
    Call("NormalizedEntropy", NormalizedEntropy, {"device": maybe(DEVICE)}),
    Call("RecTaskInfo", RecTaskInfo, {
        "name": text("t"), "label_name": text("y"), "prediction_name": text("p"),
        "weight_name": text("w"), "session_metric_def": maybe(made(
            lambda: SessionMetricDef("s"))),
        "is_negative_task": flag(False), "tensor_name": maybe(text("x")), "weighted": flag(True),
    }),
    Call("RecMetricDef", RecMetricDef, {
        "rec_tasks": TASKS, "rec_task_indices": wholes([]), "window_size": whole(10),
        "arguments": maybe(made(dict)),
    }),
    Call("ThroughputDef", ThroughputDef, {
        "window_size": number(10, 0), "warmup_steps": whole(3, 0),
    }),
    Call("BatchSizeStage", BatchSizeStage, {
        "batch_size": whole(3, 0), "max_iters": maybe(whole(3, 0)),
    }),
    Call("SessionMetricDef", SessionMetricDef, {
        "session_var_name": text("s"), "top_threshold": maybe(whole(3)),
        "run_ranking_of_labels": flag(False),
    }),
    Call("MetricsConfig", MetricsConfig, {
        "rec_tasks": TASKS,
        "rec_metrics": Kind(
            lambda: {RecMetricEnum.NE: RecMetricDef([RecTaskInfo("t")])},
            lambda value: None if isinstance(value, dict) and not value else False),
        "rec_compute_mode": member(RecComputeMode.UNFUSED_TASKS_COMPUTATION),
        "throughput_metric": maybe(made(ThroughputDef)), "fused_update_limit": whole(0, 0),
        "state_metrics": many(list, Kind(lambda: None, lambda value: False)), **MEMORY,
    }),
    Call("ThroughputMetric", ThroughputMetric, {
        **RANKS, "window_seconds": number(5, 0), "warmup_steps": whole(3, 0),
        "batch_size_stages": maybe(Kind(lambda: None, STAGES.is_legal)),
    }),
    Call("generate_metric_module", generate_metric_module, {
        "metric_class": subclass(RecMetricModule, RecMetricModule), "metrics_config": made(_config),
        **RANKS, "my_rank": whole(0, 0, 0), "device": DEVICE,
        "state_metrics_mapping": made(dict),
        "process_group": maybe(Kind(lambda: None, lambda value: False)),
        "batch_size_stages": Kind(lambda: None, STAGES.is_legal),
    }),
    Call("RecMetricModule.update", method(_module, "update"), {
        "model_out": mapping(lambda: {
            "label": torch.ones(2), "prediction": torch.ones(2) / 2, "weight": torch.ones(2),
        }, FLAT),
    }),
    Call("compose_metric_key", compose_metric_key, {
        "namespace": NAME, "task_name": NAME, "metric_name": NAME, "metric_prefix": NAME,
    }),
]  # fmt: skip

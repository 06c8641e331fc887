"""Metrics of predictions: quality, calibration and throughput.

Functions compute a metric of given tensors. Accumulators (`update`, `merge`, `sync`, `compute`)
compute it over many batches and ranks. `RecMetricModule` computes many metrics of many tasks from a
configuration, over windows and over the lifetime.
"""

from recsys.metrics.auc import AUC, BinnedAUC, auc
from recsys.metrics.entropy import NormalizedEntropy, log_loss, normalized_entropy
from recsys.metrics.metric_module import RecMetricModule, generate_metric_module
from recsys.metrics.metrics_config import (
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    ThroughputDef,
)
from recsys.metrics.throughput import ThroughputMetric

__all__ = [
    "AUC",
    "BinnedAUC",
    "MetricsConfig",
    "NormalizedEntropy",
    "RecMetricDef",
    "RecMetricEnum",
    "RecMetricModule",
    "RecTaskInfo",
    "ThroughputDef",
    "ThroughputMetric",
    "auc",
    "generate_metric_module",
    "log_loss",
    "normalized_entropy",
]

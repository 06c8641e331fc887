"""How good the predictions are, how sure, and how fast they came.

Plain functions for arrays at hand; accumulators (`update`, `merge`, `sync`, `compute`) for
streams over many batches and ranks; `RecMetricModule` for many metrics of many tasks, as a
configuration asks for them, over windows and over the lifetime. What is kept is tensors, so it
moves and is summed like any other.
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

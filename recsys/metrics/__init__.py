"""How good the predictions are, how sure, and how fast they came.

Plain functions for arrays at hand; accumulators (``update``, ``merge``, ``sync``, ``compute``) for
streams over many batches and ranks. An accumulator's state is tensors, so it moves and is summed
like any other.
"""

from recsys.metrics.auc import AUC, BinnedAUC, auc
from recsys.metrics.entropy import NormalizedEntropy, log_loss, normalized_entropy
from recsys.metrics.throughput import ThroughputMetric

__all__ = [
    "AUC",
    "BinnedAUC",
    "NormalizedEntropy",
    "ThroughputMetric",
    "auc",
    "log_loss",
    "normalized_entropy",
]

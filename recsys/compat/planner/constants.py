"""Numbers that parts of planners written for TorchRec compute with.

Published by TorchRec 1.8. Memory is in bytes, speeds in bytes per millisecond. Our own planner
takes a machine's numbers from its `Topology`, and costs from measured speeds (docs/planner.md).
"""

from __future__ import annotations

_GIB, _PER_MS = 2**30, 1 / 1000

MAX_SIZE = 2**63 - 1
"""More bytes than there are."""
HBM_CAP = 32 * _GIB
"""Memory of a GPU."""
DDR_CAP = 128 * _GIB
"""Memory of a host, for each rank."""
SSD_CAP = 2048 * _GIB
"""Of disks, for each rank."""
HUNDRED_GB = 100 * _GIB
HBM_MEM_BW = 897 * _GIB * _PER_MS
"""Of a GPU's memory."""
DDR_MEM_BW = 51 * _GIB * _PER_MS
"""Of host memory."""
SSD_MEM_BW = 100 * 2**20 * _PER_MS
"""Of disks."""
HBM_TO_DDR_MEM_BW = 32 * _GIB * _PER_MS
"""Between a GPU and host memory."""
INTRA_NODE_BANDWIDTH = 600 * _GIB * _PER_MS
"""Between ranks of a node."""
CROSS_NODE_BANDWIDTH = 12.5 * _GIB * _PER_MS
"""Between nodes."""
MIN_CW_DIM = 128
"""Columns that a shard of a column-wise table has at least, if nothing is said."""
BWD_COMPUTE_MULTIPLIER = 2
"""Backward lookups, in forward ones."""
WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER = 1
"""The same, times that, of ids with weights."""
WEIGHTED_KERNEL_MULTIPLIER = 1.1
"""Forward lookups of ids with weights, in those without."""
FULL_BLOCK_EMB_DIM = 128
"""Columns that fill a block of threads."""
HALF_BLOCK_PENALTY = 1.15
"""What fewer than that cost, as a factor."""
QUARTER_BLOCK_PENALTY = 1.75
"""What fewer than half of that cost."""
BATCHED_COPY_PERF_FACTOR = 2.455
DP_ELEMENTWISE_KERNELS_PERF_FACTOR = 9.22
"""Passes over the gradients of a data-parallel table."""
MAX_PROPOSALS = 10_000
"""Of a grid search; one with more proposes nothing."""
DEFAULT_PERF_ESTIMATOR = "default_estimator"

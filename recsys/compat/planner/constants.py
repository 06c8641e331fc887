"""Numbers for planner components written for TorchRec, as published by TorchRec 1.8, and units.

Memory is in bytes, speeds in bytes per millisecond. The planner itself uses the numbers of its
`Topology` and measured speeds (docs/topology.md).
"""

from __future__ import annotations

from recsys.base.arguments import finite
from recsys.base.checked import checked

_GIB, _PER_MS = 2**30, 1 / 1000

MAX_SIZE = 2**63 - 1
"""Upper limit of sizes in bytes."""
HBM_CAP = 32 * _GIB
"""Memory of a GPU."""
DDR_CAP = 128 * _GIB
"""Memory of a host, per rank."""
SSD_CAP = 2048 * _GIB
"""Disk memory, per rank."""
HUNDRED_GB = 100 * _GIB
HBM_MEM_BW = 897 * _GIB * _PER_MS
"""Bandwidth of a GPU's memory."""
DDR_MEM_BW = 51 * _GIB * _PER_MS
"""Bandwidth of host memory."""
SSD_MEM_BW = 100 * 2**20 * _PER_MS
"""Bandwidth of disks."""
HBM_TO_DDR_MEM_BW = 32 * _GIB * _PER_MS
"""Bandwidth between a GPU and host memory."""
INTRA_NODE_BANDWIDTH = 600 * _GIB * _PER_MS
"""Bandwidth between ranks of a node."""
CROSS_NODE_BANDWIDTH = 12.5 * _GIB * _PER_MS
"""Bandwidth between nodes."""
MIN_CW_DIM = 128
"""Default minimum of the columns of a column-wise shard."""
BWD_COMPUTE_MULTIPLIER = 2
"""Time of a backward lookup, relative to a forward one."""
WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER = 1
"""Additional factor of `BWD_COMPUTE_MULTIPLIER` for ids with weights."""
WEIGHTED_KERNEL_MULTIPLIER = 1.1
"""Time of a forward lookup of ids with weights, relative to ids without."""
FULL_BLOCK_EMB_DIM = 128
"""Columns that fill a thread block."""
HALF_BLOCK_PENALTY = 1.15
"""Factor for fewer columns than `FULL_BLOCK_EMB_DIM`."""
QUARTER_BLOCK_PENALTY = 1.75
"""Factor for fewer columns than half of `FULL_BLOCK_EMB_DIM`."""
BATCHED_COPY_PERF_FACTOR = 2.455
DP_ELEMENTWISE_KERNELS_PERF_FACTOR = 9.22
"""Passes over the gradient of a data-parallel table."""
MAX_PROPOSALS = 10_000
"""Limit of a grid search, which proposes nothing above it."""
DEFAULT_PERF_ESTIMATOR = "default_estimator"


@checked
def sharder_name(sharder: type) -> str:
    """Return the module and name of a class, such as `my.module.MySharder`."""
    return f"{sharder.__module__}.{sharder.__name__}"


@checked
def bytes_to_gb(num_bytes: float) -> float:
    """Return bytes as GiB."""
    finite("bytes_to_gb.num_bytes", num_bytes)
    return num_bytes / 2**30


@checked
def bytes_to_mb(num_bytes: float) -> float:
    """Return bytes as MiB."""
    finite("bytes_to_mb.num_bytes", num_bytes)
    return num_bytes / 2**20


@checked
def gb_to_bytes(gb: float) -> int:
    """Return GiB as bytes."""
    finite("gb_to_bytes.gb", gb)
    return int(gb * 2**30)


@checked
def mb_to_bytes(mb: float) -> int:
    """Return MiB as bytes."""
    finite("mb_to_bytes.mb", mb)
    return int(mb * 2**20)

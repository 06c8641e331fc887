"""Prints what parts of users' planners compute with: TorchRec's numbers and small functions."""

import importlib
import json

from torchrec.distributed.planner.utils import placement, prod

MODULES = (
    "constants",
    "enumerators",
    "estimator.types",
    "planners",
    "proposers",
    "shard_estimators",
    "storage_reservations",
    "types",
    "utils",
)
NAMES = [
    "BATCHED_COPY_PERF_FACTOR",
    "BATCH_SIZE",
    "BIGINT_DTYPE",
    "BWD_COMPUTE_MULTIPLIER",
    "CROSS_NODE_BANDWIDTH",
    "DDR_CAP",
    "DDR_MEM_BW",
    "DEFAULT_PERF_ESTIMATOR",
    "DP_ELEMENTWISE_KERNELS_PERF_FACTOR",
    "FULL_BLOCK_EMB_DIM",
    "HALF_BLOCK_PENALTY",
    "HBM_CAP",
    "HBM_MEM_BW",
    "HBM_TO_DDR_MEM_BW",
    "HUNDRED_GB",
    "INTRA_NODE_BANDWIDTH",
    "KV_CACHING_RATIO",
    "MAX_PROPOSALS",
    "MAX_SIZE",
    "MIN_CW_DIM",
    "NUM_POOLINGS",
    "POOLING_FACTOR",
    "QUARTER_BLOCK_PENALTY",
    "SSD_CAP",
    "SSD_MEM_BW",
    "UVM_CACHING_RATIO",
    "WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER",
    "WEIGHTED_KERNEL_MULTIPLIER",
]

found = {}
for module in MODULES:
    values = importlib.import_module(f"torchrec.distributed.planner.{module}")
    for name in NAMES:
        if hasattr(values, name):
            found.setdefault(name, getattr(values, name))
            assert found[name] == getattr(values, name)
for device, rank, local_size in (("cpu", 3, 2), ("cuda", 3, 2), ("cuda", 1, 8)):
    found[f"placement of {device} {rank} {local_size}"] = placement(device, rank, local_size)
found["prod"] = [prod(numbers) for numbers in ([2, 3, 4], [])]
print(json.dumps(found))

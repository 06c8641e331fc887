"""Names that TorchRec users import from this path."""

from recsys.distributed.placement.plan import (
    CacheParams,
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ObjectPoolShardingPlan,
    ObjectPoolShardingType,
    ParameterSharding,
    Placement,
    ShardingType,
    ShardMetadata,
    compute_kernel_to_embedding_location,
    placement_rank,
)
from recsys.distributed.placement.plan_json import PlanRanks, ShardingPlan
from recsys.distributed.ranks.comm import Awaitable, LazyAwaitable, LazyNoWait, NoWait
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.sharded.sharder import ModuleSharder, ShardedModule, copy_to_device
from recsys.kernels.types import BoundsCheckMode

__all__ = [
    "Awaitable",
    "BoundsCheckMode",
    "CacheParams",
    "EmbeddingComputeKernel",
    "EmbeddingModuleShardingPlan",
    "EnumerableShardingSpec",
    "LazyAwaitable",
    "LazyNoWait",
    "ModuleSharder",
    "NoWait",
    "ObjectPoolShardingPlan",
    "ObjectPoolShardingType",
    "ParameterSharding",
    "Placement",
    "PlanRanks",
    "ShardMetadata",
    "ShardedModule",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "compute_kernel_to_embedding_location",
    "copy_to_device",
    "placement_rank",
]

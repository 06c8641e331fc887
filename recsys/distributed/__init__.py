"""Embedding tables on many devices, and the exchanges of a batch between them.

In the order of a run: `ranks` (processes and their groups), `placement` (plans and layouts),
`planner` (finds a plan), `stages` (one batch), `state` (tables and optimizers). `sharded` is
the engine of sharded modules. The modules that users name are built on it: `embeddingbag`,
`embedding`, `fp_embeddingbag`, `sharding_plan`, `shard` and `model_parallel`. `train_pipeline`,
`checkpoint` and `monitoring` serve whole models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.base.lazy import lazy_names

if TYPE_CHECKING:  # what editors and type checkers see of _HOMES
    from recsys.distributed.model_parallel import DistributedModelParallel
    from recsys.distributed.placement.plan import ParameterSharding
    from recsys.distributed.ranks.comm import Awaitable, NoWait
    from recsys.distributed.ranks.env import ShardingEnv
    from recsys.distributed.ranks.node import get_local_rank, get_local_size
    from recsys.distributed.sharded.sharder import ModuleSharder, ShardedModule
    from recsys.distributed.train_pipeline.pipelines import (
        EvalPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        TrainPipeline,
        TrainPipelineBase,
        TrainPipelineSparseDist,
    )

__all__ = [
    "Awaitable",
    "DistributedModelParallel",
    "EvalPipelineSparseDist",
    "ModuleSharder",
    "NoWait",
    "ParameterSharding",
    "PrefetchTrainPipelineSparseDist",
    "ShardedModule",
    "ShardingEnv",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "get_local_rank",
    "get_local_size",
]

_HOMES = {
    "Awaitable": "distributed.types",
    "DistributedModelParallel": "distributed.model_parallel",
    "EvalPipelineSparseDist": "distributed.train_pipeline.pipelines",
    "ModuleSharder": "distributed.types",
    "NoWait": "distributed.types",
    "ParameterSharding": "distributed.types",
    "PrefetchTrainPipelineSparseDist": "distributed.train_pipeline.pipelines",
    "ShardedModule": "distributed.types",
    "ShardingEnv": "distributed.types",
    "TrainPipeline": "distributed.train_pipeline.pipelines",
    "TrainPipelineBase": "distributed.train_pipeline.pipelines",
    "TrainPipelineSparseDist": "distributed.train_pipeline.pipelines",
    "get_local_rank": "distributed.ranks.node",
    "get_local_size": "distributed.ranks.node",
}

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

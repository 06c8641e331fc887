"""Placing embedding tables on many devices and moving a batch through them.

The files read in run order: ``types`` (what a plan says) -> ``planner`` (finds one) or
``sharding_plan`` (written by hand) -> ``strategies`` (rectangles) -> ``layout`` (compiles them;
``plan_layout``, ``traffic`` and ``layout_plot`` show it) -> ``input_dist`` (over
``batch_segments``, ``id_routes``, ``weight_gradients``) -> ``lookup`` and ``row_updates`` ->
``output_dist`` or ``sequence_dist`` (over ``exchange``, ``comm``, ``wire``) -> ``embeddingbag``,
``embedding`` and ``fp_embeddingbag`` (the sharded modules, over ``sharded_collection``) ->
``shard`` and ``model_parallel`` (a whole model; ``ahead``) -> ``even_batches``, ``checkpoint``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.lazy import lazy_names

if TYPE_CHECKING:  # what editors and type checkers see of _HOMES
    from recsys.distributed.model_parallel import DistributedModelParallel
    from recsys.distributed.node import get_local_rank, get_local_size
    from recsys.distributed.types import (
        Awaitable,
        ModuleSharder,
        NoWait,
        ParameterSharding,
        ShardedModule,
        ShardingEnv,
    )

__all__ = [
    "Awaitable",
    "DistributedModelParallel",
    "ModuleSharder",
    "NoWait",
    "ParameterSharding",
    "ShardedModule",
    "ShardingEnv",
    "get_local_rank",
    "get_local_size",
]

_HOMES = {
    "Awaitable": "distributed.types",
    "DistributedModelParallel": "distributed.model_parallel",
    "ModuleSharder": "distributed.types",
    "NoWait": "distributed.types",
    "ParameterSharding": "distributed.types",
    "ShardedModule": "distributed.types",
    "ShardingEnv": "distributed.types",
    "get_local_rank": "distributed.node",
    "get_local_size": "distributed.node",
}

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Training pipelines: schedules of the stages of batches in a sharded model.

`pipelines` trains on a batch while the ids of the next ones are exchanged; `context` has the state
of such a batch, and `input_prefetch` starts its input stages before the model runs. `even_batches`
ends an epoch on all ranks at the same step, `staged` runs user-defined stages, and
`gradient_accumulation` makes a step of several batches. `batches` moves batches between devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.base.lazy import lazy_names

if TYPE_CHECKING:  # what editors and type checkers see of _HOMES
    from recsys.distributed.train_pipeline.context import TrainPipelineContext
    from recsys.distributed.train_pipeline.even_batches import EvenBatches, UnevenPolicy
    from recsys.distributed.train_pipeline.gradient_accumulation import (
        GradientAccumulationConfig,
        GradientAccumulationWrapper,
    )
    from recsys.distributed.train_pipeline.pipelines import (
        EvalPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        TrainPipeline,
        TrainPipelineBase,
        TrainPipelineFusedSparseDist,
        TrainPipelineSemiSync,
        TrainPipelineSparseDist,
    )
    from recsys.distributed.train_pipeline.staged import (
        PipelineStage,
        SparseDataDistUtil,
        StagedTrainPipeline,
    )

__all__ = [
    "EvalPipelineSparseDist",
    "EvenBatches",
    "GradientAccumulationConfig",
    "GradientAccumulationWrapper",
    "PipelineStage",
    "PrefetchTrainPipelineSparseDist",
    "SparseDataDistUtil",
    "StagedTrainPipeline",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineContext",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "UnevenPolicy",
]

_FILES = {
    "even_batches": ("EvenBatches", "UnevenPolicy"),
    "gradient_accumulation": ("GradientAccumulationConfig", "GradientAccumulationWrapper"),
    "staged": ("PipelineStage", "SparseDataDistUtil", "StagedTrainPipeline"),
}
_HOMES = dict.fromkeys(__all__, "distributed.train_pipeline.pipelines") | {
    name: f"distributed.train_pipeline.{file}" for file, names in _FILES.items() for name in names
}

__getattr__ = lazy_names(__name__, _HOMES)

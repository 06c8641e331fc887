"""Who moves batches through a sharded model, and when.

`ahead` starts the input stages of a model's modules together, before the model runs; `pipelines`
trains on a batch while the next ones travel; `even_batches` ends an epoch on all ranks when one
runs out of data. In `staged` are pipelines of the user's own stages, in `gradient_accumulation`
steps of several batches; `batches` moves batches of any kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.lazy import lazy_names

if TYPE_CHECKING:  # what editors and type checkers see of _HOMES
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
        TrainPipelineContext,
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

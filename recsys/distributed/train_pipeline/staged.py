"""Pipeline of user-defined stages, and stages that send the ids of a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from torch import nn

from recsys.base.checked import check_fields, checked
from recsys.distributed.train_pipeline.batches import record_stream
from recsys.distributed.train_pipeline.context import on_stream, record_event
from recsys.distributed.train_pipeline.input_prefetch import InputPrefetcher, PrefetchedBatch
from recsys.distributed.train_pipeline.pipelines import (
    In,
    TrainPipeline,
    bare_model,
    check_iterator,
)

StageOut = TypeVar("StageOut")
_NOTHING: Any = object()


@final
@dataclass
class PipelineStage(Generic[StageOut]):
    """Stage of a pipeline; it runs on each batch while later stages process earlier batches.

    Args:
        name: Name of the stage.
        runnable: Function from the output of the previous stage to the output of this one. The
            first stage receives the batch.
        stream: CUDA stream on which it runs; ignored on a CPU.
        fill_callback: Function to call after each run while the pipeline fills.
        data_exhausted_callback: Function to call instead of `runnable` after the last batch.
    """

    name: str
    runnable: Callable[..., StageOut]
    stream: torch.Stream | None = None
    fill_callback: Callable[[], None] | None = None
    data_exhausted_callback: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@final
class StagedTrainPipeline(TrainPipeline[In, StageOut | None]):
    """Pipeline of user-defined stages that process different batches at the same time.

    `progress` advances every batch by one stage and returns the output of the last stage, None
    after the last batch. Train on that output.

    Args:
        pipeline_stages: The stages, in the order in which a batch passes them.
        debug_mode: Whether the host waits for each stage on a GPU, so that an error is raised by
            its stage.
        compute_stream: CUDA stream that uses the output of `progress`; None for the current one.
        on_flush_end: Function to call at the end of a flush.

    Raises:
        ValueError: If there are no stages.

    Example:
        >>> stages = [PipelineStage("double", lambda x: 2 * x), PipelineStage("text", str)]
        >>> pipeline = StagedTrainPipeline(stages)
        >>> batches = iter([1, 2, 3])
        >>> [pipeline.progress(batches) for _ in range(4)]
        ['2', '4', '6', None]
    """

    @checked
    def __init__(
        self,
        pipeline_stages: Sequence[PipelineStage[Any]],
        debug_mode: bool = False,
        compute_stream: torch.Stream | None = None,
        on_flush_end: Callable[[], None] | None = None,
    ) -> None:
        if not pipeline_stages:
            raise ValueError("StagedTrainPipeline needs at least one stage; received none.")
        self._stages = list(pipeline_stages)
        self._debug_mode, self._compute_stream = debug_mode, compute_stream
        self._on_flush_end = on_flush_end
        self._outputs: list[tuple[Any, Any]] = []  # output of each stage and its event
        self._is_flushing = False

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self._stages)

    @checked
    def set_flush(self, flush: bool) -> None:
        """Finish the batches in the pipeline before reading more."""
        self._is_flushing = flush

    def flush_end(self) -> None:
        """End a flush."""
        self._is_flushing = False
        if self._on_flush_end is not None:
            self._on_flush_end()

    def progress(self, dataloader_iter: Iterator[In]) -> StageOut | None:
        """Advance every batch by one stage; return the output of the last stage."""
        check_iterator(type(self).__name__, dataloader_iter)
        if not self._outputs:
            self._fill(dataloader_iter)
        if self._is_flushing and all(output is _NOTHING for output, _ in self._outputs):
            self.flush_end()
            self._fill(dataloader_iter)
        output, event = self._outputs[-1]
        if event is not None and output is not _NOTHING:
            stream = self._compute_stream or torch.cuda.current_stream()
            stream.wait_event(event)
            record_stream(output, stream)
        before = [(self._next(dataloader_iter), None), *self._outputs[:-1]]
        self._outputs = [
            self._run(stage, *arguments)
            for stage, arguments in zip(self._stages, before, strict=True)
        ]
        return None if output is _NOTHING else output

    def reset(self) -> None:
        """Drop the batches in the pipeline."""
        self._outputs, self._is_flushing = [], False

    def _next(self, source: Iterator[In]) -> Any:
        return _NOTHING if self._is_flushing else next(source, _NOTHING)

    def _fill(self, source: Iterator[In]) -> None:
        self._outputs = [(_NOTHING, None)] * self.num_stages
        for last in reversed(range(self.num_stages)):
            batch: tuple[Any, Any] = self._next(source), None
            for stage in self._stages[: last + 1]:
                batch = self._run(stage, *batch)
                if stage.fill_callback is not None:
                    with on_stream(stage.stream):
                        stage.fill_callback()
            self._outputs[last] = batch

    def _run(self, stage: PipelineStage[Any], given: Any, event: Any) -> tuple[Any, Any]:
        """Run a stage on the output of the previous one; return its output and its CUDA event."""
        if given is _NOTHING:
            if stage.data_exhausted_callback is not None:
                stage.data_exhausted_callback()
            return _NOTHING, None
        with on_stream(stage.stream):
            if event is not None and stage.stream is not None:
                stage.stream.wait_event(event)
                record_stream(given, stage.stream)
            output = stage.runnable(given)
            ended = record_event(stage.stream)
            if ended is not None and self._debug_mode:
                ended.synchronize()
            return output, ended


@final
class SparseDataDistUtil(Generic[In]):
    """Exchange of a batch's ids as a stage of a `StagedTrainPipeline`.

    The first batch shows which inputs of the model each sharded module reads. After that, pass each
    batch to `start_sparse_data_dist`, then call the model with the batch: it looks up the received
    ids.

    Args:
        model: A model with sharded modules; called with one argument, the batch.
        data_dist_stream: CUDA stream of the exchange; None on a CPU.

    `apply_jit`, `prefetch_stream`, `pipeline_postproc` and `embedding_lookup_stream` are accepted
    for TorchRec scripts and ignored.

    Example:
        >>> from recsys import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        >>> from recsys.distributed.model_parallel import DistributedModelParallel
        >>> table = EmbeddingBagConfig(9, 4, "films", feature_names=["film"])
        >>> tables = EmbeddingBagCollection(tables=[table])
        >>> model = DistributedModelParallel(tables, device=torch.device("cpu"))
        >>> ids = SparseDataDistUtil(model, None)
        >>> pipeline = StagedTrainPipeline([ids.start_sparse_data_dist_stage()])
        >>> film = KeyedJaggedTensor(["film"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        >>> batches, shapes = iter([film] * 3), []
        >>> while (batch := pipeline.progress(batches)) is not None:
        ...     shapes.append(tuple(model(batch).values().shape))
        >>> shapes
        [(2, 4), (2, 4), (2, 4)]
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        data_dist_stream: torch.Stream | None,
        apply_jit: bool = False,
        prefetch_stream: torch.Stream | None = None,
        pipeline_postproc: bool = False,
        embedding_lookup_stream: torch.Stream | None = None,
    ) -> None:
        self._model, self._stream = model, data_dist_stream
        self._prefetcher = InputPrefetcher(bare_model(model))
        self._started: list[tuple[Any, PrefetchedBatch]] = []
        self._forward = model.forward
        model.forward = self._call

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not self._prefetcher.has_observed:
            with self._prefetcher.observe(args, kwargs):
                return self._forward(*args, **kwargs)
        for index, (batch, started) in enumerate(self._started):
            if args and args[0] is batch:
                del self._started[index]
                if self._stream is not None:
                    torch.cuda.current_stream().wait_stream(self._stream)
                with started.consume():
                    return self._forward(*args, **kwargs)
        return self._forward(*args, **kwargs)

    def start_sparse_data_dist(self, batch: In) -> In:
        """Send the ids of earlier batches and the header of this one; return the batch."""
        self.wait_sparse_data_dist()
        if self._prefetcher.has_observed:
            self._started.append((batch, self._prefetcher.start((batch,), {})))
        return batch

    def wait_sparse_data_dist(self) -> None:
        """Read the headers of started batches and send their ids."""
        for _, started in self._started:
            started.send()

    def start_embedding_lookup(self, batch: In) -> In:
        """Look up a started batch in the current tables; return the batch."""
        for other, started in self._started:
            if other is batch:
                started.look_up()
        return batch

    @checked
    def start_sparse_data_dist_stage(
        self,
        name: str = "start_sparse_data_dist",
        runnable: Callable[..., Any] | None = None,
    ) -> PipelineStage[Any]:
        """Return the stage that sends ids, by `runnable` if given."""
        made = runnable or self.start_sparse_data_dist
        return PipelineStage(name, made, self._stream, self.wait_sparse_data_dist)

    @checked
    def start_embedding_lookup_stage(
        self, name: str = "start_embedding_lookup", runnable: Callable[..., Any] | None = None
    ) -> PipelineStage[Any]:
        """Return the stage that looks up embeddings, by `runnable` if given."""
        return PipelineStage(name, runnable or self.start_embedding_lookup, self._stream)

    def detach(self) -> nn.Module:
        """Drop pending exchanges and return the model, which sends ids when it is called again."""
        while self._started:
            self._started.pop()[1].drop()
        self._model.__dict__.pop("forward", None)
        return self._model

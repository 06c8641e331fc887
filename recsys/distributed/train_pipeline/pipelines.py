"""Training loops that overlap communication with computation.

While a pipeline trains on a batch, it exchanges the ids of the next batches:

    batch i          batch i+1        batch i+2
                     ids are sent     is read, copied to the device; its header is sent
    forward          ids arrive       header arrives
    backward
    optimizer's step

The header of a batch is read a whole step after it was sent, so reading does not wait. Tables are
read when the model is called, so the results equal the results of a plain loop bit for bit. The
state of a batch is in its `BatchContext`; the model is not changed. On a GPU, copies and input
stages run on their own streams.
"""

from __future__ import annotations

import abc
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from recsys.base import step_stages
from recsys.base.arguments import shown, whole, wrong_type
from recsys.base.checked import checked, checked_but
from recsys.base.step_stages import Stage
from recsys.distributed.train_pipeline.batches import record_stream, to_device
from recsys.distributed.train_pipeline.context import (
    TrainPipelineContext,
    on_stream,
    record_event,
)
from recsys.distributed.train_pipeline.input_prefetch import FeaturesFunction, InputPrefetcher

In = TypeVar("In")
Out = TypeVar("Out")
ModelForward = Callable[[Any], tuple[Tensor, Any]]


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside a DistributedModelParallel, or the model itself."""
    inner = model.module if hasattr(model, "_dmp_wrapped_module") else model
    assert isinstance(inner, nn.Module)
    return inner


class TrainPipeline(abc.ABC, Generic[In, Out]):
    """Training loop that runs one step per call."""

    @abc.abstractmethod
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Make one training step.

        Args:
            dataloader_iter: Iterator of batches. Pass the same object at every call of an epoch.

        Returns:
            The model's second output, beside the loss.

        Raises:
            StopIteration: After the last batch.
        """

    def reset(self) -> None:
        """Drop batches that were read but not trained on."""


class TrainPipelineBase(TrainPipeline[In, Out]):
    """Pipeline that trains on one batch at a time; on a GPU it copies the next batch meanwhile.

    The model is called with a batch and returns a loss and an output. In `eval()` mode there is no
    backward pass. A loss that is not a scalar is summed.

    Args:
        model: The model, usually a `DistributedModelParallel`.
        optimizer: Optimizer of the parameters that are not updated in backward.
        device: Device of the batches.
        custom_model_fwd: Function to call with a batch instead of the model.

    Raises:
        TypeError: If `model` is not an nn.Module, or `optimizer` has no `step`.

    Example:
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 1)
        ...
        ...     def forward(self, batch):
        ...         out = self.layer(batch)
        ...         return out.square().mean(), out
        >>> model = Model()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pipeline = TrainPipelineBase(model, optimizer, torch.device("cpu"))
        >>> batches = iter([torch.ones(3, 2), torch.ones(5, 2)])
        >>> pipeline.progress(batches).shape, pipeline.progress(batches).shape
        (torch.Size([3, 1]), torch.Size([5, 1]))
    """

    execute_all_batches = True
    starts_step = True
    """True if the next batch starts an optimizer step: gradients are cleared first."""
    ends_step = True
    """True if the next batch is the last of an optimizer step."""
    _needs_optimizer = True

    @checked_but("optimizer")
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: ModelForward | None = None,
    ) -> None:
        is_class = isinstance(cast(object, optimizer), type)
        if self._needs_optimizer and (is_class or not callable(getattr(optimizer, "step", None))):
            subject = f"{type(self).__name__}.optimizer"
            wrong_type(subject, "an optimizer with step() and zero_grad()", optimizer)
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._custom_forward = custom_model_fwd
        self._copies = _stream(self._device)
        self._flying: deque[TrainPipelineContext] = deque()
        self._source: Iterator[In] | None = None
        self._is_exhausted = False

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Make one training step; see `TrainPipeline`."""
        self._fill(dataloader_iter)
        if not self._flying or (self._is_exhausted and not self.execute_all_batches):
            self.reset()
            raise StopIteration
        flight = self._flying.popleft()
        if self._copies is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(flight.copied)
            record_stream(flight.batch, now)
        return self._step(flight)

    def reset(self) -> None:
        """Drop batches that were read but not trained on; call it on every rank."""
        while self._flying:
            self._flying.popleft().drop()
        self._source, self._is_exhausted = None, False

    def _fill(self, source: Iterator[In]) -> None:
        """Read batches until `_num_ahead` batches are in the pipeline."""
        if source is not self._source or self._source is None:
            check_iterator(type(self).__name__, source)
            self._source, self._is_exhausted = source, False
        while len(self._flying) <= self._num_ahead() and not self._is_exhausted:
            if self._flying:
                self._flying[-1].send()
            with step_stages.running((Stage.DATA, "")):
                batch = next(source, _NONE)
            if batch is _NONE:
                self._is_exhausted = True
            else:
                self._flying.append(self._start(batch))

    def _num_ahead(self) -> int:
        """Return the number of batches to read before training on the first of them."""
        return 0 if self._copies is None else 1

    def _start(self, batch: Any) -> TrainPipelineContext:
        with on_stream(self._copies):
            moved = to_device(batch, self._device, non_blocking=self._copies is not None)
            return TrainPipelineContext(moved, record_event(self._copies))

    def _step(self, flight: TrainPipelineContext) -> Out:
        """Train on a batch."""
        if not self._model.training:
            return self._call(flight)[1]  # type: ignore[no-any-return]
        if self.starts_step:
            self._optimizer.zero_grad()
        loss, output = self._call(flight)
        self._before_backward()
        loss.sum().backward()
        if self.ends_step:
            self._optimizer.step()
        self._after_step()
        return output  # type: ignore[no-any-return]

    def _call(self, flight: TrainPipelineContext) -> tuple[Tensor, Any]:
        loss, output = (self._custom_forward or self._model)(flight.batch)
        return loss, output

    def _before_backward(self) -> None:
        """Run code between forward and backward."""

    def _after_step(self) -> None:
        """Run code after the optimizer's step."""


class TrainPipelineSparseDist(TrainPipelineBase[In, Out]):
    """Pipeline that exchanges the ids of the next batches while it trains.

    The results equal the results of a plain loop bit for bit. The first batch runs as in a plain
    loop and shows which inputs of the model each sharded module reads. A module whose features the
    model computes, for example by a permutation in `forward`, sends its ids when it is called. A
    warning names the module; `features` lets it start early too. An error in a batch is raised on
    every rank when that batch is trained on. On a GPU without other ranks, bad ids and lengths may
    be raised with a later batch, see `ShardedCollection.check_ids`.

    Batches of `iter(EvenBatches(...))` end on all ranks at the same step. `EvenBatches.is_filler`
    describes the batch read last, two batches after the batch that trains.

    `apply_jit`, `context_type` and `pipeline_postproc` are accepted for TorchRec scripts and
    ignored; for the last see `features`.

    Args:
        model: A model with sharded modules, usually a `DistributedModelParallel`.
        optimizer: Optimizer of the parameters that are not updated in backward.
        device: Device of the batches.
        execute_all_batches: Whether to train on the remaining batches when the data end.
        custom_model_fwd: Function to call with a batch instead of the model.
        dmp_collection_sync_interval_batches: Steps between two calls of the model's `sync`, if it
            has one; None for never.
        features: Path of a sharded module -> function from a batch to its features, which
            `forward` should call too. It may read the batch only, no parameters.

    Raises:
        KeyError: If a path of `features` is not a sharded module.
        ValueError: On the first batch, if `features` and the model compute different features.

    Example:
        >>> from recsys import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        >>> from recsys.distributed.model_parallel import DistributedModelParallel
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         table = EmbeddingBagConfig(9, 4, "films", feature_names=["film"])
        ...         self.tables = EmbeddingBagCollection(tables=[table])
        ...         self.over = nn.Linear(4, 1)
        ...
        ...     def forward(self, film):
        ...         out = self.over(self.tables(film).values())
        ...         return out.square().mean(), out
        >>> model = DistributedModelParallel(Model(), device=torch.device("cpu"))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        >>> film = KeyedJaggedTensor(["film"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        >>> batches, steps = iter([film] * 3), 0
        >>> while True:
        ...     try:
        ...         scores = pipeline.progress(batches)
        ...     except StopIteration:
        ...         break
        ...     steps += 1
        >>> steps
        3
    """

    @checked_but("optimizer")
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: object = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: ModelForward | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        *,
        features: Mapping[str, FeaturesFunction] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device, custom_model_fwd)
        self.execute_all_batches = execute_all_batches
        self._features = dict(features or {})
        self._sync_interval = dmp_collection_sync_interval_batches
        if self._sync_interval is not None:
            name = f"{type(self).__name__}.dmp_collection_sync_interval_batches"
            self._sync_interval = whole(name, self._sync_interval)
        self._steps = 0
        self._dist = _stream(self._device)
        self._prefetcher: InputPrefetcher | None = None
        self.attach()

    @checked
    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Attach a model for the next steps.

        Args:
            model: The model; None for the current one.
            sparse_dist: Whether to exchange ids early; otherwise modules do when they are called.
        """
        self._model = model or self._model
        bare = bare_model(self._model)
        self._prefetcher = InputPrefetcher(bare, self._features) if sparse_dist else None

    def detach(self) -> nn.Module:
        """Return the model, which is unchanged; its batches stay in the pipeline."""
        return self._model

    def _num_ahead(self) -> int:
        if self._prefetcher is None:
            return super()._num_ahead()
        return 2 if self._prefetcher.has_observed else 0

    def _start(self, batch: Any) -> TrainPipelineContext:
        flight = super()._start(batch)
        if self._prefetcher is not None and self._prefetcher.has_observed:
            with on_stream(self._dist):
                if self._dist is not None:
                    self._dist.wait_event(flight.copied)
                    record_stream(flight.batch, self._dist)
                flight.started, flight.stream = (
                    self._prefetcher.start((flight.batch,), {}),
                    self._dist,
                )
        return flight

    def _call(self, flight: TrainPipelineContext) -> tuple[Tensor, Any]:
        prefetcher = self._prefetcher
        if flight.started is not None:
            flight.join()
            with flight.started.consume():
                return super()._call(flight)
        if prefetcher is None or prefetcher.has_observed:
            return super()._call(flight)
        with prefetcher.observe((flight.batch,), {}):
            output = super()._call(flight)
        for path, reason in prefetcher.reasons.items():
            warnings.warn(
                f"{type(self).__name__} sends the ids of module {path!r} when it is called, not "
                f"while the previous batch trains: the module {reason}. If its features depend on "
                "the batch alone, pass features={path: function of the batch}.",
                UserWarning,
                stacklevel=4,
            )
        return output

    def _after_step(self) -> None:
        self._steps += 1
        sync = getattr(self._model, "sync", None)
        if sync is not None and self._sync_interval and self._steps % self._sync_interval == 0:
            sync()


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist` that also fetches the rows of the next batch into caches.

    Tables in `fused_uvm_caching` have a cache on the GPU. The rows of the next batch are fetched
    after the optimizer's step is queued, while the host prepares the following batch. Arguments and
    results as in `TrainPipelineSparseDist`.
    """

    _start_next: ClassVar[Callable[[TrainPipelineContext], None]] = TrainPipelineContext.prefetch
    """Work on the next batch after each step."""

    @checked_but("optimizer")
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: ModelForward | None = None,
        *,
        features: Mapping[str, FeaturesFunction] | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            custom_model_fwd=custom_model_fwd,
            features=features,
        )

    def _after_step(self) -> None:
        super()._after_step()
        if self._flying:
            type(self)._start_next(self._flying[0])


class TrainPipelineFusedSparseDist(PrefetchTrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist` that looks up the next batch at the end of a step.

    The embeddings are exchanged while the next data are read and the dense layers start. Arguments
    and results as in `TrainPipelineSparseDist`.
    """

    _start_next = TrainPipelineContext.look_up


class TrainPipelineSemiSync(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist` that looks up the next batch before backward.

    The embeddings of the next batch are exchanged during the backward pass of the current batch.
    They lack the update of the current batch: embeddings are one step old, dense layers are not.

    Other arguments as in `TrainPipelineSparseDist`; `stash_gradients` and `strict` are ignored,
    too.

    Args:
        start_batch: The first step that looks up early, counted from 0.
    """

    @checked_but("optimizer")
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        start_batch: int = 900,
        stash_gradients: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: ModelForward | None = None,
        strict: bool = False,
        dmp_collection_sync_interval_batches: int | None = 1,
        *,
        features: Mapping[str, FeaturesFunction] | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            custom_model_fwd=custom_model_fwd,
            dmp_collection_sync_interval_batches=dmp_collection_sync_interval_batches,
            features=features,
        )
        self.start_batch = whole("TrainPipelineSemiSync.start_batch", start_batch, least=0)

    def is_semi_sync(self) -> bool:
        """Return whether the next step looks up before backward."""
        return self._steps >= self.start_batch

    def _before_backward(self) -> None:
        if self._flying and self.is_semi_sync():
            self._flying[0].look_up()


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist` for evaluation, without gradients and updates.

    It may run between the steps of a training pipeline for the same model. Arguments as in
    `TrainPipelineSparseDist`; call `model.eval()` first. `optimizer` is ignored, too.
    """

    _needs_optimizer = False

    @checked_but("optimizer")
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
        *,
        features: Mapping[str, FeaturesFunction] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device, features=features)

    @torch.no_grad()
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Evaluate one batch; see `TrainPipeline`."""
        return super().progress(dataloader_iter)

    def _step(self, flight: TrainPipelineContext) -> Out:
        return self._call(flight)[1]  # type: ignore[no-any-return]


_NONE: Any = object()


def check_iterator(name: str, source: object) -> None:
    """Check that `dataloader_iter` is an iterator.

    Args:
        name: Class name of the pipeline.
        source: The received value.

    Raises:
        TypeError: If it is another value.
    """
    if not isinstance(source, Iterator):
        raise TypeError(
            f"{name}.progress: dataloader_iter must be an iterator; received {shown(source)}. Make "
            "one for each epoch: iter(dataloader)."
        )


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None

"""Training loops whose communication hides behind their compute.

While a pipeline trains on a batch, the ids of those after it travel:

    batch i          batch i+1        batch i+2
                     ids are sent     is read, copied to the device; its header is sent
    forward          ids arrive       header arrives
    backward
    optimizer's step

So the header of a batch is read a whole step after it was sent, and waits for nothing; its ids
travel behind the forward and backward pass of the batch before. Tables are read when the model is
called, as in a plain loop, so that training is that of a plain loop, bit for bit. All that belongs
to a batch is in its `Trip`; the model is not changed.

On a GPU, copies and input stages have streams of their own; on a CPU the process group's threads
move the data meanwhile.
"""

from __future__ import annotations

import abc
import dataclasses
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, Generic, NoReturn, TypeVar, cast, final

import torch
from torch import Tensor, nn

from recsys.distributed.ranks import where
from recsys.distributed.train_pipeline.ahead import InputsAhead, Maker, Started
from recsys.distributed.train_pipeline.batches import record_stream, to_device
from recsys.kernels.arguments import shown, whole, wrong_type
from recsys.kernels.checked import checked, checked_but

In = TypeVar("In")
Out = TypeVar("Out")
ModelForward = Callable[[Any], tuple[Tensor, Any]]


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model in a DistributedModelParallel, or the model itself."""
    inner = model.module if hasattr(model, "_dmp_wrapped_module") else model
    assert isinstance(inner, nn.Module)
    return inner


class TrainPipeline(abc.ABC, Generic[In, Out]):
    """A loop over batches, one step at a time."""

    @abc.abstractmethod
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Make one training step.

        Args:
            dataloader_iter: where batches come from; the same object at every call of an epoch.

        Returns:
            What the model returns beside the loss.

        Raises:
            StopIteration: when all batches were trained on.
        """

    def reset(self) -> None:
        """Forget batches that were read and not trained on."""


@final
@dataclasses.dataclass(slots=True)
class TrainPipelineContext:
    """A batch under way in a pipeline.

    Attributes:
        batch: on the device.
        copied: the event after which it is there; None on a CPU.
        started: its input stages, if they have started.
        stream: of those; None on a CPU.
        sent: the event after which its ids are sent; None on a CPU.
    """

    batch: Any
    copied: Any = None
    started: Started | None = None
    stream: Any = None
    sent: Any = None

    def send(self) -> None:
        """Start sending its ids, if its header is on its way."""
        if self.started is not None:
            with _on(self.stream):
                self.started.send()
            self.sent = None if self.stream is None else _event(self.stream)

    def join(self) -> None:
        """Let the current stream go on where the input stages' stream ended."""
        if self.stream is not None and self.started is not None:
            if self.sent is None:
                self.send()
            now = torch.cuda.current_stream(self.stream.device)
            now.wait_event(self.sent)
            self.started.record_stream(now)

    def look_up(self) -> None:
        """Look its ids up."""
        if self.started is not None:
            self.join()
            self.started.look_up()

    def prefetch(self) -> None:
        """Bring its rows into caches."""
        if self.started is not None:
            self.join()
            self.started.prefetch()

    def drop(self) -> None:
        """Let what is under way arrive, and forget it."""
        if self.started is not None:
            self.started.drop()


class TrainPipelineBase(TrainPipeline[In, Out]):
    """Trains on one batch after the other; on a GPU the next is copied meanwhile.

    The model is called with a batch and returns a loss and something else; in `eval()` mode there
    is no backward pass. A loss that is no scalar is summed.

    Args:
        model: usually a `DistributedModelParallel`.
        optimizer: of what does not update itself in backward.
        device: where batches go.
        custom_model_fwd: called with a batch in place of the model.

    Raises:
        TypeError: if `model` is not an nn.Module, or `optimizer` has no `step`.

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
    _needs_optimizer = True

    @checked_but("optimizer")
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: ModelForward | None = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            wrong_type(f"{name}.model", "an nn.Module", model)
        is_class = isinstance(cast(object, optimizer), type)
        if self._needs_optimizer and (is_class or not callable(getattr(optimizer, "step", None))):
            wrong_type(f"{name}.optimizer", "an optimizer with step() and zero_grad()", optimizer)
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
        """Forget batches that were read and not trained on; every rank must."""
        while self._flying:
            self._flying.popleft().drop()
        self._source, self._is_exhausted = None, False

    def _fill(self, source: Iterator[In]) -> None:
        """Read batches until as many are under way as may be."""
        if source is not self._source or self._source is None:
            if not isinstance(cast(object, source), Iterator):
                not_an_iterator(type(self).__name__, source)
            self._source, self._is_exhausted = source, False
        while len(self._flying) <= self._num_ahead() and not self._is_exhausted:
            if self._flying:
                self._flying[-1].send()
            where.now = "data", "", monotonic()
            batch = next(source, _NONE)
            where.now = "the pipeline after data", "", monotonic()
            if batch is _NONE:
                self._is_exhausted = True
            else:
                self._flying.append(self._start(batch))

    def _num_ahead(self) -> int:
        """Return how many batches are read before the one that trains is done."""
        return 0 if self._copies is None else 1

    def _start(self, batch: Any) -> TrainPipelineContext:
        with _on(self._copies):
            moved = to_device(batch, self._device, non_blocking=self._copies is not None)
            return TrainPipelineContext(
                moved, copied=None if self._copies is None else _event(self._copies)
            )

    def _step(self, flight: TrainPipelineContext) -> Out:
        """Train on a batch."""
        if not self._model.training:
            return self._call(flight)[1]  # type: ignore[no-any-return]
        self._optimizer.zero_grad()
        loss, output = self._call(flight)
        self._before_backward()
        loss.sum().backward()
        self._optimizer.step()
        self._after_step()
        return output  # type: ignore[no-any-return]

    def _call(self, flight: TrainPipelineContext) -> tuple[Tensor, Any]:
        loss, output = (self._custom_forward or self._model)(flight.batch)
        return loss, output

    def _before_backward(self) -> None:
        """Do what comes between forward and backward."""

    def _after_step(self) -> None:
        """Do what comes after the optimizer's step."""


class TrainPipelineSparseDist(TrainPipelineBase[In, Out]):
    """Trains while the ids of the batches to come travel to the ranks that own their rows.

    The results are those of a plain loop, bit for bit. The first batch is trained on as in a plain
    loop, and shows which of the model's inputs each sharded module reads. A module that reads what
    the model makes itself, such as features that its `forward` permutes, sends when it is called,
    and one warning says so; `features` lets it start ahead, too. What is wrong with a batch is
    raised, on every rank, when its turn to be trained on comes; on a GPU without other ranks bad
    ids and lengths may be raised in place of a later batch, see `ShardedCollection.check_ids`.

    Batches of `iter(EvenBatches(...))` end on all ranks at once; its `is_filler` is then that of
    the batch read last, two ahead of the one that trains.

    Args:
        model: contains sharded modules; usually a `DistributedModelParallel`.
        optimizer: of what does not update itself in backward.
        device: where batches go.
        execute_all_batches: whether the batches under way are trained on when the data end.
        apply_jit: means nothing.
        context_type: means nothing.
        pipeline_postproc: means nothing; see `features`.
        custom_model_fwd: called with a batch in place of the model.
        dmp_collection_sync_interval_batches: steps between two calls of the model's `sync`, if it
            has one; None: never.
        features: by the path of a sharded module, what makes its features of a batch; `forward`
            should call it, too. It must read the batch alone, not what trains.

    Raises:
        KeyError: if `features` names no sharded module.
        ValueError: on the first batch, if `features` makes others than the model.

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
        features: Mapping[str, Maker] | None = None,
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
        self._ahead: InputsAhead | None = None
        self.attach()

    @checked
    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Train this model from now on.

        Args:
            model: another one, or the same if None.
            sparse_dist: whether ids travel ahead; else every module sends when it is called.
        """
        self._model = model or self._model
        bare = bare_model(self._model)
        self._ahead = InputsAhead.of_model(bare, self._features) if sparse_dist else None

    def detach(self) -> nn.Module:
        """Return the model, which is as it was given; batches under way stay with the pipeline."""
        return self._model

    def _num_ahead(self) -> int:
        if self._ahead is None:
            return super()._num_ahead()
        return 2 if self._ahead.has_observed else 0

    def _start(self, batch: Any) -> TrainPipelineContext:
        flight = super()._start(batch)
        if self._ahead is not None and self._ahead.has_observed:
            with _on(self._dist):
                if self._dist is not None:
                    self._dist.wait_event(flight.copied)
                    record_stream(flight.batch, self._dist)
                flight.started, flight.stream = self._ahead.start((flight.batch,), {}), self._dist
        return flight

    def _call(self, flight: TrainPipelineContext) -> tuple[Tensor, Any]:
        ahead = self._ahead
        if flight.started is not None:
            flight.join()
            with flight.started.used():
                return super()._call(flight)
        if ahead is None or ahead.has_observed:
            return super()._call(flight)
        with ahead.observe((flight.batch,), {}):
            found = super()._call(flight)
        for path, reason in ahead.reasons.items():
            warnings.warn(
                f"{type(self).__name__} sends the ids of module {path!r} when it is called, not "
                f"while the batch before trains: it {reason}. If it reads what is made of the "
                "batch alone, pass features={path: function of the batch}.",
                UserWarning,
                stacklevel=4,
            )
        return found

    def _after_step(self) -> None:
        self._steps += 1
        sync = getattr(self._model, "sync", None)
        if sync is not None and self._sync_interval and self._steps % self._sync_interval == 0:
            sync()


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """As `TrainPipelineSparseDist`; rows of the next batch are brought into caches, too.

    Tables in `fused_uvm_caching` have a cache on the GPU. The rows that the next batch reads are
    fetched once the optimizer's step is queued, while the host prepares the batch after it. The
    results are those of a plain loop, bit for bit.

    Args:
        model: as for `TrainPipelineSparseDist`, and so on.
        optimizer: of what does not update itself in backward.
        device: where batches go.
        execute_all_batches: whether the batches under way are trained on when the data end.
        apply_jit: means nothing.
        pipeline_postproc: means nothing.
        custom_model_fwd: called with a batch in place of the model.
        features: what makes features that the model makes itself.
    """

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
        features: Mapping[str, Maker] | None = None,
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
            self._flying[0].prefetch()


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist[In, Out]):
    """As `TrainPipelineSparseDist`; the next batch is looked up at the end of a step.

    Its embeddings travel while data are read and the model's dense layers begin. The results are
    those of a plain loop, bit for bit.

    Args:
        model: as for `TrainPipelineSparseDist`, and so on.
        optimizer: of what does not update itself in backward.
        device: where batches go.
        execute_all_batches: whether the batches under way are trained on when the data end.
        apply_jit: means nothing.
        pipeline_postproc: means nothing.
        custom_model_fwd: called with a batch in place of the model.
        features: what makes features that the model makes itself.
    """

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
        features: Mapping[str, Maker] | None = None,
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
            self._flying[0].look_up()


class TrainPipelineSemiSync(TrainPipelineSparseDist[In, Out]):
    """As `TrainPipelineSparseDist`; the next batch is looked up before backward.

    Its embeddings travel behind the backward pass of the batch that trains, so they lack that
    batch's update: embeddings are one step old. Dense layers are up to date.

    Args:
        model: as for `TrainPipelineSparseDist`, and so on.
        optimizer: of what does not update itself in backward.
        device: where batches go.
        execute_all_batches: whether the batches under way are trained on when the data end.
        apply_jit: means nothing.
        start_batch: the step from which on it does so, counted from 0: training begins in step.
        stash_gradients: means nothing.
        pipeline_postproc: means nothing.
        custom_model_fwd: called with a batch in place of the model.
        strict: means nothing.
        dmp_collection_sync_interval_batches: steps between two calls of the model's `sync`.
        features: what makes features that the model makes itself.
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
        features: Mapping[str, Maker] | None = None,
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
        """Return whether the next step looks up early."""
        return self._steps >= self.start_batch

    def _before_backward(self) -> None:
        if self._flying and self.is_semi_sync():
            self._flying[0].look_up()


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """As `TrainPipelineSparseDist`, without training: no gradients, no updates.

    It may run in the middle of training, with a training pipeline that has batches under way for
    the same model: no state of a batch is in the model.

    Args:
        model: as for `TrainPipelineSparseDist`; call its `eval()`.
        optimizer: means nothing.
        device: where batches go.
        apply_jit: means nothing.
        pipeline_postproc: means nothing.
        features: what makes features that the model makes itself.
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
        features: Mapping[str, Maker] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device, features=features)

    @torch.no_grad()
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Evaluate one batch; see `TrainPipeline`."""
        return super().progress(dataloader_iter)

    def _step(self, flight: TrainPipelineContext) -> Out:
        return self._call(flight)[1]  # type: ignore[no-any-return]


_NONE: Any = object()


def not_an_iterator(name: str, source: object) -> NoReturn:
    """Raise TypeError: `progress` of a pipeline was given something else.

    Args:
        name: of the pipeline's class.
        source: what was given.
    """
    raise TypeError(
        f"{name}.progress: dataloader_iter must be an iterator; received {shown(source)}. Make one "
        "for each epoch: iter(dataloader)."
    )


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _event(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event

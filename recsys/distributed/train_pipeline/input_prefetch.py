"""Input stages of sharded modules that start before the model is called.

A model calls its sharded modules one after another, and each call sends a header of its own. If the
features of modules are among the model's inputs, their input stages can start together: just before
the model runs, or several batches early in a pipeline. The first forward pass shows which input
each module reads, by object identity; no tracing is needed. Later passes send these inputs early.

Features that the model computes (permuted, weighted or split) are not among the inputs. Their
module sends them when it is called, unless the user declares a function that computes them. All
ranks must observe the same inputs; they compare them once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import nn

from recsys.base import step_stages
from recsys.base.arguments import MissingKeyError
from recsys.base.step_stages import Stage
from recsys.distributed.ranks.agreement import agree
from recsys.distributed.ranks.comm import LazyAwaitable, set_context
from recsys.distributed.sharded.collection import (
    ShardedCollection,
    prefetched_output,
    receive_ids,
    send_ids,
)
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.stages.header import EndOfData, FeaturesAbsentError
from recsys.distributed.stages.input_dist import start_together
from recsys.sparse import KeyedJaggedTensor

_Path: TypeAlias = tuple[object, ...]
"""Path of one input: indices, keys and attribute names."""
FeaturesFunction: TypeAlias = Callable[..., KeyedJaggedTensor]
"""Function that computes the features of a module from the inputs of the model."""


@final
class InputPrefetcher:
    """Starts the input stages of a model's sharded collections before the model runs.

    Args:
        model: The model.
        functions: Path of a sharded collection -> function that computes its features, for
            features that the model computes.

    Raises:
        KeyError: If a path of `functions` is not a sharded collection.
    """

    def __init__(
        self, model: nn.Module, functions: Mapping[str, FeaturesFunction] = MappingProxyType({})
    ) -> None:
        self.collections = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, ShardedCollection)
        }
        unknown = functions.keys() - self.collections.keys()
        if unknown:
            raise MissingKeyError(
                f"features must name sharded modules of the model, {sorted(self.collections)}; "
                f"received {sorted(unknown)}."
            )
        self._functions = {self.collections[path]: call for path, call in functions.items()}
        # of each collection that starts early; None before the first pass
        self._sources: dict[ShardedCollection, _Path | FeaturesFunction] | None = None
        self.reasons: dict[str, str] = {}
        """Path of each collection that sends when it is called -> the reason."""

    @property
    def has_observed(self) -> bool:
        """True after the first forward pass; inputs can start early then."""
        return self._sources is not None

    def __len__(self) -> int:
        """Return the number of collections that start early, or may before the first pass."""
        return len(self.collections if self._sources is None else self._sources)

    def around(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Start the input stages together; the block calls the model with the same inputs.

        Args:
            args: Inputs of the model.
            kwargs: Inputs of the model by name.

        Raises:
            Exception: On every rank, the error of any rank's features.
        """
        if len(self) < 2 or prefetched_output.get() is not None or torch.compiler.is_compiling():
            return nullcontext()
        if self._sources is None:
            return self.observe(args, kwargs)
        return self.start(args, kwargs).consume()

    @contextmanager
    def observe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Record which input each collection reads in the forward pass inside the block.

        Args:
            args: Inputs of the model.
            kwargs: Inputs of the model by name.

        Raises:
            ValueError: If a declared function and the model compute different features; on every
                rank, if modules read different inputs on some ranks.
        """
        paths = {module: path for path, module in self.collections.items()}
        reads: dict[ShardedCollection, list[int]] = {module: [] for module in paths}

        def record(module: ShardedCollection, features: KeyedJaggedTensor) -> None:
            if module in reads:
                reads[module].append(id(features))
                if module in self._functions:
                    _check_equal(paths[module], self._functions[module](*args, **kwargs), features)

        inputs = {id(features): path for path, features in _features_in((args, kwargs))}
        with set_context(prefetched_output, record):
            yield
        sources: dict[ShardedCollection, _Path | FeaturesFunction] = {}
        reasons = {}
        for path, module in self.collections.items():
            read = reads[module]
            if len(read) != 1:
                reasons[path] = f"is called {len(read)} times" if read else "is not called"
            elif source := self._functions.get(module) or inputs.get(read[0]):
                sources[module] = source
            else:
                reasons[path] = "reads features that the model computes"
        self._agree(sources, reasons)
        self._sources, self.reasons = sources, reasons

    def _agree(
        self, sources: Mapping[ShardedCollection, object], reasons: Mapping[str, str]
    ) -> None:
        """Raise an error on every rank if ranks observe different inputs; later they would hang."""
        facts_by_group: dict[dist.ProcessGroup, dict[str, str]] = {}
        for path, module in self.collections.items():
            if module.env.process_group is not None:
                source = sources.get(module)
                read = f"reads {_name_of(source)}" if isinstance(source, tuple) else "is declared"
                facts = facts_by_group.setdefault(module.env.process_group, {})
                facts[f"module {path!r}"] = f"one that {reasons.get(path, read)}"
        for group, facts in facts_by_group.items():
            agree(group, "read the first batch", facts, None, _differs)

    def start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PrefetchedBatch:
        """Start the input stages of one batch, with one header.

        If the inputs lack the features of a module on some ranks, every rank raises an error when
        the batch is consumed. If they lack them on all ranks, the module sends when it is called.

        Args:
            args: Inputs of the model.
            kwargs: Inputs of the model by name.
        """
        assert self._sources is not None
        inputs = dict(_features_in((args, kwargs)))
        batches: dict[ShardedCollection, KeyedJaggedTensor] = {}
        contexts = {}
        paths = [module.input_stage.module.path for module in self._sources]
        with step_stages.running((Stage.INPUT_DIST, ", ".join(paths))):
            for module, source in self._sources.items():
                features: KeyedJaggedTensor | Exception
                if not isinstance(source, tuple):
                    features = _call(source, args, kwargs)
                elif source in inputs:
                    features = batches[module] = inputs[source]
                else:
                    features = self._absent(module, _name_of(source), args, kwargs)
                contexts[module] = module.input_stage.prepare(features)
            if contexts:
                start_together(list(contexts.values()))
        return PrefetchedBatch(self, contexts, batches)

    def _absent(
        self,
        module: ShardedCollection,
        source: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> FeaturesAbsentError:
        path = next(path for path, other in self.collections.items() if other is module)
        arguments = [
            *map(_structure_of, args),
            *(f"{k}={_structure_of(v)}" for k, v in kwargs.items()),
        ]
        return FeaturesAbsentError(
            "Batches must have the same structure on all ranks. Module "
            f"{path!r} reads its features from {source} of the model's inputs; received inputs "
            f"without a KeyedJaggedTensor there: {', '.join(arguments)}. Give every rank batches "
            "like its first one."
        )

    def leave_out(self, module: ShardedCollection) -> None:
        """Let a module send when it is called, because the model no longer reads its source."""
        assert self._sources is not None
        self._sources.pop(module, None)


@final
class PrefetchedBatch:
    """A batch whose input stages started before the model is called.

    Args:
        prefetcher: Its prefetcher.
        contexts: Context of each module.
        given: Features of each module that reads an input of the model.
    """

    def __init__(
        self,
        prefetcher: InputPrefetcher,
        contexts: dict[ShardedCollection, BatchContext],
        given: Mapping[ShardedCollection, KeyedJaggedTensor],
    ) -> None:
        self._prefetcher, self.contexts, self._given = prefetcher, contexts, given
        self._outputs: dict[ShardedCollection, tuple[BatchContext, LazyAwaitable[Any]]] = {}
        self._is_sent = self._has_ids = False
        self._error: Exception | None = None

    def send(self) -> None:
        """Wait for the headers and start sending ids, once.

        Errors in the batch of any rank are raised by `consume`.
        """
        if self._is_sent:
            return
        self._is_sent = True
        try:
            for ctx in self.contexts.values():
                send_ids(ctx)
        except Exception as error:
            self._error = error
        self.contexts = {module: ctx for module, ctx in self.contexts.items() if not ctx.is_absent}

    def look_up(self) -> None:
        """Look up the current rows and start sending embeddings."""
        self._follow_tables()
        if self._error is None:
            for module, ctx in self.contexts.items():
                self._outputs[module] = ctx, self._output_of(module, ctx)
            self.contexts.clear()

    def _output_of(self, module: ShardedCollection, ctx: BatchContext) -> LazyAwaitable[Any]:
        return module.compute_and_output_dist(ctx, ctx if self._has_ids else receive_ids(ctx))

    def prefetch(self) -> None:
        """Fetch the rows of the batch into caches."""
        self._follow_tables()
        if self._error is None and not self._has_ids:
            self._has_ids = True
            for module, ctx in self.contexts.items():
                module.prefetch(receive_ids(ctx))

    def _follow_tables(self) -> None:
        """Send the ids, again if their tables have moved to other ranks since the first time."""
        self.send()
        if self._error is not None:
            return
        moved = {}
        for module, ctx in self.contexts.items():
            if ctx.stage is not module.input_stage:
                if not self._has_ids:
                    receive_ids(ctx)  # finish the exchange
                moved[module] = _prepare_again(module, ctx)
        for module, (ctx, output) in self._outputs.items():
            if ctx.stage is not module.input_stage:
                output.wait()
                moved[module] = _prepare_again(module, ctx)
        if not moved:
            return
        start_together(list(moved.values()))
        for module, ctx in moved.items():
            send_ids(ctx)
            if self._has_ids:
                receive_ids(ctx)
            self._outputs.pop(module, None)
            self.contexts[module] = ctx

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of pending exchanges until the current work of a stream is done."""
        for ctx in self.contexts.values():
            ctx.record_stream(stream)

    @contextmanager
    def consume(self) -> Iterator[None]:
        """Pass the results to the sharded modules in the forward pass inside the block.

        Raises:
            Exception: On every rank, the error of any rank's batch.
        """
        self._follow_tables()
        if self._error is not None:
            raise self._error
        contexts, outputs, inputs = self.contexts, self._outputs, self._given

        def find_output(module: ShardedCollection, features: KeyedJaggedTensor) -> object:
            if module in inputs and inputs[module] is not features:
                return None
            ctx = contexts.pop(module, None)
            if ctx is None:
                return outputs.pop(module, (None, None))[1]
            return self._output_of(module, ctx)

        with set_context(prefetched_output, find_output):
            yield
        for module in (*contexts, *outputs):
            self._prefetcher.leave_out(module)
        self.drop()

    def drop(self) -> None:
        """Finish all exchanges, also those not started yet, and drop the results."""
        self.send()
        if self._error is None and not self._has_ids:
            for ctx in self.contexts.values():
                receive_ids(ctx)
        self.contexts.clear()
        self._outputs.clear()


def _prepare_again(module: ShardedCollection, ctx: BatchContext) -> BatchContext:
    """Return a new context of the same batch for the current location of the tables."""
    stage = module.input_stage
    sent, stage.end_of_data = stage.end_of_data, EndOfData()  # the first context has sent it
    try:
        assert ctx.given is not None
        return stage.prepare(ctx.given)
    finally:
        stage.end_of_data = sent


def _call(
    function: FeaturesFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> KeyedJaggedTensor | Exception:
    try:
        return function(*args, **kwargs)
    except Exception as error:  # the input stage raises it on every rank
        return error


def _check_equal(path: str, computed: KeyedJaggedTensor, read: KeyedJaggedTensor) -> None:
    ours, theirs = (
        (features.lengths(), features.values(), features.weights_or_none())
        for features in (computed, read)
    )
    same = [
        mine is other if mine is None or other is None else torch.equal(mine, other)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    if computed.keys() != read.keys() or not all(same):
        raise ValueError(
            f"The function in features for module {path!r} must compute "
            f"the features that the model passes to it; received {computed.keys()} with "
            f"{computed.values().numel()} ids instead of {read.keys()} with "
            f"{read.values().numel()} ids. Call the same function in forward."
        )


def _name_of(path: _Path) -> str:
    kind, first, *inner = path
    name = f"argument {first}" if kind == 0 else f"argument {first!r}"
    return name + "".join(f"[{key!r}]" for key in inner)


def _differs(text: str) -> ValueError:
    return ValueError(f"Batches must have the same structure on all ranks. {text}")


def _structure_of(given: object, depth: int = 2) -> str:
    """Describe an input for a message: the types in its containers, and the keys."""
    if isinstance(given, Mapping) and depth:
        items = (f"{key!r}: {_structure_of(value, depth - 1)}" for key, value in given.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(given, tuple | list) and depth:
        return f"({', '.join(_structure_of(value, depth - 1) for value in given)})"
    return type(given).__name__


def _features_in(given: object, path: _Path = ()) -> Iterator[tuple[_Path, KeyedJaggedTensor]]:
    """Yield the path and value of each KeyedJaggedTensor in containers and dataclasses."""
    if isinstance(given, KeyedJaggedTensor):
        yield path, given
        return
    items: Iterable[tuple[object, object]] = ()
    if isinstance(given, Mapping):
        items = given.items()
    elif isinstance(given, tuple | list):
        items = enumerate(given)
    elif dataclasses.is_dataclass(given):
        items = ((f.name, getattr(given, f.name, None)) for f in dataclasses.fields(given))
    for key, value in items:
        yield from _features_in(value, (*path, key))

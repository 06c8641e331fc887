"""The input stages of sharded modules start before the model is called.

A model calls its sharded modules one after another, and each would send its own header. Where the
modules read features that the model is given as they are, all their input stages can start
together before the model runs: just before, or batches before, as pipelines do. Which features a
module reads is observed, not traced: the first forward pass runs plainly and notes which of the
model's inputs each module was called with, by object identity; from the second on those inputs are
sent ahead.

What a module reads of the model's own making (features that the model permuted, weighted or split)
is not among the inputs; such a module sends when it is called, as in the first pass, unless the
user declares how its features are made. All ranks must observe the same, and compare it once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import nn

from recsys import step_stages
from recsys.distributed.ranks.agreement import agree
from recsys.distributed.ranks.comm import LazyAwaitable, set_context
from recsys.distributed.sharded.collection import ShardedCollection, started_ahead
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.stages.header import EndOfData, FeaturesAbsentError
from recsys.distributed.stages.input_dist import start_together
from recsys.sparse import KeyedJaggedTensor
from recsys.step_stages import Stage

_Path: TypeAlias = tuple[object, ...]
"""How to reach one input: positions, keys and names of attributes."""
Maker: TypeAlias = Callable[..., KeyedJaggedTensor]
"""Makes a module's features of what the model is called with."""


@final
class InputsAhead:
    """Starts the input stages of a model's sharded collections before the model runs.

    Args:
        collections: by their paths in the model.
        makers: of the features of collections, by their paths, that the model makes itself.

    Raises:
        KeyError: if `makers` names no collection.
    """

    @classmethod
    def of_model(cls, model: nn.Module, makers: Mapping[str, Maker] | None = None) -> InputsAhead:
        """Make one for the sharded collections of a model."""
        found = {
            path: part
            for path, part in model.named_modules()
            if isinstance(part, ShardedCollection)
        }
        return cls(found, makers or {})

    def __init__(
        self, collections: Mapping[str, ShardedCollection], makers: Mapping[str, Maker]
    ) -> None:
        self.collections = collections
        unknown = makers.keys() - collections.keys()
        if unknown:
            raise KeyError(
                f"features must name sharded modules of the model, {sorted(collections)}; received "
                f"{sorted(unknown)}."
            )
        self._made = {collections[path]: make for path, make in makers.items()}
        self._paths: dict[ShardedCollection, _Path] | None = None  # None: not observed yet
        self.reasons: dict[str, str] = {}
        """Why collections send when they are called, by path; known once a pass was observed."""

    @property
    def has_observed(self) -> bool:
        """Whether a forward pass was observed, so that inputs can start ahead."""
        return self._paths is not None

    def __len__(self) -> int:
        """Return how many collections start ahead; before the first pass, how many may."""
        return len(self.collections if self._paths is None else [*self._paths, *self._made])

    @contextmanager
    def around(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Surround one forward pass: its own input stages start together, just before it.

        Args:
            args: the model's inputs.
            kwargs: the model's inputs by name.

        Raises:
            Exception: what is wrong with the features that are sent ahead, on every rank.
        """
        if len(self) < 2 or started_ahead.get() is not None or torch.compiler.is_compiling():
            yield
        elif self._paths is None:
            with self.observe(args, kwargs):
                yield
        else:
            with self.start(args, kwargs).used():
                yield

    @contextmanager
    def observe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Surround a forward pass that notes which of the inputs each collection reads.

        Args:
            args: the model's inputs.
            kwargs: the model's inputs by name.

        Raises:
            ValueError: if a declared maker makes other features than the model; on every rank, if
                modules read other inputs on some ranks.
        """
        calls: list[tuple[ShardedCollection, int]] = []
        names = {module: path for path, module in self.collections.items()}

        def note(module: ShardedCollection, features: KeyedJaggedTensor) -> None:
            if module in names:
                calls.append((module, id(features)))
                if module in self._made:
                    _check_made(names[module], self._made[module](*args, **kwargs), features)

        given = {id(features): path for path, features in _features_in((args, kwargs))}
        with set_context(started_ahead, note):
            yield
        paths: dict[ShardedCollection, _Path] = {}
        reasons = {}
        for module, path in names.items():
            read = [features for called, features in calls if called is module]
            if len(read) != 1:
                reasons[path] = f"is called {len(read)} times" if read else "is not called"
            elif module not in self._made:
                if read[0] in given:
                    paths[module] = given[read[0]]
                else:
                    reasons[path] = "reads features that the model makes"
        self._agree(paths, reasons)
        self._paths, self.reasons = paths, reasons
        self._made = {m: make for m, make in self._made.items() if names[m] not in reasons}

    def _agree(self, paths: Mapping[ShardedCollection, _Path], reasons: Mapping[str, str]) -> None:
        """Raise, on every rank alike, if ranks observed different things: they would hang later."""
        of_groups: dict[dist.ProcessGroup, dict[str, str]] = {}
        for path, module in self.collections.items():
            if module.env.process_group is not None:
                found = f"reads {_name_of(paths[module])}" if module in paths else "is declared"
                facts = of_groups.setdefault(module.env.process_group, {})
                facts[f"module {path!r}"] = f"one that {reasons.get(path, found)}"
        for group, facts in of_groups.items():
            agree(group, "read the first batch", facts, None, _differs)

    def start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Started:
        """Start the input stages of one batch: one header for all.

        If the inputs lack the features of a module on some ranks, every rank raises an error when
        the batch is used. If they lack them on all ranks, the module sends when it is called.

        Args:
            args: the model's inputs.
            kwargs: the model's inputs by name.
        """
        assert self._paths is not None
        inputs = dict(_features_in((args, kwargs))) if self._paths else {}
        given = {module: inputs[path] for module, path in self._paths.items() if path in inputs}
        paths = [module.input_stage.module.path for module in (*self._paths, *self._made)]
        with step_stages.running((Stage.INPUT_DIST, ", ".join(paths))):
            contexts = {
                module: module.input_stage.prepare(
                    given[module] if module in given else self._absent(module, args, kwargs)
                )
                for module in self._paths
            }
            for module, make in self._made.items():
                contexts[module] = module.input_stage.prepare(_made_by(make, args, kwargs))
            if contexts:
                start_together(list(contexts.values()))
        return Started(self, contexts, given)

    def _absent(
        self, module: ShardedCollection, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> FeaturesAbsentError:
        assert self._paths is not None
        where = _name_of(self._paths[module])
        path = next(path for path, one in self.collections.items() if one is module)
        given = [*map(_structure_of, args), *(f"{k}={_structure_of(v)}" for k, v in kwargs.items())]
        return FeaturesAbsentError(
            "Batches must have the same structure on all ranks. Module "
            f"{path!r} reads its features from {where} of the model's inputs; received inputs "
            f"without a KeyedJaggedTensor there: {', '.join(given)}. Give every rank batches like "
            "its first one."
        )

    def _leave_out(self, module: ShardedCollection) -> None:
        """Let a module send when it is called from now on: the model takes another way."""
        assert self._paths is not None
        self._paths.pop(module, None)
        self._made.pop(module, None)


@final
class Started:
    """The input stages of one batch, under way before the model is called with it.

    Args:
        ahead: what started them.
        contexts: of each module.
        given: the features of those that are among the model's inputs.
    """

    def __init__(
        self,
        ahead: InputsAhead,
        contexts: dict[ShardedCollection, BatchContext],
        given: Mapping[ShardedCollection, KeyedJaggedTensor],
    ) -> None:
        self._ahead, self.contexts, self._given = ahead, contexts, given
        self._outputs: dict[ShardedCollection, tuple[BatchContext, LazyAwaitable[Any]]] = {}
        self._is_sent = self._has_ids = False
        self._error: Exception | None = None

    def send(self) -> None:
        """Wait for the headers and start sending ids, if that was not done.

        What is wrong with the batch, on any rank, is raised when it is used.
        """
        if self._is_sent:
            return
        self._is_sent = True
        try:
            for ctx in self.contexts.values():
                _send(ctx)
        except Exception as error:
            self._error = error
        self.contexts = {module: ctx for module, ctx in self.contexts.items() if not ctx.is_absent}

    def look_up(self) -> None:
        """Look up and start sending embeddings, with the tables as they are now."""
        self._follow_tables()
        if self._error is None:
            for module, ctx in self.contexts.items():
                self._outputs[module] = ctx, self._output_of(module, ctx)
            self.contexts.clear()

    def _output_of(self, module: ShardedCollection, ctx: BatchContext) -> LazyAwaitable[Any]:
        return module.compute_and_output_dist(ctx, ctx if self._has_ids else _receive(ctx))

    def prefetch(self) -> None:
        """Bring the rows that are looked up into caches."""
        self._follow_tables()
        if self._error is None and not self._has_ids:
            self._has_ids = True
            for module, ctx in self.contexts.items():
                module.prefetch(_receive(ctx))

    def _follow_tables(self) -> None:
        """Send, and send anew what went to ranks whose tables have moved since.

        What is wrong with the batch is raised when it is used.
        """
        self.send()
        if self._error is not None:
            return
        moved = {}
        for module, ctx in self.contexts.items():
            if ctx.stage is not module.input_stage:
                if not self._has_ids:
                    _receive(ctx)  # let them arrive
                moved[module] = _prepared_again(module, ctx)
        for module, (ctx, output) in self._outputs.items():
            if ctx.stage is not module.input_stage:
                output.wait()
                moved[module] = _prepared_again(module, ctx)
        if not moved:
            return
        start_together(list(moved.values()))
        for module, ctx in moved.items():
            _send(ctx)
            if self._has_ids:
                _receive(ctx)
            self._outputs.pop(module, None)
            self.contexts[module] = ctx

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep what is under way in memory until work that is now in a stream is done."""
        for ctx in self.contexts.values():
            ctx.record_stream(stream)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Surround the forward pass that is called with this batch.

        Raises:
            Exception: what is wrong with the batch, on every rank.
        """
        self._follow_tables()
        if self._error is not None:
            raise self._error
        contexts, outputs, given = self.contexts, self._outputs, self._given

        def take(module: ShardedCollection, features: KeyedJaggedTensor) -> object:
            if module in given and given[module] is not features:
                return None
            ctx = contexts.pop(module, None)
            if ctx is None:
                return outputs.pop(module, (None, None))[1]
            return self._output_of(module, ctx)

        with set_context(started_ahead, take):
            yield
        for module in (*contexts, *outputs):
            self._ahead._leave_out(module)
        self.drop()

    def drop(self) -> None:
        """Let what is under way arrive, for a batch that nobody looks up."""
        self.send()
        if self._error is None and not self._has_ids:
            for ctx in self.contexts.values():
                _receive(ctx)
        self.contexts.clear()
        self._outputs.clear()


def _send(ctx: BatchContext) -> None:
    with step_stages.running((Stage.INPUT_DIST, ctx.stage.module.path)):
        ctx.stage.send(ctx)


def _receive(ctx: BatchContext) -> BatchContext:
    with step_stages.running((Stage.INPUT_DIST, ctx.stage.module.path)):
        return ctx.stage.ids(ctx)


def _prepared_again(module: ShardedCollection, ctx: BatchContext) -> BatchContext:
    """Return the batch of a ctx, prepared for where its tables are now."""
    stage = module.input_stage
    told, stage.end_of_data = stage.end_of_data, EndOfData()  # the first ctx has told of the epoch
    try:
        assert ctx.given is not None
        return stage.prepare(ctx.given)
    finally:
        stage.end_of_data = told


def _made_by(
    make: Maker, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> KeyedJaggedTensor | Exception:
    try:
        return make(*args, **kwargs)
    except Exception as error:  # every rank hears of it
        return error


def _check_made(path: str, made: KeyedJaggedTensor, read: KeyedJaggedTensor) -> None:
    ours, theirs = (
        (features.lengths(), features.values(), features.weights_or_none())
        for features in (made, read)
    )
    same = [
        mine is other if mine is None or other is None else torch.equal(mine, other)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    if made.keys() != read.keys() or not all(same):
        raise ValueError(
            f"The features declared for module {path!r} must be those that the model calls it "
            f"with; received {made.keys()} with {made.values().numel()} ids for {read.keys()} with "
            f"{read.values().numel()}. Let both be made by one function."
        )


def _name_of(path: _Path) -> str:
    kind, first, *inner = path
    name = f"argument {first}" if kind == 0 else f"argument {first!r}"
    return name + "".join(f"[{part!r}]" for part in inner)


def _differs(text: str) -> ValueError:
    return ValueError(f"Batches must have the same structure on all ranks. {text}")


def _structure_of(given: object, depth: int = 2) -> str:
    """Describe an input for a message: the types in its containers, and the keys."""
    if isinstance(given, Mapping) and depth:
        parts = (f"{key!r}: {_structure_of(value, depth - 1)}" for key, value in given.items())
        return f"{{{', '.join(parts)}}}"
    if isinstance(given, tuple | list) and depth:
        return f"({', '.join(_structure_of(value, depth - 1) for value in given)})"
    return type(given).__name__


def _features_in(given: object, path: _Path = ()) -> Iterator[tuple[_Path, KeyedJaggedTensor]]:
    """Yield the features in containers and dataclasses, and how each is reached."""
    if isinstance(given, KeyedJaggedTensor):
        yield path, given
    elif isinstance(given, Mapping):
        for key, value in given.items():
            yield from _features_in(value, (*path, key))
    elif isinstance(given, tuple | list):
        for position, value in enumerate(given):
            yield from _features_in(value, (*path, position))
    elif dataclasses.is_dataclass(given):
        for field in dataclasses.fields(given):
            yield from _features_in(getattr(given, field.name, None), (*path, field.name))

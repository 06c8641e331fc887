"""Several sharded modules of one model share one header exchange.

A model calls its sharded modules one after another, and each would send its own header. Where the
modules read features that the model is given as they are, all their input stages can start
together before the model runs. Which features a module reads is observed, not traced: the first
forward pass runs plainly and notes which of the model's inputs each module was called with, by
object identity; from the second on those inputs are sent ahead.

What a module reads of its own making (features that the model permuted, weighted or split) is not
among the inputs; such a module sends when it is called, as in the first pass. All ranks run the
same model, so they observe the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import nn

from recsys.distributed.ranks.comm import holding
from recsys.distributed.sharded_collection import ShardedCollection, started_ahead
from recsys.distributed.stages.input_dist import Trip, start_together
from recsys.sparse import KeyedJaggedTensor

_Path: TypeAlias = tuple[object, ...]
"""How to reach one input: positions, keys and names of attributes."""


@final
class InputsAhead:
    """Starts the input stages of a model's sharded collections before the model runs.

    Args:
        collections: two at least.
    """

    @classmethod
    def of_model(cls, model: nn.Module) -> InputsAhead | None:
        """Make one for the sharded collections of a model; None if there are fewer than two."""
        found = [part for part in model.modules() if isinstance(part, ShardedCollection)]
        return cls(found) if len(found) > 1 else None

    def __init__(self, collections: Sequence[ShardedCollection]) -> None:
        self._collections = collections
        self._paths: dict[ShardedCollection, _Path] | None = None  # None: not observed yet

    @contextmanager
    def around(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Surround one forward pass.

        Args:
            args: the model's inputs.
            kwargs: the model's inputs by name.

        Raises:
            Exception: what is wrong with the features that are sent ahead, on every rank.
        """
        inputs = self._collections if self._paths is None else self._paths
        if len(inputs) < 2 or torch.compiler.is_compiling():
            yield
        elif self._paths is None:
            with self._observe(args, kwargs):
                yield
        else:
            with self._send(dict(_features_in((args, kwargs)))):
                yield

    @contextmanager
    def _observe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        calls: list[tuple[ShardedCollection, int]] = []

        def note(module: ShardedCollection, features: KeyedJaggedTensor) -> None:
            if module in self._collections:
                calls.append((module, id(features)))

        paths = {id(features): path for path, features in _features_in((args, kwargs))}
        with holding(started_ahead, note):
            yield
        modules = [module for module, _ in calls]
        self._paths = {
            module: paths[read]
            for module, read in calls
            if read in paths and modules.count(module) == 1
        }

    @contextmanager
    def _send(self, inputs: Mapping[_Path, KeyedJaggedTensor]) -> Iterator[None]:
        assert self._paths is not None
        read = {module: inputs[path] for module, path in self._paths.items() if path in inputs}
        if len(read) < 2:
            yield
            return
        trips = [m.input_stage.prepare(features) for m, features in read.items()]
        start_together(trips)
        sent = dict(zip(read, [trip.send() for trip in trips], strict=True))

        def take(module: ShardedCollection, features: KeyedJaggedTensor) -> Trip | None:
            if read.get(module) is not features:
                return None
            return sent.pop(module, None)

        with holding(started_ahead, take):
            yield
        for module, trip in sent.items():  # the model takes another way by now
            trip.ids()
            del self._paths[module]


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

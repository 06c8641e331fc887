"""Stages of a training step, reported to observers: a watchdog, a step report.

The engine enters and leaves stages; without an observer this costs next to nothing. An observer is
called in the thread that runs the stage, which is autograd's for backward passes on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, unique
from threading import current_thread, main_thread
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, final

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

P = ParamSpec("P")
R = TypeVar("R")


@unique
class Stage(Enum):
    """Stages of a training step. The value completes a message: "rank 0 is in lookup of ebc"."""

    DATA = "data"
    INPUT_DIST = "input_dist"
    LOOKUP = "lookup"
    OUTPUT_DIST = "output_dist"
    GRADIENT_DIST = "backward"
    TABLE_UPDATE = "the update of tables"
    OPTIMIZER = "the optimizer's step"
    WAIT = "wait"
    LONG_SECTION = "long section"


class Observer(Protocol):
    """Receives the stages of this process."""

    def enter(self, stage: Stage, subject: str) -> None:
        """Record the begin of a stage.

        Args:
            stage: The stage. It may begin inside another one.
            subject: The path of the module; for `WAIT` the purpose of the exchange, and for
                `LONG_SECTION` its name. "" if there is none.
        """

    def leave(self, stage: Stage, subject: str, *, failed: bool) -> None:
        """Record the end of a stage; `failed` if by an exception."""

    def exchange_started(self, pending: Any) -> None:
        """Record the begin of an asynchronous exchange, a `Pending`."""

    def exchange_finished(self, pending: Any) -> None:
        """Record the end of the wait for an exchange."""


_observers: tuple[Observer, ...] = ()


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Report the stages inside the block, and the steps of all optimizers, to an observer."""
    global _observers
    _observers = (*_observers, observer)
    enter, leave = observer.enter, observer.leave
    handles = [
        register_optimizer_step_pre_hook(lambda *_: enter(Stage.OPTIMIZER, "")),
        register_optimizer_step_post_hook(lambda *_: leave(Stage.OPTIMIZER, "", failed=False)),
    ]
    try:
        yield
    finally:
        _observers = tuple(other for other in _observers if other is not observer)
        for handle in handles:
            handle.remove()


@final
class running:
    """Context manager: the block runs as a stage."""

    __slots__ = ("_observers", "_stage", "_subject")

    def __init__(self, of: Stage, subject: str = "") -> None:
        self._stage, self._subject = of, subject

    def __enter__(self) -> None:
        self._observers = _observers  # one that is added meanwhile sees no end without a begin
        for observer in self._observers:
            observer.enter(self._stage, self._subject)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for observer in self._observers:
            observer.leave(self._stage, self._subject, failed=kind is not None)


def in_stage(
    of: Stage,
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Decorate a method to run as a stage; `path` of its object is the subject."""

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if not _observers:
                return method(self, *args, **kwargs)
            with running(of, self.path):
                return method(self, *args, **kwargs)

        return call

    return decorate


def look_up(
    path: str, forward: Callable[P, torch.Tensor], /, *args: P.args, **kwargs: P.kwargs
) -> torch.Tensor:
    """Run a lookup as a stage, and its backward, in which tables are updated, as another one."""
    if not _observers:
        return forward(*args, **kwargs)
    with running(Stage.LOOKUP, path):
        output = forward(*args, **kwargs)
    node, update = output.grad_fn, running(Stage.TABLE_UPDATE, path)
    if node is not None:
        node.register_prehook(lambda _: update.__enter__())
        node.register_hook(lambda *_: update.__exit__(None, None, None))
    return output


def exchange_started(pending: Any) -> None:
    """Report the begin of an asynchronous exchange."""
    for observer in _observers:
        observer.exchange_started(pending)


def exchange_finished(pending: Any) -> None:
    """Report the end of the wait for an exchange."""
    for observer in _observers:
        observer.exchange_finished(pending)


@contextmanager
def waiting(purpose: str) -> Iterator[None]:
    """Report that the main thread waits for other ranks; other threads report nothing.

    Args:
        purpose: What the ranks do together.
    """
    if current_thread() is not main_thread():
        yield
        return
    with running(Stage.WAIT, purpose):
        yield


@contextmanager
def long_section(name: str) -> Iterator[None]:
    """Report that the main thread may take long; other threads, such as a save's, report nothing.

    Args:
        name: The section, such as "evaluation".
    """
    if current_thread() is not main_thread():
        yield
        return
    with running(Stage.LONG_SECTION, name):
        yield

"""Stages of a training step, reported to observers: a watchdog, a step report.

The engine enters and leaves stages; without an observer this costs next to nothing. An observer is
called in the thread that runs the stage, which is autograd's for backward passes on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, unique
from threading import current_thread, main_thread
from types import TracebackType
from typing import Any, Protocol, TypeAlias, final

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


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
        """Record the start of a stage.

        Args:
            stage: The stage. It may begin inside another one.
            subject: The path of the module; for `WAIT` the purpose of the exchange, and for
                `LONG_SECTION` its name. "" if there is none.
        """

    def leave(self, stage: Stage, subject: str, *, failed: bool) -> None:
        """Record the end of a stage; `failed` if by an exception."""

    def exchange_started(self, pending: Any) -> None:
        """Record the start of an asynchronous exchange, a `Pending`."""

    def exchange_finished(self, pending: Any) -> None:
        """Record the end of the wait for an exchange."""


Place: TypeAlias = tuple[Stage, str]
"""A stage and its subject."""
observers: tuple[Observer, ...] = ()
"""Receivers of the stages. Guard calls that observers alone need: `if step_stages.observers:`."""
running: Callable[[Place], AbstractContextManager[object]] = nullcontext
"""Context manager of a block that runs as a stage: `with step_stages.running((stage, subject)):`.
It is `nullcontext` without observers. Read it from the module at each use."""


@final
class _Running:
    """Reports the start and the end of a block."""

    __slots__ = ("_observers", "_place")

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> None:
        self._observers = observers  # observers that are added later get no end without a start
        for observer in self._observers:
            observer.enter(*self._place)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for observer in self._observers:
            observer.leave(*self._place, failed=kind is not None)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Report the stages inside the block, and the steps of all optimizers, to an observer."""
    _set_observers((*observers, observer))
    enter, leave = observer.enter, observer.leave
    handles = [
        register_optimizer_step_pre_hook(lambda *_: enter(Stage.OPTIMIZER, "")),
        register_optimizer_step_post_hook(lambda *_: leave(Stage.OPTIMIZER, "", failed=False)),
    ]
    try:
        yield
    finally:
        _set_observers(tuple(other for other in observers if other is not observer))
        for handle in handles:
            handle.remove()


def _set_observers(given: tuple[Observer, ...]) -> None:
    global observers, running
    observers, running = given, _Running if given else nullcontext


def report_update(output: torch.Tensor, path: str) -> None:
    """Report the backward of a lookup, in which tables are updated, as a stage.

    Args:
        output: The output of the lookup.
        path: The path of the module.
    """
    node, update = output.grad_fn, _Running((Stage.TABLE_UPDATE, path))
    if node is not None:
        node.register_prehook(lambda _: update.__enter__())
        node.register_hook(lambda *_: update.__exit__(None, None, None))


def exchange_started(pending: Any) -> None:
    """Report the start of an asynchronous exchange."""
    for observer in observers:
        observer.exchange_started(pending)


def exchange_finished(pending: Any) -> None:
    """Report the end of the wait for an exchange."""
    for observer in observers:
        observer.exchange_finished(pending)


@contextmanager
def waiting(purpose: str) -> Iterator[None]:
    """Report that the main thread waits for other ranks; other threads report nothing.

    Args:
        purpose: The purpose of the exchange.
    """
    with _running_on_main_thread(Stage.WAIT, purpose):
        yield


@contextmanager
def long_section(name: str) -> Iterator[None]:
    """Report a long section of the main thread; other threads, such as a save's, report nothing.

    Args:
        name: The section, such as "evaluation".
    """
    with _running_on_main_thread(Stage.LONG_SECTION, name):
        yield


def _running_on_main_thread(stage: Stage, subject: str) -> AbstractContextManager[object]:
    return running((stage, subject)) if current_thread() is main_thread() else nullcontext()

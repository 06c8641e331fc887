"""Errors of checkpoints: ordinary exceptions, the same on every rank."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from recsys.contact import explain
from recsys.distributed.ranks.comm import gather_objects, met_outside
from recsys.distributed.ranks.env import ShardingEnv

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or read, or lacks something that was to be loaded."""


def on_every_rank(env: ShardingEnv, what: str, work: Callable[[], T]) -> list[T]:
    """Call a function on every rank; an error on one of them is raised on all.

    Every rank must call it. The results are exchanged in one collective: keep them small.

    Args:
        env: the ranks.
        what: leads errors that do not say where they come from, such as "Saving /runs/1".
        work: must not exchange anything itself, but errors, of which the other ranks hear here.

    Returns:
        What it returned on each rank.

    Raises:
        CheckpointError: the error of the lowest failing rank, led by its number. A TypeError or
            ValueError stays one.
    """
    result, error = None, None
    try:
        with met_outside():
            result = work()
    except Exception as raised:  # whatever it is: the other ranks wait
        error = raised
    mine = (result, None if error is None else (type(error).__name__, _text_of(what, error)))
    outcomes = gather_objects(env.process_group, f"meet in the stage '{what}'", mine)
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            name, text = failure
            kind = {"TypeError": TypeError, "ValueError": ValueError}.get(name, CheckpointError)
            failed = kind(f"On rank {rank}: {text}" if env.world_size > 1 else text)
            failed._of_rank = rank  # type: ignore[attr-defined]  # see comm.raise_failure
            raise failed from error
    return [result for result, _ in outcomes]  # type: ignore[misc]  # no failure: all are results


def _text_of(what: str, error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, KeyError) and error.args:  # str() would quote it
        return f"{what}: {error.args[0]}"
    named = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
    return f"{what}: {named}{error}"


@contextlib.contextmanager
def failures_named(message: str, env: ShardingEnv, what: str) -> Iterator[None]:
    """Raise what fails inside `torch.distributed.checkpoint` as a CheckpointError.

    Its own exception, raised alike on every rank, is no `Exception`: it would pass the
    `except Exception` of a training loop. An interrupt of the user's stays one.

    Args:
        message: leads the reasons; names the path.
        env: the ranks.
        what: they do, for messages, such as "save a checkpoint".
    """
    try:
        yield
    except CheckpointException as error:
        if any(isinstance(failure[0], KeyboardInterrupt) for failure in error.failures.values()):
            raise KeyboardInterrupt from None
        reasons = "; ".join(
            f"rank {rank}: {_reason(failure[0])}"
            for rank, failure in sorted(error.failures.items())
        )
        failed = CheckpointError(f"{message} {reasons}")
        failed._of_rank = min(error.failures)  # type: ignore[attr-defined]
        raise failed from error
    except RuntimeError as error:  # such as a process group whose other end is gone
        told = explain(error, env.process_group, what) if env.world_size > 1 else error
        raise CheckpointError(f"{message} {_reason(told)}") from error
    except Exception as error:
        raise CheckpointError(f"{message} {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    named = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return f"{named}{error}"


def without_expected_warnings(alone: bool) -> contextlib.AbstractContextManager[Any]:
    """Hide the warning that one process is taken for one.

    Args:
        alone: whether it is; else nothing is touched, as other threads may be warned meanwhile.
    """
    return _without_warnings() if alone else contextlib.nullcontext()


@contextlib.contextmanager
def _without_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.distributed is disabled, unavailable or unini")
        yield

"""Errors of checkpoints: ordinary exceptions, the same on every rank."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from recsys.base.contact import explain
from recsys.distributed.ranks.agreement import caller_handles_errors, text_of
from recsys.distributed.ranks.comm import gather_objects
from recsys.distributed.ranks.env import ShardingEnv

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or read, or lacks requested values."""


def on_every_rank(env: ShardingEnv, what: str, work: Callable[[], T]) -> list[T]:
    """Call a function on every rank, and raise an error of one rank on all ranks.

    Every rank must call it. The results are exchanged in one collective: keep them small.

    Args:
        env: The ranks.
        what: Start of errors that do not name their source, such as "Saving /runs/1".
        work: The function. It must not run collectives; its errors are exchanged here.

    Returns:
        The result of each rank.

    Raises:
        CheckpointError: The error of the lowest failing rank, led by the rank's number. A
            TypeError or ValueError keeps its type.
    """
    result, error = None, None
    try:
        with caller_handles_errors():
            result = work()
    except Exception as raised:  # any error: the other ranks wait
        error = raised
    mine = (result, None if error is None else (type(error).__name__, _text_of(what, error)))
    outcomes = gather_objects(env.process_group, f"meet in the stage '{what}'", mine)
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            name, text = failure
            kind = {"TypeError": TypeError, "ValueError": ValueError}.get(name, CheckpointError)
            failed = kind(f"On rank {rank}: {text}" if env.world_size > 1 else text)
            failed._of_rank = rank  # type: ignore[attr-defined]  # see agreement.raise_failure
            raise failed from error
    return [result for result, _ in outcomes]  # type: ignore[misc]  # no failure: all are results


def _text_of(what: str, error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    is_plain = isinstance(error, TypeError | ValueError | KeyError)
    return f"{what}: {'' if is_plain else f'{type(error).__name__}: '}{text_of(error)}"


@contextlib.contextmanager
def failures_named(message: str, env: ShardingEnv, what: str) -> Iterator[None]:
    """Raise failures inside `torch.distributed.checkpoint` as a CheckpointError.

    Its own exception, the same on every rank, is not an `Exception`: it would pass the
    `except Exception` of a training loop. An interrupt of the user's remains an interrupt. The
    warning that a single process is assumed is hidden.

    Args:
        message: Start of the error; names the path.
        env: The ranks.
        what: Action in messages, such as "save a checkpoint".
    """
    try:
        with contextlib.ExitStack() as stack:
            if env.process_group is None:  # otherwise other threads may receive warnings meanwhile
                stack.enter_context(warnings.catch_warnings())
                expected = ".*torch.distributed is disabled, unavailable or unini"
                warnings.filterwarnings("ignore", expected)
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
    except RuntimeError as error:  # for example a process group that lost a rank
        explained = explain(error, env.process_group, what) if env.world_size > 1 else error
        raise CheckpointError(f"{message} {_reason(explained)}") from error
    except Exception as error:
        raise CheckpointError(f"{message} {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    named = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return f"{named}{error}"

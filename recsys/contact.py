"""What ranks say when contact with another is lost in an exchange."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist


class LostContactError(RuntimeError):
    """Another rank is gone; every rank that is left finds out by itself."""

    _raised_on_all_ranks = True


@contextmanager
def explained(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """Run exchanges; argument as of `explain`.

    Raises:
        LostContactError: if contact with another rank is lost.

    Example:
        >>> with explained(None, "add up numbers"):
        ...     raise RuntimeError("sizes differ")
        Traceback (most recent call last):
        ...
        RuntimeError: sizes differ
    """
    try:
        yield
    except RuntimeError as error:
        raise_explained(error, group, what)


ask_watchdog: Callable[[], str] | None = None
"""Function that returns the reason of a lost connection; None without an open watchdog."""
_WAIT_FOR_SIGNS = 5.0
"""Seconds in which ranks that lost contact say so, to find those that do not."""

_CONNECTION = re.compile("gloo/transport|NCCL|Connection (?:reset|closed)|Broken pipe|Timed out")
"""What errors of process groups say when a rank is lost, beside their own type."""


def explain(error: RuntimeError, group: dist.ProcessGroup | None, what: str) -> RuntimeError:
    """Return an error of an exchange; if contact was lost, one that says when, and with which.

    A rank that is left over fails, too, sooner or later, and says so in the store of the process
    group; the lost one is among those that say nothing.

    Args:
        error: of the exchange.
        group: the ranks.
        what: the ranks were to do.
    """
    if not is_lost_contact(error):
        return error  # such as memory that ran out
    own = dist.get_rank()
    who = ask_watchdog() if ask_watchdog is not None else _ask_ranks(group, own)
    return LostContactError(
        f"Rank {own} of {dist.get_world_size()} lost contact with the others when the ranks were "
        f"to {what}. {who}: look for the first error in the logs of the ranks; a process may have "
        f"been killed, or be out of memory. The exchange said: {error}"
    )


def is_lost_contact(error: BaseException) -> bool:
    """Return whether an error says that another rank is lost, as process groups say it, too."""
    if isinstance(error, LostContactError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_CONNECTION.search(str(error)))


def _ask_ranks(group: dist.ProcessGroup | None, own: int) -> str:
    try:
        silent = _silent_ranks(group, own)
    except Exception:  # the store is gone: rank 0 holds it, unless torchrun does
        silent = [0] if own else []
    if silent:
        return f"Nothing is heard of {'rank' if len(silent) == 1 else 'ranks'} {_listed(silent)}"
    return "The failed rank could not be identified"


def raise_explained(error: RuntimeError, group: dist.ProcessGroup | None, what: str) -> NoReturn:
    """Raise what `explain` returns; the arguments are the same.

    Args:
        error: of the exchange, which is being handled.
        group: the ranks.
        what: the ranks were to do.

    Raises:
        LostContactError: caused by the error, if contact with another rank is lost.
        RuntimeError: the error itself, if not.
    """
    told = explain(error, group, what)
    if told is error:
        raise error
    raise told from error


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _silent_ranks(group: dist.ProcessGroup | None, own: int) -> list[int]:
    """Return the ranks that do not say in time that they lost contact, too."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"recsys/lost_contact/{own}", "1")
    end = time.monotonic() + _WAIT_FOR_SIGNS
    silent = dist.get_process_group_ranks(group)
    while silent and time.monotonic() < end:
        silent = [r for r in silent if not store.check([f"recsys/lost_contact/{r}"])]
        time.sleep(0.1)
    return silent

"""Error reports for exchanges that lose contact with another rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist


class LostContactError(RuntimeError):
    """Contact with another rank is lost; each remaining rank detects it separately."""

    _raised_on_all_ranks = True


@contextmanager
def explained(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """Run exchanges, and report a lost rank; arguments as for `explain`.

    Raises:
        LostContactError: If contact with another rank is lost.

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


ask_watchdog: Callable[[], str | None] | None = None
"""Function that returns the reason of a lost connection, or None if it is unknown; None without an
open watchdog."""
ask_last_save: Callable[[], str] | None = None
"""Function that returns a sentence about the last save, for the message of a watchdog that ends
this process; None for no sentence."""
_WAIT_FOR_SIGNS = 5.0
"""Seconds to wait for reports of the remaining ranks; the lost rank sends none."""

_CONNECTION = re.compile("gloo/transport|NCCL|Connection (?:reset|closed)|Broken pipe|Timed out")
"""Texts of process group errors after a rank is lost."""


def explain(error: RuntimeError, group: dist.ProcessGroup | None, what: str) -> RuntimeError:
    """Return an error of an exchange, as a LostContactError with the lost rank if contact was lost.

    Each remaining rank also fails and records this in the store of the process group. The lost rank
    records nothing.

    Args:
        error: Error of the exchange.
        group: The ranks of the exchange.
        what: Purpose of the exchange, for the message.
    """
    if not is_lost_contact(error):
        return error  # such as out of memory
    rank = dist.get_rank()
    reason = ask_watchdog() if ask_watchdog is not None else None
    who = reason or _ask_ranks(group, rank)
    return LostContactError(
        f"Rank {rank} of {dist.get_world_size()} lost contact with the others when the ranks were "
        f"to {what}. {who}: look for the first error in the logs of the ranks; a process may have "
        "been killed, or be out of memory, or have ended without this call, which every rank must "
        f"make. Error of the exchange: {error}"
    )


def is_lost_contact(error: BaseException) -> bool:
    """Return whether an error, of ours or of a process group, means that a rank is lost."""
    if isinstance(error, LostContactError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_CONNECTION.search(str(error)))


def _ask_ranks(group: dist.ProcessGroup | None, own: int) -> str:
    try:
        silent = _silent_ranks(group, own)
    except Exception:  # no store: it is on rank 0, unless torchrun has it
        silent = [0] if own else []
    if silent:
        ranks = "rank" if len(silent) == 1 else "ranks"
        return f"Nothing is heard of {ranks} {', '.join(map(str, silent))}"
    return "The failed rank could not be identified"


def raise_explained(error: RuntimeError, group: dist.ProcessGroup | None, what: str) -> NoReturn:
    """Raise the result of `explain`.

    Args:
        error: Error of the exchange, which is being handled.
        group: The ranks of the exchange.
        what: Purpose of the exchange, for the message.

    Raises:
        LostContactError: Caused by the error, if contact with another rank is lost.
        RuntimeError: The error itself, if not.
    """
    explained_error = explain(error, group, what)
    if explained_error is error:
        raise error
    raise explained_error from error


def _silent_ranks(group: dist.ProcessGroup | None, own: int) -> list[int]:
    """Return the ranks that do not record in time that they lost contact."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"recsys/lost_contact/{own}", "1")
    end = time.monotonic() + _WAIT_FOR_SIGNS
    silent = dist.get_process_group_ranks(group)
    while silent and time.monotonic() < end:
        silent = [r for r in silent if not store.check([f"recsys/lost_contact/{r}"])]
        time.sleep(0.1)
    return silent

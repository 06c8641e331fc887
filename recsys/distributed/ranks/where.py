"""Where this process is in its training step, for a watchdog that another thread runs.

The stages assign; nobody reads but a watchdog, once in a while. An assignment makes a new tuple,
with the time, so that a process that comes by the same place again is seen to move.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from time import monotonic

now: tuple[str, str, float] = ("the time before its first step", "", monotonic())
"""The stage, the path of the module it is of ("" for none), and since when."""
waits_to = ""
"""What the process waits to do together with other ranks; "" while it does not wait."""
exchanges = 0
"""How many exchanges the stages have started since a watchdog was opened: the same number on every
rank at the same place."""
declared = ""
"""The long section that the process is in, by its name; "" outside of any."""


@contextmanager
def long_section(name: str) -> Iterator[None]:
    """Declare that what the block does may take long on any rank.

    Args:
        name: what it does, such as "evaluation".
    """
    global declared, now
    if current_thread() is not main_thread():  # a save aside: training goes on
        yield
        return
    outer, before = declared, now[:2]
    declared, now = name, (name, "", monotonic())
    try:
        yield
    except BaseException:
        declared = outer  # it keeps the place, for messages
        raise
    declared, now = outer, (*before, monotonic())


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say that the block waits for other ranks.

    Args:
        what: they do together.
    """
    global waits_to
    if current_thread() is not main_thread():
        yield
        return
    outer, waits_to = waits_to, what
    try:
        yield
    finally:
        waits_to = outer

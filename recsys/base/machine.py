"""Name of this machine, for processes that compare whether they share one."""

from __future__ import annotations

import functools
import socket
from contextlib import suppress
from pathlib import Path


@functools.cache
def machine_name() -> str:
    """Return the host name and Linux's boot id: cloned machine images share their host name.

    Example:
        >>> machine_name() == machine_name()
        True
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(parts)

"""Processes of a job that do not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["end_with_launcher"]

_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> bool:
    """Let this process be killed when the process that started it ends, whatever ended it.

    torchrun's agent ends its workers, unless it is killed itself: then they would train on without
    it, beside those of the next try. Call it at the start of a training script, on the main thread.

    Returns:
        Whether that is so: on Linux, in a process that torchrun started.

    Example:
        >>> end_with_launcher()  # not started by torchrun
        False
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    launcher = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return False
    if os.getppid() != launcher:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)
    return True

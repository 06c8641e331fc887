"""One ending for a training script: an interrupt, a lost rank, a full disk, or another error."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from recsys.contact import is_lost_contact
from recsys.distributed.checkpoint import CheckpointError, newest_version
from recsys.distributed.monitoring.loss_guard import BadLossError
from recsys.kernels.arguments import path_of

_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of SIGINT, as shells report it."""
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def exit_on_error(folder: str | Path, advice: str = "") -> Iterator[None]:
    """End the process after an error, with one message that names the cause and the last save.

    Put it around the training of a script. Ctrl-C exits with code 130, an error with code 1. An
    error whose message has the cause is printed without a traceback: a lost rank, a bad loss, a
    checkpoint that cannot be saved or loaded, a full disk. The process waits for no other rank.

    Args:
        folder: Folder of the trainer.
        advice: End of the message if there is a save, such as the command that resumes.

    Raises:
        TypeError: `folder` is not a path.

    Example:
        >>> with exit_on_error("runs/clicks"):
        ...     pass  # trainer.fit(train, validation)
    """
    saves = path_of("exit_on_error.folder", folder)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        _end(error, saves, advice)


def _end(error: BaseException, folder: Path, advice: str) -> NoReturn:
    is_interrupt = isinstance(error, KeyboardInterrupt)
    if not is_interrupt and not _has_cause(error):
        sys.excepthook(type(error), error, error.__traceback__)
    rank = dist.get_rank() if dist.is_initialized() else 0
    reports = 0 if is_interrupt or is_lost_contact(error) else getattr(error, "_of_rank", rank)
    if rank == reports:
        kind = "" if _has_cause(error) else f"{type(error).__name__}: "
        cause = "interrupted" if is_interrupt else f"{kind}{error}".rstrip(".")
        saves = (newest_version(folder / name) for name in ("last", "best"))
        last = next((save for save in saves if save is not None), None)
        text = f"Training has ended: {cause}. "
        text += f"The last save is {last}." if last else f"Nothing was saved in {folder}."
        print(f"{text} {advice}".rstrip() if last else text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_INTERRUPTED if is_interrupt else 1)  # without waiting for other ranks or threads


def _has_cause(error: BaseException) -> bool:
    """Return whether the message alone explains an error."""
    if isinstance(error, CheckpointError | BadLossError) or is_lost_contact(error):
        return True
    return isinstance(error, OSError) and error.errno in _FULL_DISK

"""One ending for a training script: an interrupt, a lost rank, a full disk, or another error."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, final

import torch.distributed as dist

from recsys.base import contact
from recsys.base.arguments import path_of
from recsys.base.contact import is_lost_contact
from recsys.distributed.checkpoint import CheckpointError, newest_version
from recsys.distributed.monitoring.loss_guard import BadLossError

_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of SIGINT, as shells report it."""
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def exit_on_error(folder: str | Path, advice: str = "") -> Iterator[None]:
    """End the process after an error, with one message that names the cause and the last save.

    Put it around the training of a script, on every rank; rank 0 prints the message. Ctrl-C exits
    with code 130, an error with code 1. An error whose message has the cause is printed without a
    traceback: a lost rank, a bad loss, a checkpoint that cannot be saved or loaded, a full disk.
    The process waits for no other rank. If a `Watchdog` ends it, its message names the last save.

    Args:
        folder: Folder of the trainer.
        advice: End of the message if there is a save, such as the command that resumes.

    Raises:
        TypeError: `folder` is not a path.

    Example:
        >>> with exit_on_error("runs/clicks"):
        ...     pass  # trainer.fit(train, validation)
    """
    last_save = _LastSave(path_of("exit_on_error.folder", folder), advice)
    if last_save.is_first_rank:
        contact.ask_last_save = last_save
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        _end(error, last_save)
    finally:
        contact.ask_last_save = None


@final
class _LastSave:
    """Sentence about the last save; remembers whether it was printed."""

    def __init__(self, folder: Path, advice: str) -> None:
        self._folder, self._advice = folder, advice
        self.is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
        self.is_printed = False

    def __call__(self, error: str = "") -> str:
        self.is_printed = True
        for name in ("last", "best"):
            if (version := newest_version(self._folder / name)) is not None:
                if str(version) in error:  # it cannot be loaded
                    return f"{version} is the last save: move it away, or train in another folder."
                return f"The last save is {version}. {self._advice}".rstrip()
        return f"Nothing was saved in {self._folder}."


def _end(error: BaseException, last_save: _LastSave) -> NoReturn:
    is_interrupt = isinstance(error, KeyboardInterrupt)
    if not is_interrupt and not _has_cause(error):
        sys.excepthook(type(error), error, error.__traceback__)
    if last_save.is_first_rank and not last_save.is_printed:
        kind = "" if _has_cause(error) else f"{type(error).__name__}: "
        cause = "interrupted" if is_interrupt else f"{kind}{error}".rstrip(".")
        unloaded = str(error) if isinstance(error, CheckpointError) else ""
        print(f"Training has ended: {cause}. {last_save(unloaded)}", file=sys.stderr)
    elif not last_save.is_first_rank and _is_of_one_rank(error):
        print(f"Rank {dist.get_rank()}: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_INTERRUPTED if is_interrupt else 1)  # without waiting for other ranks or threads


def _is_of_one_rank(error: BaseException) -> bool:
    """Return whether the first rank cannot report an error, which explains itself."""
    return isinstance(error, BadLossError) or (
        isinstance(error, OSError) and error.errno in _FULL_DISK
    )


def _has_cause(error: BaseException) -> bool:
    """Return whether the message alone explains an error."""
    if isinstance(error, CheckpointError | BadLossError) or is_lost_contact(error):
        return True
    return isinstance(error, OSError) and error.errno in _FULL_DISK

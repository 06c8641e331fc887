"""Preemption: all ranks end after the same step when the scheduler takes their machines."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from recsys.base.arguments import path_of
from recsys.base.checked import checked_but
from recsys.base.contact import explained
from recsys.base.logs import logger
from recsys.distributed.ranks.stop import stop

_B = TypeVar("_B")
_EVERY = 10
"""Batches between two exchanges of a model whose ranks exchange no headers."""


@final
class PreemptedExit(SystemExit):
    """End of a preempted job, on all ranks: exits with `Preemption.exit_code`."""


@final
class Preemption:
    """Ends a job at the request of its scheduler, on all ranks after the same batch.

    A request to one rank is enough. The header of the next batch contains it, so a step needs no
    further exchange. Models on several ranks without a sharded collection, and models in a
    `DMPCollection`, exchange one number every 10 batches. `Trainer` opens a `Preemption` itself.

    A signal for which the script has a handler is left to the script. Signals are caught only if
    the main thread opens the object.

    Args:
        model: The model, sharded if it will be.
        signals: Names of the signals that are requests.
        file: A file that is a request once it is made or changed; None for none.
        ask: Function that returns True for a request; None for none. The first rank of each machine
            calls it in a thread of its own.
        every: Seconds between two looks at `file` and `ask`.
        exit_code: Code of `leave`, by which a scheduler starts the job again. 75 is EX_TEMPFAIL of
            `sysexits.h`.

    Raises:
        TypeError: An argument has another type.
        ValueError: A signal is unknown or cannot be caught, or `every` is not positive.
        RuntimeError: On entering, if the process has an open one.

    Attributes:
        is_due: Whether all ranks have seen a request.

    Example:
        >>> layer, trained = nn.Linear(1, 1), 0
        >>> with Preemption(layer) as preemption:
        ...     for batch in preemption.until_due(range(100)):
        ...         trained += 1
        ...         if batch == 3:
        ...             os.kill(os.getpid(), signal.SIGTERM)
        ...     if preemption.is_due:
        ...         pass  # save, then preemption.leave()
        >>> trained, preemption.is_due
        (4, True)
    """

    @checked_but("model", "file")
    def __init__(
        self,
        model: nn.Module,
        *,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        file: str | Path | None = None,
        ask: Callable[[], bool] | None = None,
        every: float = 1.0,
        exit_code: int = 75,
    ) -> None:
        if not every > 0:
            raise ValueError(f"Preemption.every must be positive; received {every}.")
        self._signals = [_signal(name) for name in signals]
        self._file = None if file is None else path_of("Preemption.file", file)
        self._ask, self._every, self.exit_code = ask, every, exit_code
        self._model = model
        self._before: dict[signal.Signals, Any] = {}
        self._closed = threading.Event()
        self._num_ranks, self._has_headers, self._num_read = 1, False, 0
        self.is_due = False

    def __enter__(self) -> Self:
        global _open, _pid
        if _open is not None:
            raise RuntimeError(
                "A Preemption is open in this process already; pass it to the Trainer, or close it."
            )
        _open, _pid = self, os.getpid()
        self.is_due = stop.is_requested = stop.is_agreed = False
        self._num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._has_headers = any(
            stage.module.env.replicas is None
            for module in self._model.modules()
            if (stage := getattr(module, "input_stage", None)) is not None
        )
        self._num_read = 0
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                handler = signal.getsignal(number)
                if handler is signal.SIG_DFL or getattr(handler, "yields_to_preemption", False):
                    self._before[number] = signal.signal(number, _request)
        self._closed.clear()
        if (self._file or self._ask) and os.environ.get("LOCAL_RANK", "0") == "0":
            at_start = _changed_at(self._file)
            threading.Thread(
                target=self._look, args=(at_start,), name="preemption", daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        global _open
        self._closed.set()
        for number, handler in self._before.items():
            if catches(number):
                signal.signal(number, handler)
        self._before.clear()
        _open = None
        stop.is_requested = stop.is_agreed = False

    @property
    def is_open(self) -> bool:
        """True while it handles requests."""
        return _open is self

    @property
    def is_requested(self) -> bool:
        """True if this rank was asked to end; other ranks may not know it yet."""
        return stop.is_requested

    def until_due(self, batches: Iterable[_B]) -> Iterator[_B]:
        """Yield batches until all ranks have seen a request; then `is_due` is True on all ranks.

        A train pipeline that reads from it trains on each batch that it has read.

        Args:
            batches: Batches of this rank. All ranks have the same number.
        """
        for batch in batches:
            yield batch
            if self.agrees():
                return

    def agrees(self, *, may_exchange: bool = True) -> bool:
        """Return whether all ranks have seen a request; call it after each batch on every rank.

        Args:
            may_exchange: Whether ranks that exchange no headers may exchange a number here.
        """
        if not self.is_open:
            return False
        self._num_read += may_exchange
        if self._num_ranks == 1:
            self.is_due = stop.is_requested
        elif self._has_headers:
            self.is_due = stop.is_agreed
        elif may_exchange and self._num_read % _EVERY == 0:
            device = "cuda" if "nccl" in dist.get_backend() else "cpu"
            asked = torch.tensor([int(stop.is_requested)], device=device)
            with explained(None, "look for a preemption"):
                dist.all_reduce(asked, dist.ReduceOp.MAX)
            self.is_due = bool(asked)
        return self.is_due

    def leave(self) -> NoReturn:
        """End this rank with `exit_code`; call it after the save.

        Raises:
            PreemptedExit: Always.
        """
        raise PreemptedExit(self.exit_code)

    def _look(self, at_start: int | None) -> None:
        """Look for requests by the file and by the function."""
        has_failed = False
        while not self._closed.wait(self._every):
            changed = _changed_at(self._file)
            if changed is not None and changed != at_start:
                stop.is_requested = True
            if self._ask is None:
                continue
            try:
                stop.is_requested |= bool(self._ask())
            except Exception as error:  # the job continues without it
                if not has_failed:
                    logger.warning("Preemption.ask failed, and is called again: %r", error)
                has_failed = True


_open: Preemption | None = None
_pid = -1  # of the process that opened it


def catches(number: signal.Signals) -> bool:
    """Return whether a signal to this process is a request to end."""
    return signal.getsignal(number) is _request


def _request(number: int, _: FrameType | None) -> None:
    if os.getpid() == _pid:
        stop.is_requested = True
    else:  # a forked process, such as a data loader's
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _changed_at(file: Path | None) -> int | None:
    try:
        return None if file is None else file.stat().st_mtime_ns
    except OSError:
        return None


def _signal(name: str) -> signal.Signals:
    number = getattr(signal, name, None) if name.startswith("SIG") else None
    if not isinstance(number, signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(
            "Preemption.signals must be names of signals that can be caught, such as 'SIGTERM'; "
            f"received {name!r}."
        )
    return number

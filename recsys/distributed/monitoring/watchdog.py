"""Watchdog: reports ranks that are late, and ends all ranks when one fails."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn, Self, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _get_default_group,
    default_pg_timeout,
)

from recsys.base import contact
from recsys.base.checked import checked
from recsys.base.logs import logger
from recsys.base.step_stages import long_section, observe
from recsys.distributed.monitoring import preemption
from recsys.distributed.ranks.heartbeats import (
    MISSED,
    Beat,
    End,
    Heartbeats,
    in_words,
    late_ranks,
)
from recsys.distributed.ranks.position import Position

__all__ = ["Watchdog", "end_with_launcher"]

_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> bool:
    """Make the kernel kill this process when its parent, torchrun's agent, ends.

    The agent ends its workers unless it is killed itself. Without this call they would then
    continue training beside the workers of the next attempt. Call it at the start of a training
    script, on the main thread.

    Returns:
        Whether the process is set up so: on Linux, in a process that torchrun started.

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


@final
class Watchdog:
    """Warns of ranks that keep others waiting, and ends all ranks when one fails.

    Open it after the process group is initialized, around the training loop:

        with Watchdog(abort_after=600) as watchdog:
            for batch in loader:
                ...
            with watchdog.pause("evaluation"):
                ...

    - If a rank stays in one stage longer than `warn_after`, a warning names the rank, the stage,
      the module and the ranks that wait. After `abort_after` every rank prints the same and the
      stacks of its threads, and ends.
    - If a rank raises, exits or is killed, the other ranks end within seconds and print its number
      and stage. Its traceback is printed once, by that rank.

    - If a machine vanishes or a process is stopped, the other ranks end after a minute, or after
      `abort_after` if that is less, also in a save or in `pause`.

    A rank in a call that holds the GIL sends no heartbeats, but its process shows that it lives.
    Only `abort_after` limits such a call: the other ranks end, and this rank is ended by torchrun
    or by a timer in C. In a save and in `pause` the call has no limit. On SIGTERM, which torchrun
    sends, a process first prints why the job ends, unless the script handles the signal. Without
    other ranks the watchdog does nothing.

    Args:
        warn_after: Time in one stage before a warning, in seconds.
        abort_after: Time in one stage before all ranks end, in seconds; None for the timeout of the
            process group.

    Raises:
        ValueError: If a number is not positive.
        RuntimeError: On entering, if a watchdog is open in the process.

    Example:
        >>> with Watchdog(warn_after=60) as watchdog:
        ...     with watchdog.pause("evaluation"):
        ...         pass
    """

    @checked
    def __init__(self, *, warn_after: float = 30.0, abort_after: float | None = None) -> None:
        for name, seconds in [("warn_after", warn_after), ("abort_after", abort_after)]:
            if seconds is not None and not seconds > 0:
                raise ValueError(f"Watchdog.{name} must be positive; received {seconds}.")
        self._warn_after, self._given_abort_after = warn_after, abort_after
        self._beats: Heartbeats | None = None
        self._closing = ExitStack()
        self._ends = False  # the main thread handles an error
        self._stopped = False
        self._printing, self._has_printed = threading.Lock(), False

    def __enter__(self) -> Self:
        if contact.ask_watchdog is not None:
            raise RuntimeError("A Watchdog is open in this process already; close it first.")
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self
        self._rank = dist.get_rank()
        self._abort_after = self._given_abort_after or _timeout_of_group()
        self._interval = min(1.0, self._abort_after / 16, self._warn_after / 10)
        self._next_warning = self._warn_after
        self._ends = self._stopped = False
        self._position = Position()
        self._silence = min(_SILENCE, self._abort_after)
        prefix, store = _prefix(), dist.distributed_c10d._get_default_store()
        self._beats = Heartbeats(
            PrefixStore(prefix, store),
            self._rank,
            dist.get_world_size(),
            self._interval,
            self._position,
            f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{prefix}/pulse",
        )
        self._closing.enter_context(observe(self._position))
        contact.ask_watchdog = self._ask
        self._signals, self._waker = socket.socketpair()
        self._closing.callback(self._waker.close)
        self._closing.callback(self._signals.close)
        self._catch_sigterm()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._beats is None:
            return
        beats, self._ends = self._beats, error is not None
        left = error is None or isinstance(error, preemption.PreemptedExit)
        left |= isinstance(error, SystemExit) and not error.code
        if not left:
            assert error is not None
            self._report_error(error, beats)
        self._stopped = True
        self._waker.send(b"\0")
        self._thread.join(timeout=2)
        beats.stop(left=left)
        faulthandler.cancel_dump_traceback_later()
        self._closing.close()
        contact.ask_watchdog = None
        self._beats = None

    @checked
    def pause(self, name: str) -> AbstractContextManager[None]:
        """Suspend warnings and aborts on all ranks while the block runs.

        Saves and loads of checkpoints do so themselves.

        Args:
            name: Name of the work, such as "evaluation" or "compile".
        """
        return long_section(name)

    # -- an error of this rank --------------------------------------------------------------------

    def _report_error(self, error: BaseException, beats: Heartbeats) -> None:
        """Print an error once in the job, and announce the end to the other ranks."""
        place, rank = Beat.of(self._position, 0).place, self._rank
        if isinstance(error, SystemExit):
            self._log(beats.announce(End(text=f"rank {rank} exited by {error!r}, in {place}")).text)
            return
        if not isinstance(error, Exception):
            beats.announce(End(text=f"rank {rank} ended by {type(error).__name__}, in {place}"))
            return
        said = f"{type(error).__name__}: {error}"
        of_rank = getattr(error, "_of_rank", rank)  # one of a rank, raised on all
        follows = of_rank != rank or contact.is_lost_contact(error)
        if follows or not beats.claim():
            end = beats.wait_for_end(_PATIENCE)
            if end is not None and (follows or end.error == said):
                self._print_reason(end)
                _print_no_more_of(error)
                return
        text = f"rank {rank} raised {_first_line(said)}, in {place}: see its traceback"
        self._log(f"rank {rank} raised this in {place}:")
        _print_traceback(error)
        sys.stderr.flush()
        _print_no_more_of(error)
        beats.announce(End(text=text, error=said))

    def _ask(self) -> str | None:
        """Return the reason of a lost connection, unless the watching thread ends the process."""
        assert self._beats is not None
        self._beats.look = True
        end = self._beats.wait_for_end(_PATIENCE)
        return None if end is None else end.text

    def _print_reason(self, end: End) -> None:
        with self._printing:
            if not self._has_printed:
                place = Beat.of(self._position, 0).place
                saved = "" if contact.ask_last_save is None else f" {contact.ask_last_save()}"
                self._log(f"{end.text}. This rank was in {place}, and ends.{saved}")
            self._has_printed = True

    def _log(self, text: str) -> None:
        logger.warning("Watchdog: %s", text)

    # -- the watching thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._beats is not None
        while True:
            began = monotonic()
            ready, _, _ = select.select([self._signals], [], [], self._interval)
            if self._stopped:
                return
            late = monotonic() - began - self._interval
            if late > self._interval:  # stopped, or another thread held Python's lock
                self._beats.rest(late)
                continue
            if ready and signal.SIGTERM in self._signals.recv(64) and not self._ends:
                if not self._continues_after_sigterm():
                    return
                continue
            if not self._ends:
                self._judge()

    def _judge(self) -> None:
        beats = self._beats
        assert beats is not None
        if beats.end is not None:
            self._end(beats.end)
        stays = monotonic() - self._position.place[2]
        looks = stays > 3 * self._interval
        if looks and not beats.look:
            beats.forget_silence()
        beats.look = looks
        known, silent = {**beats.beats, self._rank: Beat.of(self._position, 0)}, beats.silent()
        if beats.look and (lost := beats.lost(self._silence)):
            self._end(beats.announce(End(text=in_words(known, silent, list(lost)), stacks=True)))
        unheard = monotonic() - beats.answered
        no_answer = f"the store of the job has not answered for {unheard:.0f} s"
        if unheard > self._silence:
            self._end(beats.announce(End(text=no_answer, stacks=True)))
        if self._position.long_section:
            faulthandler.cancel_dump_traceback_later()
        else:  # for a call that holds the GIL: then this thread does not run
            _dump_and_end_after(self._abort_after + _MARGIN)
        if stays < self._warn_after:
            self._next_warning = self._warn_after
        if stays < min(self._next_warning, self._abort_after):
            return
        if any(beat is not None and beat.long_section for beat in known.values()):
            return
        late = late_ranks(known, silent)
        text = in_words(known, silent, late)
        if unheard > MISSED * self._interval:
            text = f"{no_answer}; {text}"
        elif not late:
            return
        if stays >= self._abort_after:
            limit = f"longer than abort_after={self._abort_after:g} s"
            self._end(beats.announce(End(text=f"{text}: {limit}", stacks=True)))
        on_time = [rank for rank in known if rank not in late] or [self._rank]
        if self._rank == on_time[0]:
            self._log(text)
        self._next_warning = 2 * stays

    def _continues_after_sigterm(self) -> bool:
        """Print the reason if a rank has announced one, and end the process.

        Without a reason, an open `Preemption` ends it after its save.

        Returns:
            Whether the watchdog is still open; the search for a reason takes seconds.
        """
        assert self._beats is not None
        ends_itself = preemption.catches(signal.SIGTERM)
        end, until = None, monotonic() + 2 + 2 * self._interval
        while end is None and monotonic() < until and not self._stopped:
            end = self._beats.wait_for_end(0.1)
        if end is not None:
            self._end(end, 128 + signal.SIGTERM)
        if not (ends_itself or self._stopped):
            os._exit(128 + signal.SIGTERM)
        self._silence = min(self._silence, _SILENCE_OF_ENDING)
        return not self._stopped

    def _end(self, end: End, code: int = 1) -> NoReturn:
        """Print the reason and end the process without its main thread."""
        _dump_and_end_after(2 * _MARGIN)  # in case this function hangs
        self._print_reason(end)
        if end.stacks:
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        elif code == 1:  # torchrun calls the process that ends first the root cause
            select.select([self._signals], [], [], _MARGIN)
        sys.stdout.flush()
        os._exit(code)

    def _catch_sigterm(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        is_ours = preemption.catches(signal.SIGTERM)
        if not is_main or not (is_ours or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
            return
        self._waker.setblocking(False)
        before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop has it
            signal.set_wakeup_fd(before)
            return
        _wakes.set()
        if not is_ours:
            signal.signal(signal.SIGTERM, _leave_it_to_the_thread)
        self._closing.callback(_restore_sigterm)


_PATIENCE = 4.0
"""Seconds to wait for the announcement of a failed rank."""
_MARGIN = 2.0
_SILENCE_OF_ENDING = 10.0
"""The same after a SIGTERM: torchrun sends it to all ranks when one was killed."""
_SILENCE = 60.0
"""Seconds without a sign of life after which a rank, or the store of the job, counts as lost."""


def _leave_it_to_the_thread(*_: object) -> None:
    """Do nothing: the signal wakes the watching thread, even while the main thread is in C."""


_leave_it_to_the_thread.yields_to_preemption = True  # type: ignore[attr-defined]

_wakes = threading.Event()
"""Set while signals wake the watching thread of this process."""


def _restore_sigterm() -> None:
    if _wakes.is_set():
        _wakes.clear()
        signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# A forked process, such as a data loader's, has no watching thread; its signals would wake the
# thread of its parent.
os.register_at_fork(after_in_child=_restore_sigterm)


def _prefix() -> str:
    """Return a prefix of keys for each attempt of the job and each watchdog."""
    tries = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"recsys/watchdog/{tries}/{next(_numbers)}"


_numbers = itertools.count(1)


def _timeout_of_group() -> float:
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    backend = _get_default_group()._get_backend(device)
    options = getattr(backend, "options", None)  # not every backend has some
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout.total_seconds()


def _dump_and_end_after(seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


def _first_line(text: str) -> str:
    lines = text.splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ..."


def _print_traceback(error: BaseException) -> None:
    """Print an error; without frames of libraries if the message has the rank and the cause."""
    is_ours = type(error).__module__.partition(".")[0] == "recsys"
    is_of_input = is_ours or isinstance(error, ValueError | TypeError | KeyError | IndexError)
    if not (is_of_input and hasattr(error, "_of_rank")):
        traceback.print_exception(error)
        return
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not _is_of_library(frame.filename)]
    lines = traceback.format_list(user_frames) + traceback.format_exception_only(error)
    print("".join(lines), end="", file=sys.stderr)


def _is_of_library(file: str) -> bool:
    if file.startswith(_PYTHON):
        return "site-packages" not in file  # an installed package may be the user's own
    return file.startswith(_LIBRARIES)


_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_LIBRARIES = f"{Path(__file__).parents[2]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}"


def _print_no_more_of(error: BaseException) -> None:
    """Suppress a second traceback of an error at the end of the process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: Any) -> None:
        if raised is not error:
            before(kind, raised, trace)
            return
        _dump_and_end_after(10)  # destroying process groups may hang

    sys.excepthook = hook

"""Heartbeats: the stage of each rank and the reason why the job ends, in the store of the job.

A thread writes this rank's `Beat` over its own connection, because the connection of the process
group is blocked while the rank waits. The beats of other ranks are read only while this rank stays
in one stage: then it waits for another rank, or others wait for it.

A rank that holds Python's lock is silent and alive. Ranks of the same machine look at its process;
ranks of other machines read its `pulse`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from recsys.base.machine import machine_name
from recsys.distributed.ranks import pulse
from recsys.distributed.ranks.position import Position

MISSED = 5
"""Missed beats after which a rank counts as silent."""
_ERRORS = (RuntimeError, OSError, TimeoutError)  # of a store that is gone, or does not answer


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """Status of a rank.

    Attributes:
        number: Number of the beat.
        stage: Stage of the training step.
        module: Path of the stage's module; "" for none.
        seconds: Time since entering the stage.
        waiting_for: Purpose of the exchange that it waits for; "" if it does not wait.
        exchanges: Number of exchanges started.
        long_section: Name of its long section, or "".
        left: Whether it has left the training loop.
        process: Process id.
        machine: Name of the machine and its namespace of process ids.
    """

    number: int
    stage: str
    module: str
    seconds: float
    waiting_for: str
    exchanges: int
    long_section: str
    left: bool
    process: int
    machine: str

    @classmethod
    def of(cls, position: Position, number: int, *, left: bool = False) -> Beat:
        """Make the heartbeat of this process."""
        stage, module, since = position.place
        return cls(
            number=number,
            stage=stage,
            module=module,
            seconds=monotonic() - since,
            waiting_for=position.waiting_for,
            exchanges=position.exchanges,
            long_section=position.long_section,
            left=left,
            process=os.getpid(),
            machine=_process_space(),
        )

    @property
    def place(self) -> str:
        """The stage and the module, for messages."""
        return f"{self.stage} of {self.module}" if self.module else self.stage


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Reason for the end of a job.

    Attributes:
        text: The rank, its failure and its stage.
        error: Type and text of its exception, if any.
        stacks: Whether each rank prints the stacks of its threads.
    """

    text: str
    error: str = ""
    stacks: bool = False


@functools.cache
def _process_space() -> str:
    """Return a name for the namespace of process ids, whose number alone is equal on machines."""
    with suppress(OSError):
        return f"{machine_name()} {os.readlink('/proc/self/ns/pid')}"
    return machine_name()


def lives(process: int) -> bool:
    """Return whether a process of this machine is running, and not a zombie.

    Args:
        process: Process id.
    """
    if Path("/proc/self/stat").exists():
        return pulse.state_of(process) not in "ZX"
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _base_of(store: Store) -> TCPStore | None:
    """Return the TCP store below all prefixes, over the same connection; None for other stores."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


@final
class Heartbeats:
    """Thread that writes this rank's beats and reads the beats of other ranks.

    Args:
        store: Store of the job; the thread opens its own connection to it.
        pulse_key: Prefix of the keys of pulses, without the prefixes of `store`; the same on all
            ranks.
        rank: This rank.
        world_size: Number of ranks.
        interval: Time between two beats, in seconds.
        position: Position of this process.

    Attributes:
        look: Whether to read the beats of other ranks.
        beats: The last beat of each rank; None before the first.
        end: The reason for the end of the job, once a rank has announced it.
        answered: Time of the store's last answer (`monotonic`, in seconds).
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        interval: float,
        position: Position,
        pulse_key: str = "recsys/pulse",
    ) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._interval, self._position = rank, interval, position
        self.look = False
        self.beats: dict[int, Beat | None] = dict.fromkeys(range(world_size))
        self._moved = dict.fromkeys(range(world_size), monotonic())  # time of the last new beat
        self._near: dict[int, int] = {}  # processes of other ranks on this machine
        self._pulses: dict[int, tuple[str, float]] = {}  # of ranks elsewhere, and time of change
        self._pulse_key, self._base = pulse_key, _base_of(self._store)
        self._pulse: subprocess.Popen[bytes] | None = None
        self.end: End | None = None
        self.answered = monotonic()
        self._number = 0
        self._lock = threading.Lock()  # one request at a time
        self._stopped, self._wake = False, threading.Event()
        self._end_announced = threading.Event()
        self._write(left=False)
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def stop(self, *, left: bool) -> None:
        """Stop the thread.

        Args:
            left: Whether to report that this rank has left the training loop.
        """
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout=2)
        if self._pulse is not None:
            self._pulse.kill()
            self._pulse.wait()
        if left:
            with suppress(*_ERRORS):
                self._write(left=True)

    def silent(self) -> dict[int, float]:
        """Return silent ranks -> seconds since their last beat."""
        now = monotonic()
        silent = {rank: now - at for rank, at in self._moved.items() if rank != self._rank}
        return {
            rank: seconds
            for rank, seconds in silent.items()
            if seconds > MISSED * self._interval and self.beats[rank] is not None
        }

    def lost(self, limit: float) -> dict[int, float]:
        """Return silent ranks whose process shows no life -> seconds since their last beat.

        Args:
            limit: Least time without a beat, and without a pulse, in seconds.
        """
        silent = self.silent().items()
        return {rank: age for rank, age in silent if age > limit and not self._is_alive(rank)}

    def _is_alive(self, rank: int) -> bool:
        """Return whether a silent rank's process runs, or nothing is known about it."""
        if (process := self._near.get(rank)) is not None:
            return lives(process) and pulse.state_of(process) != "T"
        if rank not in self._pulses:
            return True
        text, at = self._pulses[rank]
        return text[-1] not in "TZX" and monotonic() - at <= MISSED * max(self._interval, 1.0)

    def forget_silence(self) -> None:
        """Count silence from now: beats and pulses that no process has read yet are not missing."""
        now = monotonic()
        self._moved = dict.fromkeys(self._moved, now)
        self._pulses = {rank: (text, now) for rank, (text, _) in self._pulses.items()}

    def rest(self, seconds: float) -> None:
        """Exclude a time in which no thread of this process ran from the silence of others."""
        self._moved = {rank: at + seconds for rank, at in self._moved.items()}
        self._pulses = {rank: (text, at + seconds) for rank, (text, at) in self._pulses.items()}
        self.answered += seconds

    def claim(self) -> bool:
        """Return whether this rank is the first to claim an error."""
        with suppress(*_ERRORS), self._lock:
            count: int = self._store.add("claims", 1)
            return count == 1
        return True

    def announce(self, end: End) -> End:
        """Announce why the job ends; return the first announcement of any rank."""
        with suppress(*_ERRORS), self._lock:
            end = End(**json.loads(self._store.compare_set("end", "", json.dumps(asdict(end)))))
        self.end = end
        self._end_announced.set()
        return end

    def wait_for_end(self, seconds: float) -> End | None:
        """Wait for an announcement, at most some seconds."""
        until = monotonic() + seconds
        while self.end is None and monotonic() < until and self._thread.is_alive():
            self._wake.set()
            self._end_announced.wait(0.1)
        return self.end

    def _run(self) -> None:
        while not self._stopped:
            with suppress(*_ERRORS):
                self._exchange()
            self._wake.wait(self._interval)
            self._wake.clear()

    def _exchange(self) -> None:
        dead = [rank for rank, process in self._near.items() if not lives(process)]
        dead += [rank for rank, (text, _) in self._pulses.items() if text[-1] in "ZX"]
        try:
            self._write(left=False)
            with self._lock:
                if self.end is None and self._store.check(["end"]):
                    self.end = End(**json.loads(self._store.get("end")))
                    self._end_announced.set()
            self._read([r for r, b in self.beats.items() if self.look or b is None or r in dead])
            self.answered = monotonic()
        finally:
            if self.end is None:
                self._notice(dead)

    def _notice(self, dead: list[int]) -> None:
        """Announce the end of the job if it needs ranks whose processes have ended."""
        stays = monotonic() - self._position.place[2]
        is_connected = monotonic() - self.answered < 1
        for rank in dead:
            beat = self.beats[rank]
            assert beat is not None
            if (beat.left or not is_connected) and stays < 3:
                continue  # the training may be over
            what = "has ended its training" if beat.left else "is gone, its process has ended"
            self.announce(End(text=f"rank {rank} {what}; it was last seen in {beat.place}"))

    def _write(self, *, left: bool) -> None:
        self._number += 1
        beat = Beat.of(self._position, self._number, left=left)
        with self._lock:
            self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def _read(self, ranks: list[int]) -> None:
        with self._lock:
            there = [rank for rank in ranks if self._store.check([f"beat/{rank}"])]
            texts = self._store.multi_get([f"beat/{rank}" for rank in there]) if there else []
        self._record({r: Beat(**json.loads(text)) for r, text in zip(there, texts, strict=True)})
        self._read_pulses([rank for rank in there if rank not in (self._rank, *self._near)])

    def _read_pulses(self, ranks: list[int]) -> None:
        """Read the pulses of ranks on other machines; start this rank's if there are any."""
        base = self._base
        if base is None or not ranks:
            return
        if self._pulse is None:
            arguments = [base.host, base.port, f"{self._pulse_key}/{self._rank}"]
            arguments += [max(self._interval, 0.1), os.getpid()]
            self._pulse = subprocess.Popen(
                [sys.executable, "-I", "-S", str(pulse.__file__), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the rank
            )
        with self._lock:
            keys = {rank: f"{self._pulse_key}/{rank}" for rank in ranks}
            there = [rank for rank in ranks if base.check([keys[rank]])]
            texts = base.multi_get([keys[rank] for rank in there]) if there else []
        for rank, text in zip(there, texts, strict=True):
            if self._pulses.get(rank, ("", 0.0))[0] != text.decode():
                self._pulses[rank] = text.decode(), monotonic()

    def _record(self, found: Mapping[int, Beat]) -> None:
        for rank, beat in found.items():
            before = self.beats[rank]
            if before is None or before.number != beat.number:
                self._moved[rank] = monotonic()
            self.beats[rank] = beat
            if rank != self._rank and beat.machine == _process_space():
                self._near[rank] = beat.process


def late_ranks(beats: Mapping[int, Beat | None], silent: Mapping[int, float]) -> list[int]:
    """Return the ranks that keep the others waiting.

    These are ranks that have not begun, are silent, or have left while another waits. Otherwise
    they are the ranks with the fewest exchanges, if possible ranks that do not wait; if all ranks
    are equal, the one that has been in its stage longest.

    Args:
        beats: The beat of each rank.
        silent: Silent ranks.
    """
    lacking = [rank for rank, beat in beats.items() if beat is None or rank in silent]
    here = {rank: beat for rank, beat in beats.items() if beat is not None and rank not in silent}
    lacking = [rank for rank in lacking if not getattr(beats[rank], "left", False)]
    if lacking:
        return lacking
    left = [rank for rank, beat in beats.items() if beat is not None and beat.left]
    if left:
        waits = any(beat.waiting_for for beat in here.values() if not beat.left)
        return left if waits else []
    fewest = min(beat.exchanges for beat in here.values())
    late = [rank for rank, beat in here.items() if beat.exchanges == fewest]
    late = [rank for rank in late if not here[rank].waiting_for] or late
    if len(late) == len(beats) > 1:
        return [max(late, key=lambda rank: here[rank].seconds)]
    return late


def in_words(beats: Mapping[int, Beat | None], silent: Mapping[int, float], late: list[int]) -> str:
    """Describe the stages of all ranks, late ranks first.

    Args:
        beats: The beat of each rank.
        silent: Silent ranks -> seconds since their last beat.
        late: Ranks that keep the others waiting.
    """
    ranks_by_text: dict[str, list[int]] = {}
    for rank in (*late, *(rank for rank in beats if rank not in late)):
        beat = beats[rank]
        if beat is None:
            text = "{has} not begun"
        elif beat.left:
            text = f"{{has}} left the training, in {beat.place}"
        elif rank in silent:
            text = f"{{has}} sent no heartbeat for {silent[rank]:.0f} s, last seen in {beat.place}"
        elif rank in late:
            text = f"{{has}} been in {beat.place} for {beat.seconds:.0f} s"
        elif beat.waiting_for:
            text = f"{{wait}} in {beat.place} to {beat.waiting_for}"
        else:
            text = f"{{is}} in {beat.place}"
        ranks_by_text.setdefault(text, []).append(rank)
    return "; ".join(_phrase(text, ranks) for text, ranks in ranks_by_text.items())


def _phrase(text: str, ranks: list[int]) -> str:
    singular = {"has": "has", "wait": "waits", "is": "is"}
    many = {"has": "have", "wait": "wait", "is": "are"}
    for verb in singular:
        text = text.replace(f"{{{verb}}}", (singular if len(ranks) == 1 else many)[verb])
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" * (len(ranks) > 8))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named} {text}"

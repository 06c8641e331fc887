"""The pulse shows whether a process lives, without its help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from recsys.distributed.ranks import heartbeats, pulse
from recsys.distributed.ranks.heartbeats import Heartbeats
from recsys.distributed.ranks.position import Position

# starts the pulse of itself, as a rank does, and then holds Python's lock
PARENT = """
import ctypes, os, subprocess, sys
command = [sys.executable, "-I", "-S", sys.argv[1], "127.0.0.1", sys.argv[2], "key", "0.05"]
subprocess.Popen([*command, str(os.getpid())])
ctypes.PyDLL(None).sleep(60)
"""


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))


def test_states_of_a_process_that_holds_the_lock_stops_and_ends() -> None:
    store = _store()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, pulse.__file__, str(store.port)])

    def state() -> str:
        return store.get("key").decode().split()[1]

    _wait_until(lambda: state() in "RS")
    first = store.get("key")
    _wait_until(lambda: store.get("key") != first)
    parent.send_signal(signal.SIGSTOP)
    _wait_until(lambda: state() == "T")
    parent.send_signal(signal.SIGCONT)
    _wait_until(lambda: state() in "RS")
    parent.kill()
    parent.wait()
    _wait_until(lambda: state() == "X")
    assert pulse.state_of(parent.pid) == "X"
    assert pulse.state_of(os.getpid()) == "R"


def _num_sockets() -> int:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


def test_beats_and_pulses_share_one_connection() -> None:
    store = _store()
    before = _num_sockets()
    beats = Heartbeats(dist.PrefixStore("job", store), 0, 2, 0.05, Position())
    try:
        assert beats._base is not None
        time.sleep(0.2)
        assert _num_sockets() == before + 2  # both ends are in this process
    finally:
        beats.stop(left=False)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dist.TCPStore, Heartbeats, Heartbeats]]:
    """Two ranks on machines of their own that look at each other, and their store."""
    names = iter(range(1_000_000))
    monkeypatch.setattr(heartbeats, "_process_space", lambda: f"machine {next(names)}")
    store = _store()
    job = dist.PrefixStore("job", dist.PrefixStore("watchdog", store))
    first, second = (Heartbeats(job, rank, 2, 0.05, Position()) for rank in (0, 1))
    first.look = second.look = True
    try:
        _wait_until(lambda: 1 in first._pulses and 0 in second._pulses)
        yield store, first, second
    finally:
        for beats in (first, second):
            beats.stop(left=False)
            assert beats._pulse is not None
            assert beats._pulse.returncode is not None


def test_a_silent_rank_of_another_machine_is_lost_only_without_a_pulse(
    pair: tuple[dist.TCPStore, Heartbeats, Heartbeats],
) -> None:
    _, first, second = pair
    second._stopped = True  # as if it could not run its threads
    second._thread.join()
    _wait_until(lambda: 1 in first.silent())
    time.sleep(0.5)
    assert first.lost(0.4) == {}
    assert second._pulse is not None
    second._pulse.kill()  # as if its machine had vanished
    _wait_until(lambda: list(first.lost(0.4)) == [1])
    first.forget_silence()  # as if it had not looked until now
    assert first.lost(0.4) == {}
    _wait_until(lambda: list(first.lost(0.4)) == [1])
    first.rest(60)
    assert first.lost(0.4) == {}


def test_a_rank_that_is_killed_on_another_machine_is_named(
    pair: tuple[dist.TCPStore, Heartbeats, Heartbeats],
) -> None:
    store, first, second = pair
    second.stop(left=False)
    store.set("recsys/pulse/1", "7 X")
    end = first.wait_for_end(30)
    assert end is not None
    assert end.text.startswith("rank 1 is gone, its process has ended; it was last seen in")

"""Heartbeats identify the late rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from recsys.base.step_stages import Stage
from recsys.distributed.ranks.heartbeats import (
    Beat,
    End,
    Heartbeats,
    in_words,
    late_ranks,
    lives,
)
from recsys.distributed.ranks.position import Position

WAITS = Beat(
    number=1,
    stage="input_dist",
    module="ebc",
    seconds=30.0,
    waiting_for="exchange id counts",
    exchanges=7,
    long_section="",
    left=False,
    process=1,
    machine="here",
)
WORKS = replace(WAITS, stage="the loop", module="", waiting_for="", seconds=31.0)
BEHIND = replace(WORKS, exchanges=6)
LEFT = replace(WORKS, left=True)


@pytest.mark.parametrize(
    ("beats", "silent", "late"),
    [
        ([WAITS, BEHIND, WAITS], [], [1]),
        ([WAITS, WORKS, WAITS], [], [1]),
        ([replace(WAITS, exchanges=6), WORKS, BEHIND], [], [2]),
        ([WORKS, WORKS, replace(WORKS, seconds=31.5)], [], [2]),
        ([WAITS, BEHIND, WAITS], [0], [0]),
        ([WAITS, None, BEHIND], [], [1]),
        ([WAITS, LEFT, WAITS], [], [1]),
        ([WAITS, LEFT, WAITS], [1], [1]),
        ([WORKS, LEFT, LEFT], [], []),
        ([BEHIND], [], [0]),
    ],
)
def test_the_late_rank(beats: list[Beat | None], silent: list[int], late: list[int]) -> None:
    assert late_ranks(dict(enumerate(beats)), dict.fromkeys(silent, 6.0)) == late


def test_places_are_said_together() -> None:
    beats = dict(enumerate([WAITS, BEHIND, WAITS, WAITS]))
    assert in_words(beats, {}, [1]) == (
        "rank 1 has been in the loop for 31 s; "
        "ranks 0, 2, 3 wait in input_dist of ebc to exchange id counts"
    )
    silent = "rank 3 has sent no heartbeat for 9 s, last seen in input_dist of ebc; "
    assert in_words(beats, {3: 9.0}, [3]).startswith(silent)
    assert in_words({0: WORKS, 1: None}, {}, [1]) == "rank 1 has not begun; rank 0 is in the loop"
    many = in_words(dict.fromkeys(range(12), WORKS), {}, [])
    assert many == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more are in the loop"


def _pair(folder: Path) -> tuple[Heartbeats, Heartbeats]:
    stores = [dist.FileStore(str(folder / "store"), 2) for _ in range(2)]
    position = Position()
    position.enter(Stage.LOOKUP, "ebc")
    return (
        Heartbeats(stores[0], 0, 2, 0.02, Position()),
        Heartbeats(stores[1], 1, 2, 0.02, position),
    )


def _wait_until(condition: object) -> None:
    end = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_ranks_hear_each_other(tmp_path: Path) -> None:
    first, second = _pair(tmp_path)
    first.look = True
    _wait_until(lambda: first.beats[1] is not None and first.beats[1].place == "lookup of ebc")
    assert not first.silent()
    second.stop(left=True)
    _wait_until(lambda: first.beats[1] is not None and first.beats[1].left)
    _wait_until(lambda: list(first.silent()) == [1])
    first.stop(left=True)


def test_the_first_reason_holds_on_all(tmp_path: Path) -> None:
    first, second = _pair(tmp_path)
    assert [first.claim(), second.claim()] == [True, False]
    end = End(text="rank 0 raised", error="ValueError: x")
    assert first.announce(end) == end
    assert second.wait_for_end(10) == end
    assert second.announce(End(text="another")) == end
    for beats in (first, second):
        beats.stop(left=False)


def test_the_end_of_a_process_is_seen(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert lives(os.getpid())
    assert lives(child.pid)
    first, second = _pair(tmp_path)
    second.stop(left=False)
    _wait_until(lambda: first.beats[1] is not None)
    first._near[1] = child.pid
    time.sleep(0.1)
    assert first.end is None
    child.kill()
    found = first.wait_for_end(10)
    assert found is not None
    assert found.text.startswith("rank 1 is gone, its process has ended; it was last seen in ")
    child.communicate()
    assert not lives(child.pid)
    first.stop(left=True)

"""The example of a stream: each event is read once, and the job resumes at its position."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stream.clicks import clicks
from stream.events import FileEvents, KafkaEvents

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/stream"
TRITON = Path(os.environ.get("RECSYS_TRITON", ROOT / ".cache/triton"))
BACKENDS = Path(os.environ.get("RECSYS_BACKENDS", ROOT / "build/predictor/backends"))


def event(number: int) -> dict[str, int]:
    return {"user": number, "item": -number, "clicked": 1}


def write(path: Path, numbers: range) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(event(number)) + "\n" for number in numbers)


def users(events: Any, limit: int = 1000, seconds: float = 0.0) -> list[int]:
    return [one["user"] for one in events.read(limit, seconds)]


def test_a_file_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "clicks"
    events = FileEvents(path)
    assert users(events) == []
    write(path, range(5))
    with path.open("a") as file:
        file.write('{"user":')
    assert users(events, limit=3) == [0, 1, 2]
    state = events.state_dict()
    assert users(events) == [3, 4]
    with path.open("a") as file:
        file.write(' 5, "item": 3, "clicked": 0}\n')
    assert users(events) == [5]
    again = FileEvents(path)
    again.load_state_dict(state)
    assert users(again) == [3, 4, 5]


BAD = [
    b"{",
    b"\xff",
    b"",
    b"7",
    b"null",
    b"[]",
    b"[" * 100_000,
    b'{"user": 1, "item": 2}',
    b'{"user": "ann", "item": 2, "clicked": 0}',
    b'{"user": 1.5, "item": 2, "clicked": 0}',
    b'{"user": 9223372036854775808, "item": 2, "clicked": 0}',
    b'{"user": 1, "item": 2, "clicked": NaN}',
    b'{"user": 1, "item": 2, "clicked": 2}',
    b'{"user": 1, "item": 2, "clicked": null}',
]


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_line_that_is_no_event_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    path = tmp_path / "clicks"
    write(path, range(2))
    with path.open("ab") as file:
        file.write(line + b"\n")
    write(path, range(2, 4))
    events = FileEvents(path)
    assert users(events) == [0, 1, 2, 3]
    assert capsys.readouterr().err.startswith(f"{path}: left out {line[:80]!r}")
    again = FileEvents(path)
    again.load_state_dict(events.state_dict())
    assert users(again) == []


def test_ranks_share_a_file(tmp_path: Path) -> None:
    write(tmp_path / "clicks", range(10))
    ranks = [FileEvents(tmp_path / "clicks", rank, 3) for rank in range(3)]
    assert [users(events, 2) for events in ranks] == [[0, 3], [1, 4], [2, 5]]
    one = FileEvents(tmp_path / "clicks")
    one.load_state_dicts([events.state_dict() for events in ranks])
    assert users(one) == [4, 5, 6, 7, 8, 9]


def test_a_topic_is_read_from_the_saved_offsets() -> None:
    """Against the mock broker of the client's library."""
    kafka = pytest.importorskip("confluent_kafka", reason="needs the extra kafka")
    quiet = {"log_level": 0}
    producer = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "none:1", **quiet})
    [broker] = producer.list_topics(timeout=10).brokers.values()

    def send(numbers: range) -> None:
        for number in numbers:
            producer.produce("clicks", json.dumps(event(number)), partition=number % 4)
        assert producer.flush(10) == 0

    def read(events: KafkaEvents, count: int) -> set[int]:
        found: list[int] = []
        end = time.monotonic() + 30
        while len(found) < count and time.monotonic() < end:
            found += users(events, 50, 1.0)
        assert len(set(found)) == len(found) == count
        return set(found)

    send(range(100))
    producer.produce("clicks", b"no event", partition=1)
    servers = f"{broker.host}:{broker.port}"
    ranks = [KafkaEvents(servers, "clicks", rank, 2) for rank in range(2)]
    assert read(ranks[0], 50) | read(ranks[1], 50) == {*range(100)}
    states = [events.state_dict() for events in ranks]
    send(range(100, 160))
    again = KafkaEvents(servers, "clicks")
    again.load_state_dicts(states)
    assert read(again, 60) == {*range(100, 160)}
    ranks[1].load_state_dict(states[1])
    assert read(ranks[1], 30) == {n for n in range(100, 160) if n % 4 in (1, 3)}


def test_clicks_come_and_go() -> None:
    found = list(clicks(2000.0, 0.2))
    assert 200 < len(found) <= 401
    assert all(-(2**63) <= click[name] < 2**63 for click in found for name in ("user", "item"))
    assert 0.2 < sum(click["clicked"] for click in found) / len(found) < 0.6


def test_a_job_goes_on_at_its_position(tmp_path: Path) -> None:
    """Two runs read each click once, and the second publishes a version of its own."""
    path = tmp_path / "clicks"
    with path.open("w") as file:
        file.writelines(json.dumps(click) + "\n" for click in clicks(10_000.0, 1.0))
    num_clicks = len(path.read_text().splitlines())
    with path.open("a") as file:
        file.write('{"user": 1}\n')
    command = [sys.executable, str(EXAMPLE / "train.py"), "--events", str(path), "--out"]
    command += [str(tmp_path / "out"), "--seconds", "1", "--publish", "0.1", "--save", "10"]
    counts = []
    for version in (1, 2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        counts.append(sum(map(int, re.findall(r"(\d+) clicks", done.stdout))))
        folder = tmp_path / "out/models/clicks" / str(version)
        assert (folder / "program.pt2").exists()
        if version == 1:
            assert len(list((folder / "deltas").iterdir())) > 1
            assert float(re.findall(r"loss ([\d.]+)", done.stdout)[-1]) < 0.66
            with path.open("a") as file:
                file.writelines(json.dumps(click) + "\n" for click in clicks(10_000.0, 0.1))
    assert counts == [num_clicks, len(path.read_text().splitlines()) - num_clicks - 1]


@pytest.mark.skipif(
    not (TRITON / "pytriton").is_dir(), reason=f"needs Triton in {TRITON}: make serve unpacks it"
)
@pytest.mark.skipif(
    not (BACKENDS / "recsys/libtriton_recsys.so").exists(),
    reason=f"needs the backend in {BACKENDS}: make predictor builds it",
)
def test_a_click_changes_the_answer_of_a_server(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "freshness.py"), "--out", str(tmp_path)]
    command += ["--seconds", "10", "--triton", str(TRITON), "--backends", str(BACKENDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    [(clicks, high, failed)] = re.findall(
        r"(\d+) clicks: median .* 99% ([\d.]+) s .* (\d+) of \d+ requests failed", done.stdout
    )
    assert int(clicks) > 3
    assert float(high) < 20
    assert failed == "0"

"""Copies of a version at an address: upload by a publisher, download by a server."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from recsys.inference import Publisher, follow
from recsys.inference.packages.deltas import read_deltas
from tests.inference.packages.test_indexes import batch_of, new_model, trained
from tests.inference.test_publisher import applied, rows_of, version_of


@pytest.fixture(params=["memory", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "remote with spaces" / "1")
    return f"memory://{uuid.uuid4()}/movies/1"


def test_a_follower_has_all_deltas_of_a_publisher(tmp_path: Path, url: str) -> None:
    model = new_model(unknown="zero")
    base = rows_of(model)
    publisher = Publisher(model, version_of(tmp_path / "own"), url=url)
    assert follow(url, tmp_path / "served/1") == 0
    for last in range(3):
        trained(model, range(last * 5, last * 5 + 5))
        publisher.publish()
    assert follow(url, tmp_path / "served/1") == 3
    assert follow(url, tmp_path / "served/1") == 0
    found = applied(tmp_path / "served/1", base)
    assert all(torch.equal(found[name][0], rows) for name, rows in rows_of(model).items())
    assert follow(url, tmp_path / "late/1") == 3
    stop = threading.Event()
    counts: list[int] = []
    thread = threading.Thread(
        target=lambda: counts.append(follow(url, tmp_path / "late/1", every=0.01, stop=stop))
    )
    thread.start()
    trained(model, range(3))
    publisher.publish()
    while len(list(read_deltas(tmp_path / "late/1"))) < 4:
        assert thread.is_alive()
    stop.set()
    thread.join(timeout=30)
    assert counts == [1]
    publisher.close()


def test_files_that_do_not_fit_are_named_and_not_copied(tmp_path: Path, url: str) -> None:
    files, root = fsspec.url_to_fs(url)
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json"):
        follow(url, tmp_path / "served/1")
    model = new_model()
    publisher = Publisher(model, version_of(tmp_path / "own"), url=url)
    follow(url, tmp_path / "served/1")
    for seed in range(3):
        model.train()(batch_of(seed)).sum().backward()
        publisher.publish()
    publisher.close()
    second = f"{root}/deltas/000000000002.delta"
    whole = files.cat_file(second)
    files.pipe_file(second, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="does not match"):
        follow(url, tmp_path / "served/1")
    files.rm_file(second)
    with pytest.raises(ValueError, match=r"must have 000000000002\.delta before"):
        follow(url, tmp_path / "served/1")
    assert len(list(read_deltas(tmp_path / "served/1"))) == 1
    files.pipe_file(second, whole)
    assert follow(url, tmp_path / "served/1") == 2


def test_the_command_follows_until_it_is_stopped(tmp_path: Path) -> None:
    model = new_model()
    publisher = Publisher(model, version_of(tmp_path / "own"), url=str(tmp_path / "remote"))
    served = tmp_path / "served/1"
    command = [sys.executable, "-m", "recsys", "follow", str(tmp_path / "remote"), str(served)]
    process = subprocess.Popen([*command, "--every", "0.05"], stderr=subprocess.PIPE)
    try:
        trained(model, range(3))
        file = publisher.publish()
        assert file is not None
        end = time.monotonic() + 60
        while not (served / "deltas" / file.name).exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert len(list(read_deltas(served))) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    publisher.close()

"""Copies of a version at an address: upload by a publisher, download by a server."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from functools import partial
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


def test_stray_and_unlisted_files_are_left_out(tmp_path: Path, url: str) -> None:
    files, root = fsspec.url_to_fs(url)
    model = new_model()
    publisher = Publisher(model, version_of(tmp_path / "own"), url=url)
    files.makedirs(f"{root}/deltas", exist_ok=True)
    for name in (
        "notes.txt",
        "deltas/abc.delta",
        "deltas/1.delta",
        "deltas/000000000001.delta.old",
    ):
        files.pipe_file(f"{root}/{name}", b"not of the package")
    served = tmp_path / "served/1"
    assert follow(url, served) == 0
    trained(model, range(3))
    publisher.publish()
    publisher.close()
    assert follow(url, served) == 1
    assert [path.name for path in (served / "deltas").iterdir()] == ["000000000001.delta"]
    assert not (served / "notes.txt").exists()


@pytest.mark.parametrize("name", ["tables/i", "manifest.json", "deltas/000000000001.delta"])
def test_links_out_of_an_address_are_refused(tmp_path: Path, name: str) -> None:
    model = new_model()
    remote = tmp_path / "remote"
    publisher = Publisher(model, version_of(tmp_path / "own"), url=str(remote))
    trained(model, range(3))
    publisher.publish()
    publisher.close()
    (remote / name).rename(tmp_path / "outside")
    (remote / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=f"{name} must be in .*link.*outside"):
        follow(str(remote), tmp_path / "served/1")


def test_an_address_with_another_version_is_refused(tmp_path: Path, url: str) -> None:
    model = new_model()
    own = version_of(tmp_path / "own")
    Publisher(model, own, url=url).close()
    (own / "manifest.json").write_text((own / "manifest.json").read_text() + " ")
    with pytest.raises(ValueError, match="received a version with another manifest"):
        Publisher(model, own, url=url)


def test_unfinished_files_are_removed(tmp_path: Path, url: str) -> None:
    """A trainer and a follower were killed while they copied."""
    model = new_model()
    own, served = version_of(tmp_path / "own"), tmp_path / "served/1"
    Publisher(model, own, url=url).close()
    files, root = fsspec.url_to_fs(url)
    files.pipe_file(f"{root}/.part-0123", b"half")
    (tmp_path / "served/.part-1/tables").mkdir(parents=True)
    assert follow(url, served) == 0
    (served / "deltas/.part-4567").write_bytes(b"half")
    publisher = Publisher(model, own, url=url)
    trained(model, range(3))
    publisher.publish()
    publisher.close()
    assert not files.exists(f"{root}/.part-0123")
    assert follow(url, served) == 1
    assert [path.name for path in (tmp_path / "served").rglob(".part*")] == []
    shutil.rmtree(served / "deltas")  # a copy without empty folders
    assert follow(url, served) == 1


def test_the_command_follows_until_it_is_stopped(tmp_path: Path) -> None:
    model = new_model()
    publisher = Publisher(model, version_of(tmp_path / "own"), url=str(tmp_path / "remote"))
    served = tmp_path / "served/1"
    command = [sys.executable, "-m", "recsys", "follow", str(tmp_path / "remote"), str(served)]
    process = subprocess.Popen(
        [*command, "--every", "0.05"],
        stderr=subprocess.PIPE,
        # a test runner in the background ignores the signal, and so would the command
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
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

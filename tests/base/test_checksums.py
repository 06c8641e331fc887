"""Checksums of exported files: every flipped bit is found, and files are whole or not there."""

from __future__ import annotations

import hashlib
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recsys.base.checksums import checksum_file, new_file, verify_if_present
from recsys.distributed.checkpoint import export_safetensors, save_checkpoint
from recsys.inference import export_torchscript, verify_checksum
from tests.inference.test_export import dlrm, inputs_of

WRITES = """
import sys, time
from recsys.base.checksums import new_file
with new_file(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("half", flush=True)
    time.sleep(100)
"""


def _write(path: Path, text: str = "text") -> None:
    with new_file(path) as temporary:
        temporary.write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _consolidated(path: Path) -> None:
    save_checkpoint(path.parent, torch.nn.Linear(30, 20), consolidated=True)
    for file in (path.parent / "step-1").glob("model.safetensors*"):
        file.rename(path.parent / file.name)
    shutil.rmtree(path.parent / "step-1")


def _safetensors(path: Path) -> None:
    save_checkpoint(path.parent / "c", torch.nn.Linear(30, 20))
    export_safetensors(path.parent / "c", path)
    shutil.rmtree(path.parent / "c")


@pytest.mark.parametrize(
    ("name", "export"),
    [
        ("text.txt", _write),
        ("model.pt", lambda path: export_torchscript(dlrm(), path, inputs_of(3))),
        ("model.safetensors", _safetensors),
        ("model.safetensors", _consolidated),
    ],
)
def test_every_flipped_bit_is_found(
    tmp_path: Path, name: str, export: Callable[[Path], object]
) -> None:
    path = tmp_path / name
    export(path)
    assert names(tmp_path) == [name, f"{name}.sha256"]
    verify_checksum(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (tmp_path / f"{name}.sha256").read_text() == f"{digest}  {name}\n"
    rng = random.Random(0)
    for _ in range(50):
        bit = rng.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(ValueError, match=f"{name} is damaged.*not match its checksum"):
            verify_if_present(path)
        flip(path, bit)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        verify_checksum(path)


def test_flipped_bits_of_the_checksum_are_found(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    _write(path)
    sums = checksum_file(path)
    sound = sums.read_bytes()
    for bit in range(8 * 66):  # digest and separator; the name does not count: files are renamed
        flip(sums, bit)
        if sums.read_bytes().lower() != sound.lower():
            with pytest.raises(ValueError, match="damaged"):
                verify_checksum(path)
        sums.write_bytes(sound)
    path.rename(tmp_path / "other.pt")
    sums.rename(tmp_path / "other.pt.sha256")
    verify_checksum(tmp_path / "other.pt")


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="there is no sha256sum")
@pytest.mark.parametrize("name", ["model.pt", "a b.pt", "back\\slash.pt", "two\nlines", "prêt"])
def test_the_format_is_that_of_sha256sum(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    _write(path)
    sums = checksum_file(path)
    done = subprocess.run(["sha256sum", "-c", sums.name], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    ours = sums.read_bytes()
    sums.unlink()
    with pytest.raises(FileNotFoundError, match="has no checksum: there is no") as caught:
        verify_checksum(path)
    command = str(caught.value).partition("make its checksum: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert sums.read_bytes() == ours
    verify_checksum(path)
    for mode in ("-b", "-t"):
        done = subprocess.run(["sha256sum", mode, name], cwd=tmp_path, capture_output=True)
        sums.write_bytes(done.stdout)
        verify_checksum(path)


def test_a_file_without_checksum_is_loaded_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_text("text")
    with pytest.warns(UserWarning, match=r"no file model\.pt\.sha256 .*loaded unverified"):
        verify_if_present(path)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        verify_if_present(tmp_path / "no.pt")


@pytest.mark.parametrize("content", [b"", b"text", b"0" * 64, b"0" * 64 + b"  a\n\n", b"\xff" * 99])
def test_a_checksum_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt"
    _write(path)
    checksum_file(path).write_bytes(content)
    with pytest.raises(ValueError, match=r"one line of sha256sum.*is damaged"):
        verify_if_present(path)


def test_a_failed_write_leaves_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "model.pt"
    _write(path, "before")
    with pytest.raises(FileNotFoundError), new_file(path):
        pass  # nothing was written
    with pytest.raises(UnicodeEncodeError), new_file(path) as temporary:
        temporary.write_text("half" * 10_000 + "é", "ascii")
    assert path.read_text() == "before"
    verify_checksum(path)
    assert names(path.parent) == ["model.pt", "model.pt.sha256"]


def test_what_a_killed_writer_left_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    _write(path, "before")
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        verify_checksum(path)
        assert path.read_text() == "before"
    left = {"model.pt.part.pt", "model.pt.sha256.part"}
    assert set(names(tmp_path)) == {"model.pt", "model.pt.sha256"} | left
    _write(path, "after")
    assert names(tmp_path) == ["model.pt", "model.pt.sha256"]
    assert path.read_text() == "after"
    verify_checksum(path)


def test_writers_of_one_path_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    inside: list[int] = []

    def write(number: int) -> None:
        for i in range(20):
            with new_file(path) as temporary:
                assert not inside
                inside.append(number)
                temporary.write_text(f"{number} {i}" * 100)
                inside.pop()

    def write_noted(number: int) -> None:
        try:
            write(number)
        except BaseException as error:
            failed.append(error)

    failed: list[BaseException] = []
    threads = [threading.Thread(target=write_noted, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        try:
            verify_checksum(path)  # never the checksum of another file
        except FileNotFoundError:
            continue
    for thread in threads:
        thread.join()
    assert not failed
    verify_checksum(path)
    assert names(tmp_path) == ["model.pt", "model.pt.sha256"]

"""Names of machines: cloned images share their host name, not their boot id."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from recsys.base.machine import machine_name
from recsys.distributed.ranks import heartbeats
from recsys.distributed.ranks.heartbeats import Beat
from recsys.distributed.ranks.position import Position


def _forget() -> None:
    for function in (machine_name, heartbeats._process_space):
        function.cache_clear()


@pytest.fixture(autouse=True)
def _names_are_read_anew() -> Iterator[None]:
    _forget()
    yield
    _forget()


def test_a_name_has_the_host_and_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        pytest.skip("needs Linux")
    boot_id = boot.read_text().strip()
    assert machine_name() == f"{socket.gethostname()} {boot_id}"
    here = Beat.of(Position(), 0).machine
    _forget()
    monkeypatch.setattr(Path, "read_text", lambda _: "another-boot\n")
    clone = Beat.of(Position(), 0).machine
    assert clone == here.replace(boot_id, "another-boot")
    assert clone != here


def test_without_a_boot_id_the_host_name_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert machine_name() == socket.gethostname()

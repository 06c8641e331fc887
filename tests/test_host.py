"""The judgements about a machine of a job, on made-up machines; and that it looks at this one."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path
from typing import Any

import pytest

from recsys import host
from recsys.__main__ import main
from recsys.base.findings import Finding
from recsys.host import HostFacts, collect_host, diagnose_host

HEALTHY = HostFacts()


def problems(facts: HostFacts) -> list[Finding]:
    return [finding for finding in diagnose_host(facts) if finding.level == "problem"]


def test_a_healthy_machine() -> None:
    assert {finding.level for finding in diagnose_host(HEALTHY)} == {"ok"}
    answers = HostFacts(rendezvous="host0:29500")
    assert {finding.level for finding in diagnose_host(answers)} == {"ok"}
    chosen = HostFacts(addresses=(), chosen={"GLOO_SOCKET_IFNAME": "eth0"})
    assert {finding.level for finding in diagnose_host(chosen)} == {"ok"}
    ipv6 = HostFacts(
        addresses=("fd00::2",), interfaces={"lo": ["::1"], "eth0": ["10.0.0.2", "fd00::2"]}
    )
    assert {finding.level for finding in diagnose_host(ipv6)} == {"ok"}


@pytest.mark.parametrize(
    ("facts", "words", "fix"),
    [
        ({"addresses": ()}, "must resolve, as", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"addresses": ("127.0.1.1",)}, "127.0.1.1", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"addresses": ("127.0.1.1", "::1")}, "/etc/hosts", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"addresses": ("10.9.9.9",)}, "10.9.9.9, which", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"interfaces": {"lo": ["127.0.0.1", "::1"]}}, "No network interface", None),
        (
            {"chosen": {"GLOO_SOCKET_IFNAME": "ib0"}},
            "received 'ib0'",
            "export GLOO_SOCKET_IFNAME=eth0",
        ),
        ({"rendezvous": "host0:1", "rendezvous_error": "timed out"}, "host0:1 cannot", None),
        ({"shared_bytes": 64 << 20}, "64 MiB", "docker run --shm-size=16g ..."),
        ({"shared_bytes": None}, "no /dev/shm", "docker run --shm-size=16g ..."),
    ],
)
def test_problems(facts: dict[str, Any], words: str, fix: str | None) -> None:
    [problem] = problems(HostFacts(**facts))
    assert words in problem.text
    assert problem.fix == fix


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"rendezvous": "host0:1", "rendezvous_error": "refused"}, "before torchrun starts"),
        ({"open_files": 1024}, "1024 files"),
        ({"has_synchronized_clock": False}, "not synchronized"),
    ],
)
def test_notes(facts: dict[str, Any], words: str) -> None:
    [note] = [finding for finding in diagnose_host(HostFacts(**facts)) if finding.level != "ok"]
    assert note.level == "note"
    assert words in note.text


def test_unknown_facts_are_left_out() -> None:
    facts = HostFacts(has_synchronized_clock=None, open_files=None)
    texts = [finding.text for finding in diagnose_host(facts)]
    assert not any("clock" in text for text in texts)
    assert "A process can open any number of files." in texts


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = collect_host(f"127.0.0.1:{port}")
    assert facts.name == socket.gethostname()
    assert facts.rendezvous_error is None
    assert {"127.0.0.1", "::1"} & {*facts.interfaces["lo"]}
    assert facts.shared_bytes is None or Path("/dev/shm").is_dir()
    assert collect_host(f"127.0.0.1:{port}").rendezvous_error == "refused"
    assert collect_host("host.invalid:1").rendezvous_error not in (None, "refused")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo9")
    assert main(["doctor", "--host"]) == 1
    report = capsys.readouterr().out
    assert "lo9" in report or "No network interface" in report


def test_every_interface_is_known_by_its_address() -> None:
    """An address of an interface is one at which this machine can listen."""
    for address in itertools.chain.from_iterable(host._interfaces().values()):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listening:
            listening.bind((address, 0))


@pytest.mark.parametrize("address", ["host0", ":29500", "host0:", "host0:x"])
def test_a_rendezvous_has_a_port(address: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT.* received"):
        collect_host(address)

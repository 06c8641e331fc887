"""Two nodes on this machine: network namespaces that are joined by a pair of virtual cables.

Each has a loopback device and an address of its own, and reaches nothing but the other. Where the
kernel refuses that, both nodes are at the loopback address of the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PORT = 29_511  # no other job of the tests uses this port
RENDEZVOUS = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"


@dataclass(frozen=True, eq=False)
class Node:
    """A node: the prefix of its commands, its address, and the name of its network device."""

    prefix: tuple[str, ...]
    address: str
    device: str

    @property
    def is_apart(self) -> bool:
        """True if the node has a network of its own."""
        return bool(self.prefix)

    def torchrun(
        self, first: Node, log: Path, script: str, *arguments: str, nnodes: str = "2",
        port: int = PORT, ranks: int = 2,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Starts a job's agent here; the job meets at the first node."""
        command = [
            *(*self.prefix, sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
            *(f"--nnodes={nnodes}", f"--nproc-per-node={ranks}", "--max-restarts=2"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:{port}", "--rdzv-id=job"),
            *(f"--rdzv-conf={RENDEZVOUS},is_host={int(self is first)}", "--monitor-interval=0.1"),
            *(f"--local-addr={self.address}", "-m", script, *arguments),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.device,
            "TP_SOCKET_IFNAME": self.device,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with log.open("ab") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
            )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Makes the nodes, and removes them at the end."""
    names = [f"recsys{os.getpid()}n{number}" for number in range(2)]
    ends = [f"v{os.getpid()}n{number}"[:15] for number in range(2)]
    made = []
    try:
        if shutil.which("ip") is None:
            raise OSError("no command ip")
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            _ip("link", "set", end, "netns", name)
            inside = ("-n", name)
            _ip(*inside, "addr", "add", f"10.77.0.{number + 1}/24", "dev", end)
            _ip(*inside, "link", "set", end, "up")
            _ip(*inside, "link", "set", "lo", "up")
        nodes = [
            Node(("ip", "netns", "exec", name), f"10.77.0.{number + 1}", end)
            for number, (name, end) in enumerate(zip(names, ends, strict=True))
        ]
    except (OSError, subprocess.CalledProcessError):
        nodes = [Node((), "127.0.0.1", "lo") for _ in range(2)]
    try:
        yield nodes
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

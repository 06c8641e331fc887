"""A Triton server on the loopback interface, started from an unpacked `nvidia-pytriton` package."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int


def free_ports(count: int) -> list[int]:
    """Return unused ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def find_server(folder: Path) -> Path:
    """Return the program of Triton in an unpacked `nvidia-pytriton`, and make it executable.

    Args:
        folder: Target of `pip install --no-deps --target FOLDER nvidia-pytriton`.
    """
    program = folder / "pytriton/tritonserver/bin/tritonserver"
    if not program.is_file():
        raise FileNotFoundError(
            f"{folder} must contain an unpacked nvidia-pytriton; it has no {program}. "
            f"Run pip install --no-deps --target {folder} nvidia-pytriton."
        )
    program.chmod(program.stat().st_mode | 0o111)
    return program


@contextlib.contextmanager
def triton_server(
    program: Path,
    models: Path,
    backends: Path,
    arguments: Sequence[str] = (),
    ports: tuple[int, int] = (0, 0),
    log: Path | None = None,
    seconds: float = 120.0,
) -> Iterator[Server]:
    """Start a server, wait until it is ready, and stop it at the end.

    Args:
        program: Result of `find_server`.
        models: Folder of the models, each a package.
        backends: Folder whose folder `recsys` has the backend.
        arguments: More arguments of `tritonserver`.
        ports: Ports of HTTP and gRPC; 0: a free one.
        log: File for the server's log; None: the log goes to the standard error.
        seconds: Time limit of the start.

    Raises:
        RuntimeError: The server ended or was not ready in time; the message has its log's end.
    """
    free = free_ports(2)
    http_port, grpc_port = (port or free[i] for i, port in enumerate(ports))
    command = [
        str(program),
        f"--model-repository={models}",
        f"--backend-directory={backends}",
        f"--http-address={HOST}",
        f"--http-port={http_port}",
        f"--grpc-address={HOST}",
        f"--grpc-port={grpc_port}",
        "--allow-metrics=false",
        "--exit-timeout-secs=3",  # the server waits so long for clients that keep a connection
        *arguments,
    ]
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else None
        process = subprocess.Popen(command, stdout=output, stderr=output)
        stack.callback(stop, process)
        try:
            wait_until_ready(process, http_port, seconds)
        except RuntimeError as error:
            raise RuntimeError(f"{error} {errors_of(log)}") from None
        yield Server(process, http_port, grpc_port)


def errors_of(log: Path | None) -> str:
    """Return the errors in a log of Triton."""
    if log is None:
        return "See the log above."
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if line.startswith(("E", "error", "terminate")))


def wait_until_ready(process: subprocess.Popen[bytes], port: int, seconds: float) -> None:
    """Wait until the server's models are loaded."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"The server ended with exit code {process.returncode}.")
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(HOST, port, timeout=5)
            with contextlib.closing(connection):
                connection.request("GET", "/v2/health/ready")
                if connection.getresponse().status == 200:
                    return
        time.sleep(0.05)
    raise RuntimeError(f"The server was not ready after {seconds:.0f} s.")


def stop(process: subprocess.Popen[bytes], seconds: float = 30.0) -> None:
    """End a server: ask it first, and kill it after a while."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
    process.wait()

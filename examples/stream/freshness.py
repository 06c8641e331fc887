"""Train on a stream while Triton serves, and measure the time from a click to a changed answer.

    python examples/stream/freshness.py --seconds 600

It starts the made-up clicks, the training job, and a server on loopback. Every half second it adds
a click of a new user on a new item to the stream, and asks the server for their score until the
answer differs from that for unknown ids. All other answers are requests of known ids. It prints the
median and the 99th percentile of these times, and the number of failed requests.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from triton_server import find_server, stop, triton_server

HERE = Path(__file__).parent
LIMIT = 60.0  # seconds for a changed answer


class Client:
    """Scores pairs of ids by HTTP, over one connection."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        self.num_requests = self.num_failed = 0

    def score(self, user: int, item: int) -> float | None:
        """Return the score; None if the request failed."""
        ids = {"user": user, "item": item}
        inputs = [
            {"name": name, "shape": [1], "datatype": "INT64", "data": [value]}
            for name, value in ids.items()
        ]
        self.num_requests += 1
        try:
            self.connection.request(
                "POST", "/v2/models/clicks/infer", json.dumps({"inputs": inputs})
            )
            response = self.connection.getresponse()
            answer = json.loads(response.read())
            if response.status == 200:
                return float(answer["outputs"][0]["data"][0])
            print(answer, file=sys.stderr)
        except (OSError, http.client.HTTPException, ValueError) as error:
            print(repr(error), file=sys.stderr)
            self.connection.close()
        self.num_failed += 1
        return None


@contextlib.contextmanager
def process(*command: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python program of this folder until the end of the block."""
    started = subprocess.Popen([sys.executable, *map(str, command)])
    try:
        yield started
    finally:
        stop(started)


def wait_for(path: Path, job: subprocess.Popen[bytes]) -> None:
    """Wait until a file exists."""
    while not path.exists():
        if job.poll() is not None:
            raise RuntimeError(f"The training job ended with exit code {job.returncode}.")
        time.sleep(0.1)


def measure(client: Client, events: Path, seconds: float) -> list[float]:
    """Return seconds from clicks to changed answers."""
    found, end, number = [], time.monotonic() + seconds, 2**40
    with events.open("ab", buffering=0) as file:
        while time.monotonic() < end:
            number += 1
            if (before := client.score(number, -number)) is None:
                continue
            click = {"time": time.time(), "user": number, "item": -number, "clicked": 1}
            file.write(json.dumps(click).encode() + b"\n")
            start = time.monotonic()
            while client.score(number, -number) in (before, None):
                if time.monotonic() - start > LIMIT:
                    raise RuntimeError(f"The answer has not changed after {LIMIT:.0f} s.")
                time.sleep(0.005)
            found.append(time.monotonic() - start)
            time.sleep(0.5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=2000.0, help="clicks per second")
    parser.add_argument("--out", type=Path, default=Path("runs/stream"))
    parser.add_argument("--triton", type=Path, default=Path(".cache/triton"))
    parser.add_argument("--backends", type=Path, default=Path("build/predictor/backends"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    events, models = options.out / "clicks", options.out / "models"
    with contextlib.ExitStack() as stack:
        stream = HERE / "clicks.py", "--events", events, "--rate", options.rate
        stack.enter_context(process(*stream))
        train = HERE / "train.py", "--events", events, "--out", options.out
        job = stack.enter_context(process(*train))
        wait_for(models / "clicks/config.pbtxt", job)
        wait_for(models / "clicks/1/deltas/000000000001.delta", job)
        server = stack.enter_context(
            triton_server(
                find_server(options.triton),
                models,
                options.backends,
                ["--model-control-mode=poll", "--repository-poll-secs=1"],
                log=options.out / "triton.log",
            )
        )
        client = Client(server.http_port)
        times = measure(client, events, options.seconds)
    median, high = np.percentile(times, [50, 99])
    print(
        f"{len(times)} clicks: median {median:.2f} s, 99% {high:.2f} s from click to answer; "
        f"{client.num_failed} of {client.num_requests} requests failed"
    )


if __name__ == "__main__":
    main()

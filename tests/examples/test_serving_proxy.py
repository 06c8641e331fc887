"""The proxy of examples/serving in front of a server that records its requests."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from serving.proxy import MAX_DEPTH, RefusedError, check_depth, proxy

INFER = "/v2/models/movies/infer"


class _Upstream(ThreadingHTTPServer):
    daemon_threads = True
    received: list[tuple[str, str, bytes, str | None]]


class _Recorder(BaseHTTPRequestHandler):
    server: _Upstream  # type: ignore[assignment]

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.headers.get("Inference-Header-Content-Length")
        self.server.received.append((self.command, self.path, body, kind))
        self.send_response(400 if "bad" in self.path else 200)
        self.send_header("Inference-Header-Content-Length", "7")
        self.end_headers()
        self.wfile.write(b"answer " + body[:9])

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[_Upstream, int]]:
    with _Upstream(("127.0.0.1", 0), _Recorder) as upstream:
        upstream.received = []
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        with proxy(0, upstream.server_port) as port:
            yield upstream, port
        upstream.shutdown()


def ask(port: int, path: str, body: bytes | None, headers: Any = ()) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET" if body is None else "POST", path, body, dict(headers))
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers
    connection.close()
    return found


def test_requests_and_answers_pass(served: tuple[_Upstream, int]) -> None:
    upstream, port = served
    upstream.received.clear()
    body = json.dumps({"inputs": [{"name": "[[[", "data": [[1, 2], ['"\\"[', "{"]]}]}).encode()
    binary = body + b"[" * 1000  # tensors follow the JSON
    cases: tuple[tuple[str, bytes | None, dict[str, str]], ...] = (
        ("/v2/health/ready", None, {}),
        (INFER, body, {}),
        ("/v2/models/movies/versions/3/infer", b"{}", {}),
        ("/v2/models/bad/infer", b"{}", {}),
        ("/v2/repository/index", b"", {}),
        (INFER, binary, {"Inference-Header-Content-Length": str(len(body))}),
    )
    for path, sent, headers in cases:
        status, answer, received = ask(port, path, sent, headers)
        assert status == (400 if "bad" in path else 200)
        assert answer == b"answer " + (sent or b"")[:9]
        assert received["Inference-Header-Content-Length"] == "7"
    assert [(path, got) for _, path, got, _ in upstream.received] == [
        (path, sent or b"") for path, sent, _ in cases
    ]
    assert upstream.received[-1][3] == str(len(body))


DEEP = b"[" * 1_000_000


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        (INFER, DEEP, {}, 400),
        (INFER, b'{"inputs": ' + DEEP, {}, 400),
        (INFER, b'{"a":' * 100_000, {}, 400),
        (INFER, b'["\\"", ' + DEEP, {}, 400),
        (INFER, DEEP, {"Inference-Header-Content-Length": "1000"}, 400),
        (INFER, b"{}", {"Inference-Header-Content-Length": "3"}, 400),
        (INFER, b"{}", {"Inference-Header-Content-Length": "-1"}, 400),
        (INFER, b"{}", {"Content-Encoding": "gzip"}, 415),
        (INFER, b"{}", {"Transfer-Encoding": "chunked"}, 415),
        (INFER, b"", {"Content-Length": "99999999999"}, 413),
        ("/v2/repository/models/movies/load", b"{}", {}, 403),
        ("/v2/systemsharedmemory/region/a/register", b"{}", {}, 403),
        ("/v2/logging", b"{}", {}, 403),
        ("/v2/models/movies/infer/../../load", b"{}", {}, 403),
    ],
)
def test_other_requests_are_refused(
    served: tuple[_Upstream, int], path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    upstream, port = served
    upstream.received.clear()
    found, answer, _ = ask(port, path, body, headers)
    assert found == status
    assert json.loads(answer)["error"]
    assert upstream.received == []


def test_a_server_that_is_gone() -> None:
    with _Upstream(("127.0.0.1", 0), _Recorder) as upstream:
        target = upstream.server_port
    with proxy(0, target) as port:
        status, answer, _ = ask(port, "/v2/health/ready", None)
    assert (status, b"does not answer" in answer) == (502, True)


def test_depth_is_counted_as_json_nests() -> None:
    rng = random.Random(0)

    def value(depth: int) -> Any:
        text = "".join(rng.choice('[]{}"\\ a') for _ in range(rng.randrange(8)))
        if depth == 0:
            return text
        inner = value(depth - 1)
        return [text, inner, 1] if rng.random() < 0.5 else {text: 0, text + "x": inner}

    refused = 0
    for _ in range(500):
        depth = rng.choice([1, 20, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 90])
        text = json.dumps(value(depth)).encode()
        try:
            check_depth(text)
            assert depth <= MAX_DEPTH
        except RefusedError:
            assert depth > MAX_DEPTH
            refused += 1
    assert 100 < refused < 250

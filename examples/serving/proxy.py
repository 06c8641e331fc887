"""HTTP proxy in front of Triton that passes inference and reads, and refuses deeply nested JSON.

The JSON parser of the Triton release that `make serve` installs calls itself for each bracket: a
body of a megabyte of brackets ends the server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"
MAX_DEPTH = 64
MAX_BYTES = 64 << 20
_SENT = re.compile(r"/v2/(models/[^/?]+(/versions/[^/?]+)?/infer|repository/index)(\?.*)?")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.S)
_BRACKET = re.compile(rb"[\[\]{}]")
_JSON_BYTES = "Inference-Header-Content-Length"
_HOP_BY_HOP = {"connection", "content-length", "expect", "host", "keep-alive", "transfer-encoding"}


class RefusedError(Exception):
    """A request that is not passed: status and message."""


def check_depth(text: bytes) -> None:
    """Check that brackets outside of strings are nested at most `MAX_DEPTH` times.

    Raises:
        RefusedError: They are nested deeper.
    """
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", text)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise RefusedError(400, f"JSON must be nested at most {MAX_DEPTH} times.")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60.0  # seconds without data from the client
    server: _Proxy

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: Triton has a log."""

    def _pass_on(self) -> None:
        try:
            body = self._checked_body()
            answer, content = self._ask(body)
        except RefusedError as error:
            status, message = error.args
            self.close_connection = True  # the body may not have been read
            content = json.dumps({"error": message}).encode()
            headers = {"Content-Type": "application/json", "Connection": "close"}
        else:
            status = answer.status
            headers = {n: v for n, v in answer.getheaders() if n.lower() not in _HOP_BY_HOP}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _checked_body(self) -> bytes:
        if self.command == "POST" and not _SENT.fullmatch(self.path):
            raise RefusedError(403, "Only inference is passed on; see docs/serving_triton.md.")
        if "Transfer-Encoding" in self.headers or "Content-Encoding" in self.headers:
            raise RefusedError(415, "Send the body uncompressed, with a Content-Length.")
        size = self._number("Content-Length", MAX_BYTES, 413)
        num_json = self._number(_JSON_BYTES, size, 400) if _JSON_BYTES in self.headers else size
        body = self.rfile.read(size)
        check_depth(body[:num_json])
        return body

    def _number(self, name: str, most: int, status: int) -> int:
        values = self.headers.get_all(name) or ["0"]
        if len(values) > 1 or not re.fullmatch(r"[0-9]{1,18}", values[0]):
            raise RefusedError(400, f"{name} must be one number; received {values}.")
        if int(values[0]) > most:
            raise RefusedError(status, f"{name} must be at most {most}; received {values[0]}.")
        return int(values[0])

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {n: v for n, v in self.headers.items() if n.lower() not in _HOP_BY_HOP}
        connection = http.client.HTTPConnection(HOST, self.server.target, timeout=300)
        try:
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                return answer, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise RefusedError(502, f"Triton does not answer: {error!r}.") from None


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    target: int


@contextlib.contextmanager
def proxy(port: int, target: int) -> Iterator[int]:
    """Pass requests to a server on this machine, until the end of the block.

    Args:
        port: Port of the proxy on the loopback interface; 0: a free one.
        target: HTTP port of Triton.

    Yields:
        The port of the proxy.
    """
    with _Proxy((HOST, port), _Handler) as server:
        server.target = target
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()

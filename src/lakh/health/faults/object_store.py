"""A proxy in front of an S3-compatible server that passes requests on, or fails them as a busy server does."""

from __future__ import annotations

import http.client
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

__all__ = ["SLOW_DOWN", "FaultyObjectStore", "StoreFault"]

StoreFault = Literal["pass", "reset", "slow"] | tuple[int, bytes]
"""What happens to a request: passed on, its connection reset, passed on late, or answered with a status and body."""
SLOW_DOWN: StoreFault = (
    503,
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
)
FORWARD_TIMEOUT_S = 30.0
SLOW_S = 2.0
_NOT_PASSED_ON = {"content-length", "transfer-encoding", "connection", "server", "date"}


class FaultyObjectStore:
    """`fault` decides about each request by its method and path. Use `url` as AWS_ENDPOINT_URL."""

    def __init__(self, target: str) -> None:
        self.fault: Callable[[str, str], StoreFault] = lambda method, path: "pass"
        self.requests: list[tuple[str, str]] = []
        host = urlsplit(target).netloc
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.requests.append((self.command, self.path))
                fault = outer.fault(self.command, self.path)
                if fault == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    self.connection.close()
                    self.close_connection = True
                    return
                if isinstance(fault, tuple):
                    (status, content), headers = fault, [("Content-Type", "application/xml")]
                else:
                    if fault == "slow":
                        time.sleep(SLOW_S)
                    forward = http.client.HTTPConnection(host, timeout=FORWARD_TIMEOUT_S)
                    forward.request(self.command, self.path, body, dict(self.headers))
                    answer = forward.getresponse()
                    status, content, headers = answer.status, answer.read(), answer.getheaders()
                self._answer(status, content, headers)

            def _answer(self, status: int, content: bytes, headers: list[tuple[str, str]]) -> None:
                self.send_response(status)
                length = {key.lower(): value for key, value in headers}.get("content-length", len(content))
                for key, value in headers:
                    if key.lower() not in _NOT_PASSED_ON:
                        self.send_header(key, value)
                self.send_header("Content-Length", str(length if self.command == "HEAD" else len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """A killed client resets its connection, which is no error here."""
                if not isinstance(sys.exception(), ConnectionError):
                    super().handle_error(request, client_address)  # type: ignore[arg-type]

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

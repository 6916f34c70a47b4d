"""JSON-RPC 2.0 with LSP's framing: `Content-Length: N`, an empty line, N bytes of JSON.

A message that is not JSON is answered with an error and skipped. A header that cannot be read ends the connection,
because nobody knows where the next message begins.
"""

from __future__ import annotations

import json
import threading
from typing import Any, BinaryIO

from lakh.errors import UserError

__all__ = ["CANCELLED", "INTERNAL_ERROR", "INVALID_PARAMS", "INVALID_REQUEST", "METHOD_NOT_FOUND", "PARSE_ERROR"]
__all__ += ["NOT_INITIALIZED", "RpcError", "RpcReader", "RpcWriter"]

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
NOT_INITIALIZED, CANCELLED = -32002, -32800
MAX_MESSAGE_BYTES = 64 << 20
MAX_HEADER_BYTES = 1 << 13
MAX_LENGTH_DIGITS = 20  # Python refuses to read numbers of thousands of digits


class RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class RpcReader:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self) -> dict[str, Any]:
        """The next message. Raises EOFError at the end, an RpcError for what is not a JSON object, a UserError for
        a header that cannot be read.
        """
        size = self._content_length()
        body = self._stream.read(size)
        if len(body) < size:
            raise EOFError
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise RpcError(PARSE_ERROR, "the message is not JSON") from None
        if not isinstance(message, dict):
            raise RpcError(INVALID_REQUEST, "the message is not an object")
        return message

    def _content_length(self) -> int:
        size, num_bytes = None, 0
        while True:
            line = self._stream.readline(MAX_HEADER_BYTES)
            num_bytes += len(line)
            if not line:
                raise EOFError
            if line in (b"\r\n", b"\n"):
                if size is None:
                    raise _bad_header("has no Content-Length")
                return size
            if num_bytes >= MAX_HEADER_BYTES:
                raise _bad_header("is longer than a header")
            name, colon, value = line.partition(b":")
            if not colon:
                raise _bad_header(f"has the line {line[:40]!r}")
            if name.strip().lower() == b"content-length":
                digits = value.strip()
                if not digits.isdigit() or len(digits) > MAX_LENGTH_DIGITS or int(digits) > MAX_MESSAGE_BYTES:
                    raise _bad_header(f"has the length {digits[:20]!r}")
                size = int(digits)


def _bad_header(found: str) -> UserError:
    return UserError("standard input", f"is not a language client: a header {found}", "start lakh lsp from an editor")


class RpcWriter:
    """Thread-safe."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def write(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":"), allow_nan=False).encode()
        with self._lock:
            self._stream.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            self._stream.flush()

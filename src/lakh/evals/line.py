"""The line to the first process of a cell: JSON out, JSON back, and never a wait without an end.

    Packets   a socket that carries descriptors too: a program's texts go as sealed memory files, its verdict comes back
              over a pipe of its own
    Frames    two pipes, for containers: the texts go inside the order (inside/relay.py)

Lost means that the other end is gone. Knows nothing of walls or verdicts.
"""

from __future__ import annotations

import array
import base64
import contextlib
import fcntl
import json
import os
import select
import socket
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Frames", "Line", "Lost", "Packets"]

PACKET_BYTES = 1 << 16
LENGTH_BYTES = 8  # as inside/values.py has it
LARGEST_FRAME_BYTES = 1 << 24


class Lost(Exception):
    pass


class Line(Protocol):
    def order(self, document: dict[str, Any], texts: Sequence[bytes]) -> None: ...

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], bytes] | None:
        """A report, and what was said on the verdict's pipe; None where nothing came in time."""
        ...

    def close(self) -> None: ...


class Packets:
    def __init__(self) -> None:
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._hear = -1

    def setup(self, document: dict[str, Any], descriptors: Sequence[int]) -> None:
        self.theirs.close()
        self._send(document, descriptors)

    def order(self, document: dict[str, Any], texts: Sequence[bytes]) -> None:
        self._hear, say = os.pipe()
        files: list[int] = []
        try:
            for text in texts:
                files.append(_sealed(text))
            self._send(document, [*files, say])
        finally:
            for descriptor in (*files, say):
                os.close(descriptor)

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], bytes] | None:
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(PACKET_BYTES)
        except TimeoutError:
            return None
        except OSError:
            data = b""
        if not data:
            raise Lost
        return json.loads(data), self._said()

    def close(self) -> None:
        self._socket.close()
        self.theirs.close()
        self._said()

    def _said(self) -> bytes:
        if self._hear < 0:
            return b""
        said = b""
        os.set_blocking(self._hear, False)
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self._hear, 8192):
                said += block
        os.close(self._hear)
        self._hear = -1
        return said

    def _send(self, document: dict[str, Any], descriptors: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._socket.sendmsg([json.dumps(document).encode()], rights)
        except OSError:
            raise Lost from None


class Frames:
    """`orders` and `reports` are the ends of the pipes to and from the process."""

    def __init__(self, orders: int, reports: int) -> None:
        self._orders, self._reports = orders, reports
        self._read = b""
        os.set_blocking(reports, False)

    def setup(self, document: dict[str, Any], descriptors: Sequence[int]) -> None:
        assert not descriptors
        self._send(document)

    def order(self, document: dict[str, Any], texts: Sequence[bytes]) -> None:
        self._send(document | {"documents": [base64.b64encode(text).decode() for text in texts]})

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], bytes] | None:
        poller = select.poll()
        poller.register(self._reports, select.POLLIN)
        while (frame := self._frame()) is None:
            if not poller.poll(1000 * timeout_s):
                return None
            block = os.read(self._reports, PACKET_BYTES)
            if not block:
                raise Lost
            self._read += block
        document = json.loads(frame)
        if "report" not in document:
            return document, b""
        return document["report"], base64.b64decode(document["said"])

    def close(self) -> None:
        for descriptor in (self._orders, self._reports):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _frame(self) -> bytes | None:
        if len(self._read) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + int.from_bytes(self._read[:LENGTH_BYTES], "little")
        if end > LARGEST_FRAME_BYTES:
            raise Lost
        if len(self._read) < end:
            return None
        frame, self._read = self._read[LENGTH_BYTES:end], self._read[end:]
        return frame

    def _send(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        data = memoryview(len(body).to_bytes(LENGTH_BYTES, "little") + body)
        try:
            while data:
                data = data[os.write(self._orders, data) :]
        except OSError:
            raise Lost from None


def _sealed(data: bytes) -> int:
    """A memory file that nobody can change any more."""
    descriptor = os.memfd_create("sealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor

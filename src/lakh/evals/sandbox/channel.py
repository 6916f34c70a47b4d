"""Messages between a worker and its first process: JSON only, nothing is ever unpickled, and no wait without a timeout.

    SocketChannel   a socket that also carries descriptors: a program's texts go as sealed memory files, its outcome
                    comes back over a pipe of its own
    PipeChannel     two pipes, for containers: the texts are part of the request (sandboxed/relay.py)

Both raise lakh.child_process.ChannelClosed when the other side is gone.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from lakh.child_process import Channel, ChannelClosed
from lakh.evals.sandboxed import messages

__all__ = ["PipeChannel", "SandboxChannel", "SocketChannel"]

LARGEST_RESPONSE_BYTES = 1 << 24


class SocketChannel:
    """Not a child_process.Channel: packets with descriptors cannot go through its byte stream."""

    def __init__(self) -> None:
        self._socket, self.remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._outcome = -1

    def send_setup(self, setup: dict[str, Any], descriptors: Sequence[int]) -> None:
        self.remote.close()
        self._send(setup, descriptors)

    def send_request(self, request: dict[str, Any], texts: Sequence[bytes]) -> None:
        self._outcome, outcome_writer = os.pipe()
        descriptors: list[int] = []
        try:
            for text in texts:
                descriptors.append(_sealed(text))
            self._send(request, [*descriptors, outcome_writer])
        finally:
            messages.close(*descriptors, outcome_writer)

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """A response and the examiner's outcome. TimeoutError if nothing comes in time."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(messages.PACKET_BYTES)
        except TimeoutError:
            raise
        except OSError:
            data = b""
        if not data:
            raise ChannelClosed
        return json.loads(data), self._drain()

    def close(self) -> None:
        self._socket.close()
        self.remote.close()
        self._drain()

    def _drain(self) -> bytes:
        descriptor, self._outcome = self._outcome, -1
        return messages.drain(descriptor) if descriptor >= 0 else b""

    def _send(self, document: dict[str, Any], descriptors: Sequence[int]) -> None:
        try:
            messages.send_packet(self._socket, document, descriptors)
        except OSError:
            raise ChannelClosed from None


class PipeChannel:
    """`requests` and `responses` are our ends of the pipes to and from the process."""

    def __init__(self, requests: int, responses: int) -> None:
        self._channel = Channel(responses, requests, codec="json", max_message_bytes=LARGEST_RESPONSE_BYTES)
        self.close = self._channel.close

    def send_setup(self, setup: dict[str, Any], descriptors: Sequence[int]) -> None:
        assert not descriptors
        self._channel.send(setup)

    def send_request(self, request: dict[str, Any], texts: Sequence[bytes]) -> None:
        self._channel.send(request | {"texts": [base64.b64encode(text).decode() for text in texts]})

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        document = self._channel.receive(timeout_s)
        if "response" not in document:
            return document, b""
        return document["response"], base64.b64decode(document["outcome"])


SandboxChannel = SocketChannel | PipeChannel


def _sealed(data: bytes) -> int:
    """A memory file that can no longer be changed."""
    descriptor = messages.memory_file(data, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor

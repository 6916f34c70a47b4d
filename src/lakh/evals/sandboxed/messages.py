"""Messages between the processes of a sandbox: length-prefixed bytes over pipes, JSON packets with descriptors over
sockets, texts in memory files.

The framing is that of lakh.child_process, which the host uses for containers. It is written again here because
sandboxed code has the standard library only, and whatever the zygote imports is memory to copy for every program.
"""

from __future__ import annotations

import _socket as socket
import array
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

LARGEST_MESSAGE_BYTES = 64 << 20
LENGTH_BYTES = 8
READ_BYTES = 1 << 16
PACKET_BYTES = 1 << 16


def _encoder() -> Callable[[Any], str]:
    """JSON's own encoder, made once: both json.dumps and JSONEncoder.encode make one for every document."""
    plain = json.JSONEncoder(separators=(",", ":")).encode
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    try:
        write = make(None, plain, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
        example = [None, True, 1, -1.5, "a\ud800", ["l", float("inf")]]
        if "".join(write(example, 0)) == plain(example):
            return lambda document: "".join(write(document, 0))
    except TypeError:  # another Python version's takes other arguments
        pass
    return plain


to_json = _encoder()
_scan: Any = vars(json.JSONDecoder())["scan_once"]


def parse_json(text: str) -> Any:
    """The document that `to_json` wrote; ValueError for anything else."""
    try:
        document, end = _scan(text, 0)
    except StopIteration:
        raise ValueError("no JSON") from None
    if end != len(text):
        raise ValueError("more than one document")
    return document


def last_line_in(error: BaseException, file: str) -> int:
    """The line of this file at which an error was raised or passed; 0 if it never was there."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


# --- over a pipe: a length, then bytes ----------------------------------------------------------------------------


def send(descriptor: int, document: Any) -> None:
    """Write one message of JSON."""
    send_bytes(descriptor, to_json(document).encode())


def send_bytes(descriptor: int, body: bytes) -> None:
    if len(body) > LARGEST_MESSAGE_BYTES:
        raise ValueError("too large to send")
    data = len(body).to_bytes(LENGTH_BYTES, "little") + body
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])


class MessageReader:
    """Reads messages from a pipe, with one system call for each small message."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = bytearray()

    def next(self) -> bytes | None:
        """The bytes of one message; None at the end. ValueError for a length above the limit."""
        while True:
            if len(self._read) >= LENGTH_BYTES:
                end = LENGTH_BYTES + int.from_bytes(self._read[:LENGTH_BYTES], "little")
                if end > LENGTH_BYTES + LARGEST_MESSAGE_BYTES:
                    raise ValueError("a message too large to read")
                if len(self._read) >= end:
                    body = bytes(self._read[LENGTH_BYTES:end])
                    del self._read[:end]
                    return body
            block = os.read(self._descriptor, READ_BYTES)
            if not block:
                return None
            self._read += block


# --- over a socket: a packet of JSON, with descriptors ------------------------------------------------------------


def send_packet(connection: Any, document: Any, descriptors: Sequence[int] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([json.dumps(document).encode()], rights)


def receive_packet(connection: Any) -> tuple[dict[str, Any], list[int]]:
    """A document and its descriptors. When the other side has closed, this process exits too."""
    numbers = array.array("i")
    data, extra, _, _ = connection.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(8 * numbers.itemsize))
    if not data:
        os._exit(0)
    for level, kind, body in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(body[: len(body) - len(body) % numbers.itemsize])
    return json.loads(data), list(numbers)


# --- files and pipes ----------------------------------------------------------------------------------------------


def memory_file(data: bytes, flags: int = os.MFD_CLOEXEC) -> int:
    descriptor = os.memfd_create("text", flags)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def read_all(descriptor: int) -> bytes:
    """A memory file from its beginning, whatever its offset."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def drain(descriptor: int) -> bytes:
    """What is in a pipe now; closes it."""
    data = b""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while block := os.read(descriptor, 8192):
            data += block
    os.close(descriptor)
    return data


def close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

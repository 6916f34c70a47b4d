"""The first process of a container, which no descriptor can be handed into: orders and reports as frames of JSON.

Frames come on stdin and go to stdout (values.py). An order's texts are in its frame; here they become the memory files
and the pipe that the zygote expects. The zygote is forked before the first order comes, so what candidates can find in
their memory holds no test. The end of stdin is our end, and as we are process 1, that of all in the container.
"""

from __future__ import annotations

import array
import base64
import contextlib
import json
import os
import signal
import socket
from typing import Any

from lakh.evals.inside import values, zygote


def main() -> None:
    orders, reports = os.dup(0), os.dup(1)
    inbox = values.Inbox(orders)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    setup = _next(inbox)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what loses its parent comes to us, and is not waited for
    if os.fork() == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            line.close()
            _close(orders, reports)
            os.dup2(theirs.fileno(), zygote.ORDER)
            theirs.close()
            zygote.main()
        finally:
            os._exit(1)
    theirs.close()
    line.send(json.dumps(setup).encode())
    values.send(reports, json.loads(_hear(line)))
    while True:
        values.send(reports, _relay(line, _next(inbox)))


def _relay(line: socket.socket, order: dict[str, Any]) -> dict[str, Any]:
    hear, say = os.pipe()
    files = [_file(base64.b64decode(text)) for text in order.pop("documents")]
    rights = array.array("i", [*files, say])
    line.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    _close(*files, say)
    report = json.loads(_hear(line))
    os.set_blocking(hear, False)
    said = b""
    with contextlib.suppress(BlockingIOError):
        while block := os.read(hear, 8192):
            said += block
    os.close(hear)
    return {"report": report, "said": base64.b64encode(said).decode()}


def _next(inbox: values.Inbox) -> dict[str, Any]:
    frame = inbox.next()
    if frame is None:
        os._exit(0)
    document: dict[str, Any] = json.loads(frame)
    return document


def _hear(line: socket.socket) -> bytes:
    data = line.recv(zygote.PACKET_BYTES)
    if not data:
        os._exit(1)
    return data


def _file(data: bytes) -> int:
    descriptor = os.memfd_create("order")
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

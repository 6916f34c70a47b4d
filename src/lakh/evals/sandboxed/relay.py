"""The first process of a container, into which no descriptor can be passed: requests on stdin, responses on stdout.

A request carries its texts; here they become the memory files and the pipe that the zygote expects. The zygote is
forked before the first request arrives, so a candidate's memory holds no test. When stdin ends this process exits, and
as it is process 1 everything in the container ends with it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
from typing import Any

from lakh.evals.sandboxed import messages, zygote


def main() -> None:
    requests, responses = os.dup(0), os.dup(1)
    reader = messages.MessageReader(requests)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)
    connection, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    setup = _next(reader)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans become our children, and are not waited for
    if os.fork() == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            messages.close(requests, responses)
            os.dup2(zygote_end.fileno(), zygote.REQUEST_FD)
            zygote_end.close()
            zygote.main()
        finally:
            os._exit(1)
    zygote_end.close()
    messages.send_packet(connection, setup)
    messages.send(responses, messages.receive_packet(connection)[0])
    while True:
        messages.send(responses, _relay(connection, _next(reader)))


def _relay(connection: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    outcome, outcome_writer = os.pipe()
    descriptors = [messages.memory_file(base64.b64decode(text)) for text in request.pop("texts")]
    descriptors.append(outcome_writer)
    messages.send_packet(connection, request, descriptors)
    messages.close(*descriptors)
    response = messages.receive_packet(connection)[0]
    return {"response": response, "outcome": base64.b64encode(messages.drain(outcome)).decode()}


def _next(reader: messages.MessageReader) -> dict[str, Any]:
    message = reader.next()
    if message is None:
        os._exit(0)
    document: dict[str, Any] = json.loads(message)
    return document

"""Limits of HTTP connections: how long one may be idle, and how many there may be.

A connection is idle while it has no request in progress: before its first request, between two, and while the header of
one arrives. After IDLE_S it is closed, so a client that sends half a header, or one byte a second, holds nothing for
long (bodies and unread responses have limits of their own: http.py, responses.py).

Every connection is a file descriptor, and a server without descriptors cannot even answer its health check. Beyond
`max_connections` a new connection closes the one that was idle longest, and completions on a new connection get a 503;
RESERVED more are accepted for /health, /ready and /metrics, and any beyond these are closed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from lakh.server.metrics import MetricFamily, counter, gauge
from lakh.server.request import RequestError

__all__ = ["RESERVED", "ConnectionLimits", "log_rarely"]

log = logging.getLogger(__name__)

IDLE_S = 60.0
RESERVED = 64
LOG_EVERY_S = 10.0
SETTLE_S = 1.0


class ConnectionLimits:
    def __init__(
        self,
        max_connections: int,
        *,
        reserved: int | None = None,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reserved`: more connections, for probes. `server` must be set before the first connection."""
        self.most = max_connections + (RESERVED if reserved is None else reserved)
        self.server: web.Server | None = None
        self._max, self._idle_s, self._clock = max_connections, idle_s, clock
        self._active: Counter[Any] = Counter()
        self._idle_since_s: dict[Any, float] = {}
        """In order of time."""
        self.num_closed = 0

    @classmethod
    def within(cls, max_files: int) -> ConnectionLimits:
        """Half of the open files that the process may have: a gateway has a connection to an engine for each client's.
        With few files the process itself needs a large part of them, so fewer are reserved.
        """
        reserved = min(RESERVED, max_files // 8)
        return cls(max((max_files - 2 * reserved) // 2, 1), reserved=reserved)

    def new_protocol(self) -> asyncio.Protocol:
        """The protocol of a new connection; for `loop.create_server`."""
        assert self.server is not None
        if self.num_open >= self._max:
            self._refresh()
        if self.num_open >= self._max and self._idle_since_s:
            self._close(next(iter(self._idle_since_s)))
        if self.num_open >= self.most:
            self.num_closed += 1
            return _ClosedAtOnce()
        protocol = self.server()
        self._idle_since_s[protocol] = self._clock()
        return protocol

    @property
    def num_open(self) -> int:
        return len(self._idle_since_s) + len(self._active)

    @contextlib.contextmanager
    def request(self, protocol: Any, *, is_probe: bool) -> Iterator[None]:
        """Around the handling of a request. Raises a 503 beyond `max_connections`, except for probes."""
        self._idle_since_s.pop(protocol, None)
        self._active[protocol] += 1
        try:
            if not is_probe and len(self._active) > self._max:
                raise RequestError(None, "too many connections; try again later", status=503, code="too_many_clients")
            yield
        finally:
            self._active[protocol] -= 1
            if not self._active[protocol]:
                del self._active[protocol]
                self._idle_since_s[protocol] = self._clock()

    async def close_idle(self) -> None:
        """Close idle connections when their time is up; runs until it is cancelled."""
        while True:
            await asyncio.sleep(self._idle_s / 4)
            self._refresh()
            now_s = self._clock()
            for protocol in [one for one, since_s in self._idle_since_s.items() if now_s - since_s > self._idle_s]:
                self._close(protocol)

    def _refresh(self) -> None:
        """Forget connections that the client closed. A new one is not in the server's list at once."""
        assert self.server is not None
        now_s, still_open = self._clock(), set(self.server.connections)
        for protocol in [one for one, since_s in self._idle_since_s.items() if now_s - since_s > SETTLE_S]:
            if protocol not in still_open:
                del self._idle_since_s[protocol]
        for protocol in still_open - self._idle_since_s.keys() - self._active.keys():
            self._idle_since_s[protocol] = now_s

    def _close(self, protocol: Any) -> None:
        del self._idle_since_s[protocol]
        self.num_closed += 1
        protocol.force_close()

    def metric_families(self) -> list[MetricFamily]:
        return [
            gauge("http_connections", "Open HTTP connections.", self.num_open),
            counter("http_connections_closed_total", "Connections closed because they were idle.", self.num_closed),
        ]


class _ClosedAtOnce(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def log_rarely(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception handler of an event loop: without descriptors, `accept` fails thousands of times a second."""
    if not isinstance(context.get("exception"), OSError) or "accept" not in context.get("message", ""):
        loop.default_exception_handler(context)
        return
    now_s = loop.time()
    if now_s >= getattr(log_rarely, "next_s", 0.0):
        log_rarely.next_s = now_s + LOG_EVERY_S  # type: ignore[attr-defined]
        log.error("cannot accept connections: %s (raise the limit of open files: ulimit -n)", context["exception"])

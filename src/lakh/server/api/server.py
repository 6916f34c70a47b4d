"""Starts and stops the server: HTTP and gRPC over one backend, draining on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.connections import ConnectionLimits, log_rarely
from lakh.server.api.http import HttpApi
from lakh.server.api.listen import cannot_listen
from lakh.server.api.operator_routes import Operator
from lakh.server.api.request_handler import RequestHandler
from lakh.server.api.tls import Tls
from lakh.server.backend import Backend
from lakh.server.metrics import MetricSource
from lakh.server.observability.request_record import RequestObserver
from lakh.server.store import CacheStore

__all__ = ["MAX_BODY_BYTES", "HttpServer", "running", "serve", "serve_until_signal"]

log = logging.getLogger(__name__)
aiohttp_log = logging.getLogger(f"{__name__}.aiohttp")

MAX_BODY_BYTES = 4 << 20
DRAIN_S = 10.0  # for running requests, after a signal to stop
CLOSE_S = 5.0  # for connections, after that
MAX_FILES = 1 << 16
BACKLOG = 128


class HttpServer:
    """A running server."""

    def __init__(self, handler: RequestHandler, url: str, drain_s: float) -> None:
        self.handler, self.url, self._drain_s = handler, url, drain_s

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Reject new requests on HTTP and gRPC, and give running ones `drain_s` to finish, or until `hurry` is set."""
        if self.handler.is_draining:
            return
        self.handler.is_draining = True
        backend = self.handler.backend
        drained = asyncio.create_task(backend.drain(self._drain_s))
        hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
        try:
            await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
            await (drained if drained.done() else backend.drain(0.0))
        finally:
            drained.cancel()
            hurried.cancel()


@contextlib.asynccontextmanager
async def running(
    backend: Backend,
    host: str,
    port: int,
    *,
    drain_s: float = DRAIN_S,
    max_body_bytes: int = MAX_BODY_BYTES,
    keys: ApiKeys | None = None,
    store: CacheStore | None = None,
    tls: Tls | None = None,
    cors: str | None = None,
    operator: Operator | None = None,
    observers: Sequence[RequestObserver] = (),
    metric_sources: Sequence[MetricSource] = (),
    connections: ConnectionLimits | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve HTTP inside the block; `url` has the real port if `port` is 0.

    At the end it drains before it stops listening, and closes the backend and the store. Requests that exceed `drain_s`
    end with "abort".
    """
    connections = connections or ConnectionLimits.within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    handler = RequestHandler(
        backend, keys=keys, store=store, metric_sources=[connections, *metric_sources], observers=observers
    )
    app = HttpApi(handler, connections, max_body_bytes=max_body_bytes, cors=cors, operator=operator).app
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S, logger=aiohttp_log
    )
    await runner.setup()
    connections.server = runner.server
    loop = asyncio.get_running_loop()
    closing_idle = asyncio.create_task(connections.close_idle())
    listener: asyncio.Server | None = None
    try:
        await backend.start()
        context = None if tls is None else tls.context()
        try:
            listener = await loop.create_server(connections.new_protocol, host, port, ssl=context, backlog=BACKLOG)
        except OSError as error:
            raise cannot_listen("--http", host, port, error) from None
        scheme = "http" if tls is None else "https"
        real_port = listener.sockets[0].getsockname()[1]
        server = HttpServer(handler, f"{scheme}://{f'[{host}]' if ':' in host else host}:{real_port}", drain_s)
        try:
            yield server
        finally:
            await server.drain()
    finally:
        if listener is not None:
            listener.close()
        await runner.cleanup()
        closing_idle.cancel()
        await backend.close()
        if store is not None:
            await store.close()


def serve(backend: Backend, host: str, port: int, **options: Any) -> None:
    """`serve_until_signal` in an event loop of its own."""
    _raise_file_limit()
    asyncio.run(serve_until_signal(backend, host, port, **options))


async def serve_until_signal(
    backend: Backend,
    host: str,
    port: int,
    *,
    on_ready: Callable[[str, str | None], None] = lambda url, grpc_address: None,
    on_hangup: Callable[[], None] | None = None,
    grpc_address: tuple[str, int] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    tls: Tls | None = None,
    **options: Any,
) -> None:
    """Serve until SIGTERM, SIGINT or, without `on_hangup`, SIGHUP; a second signal also ends the running requests.

    Calls `on_ready` with the HTTP and gRPC addresses, and `on_hangup` at SIGHUP. `options` are those of `running`.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_rarely)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    if on_hangup is not None:
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            running(backend, host, port, tls=tls, max_body_bytes=max_body_bytes, **options)
        )
        grpc_at = None
        if grpc_address is not None:
            from lakh.server.api import grpc

            grpc_at = await stack.enter_async_context(
                grpc.running(server.handler, *grpc_address, tls=tls, max_message_bytes=max_body_bytes)
            )
        on_ready(server.url, grpc_at)
        await stop.wait()
        log.info("stopping: running requests may finish")
        await server.drain(hurry)  # before either API closes


def _raise_file_limit() -> None:
    """As many open files as the system allows: shells start with 1,024, and every client is one (two in a gateway)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _is_our_error(record: logging.LogRecord) -> bool:
    """aiohttp logs a traceback for malformed HTTP, which was answered with a 400."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


aiohttp_log.addFilter(_is_our_error)

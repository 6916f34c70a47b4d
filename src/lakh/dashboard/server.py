"""The page and its data over HTTP.

    GET /            the page
    GET /data.json   ?run=NAME (repeatable), ?from=STEP&to=STEP, ?points=N; 304 if nothing has changed

Read-only. One task follows the files; requests are answered from memory. While the server listens on loopback it
accepts only loopback host names, which stops DNS rebinding.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import math
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from lakh.dashboard.page import as_json, content_policy, page
from lakh.dashboard.runs import RunCollection
from lakh.errors import UserError

__all__ = ["application", "serve"]

READ_BUDGET_S = 0.25
POLL_S = 1.0
MAX_POINTS = 5_000
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(runs: RunCollection, *, loopback_only: bool = True) -> web.Application:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if loopback_only and _host_name(request.host) not in LOOPBACK:
            raise web.HTTPForbidden(text="this dashboard accepts only loopback host names")
        return await handler(request)

    async def index(request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": content_policy(), "X-Content-Type-Options": "nosniff"}
        return web.Response(text=page(None), content_type="text/html", headers=headers)

    async def data(request: web.Request) -> web.Response:
        names = request.query.getall("run", [])
        points = int(_number(request, "points", 600, 10, MAX_POINTS))
        window = None
        if "from" in request.query or "to" in request.query:
            window = (_number(request, "from", -math.inf), _number(request, "to", math.inf))
        # The state of a silent run depends on the clock, so the tag changes every 15 s.
        digest = hashlib.sha256(f"{runs.version()} {sorted(names)} {points} {window}".encode()).hexdigest()[:16]
        tag = f'"{digest}-{int(asyncio.get_running_loop().time() // 15)}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag})
        text = await asyncio.to_thread(lambda: as_json(runs.data(names, points=points, window=window)))
        response = web.Response(text=text, content_type="application/json", headers={"ETag": tag})
        response.enable_compression()
        return response

    async def following(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(_follow(runs))
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app = web.Application(middlewares=[guard])
    app.router.add_get("/", index)
    app.router.add_get("/data.json", data)
    app.cleanup_ctx.append(following)
    return app


async def _follow(runs: RunCollection) -> None:
    while True:
        more = await asyncio.to_thread(runs.refresh, READ_BUDGET_S)
        await asyncio.sleep(0.01 if more else POLL_S)


def serve(runs: RunCollection, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. Calls `ready(url)` once it listens; port 0 picks a free port."""
    asyncio.run(_serve(runs, host, port, ready))


async def _serve(runs: RunCollection, host: str, port: int, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    runner = web.AppRunner(application(runs, loopback_only=host in LOOPBACK), access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise _cannot_listen(host, port, error) from None
        bound = runner.addresses[0][1]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{bound}/")
        await stop.wait()
    finally:
        await runner.cleanup()


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(f"{host}:{port}", "the port is in use", "choose another, or --http 127.0.0.1:0 for a free one")
    return UserError(f"{host}:{port}", f"cannot listen there ({error.strerror or error})", "change --http")


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] or host


def _number(request: web.Request, name: str, default: float, low: float = -math.inf, high: float = math.inf) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise web.HTTPBadRequest(text=f"{name}={text}: not a number")
    return min(high, max(low, value))

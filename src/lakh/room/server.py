"""The page and its data over HTTP.

    GET /            the page
    GET /data.json   ?run=NAME (again for more), ?from=STEP&to=STEP, ?points=N; 304 where nothing is new

Reads only. One task follows the files; requests are answered from what it has read. Listening on this machine alone, it
answers only to names of this machine, so that a web page elsewhere cannot read it through a name of its own.
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

from lakh.errors import UserError
from lakh.room.house import House
from lakh.room.page import as_json, content_policy, page

__all__ = ["application", "serve"]

READ_S = 0.25
POLL_S = 1.0
MOST_POINTS = 5_000
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(house: House, *, only_here: bool = True) -> web.Application:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if only_here and _host_name(request.host) not in LOOPBACK:
            raise web.HTTPForbidden(text="this control room answers only to this machine's own names")
        return await handler(request)

    async def show(request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": content_policy(), "X-Content-Type-Options": "nosniff"}
        return web.Response(text=page(None), content_type="text/html", headers=headers)

    async def data(request: web.Request) -> web.Response:
        names = request.query.getall("run", [])
        points = int(_number(request, "points", 600, 10, MOST_POINTS))
        window = None
        if "from" in request.query or "to" in request.query:
            window = (_number(request, "from", -math.inf), _number(request, "to", math.inf))
        # A silent run changes by the clock alone: the tag does too, slowly.
        seen = hashlib.sha256(f"{house.version()} {sorted(names)} {points} {window}".encode()).hexdigest()[:16]
        tag = f'"{seen}-{int(asyncio.get_running_loop().time() // 15)}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag})
        text = await asyncio.to_thread(lambda: as_json(house.data(names, points=points, window=window)))
        answer = web.Response(text=text, content_type="application/json", headers={"ETag": tag})
        answer.enable_compression()
        return answer

    async def following(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(_follow(house))
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app = web.Application(middlewares=[guard])
    app.router.add_get("/", show)
    app.router.add_get("/data.json", data)
    app.cleanup_ctx.append(following)
    return app


async def _follow(house: House) -> None:
    while True:
        more = await asyncio.to_thread(house.refresh, READ_S)
        await asyncio.sleep(0.01 if more else POLL_S)


def serve(house: House, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. `ready` is told the address; port 0 takes a free one."""
    asyncio.run(_serve(house, host, port, ready))


async def _serve(house: House, host: str, port: int, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    runner = web.AppRunner(application(house, only_here=host in LOOPBACK), access_log=None)
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
        return UserError(f"{host}:{port}", "the port is in use", "give another, or --http 127.0.0.1:0 for any free one")
    return UserError(f"{host}:{port}", f"cannot listen there ({error.strerror or error})", "give another --http")


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] or host


def _number(request: web.Request, name: str, default: float, least: float = -math.inf, most: float = math.inf) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise web.HTTPBadRequest(text=f"{name}={text}: not a number")
    return min(most, max(least, value))

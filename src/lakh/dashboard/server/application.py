"""The page and its data over HTTP.

    GET /                the page
    GET /data.json       ?run=NAME (repeatable), ?from=STEP&to=STEP, ?points=N; 304 if nothing has changed
    GET /samples.json    ?run=NAME&evaluation=ID: the samples and verdicts of one evaluation
    GET /corpus.json     ?run=NAME: groups of duplicates and dropped documents of its corpus (corpus.py)
    GET /plan.json       ?model=&cluster=&gpus=&batch=&sequence=&tokens=: the best layouts and their cost (planning.py)
    GET /across.json     ?sites=&model=&batch=&sequence=: a plan for several sites, with a map (across.py)
    GET /events          server-sent events: something has changed
    GET /playground/     completions of a running server (playground.py)
    GET /healthz         200 while the server runs

Nothing here changes a run. One task follows the files; requests are answered from memory. access.py decides who may
ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import math
import signal
from collections.abc import AsyncIterator, Callable
from urllib.parse import quote

from aiohttp import web

from lakh.dashboard.page import as_json, content_policy, page
from lakh.dashboard.runs import RunCollection
from lakh.dashboard.server.access import HEALTH_PATH, LOOPBACK, guard
from lakh.dashboard.server.across import AcrossService
from lakh.dashboard.server.changes import ChangeStream
from lakh.dashboard.server.corpus import CorpusService
from lakh.dashboard.server.planning import Choices, PlanService
from lakh.dashboard.server.playground import Playground
from lakh.errors import UserError

__all__ = ["application", "serve"]

READ_BUDGET_S = 0.25
POLL_S = 1.0
MAX_POINTS = 5_000
PAGE_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


def application(
    runs: RunCollection,
    *,
    token: str | None = None,
    plan_choices: Callable[[], Choices] | None = None,
    playground: Playground | None = None,
) -> web.Application:
    """The pages for loopback, or for clients with `token`; the plan page needs names of models and clusters."""

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def index(request: web.Request) -> web.Response:
        headers = {**PAGE_HEADERS, "Content-Security-Policy": content_policy()}
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

    async def samples(request: web.Request) -> web.Response:
        name, evaluation = request.query.get("run", ""), request.query.get("evaluation", "")
        found = await asyncio.to_thread(runs.samples, name, evaluation)
        if found is None:
            raise web.HTTPNotFound(text="no such evaluation")
        response = web.Response(text=as_json({"samples": found}), content_type="application/json")
        response.enable_compression()
        return response

    changes = ChangeStream()

    async def following(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(_follow(runs, changes))
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app = web.Application(middlewares=[guard(token)])
    app.router.add_get("/", index)
    app.router.add_get(HEALTH_PATH, health)
    app.router.add_get("/events", changes.handle)
    app.router.add_get("/data.json", data)
    app.router.add_get("/samples.json", samples)
    app.router.add_get("/corpus.json", CorpusService(runs.corpus_path).handle)
    plans, across = PlanService(plan_choices or _no_choices), AcrossService(plan_choices or _no_choices)
    app.router.add_get("/across.json", across.handle)
    app.on_shutdown.append(across.stop)
    app.router.add_get("/plan-choices.json", plans.names)
    app.router.add_get("/plan.json", plans.handle)
    (playground or Playground()).add_to(app, token)
    app.cleanup_ctx.append(following)
    app.on_shutdown.append(changes.close)
    return app


def _no_choices() -> Choices:
    return {"models": (), "clusters": (), "sites": {}}


async def _follow(runs: RunCollection, changes: ChangeStream) -> None:
    while True:
        more = await asyncio.to_thread(runs.refresh, READ_BUDGET_S)
        await changes.publish(runs.version())
        await asyncio.sleep(0.01 if more else POLL_S)


def serve(
    runs: RunCollection,
    host: str,
    port: int,
    ready: Callable[[str], None],
    *,
    token: str | None = None,
    plan_choices: Callable[[], Choices] | None = None,
    playground: Playground | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM. Calls `ready(url)` once it listens; port 0 picks a free port."""
    if token is None and host not in LOOPBACK:
        raise ValueError(f"{host} is not loopback and needs a token")
    query = f"?token={quote(token)}" if token else ""
    app = application(runs, token=token, plan_choices=plan_choices, playground=playground)
    asyncio.run(_serve(app, host, port, lambda url: ready(url + query)))


async def _serve(app: web.Application, host: str, port: int, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    runner = web.AppRunner(app, access_log=None)
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

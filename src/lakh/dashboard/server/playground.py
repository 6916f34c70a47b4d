"""The playground page: completions of a running server, forwarded so that the browser talks to the dashboard only.

    GET  /playground/                   the page, which lakh.server serves too; the command passes it in
    GET  /playground/ready              of the server
    POST /playground/v1/completions     of the server

The dashboard forwards to one address, which its user chose. Answers of the server reach the page as data only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from lakh.errors import UserError

__all__ = ["Playground", "server_url"]

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 120.0
"""Of a server that answers nothing, e.g. while a long prompt waits in its queue."""
READY_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20
TYPES = ("application/json", "text/event-stream")


def server_url(text: str) -> str:
    """The address of a server without a path, a query and a trailing slash."""
    found = urlsplit(text)
    try:
        is_address = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # a port that is no number
        is_address = False
    if not is_address or found.path.strip("/") or found.query or found.fragment or found.username is not None:
        raise UserError(
            f"--server {text}", "is not the address of a server", "write e.g. --server http://127.0.0.1:8000"
        )
    return f"{found.scheme}://{found.netloc}"


@dataclass
class Playground:
    html: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    """Of the server; None: the page says how to name one."""

    def add_to(self, app: web.Application, token: str | None) -> None:
        self._token = token
        app.router.add_get("/playground", self._to_page)
        app.router.add_get("/playground/", self._page)
        app.router.add_get("/playground/ready", self._ready)
        app.router.add_post("/playground/v1/completions", self._complete)
        app.cleanup_ctx.append(self._session_of)

    async def _session_of(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            yield

    async def _to_page(self, _: web.Request) -> web.Response:
        raise web.HTTPSeeOther("/playground/")  # relative addresses of the page need the slash

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(text=self.html, content_type="text/html", headers=self.headers)

    async def _ready(self, _: web.Request) -> web.Response:
        if self.url is None:
            return web.json_response({"status": "no server: start lakh dashboard with --server URL"}, status=503)
        timeout = aiohttp.ClientTimeout(total=READY_TIMEOUT_S)
        try:
            async with self._session.get(f"{self.url}/ready", allow_redirects=False, timeout=timeout) as answer:
                body = await answer.content.read(MAX_ANSWER_BYTES)
                return web.Response(body=body, status=answer.status, content_type=TYPES[0])
        except (aiohttp.ClientError, OSError, TimeoutError):
            status = f"no server at {self.url}: start one with lakh serve MODEL, or name one with --server URL"
            return web.json_response({"status": status}, status=503)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != TYPES[0]:  # other sites can only send other types without asking first
            raise web.HTTPUnsupportedMediaType(text="send application/json")
        if self.url is None:
            return _error("no server: start lakh dashboard with --server URL", 503)
        headers = {"Content-Type": TYPES[0]}
        key = request.headers.get("Authorization", "")
        if key and key != f"Bearer {self._token}":  # the token of the dashboard is not for the server
            headers["Authorization"] = key
        body, response = await request.read(), None
        try:
            post = self._session.post(f"{self.url}/v1/completions", data=body, headers=headers, allow_redirects=False)
            async with post as answer:
                if answer.content_type not in TYPES:
                    return _error(f"{self.url} answered with {answer.status} and no completion: is it a server?", 502)
                kind = {"Content-Type": answer.content_type, "Cache-Control": "no-store"}
                response = web.StreamResponse(status=answer.status, headers=kind)
                await response.prepare(request)
                async for block in answer.content.iter_any():
                    await response.write(block)
                await response.write_eof()
                return response
        except ConnectionResetError:  # the browser is gone, or the server in the middle of an answer
            if response is None:
                return _error(f"{self.url} closed the connection", 502)
            return response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if response is None:
                return _error(f"{self.url} does not answer ({type(error).__name__})", 502)
            if request.transport is not None:
                request.transport.abort()  # the page must not take a part for the whole
            return response


def _error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)

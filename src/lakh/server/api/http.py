"""The HTTP face: completions in three dialects over one backend.

    POST /v1/completions    prompt, suffix, max_tokens, temperature, top_p, top_k, n, stop, seed, logprobs, stream;
                            lakh's own: stop_rule, order, timeout_ms, supersede, reuse; vLLM's cache_salt
    POST /v1/fim/completions, /infill    the same in the words of other clients (dialects.py)
    POST /v1/feedback       {"event": "shown" | "accepted"}: what became of a suggestion
    GET  /v1/models  /v1/models/NAME  /health  /ready  /metrics  /openapi.json

The event loop reads requests and writes answers; whose they are and what they may is the desk's (desk.py), the answers
come from its backend. A full queue or a spent quota is a 429, a client that goes away cancels its generation. Whatever
a client sends, it gets a short JSON error and never a traceback; a 500 is a bug of ours and is logged.

Without keys (keys.py) anyone who reaches the port is served: beyond 127.0.0.1, give keys and TLS (tls.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import resource
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from lakh.server.backend import Backend, CompletionDelta, Usage
from lakh.server.api import openapi
from lakh.server.api.listen import cannot_listen
from lakh.server.api.request_handler import RequestHandler, refusal
from lakh.server.api.dialects import DIALECTS, DialectResponse, Dialect
from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.tls import Tls
from lakh.server.metrics import CONTENT_TYPE
from lakh.server.request import RequestError, CompletionRequest, parse
from lakh.server.store import CacheStore

__all__ = ["HttpServer", "running", "serve"]

log = logging.getLogger(__name__)
wire_log = logging.getLogger(f"{__name__}.wire")

MAX_BODY_BYTES = 4 << 20
CLIENT_GONE = 499
READ_TIMEOUT_S = 30.0  # for a request's body
READER_TIMEOUT_S = 60.0  # for a client to take what was sent to it
DRAIN_S = 10.0  # for running requests, once we were asked to stop
CLOSE_S = 5.0  # for connections, after that
MAX_FILES = 1 << 16
AT_ONCE_BYTES = 1 << 14  # are taken by a connection's buffer at once
compact = json.JSONEncoder(separators=(",", ":")).encode  # llama.vim looks for "content":" without a space


class HttpServer:
    """The application and its state. `app` is what aiohttp serves."""

    def __init__(self, desk: RequestHandler, *, max_body_bytes: int = MAX_BODY_BYTES, drain_s: float = DRAIN_S) -> None:
        self.desk, self.max_body_bytes, self._drain_s = desk, max_body_bytes, drain_s
        self.url = ""
        self._created = int(time.time())
        self.app = web.Application(client_max_size=max_body_bytes, middlewares=[_errors])
        self.app.add_routes(
            [
                *[web.post(dialect.path, partial(self.completions, dialect)) for dialect in DIALECTS],
                web.post("/v1/feedback", self.feedback),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model:.+}", self.model),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics_page),
                web.get("/openapi.json", self.openapi),
            ]
        )

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Take no new requests on any face, and give those at work so long to finish, or until there is a `hurry`. The
        faces go on telling it meanwhile.
        """
        if self.desk.draining:
            return
        self.desk.draining = True
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self.desk.backend.drain(self._drain_s))]
        if hurry is not None:
            waits.append(asyncio.create_task(hurry.wait()))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        await (waits[0] if waits[0] in done else self.desk.backend.drain(0.0))

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self._cards()})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        card = next((card for card in self._cards() if card["id"] == name), None)
        if card is None:
            raise RequestError("model", f"model {name[:80]!r} is not served here", status=404, code="model_not_found")
        return web.json_response(card)

    def _cards(self) -> list[dict[str, Any]]:
        frame = {"object": "model", "created": self._created, "owned_by": "lakh"}
        cards = self.desk.backend.models()
        return [{"id": card.id, **frame, "context": card.context, "weights": card.weights} for card in cards]

    async def health(self, _: web.Request) -> web.Response:
        """Alive: whoever restarts us looks here."""
        return web.json_response({"status": "draining" if self.desk.draining else "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """Takes requests: whoever sends us some looks here."""
        models = [card.id for card in self.desk.backend.models()]
        if self.desk.draining or not models:
            return web.json_response({"status": "draining" if self.desk.draining else "no engine"}, status=503)
        return web.json_response({"status": "ok", "model": models[0]})

    async def metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self.desk.page().encode(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response(openapi.document())

    async def feedback(self, http: web.Request) -> web.Response:
        tenant = self.desk.tenant(http.headers.get("Authorization", ""))
        await self.desk.feedback(tenant, await _read_json(http))
        return web.json_response(await self.desk.accepted_by_tenant(tenant))

    async def completions(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        try:
            with self.desk.counted():
                tenant = self.desk.tenant(http.headers.get("Authorization", ""))
                body = await _read_json(http)
                request = parse(dialect.to_openai(body) if isinstance(body, Mapping) else body, tenant)
                return await self._complete(http, dialect, request)
        except ConnectionError:  # the client went away while we wrote: nobody reads this answer, and nothing is wrong
            return web.Response(status=CLIENT_GONE)

    async def _complete(self, http: web.Request, dialect: Dialect, request: CompletionRequest) -> web.StreamResponse:
        frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.desk.model(request),
        }
        async with contextlib.aclosing(self.desk.answer(request)) as items:
            if request.stream:
                return await self._stream(http, dialect, request, frame, items)
            pieces: list[list[CompletionDelta]] = [[] for _ in range(request.num_choices)]
            usage = None
            async for item in items:
                if isinstance(item, Usage):
                    usage = item
                else:
                    pieces[item.index].append(item)
        choices = [_choice(_joined(mine), request) for mine in pieces]
        answer = dialect.render(DialectResponse(frame, choices, _usage(usage), is_piece=False))
        return web.json_response(answer, dumps=compact)

    async def _stream(
        self,
        http: web.Request,
        dialect: Dialect,
        request: CompletionRequest,
        frame: dict[str, Any],
        items: AsyncIterator[CompletionDelta | Usage],
    ) -> web.StreamResponse:
        """HttpServer-sent events: `data: {...}` and an empty line for each piece, `data: [DONE]` at the end."""
        first = await anext(items)  # an error before the first piece is still a plain answer
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)

        async def send(data: dict[str, Any]) -> None:
            await _write(http, response, f"data: {compact(data)}\n\n".encode())

        try:
            async for item in _after(first, items):
                if isinstance(item, CompletionDelta):
                    await send(dialect.render(DialectResponse(frame, [_choice(item, request)], None, is_piece=True)))
                elif request.include_usage:
                    await send(dialect.render(DialectResponse(frame, [], _usage(item), is_piece=True)))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - the status line has gone out: say it in the stream
            await send(refusal(error).as_dict())
            await response.write_eof()
            return response
        if dialect.last_line is not None:
            await _write(http, response, f"data: {dialect.last_line}\n\n".encode())
        await response.write_eof()
        return response


async def _write(http: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """A client that takes nothing for READER_TIMEOUT_S is one that has gone."""
    transport = http.transport
    if transport is None or transport.get_write_buffer_size() + len(data) < AT_ONCE_BYTES:
        await response.write(data)  # does not wait
        return
    try:
        async with asyncio.timeout(READER_TIMEOUT_S):
            await response.write(data)
    except TimeoutError:
        transport.abort()
        raise ConnectionResetError("the client takes nothing") from None


async def _after(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for item in rest:
        yield item


def _joined(pieces: list[CompletionDelta]) -> CompletionDelta:
    """The pieces of one choice as one."""
    logprobs: dict[str, Any] | None = None
    for shown in (piece.logprobs for piece in pieces if piece.logprobs is not None):
        logprobs = {name: [*(logprobs or {}).get(name, ()), *values] for name, values in shown.items()}
    last = pieces[-1]
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return CompletionDelta(last.index, "".join(piece.text for piece in pieces), last.finish_reason, tokens, logprobs)


def _choice(piece: CompletionDelta, request: CompletionRequest) -> dict[str, Any]:
    choice = {
        "index": piece.index,
        "text": piece.text,
        "logprobs": piece.logprobs,
        "finish_reason": piece.finish_reason,
    }
    return choice | ({"token_ids": list(piece.tokens)} if request.return_token_ids else {})


def _usage(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage(0, 0)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _is_ours(record: logging.LogRecord) -> bool:
    """aiohttp logs a traceback for bytes that are no HTTP. They were answered with a 400: nothing is wrong here."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


wire_log.addFilter(_is_ours)


# --- errors -------------------------------------------------------------------------------------------------


async def _read_json(http: web.Request) -> object:
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):  # `wait_for` makes a task of it (Python 3.11)
            body = await http.read()
    except TimeoutError:
        raise RequestError(None, f"the body did not come within {READ_TIMEOUT_S:g} s", status=408) from None
    except web.RequestPayloadError as error:  # a content-encoding that it is not in, a chunk that is none
        raise RequestError(None, f"the body cannot be read ({error})"[:200]) from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(None, "the body is not JSON in UTF-8") from None


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client has gone
    except Exception as error:  # noqa: BLE001 - the one place where errors become answers
        answer = refusal(error)
        headers = {"Retry-After": str(math.ceil(answer.retry_after_s))} if answer.status in (429, 503) else {}
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return web.json_response(answer.as_dict(), status=answer.status, headers=headers)


# --- life ---------------------------------------------------------------------------------------------------


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
) -> AsyncIterator[HttpServer]:
    """A server that answers inside the block; `url` has the real port where 0 was asked for.

    At the end it drains: no new requests, and `drain_s` for those at work; the rest end with "abort". Only then
    does it stop listening. The backend and the store are closed with it.
    """
    server = HttpServer(RequestHandler(backend, keys=keys, store=store), max_body_bytes=max_body_bytes, drain_s=drain_s)
    runner = web.AppRunner(
        server.app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S, logger=wire_log
    )
    await runner.setup()
    try:
        await backend.start()
        site = web.TCPSite(runner, host, port, ssl_context=None if tls is None else tls.context())
        try:
            await site.start()
        except OSError as error:
            raise cannot_listen("--http", host, port, error) from None
        scheme = "http" if tls is None else "https"
        server.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
        try:
            yield server
        finally:
            await server.drain()
    finally:
        await runner.cleanup()
        await backend.close()
        if store is not None:
            await store.close()


def serve(
    backend: Backend,
    host: str,
    port: int,
    *,
    ready: Callable[[str, str | None], None] = lambda url, grpc_address: None,
    grpc_address: tuple[str, int] | None = None,
    tls: Tls | None = None,
    **options: Any,
) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends the requests at work too. `ready` hears the addresses (HTTP,
    gRPC) once requests are answered; `options` are those of `running`.
    """
    _allow_connections()
    asyncio.run(_serve(backend, host, port, ready, grpc_address, tls, options))


def _allow_connections() -> None:
    """As many as the system gives: shells begin with 1,024 open files, and every client is one (a gateway's two)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _serve(
    backend: Backend,
    host: str,
    port: int,
    ready: Callable[[str, str | None], None],
    grpc_address: tuple[str, int] | None,
    tls: Tls | None,
    options: dict[str, Any],
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(running(backend, host, port, tls=tls, **options))
        also = None
        if grpc_address is not None:
            from lakh.server.api import grpc

            limit = server.max_body_bytes
            also = await stack.enter_async_context(
                grpc.running(server.desk, *grpc_address, tls=tls, max_message_bytes=limit)
            )
        ready(server.url, also)
        await stop.wait()
        log.info("stopping: requests at work may finish")
        await server.drain(hurry)  # before either face closes: a stream of one is worth as much as one of the other

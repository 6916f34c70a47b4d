"""The HTTP face: OpenAI-style completions over one engine.

    POST /v1/completions    prompt, suffix, max_tokens, temperature, top_p, top_k, n, stop, seed, logprobs, stream;
                            lakh's own: stop_rule, order, timeout_ms, supersede
    POST /v1/fim/completions, /infill    the same in the words of other clients (dialects.py)
    GET  /v1/models  /health  /ready  /metrics

The engine works in one thread (worker.py); the event loop reads requests and writes answers. A full queue
is a 429, a client that goes away cancels its generation. Whatever a client sends, it gets a short JSON
error and never a traceback; a 500 is a bug of ours and is logged. With `suffix` the server builds the fill-
in-the-middle prompt and cuts it to the context around the cursor; a plain prompt that does not fit together
with max_tokens is refused.

Without keys (keys.py) anyone who reaches the port is served: beyond 127.0.0.1, give keys, and TLS by a proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from lakh.errors import UserError
from lakh.server.dialects import DIALECTS, Answered, Dialect
from lakh.server.engine import Chunk, Engine
from lakh.server.keys import Keys
from lakh.server.metrics import CONTENT_TYPE, Metrics
from lakh.server.requests import BadRequest, CompletionRequest, parse
from lakh.server.row import Row
from lakh.server.sampling import Logprobs
from lakh.server.text import StopRule, columns
from lakh.server.worker import Job, QueueFull, Stopped, Superseded, Worker

__all__ = ["Server", "as_bad_request", "rows_of", "running", "serve"]

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
CLIENT_GONE = 499
MAX_WAITING = 64
READ_TIMEOUT_S = 30.0  # for a request's body
RESULT_TIMEOUT_S = 600.0  # for the next piece of an answer, the time in the queue included
DRAIN_S = 10.0  # for running requests, once we were asked to stop
CLOSE_S = 5.0  # for connections and the thread, after that


class Server:
    """The application and its state. `app` is what aiohttp serves."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = MAX_WAITING,
        max_body_bytes: int = MAX_BODY_BYTES,
        keys: Keys | None = None,
    ) -> None:
        self.engine, self.keys = engine, keys
        self.worker = Worker(engine, max_waiting)
        # Long prompts are tokenized here, so that neither other requests nor the engine wait for it.
        self.encoders = ThreadPoolExecutor(2, "lakh-encode")
        self.metrics = Metrics()
        self.draining = False
        self.url = ""
        self._created = int(time.time())
        self.app = web.Application(client_max_size=max_body_bytes, middlewares=[_errors])
        self.app.add_routes(
            [
                *[web.post(dialect.path, partial(self.completions, dialect)) for dialect in DIALECTS],
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/ready", self.health),
                web.get("/metrics", self.metrics_page),
            ]
        )

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": self.engine.name, "object": "model", "created": self._created, "owned_by": "lakh"}
        return web.json_response({"object": "list", "data": [{**model, "context": self.engine.spec.context}]})

    async def health(self, _: web.Request) -> web.Response:
        if self.draining:
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok", "model": self.engine.name})

    async def metrics_page(self, _: web.Request) -> web.Response:
        text = self.metrics.text(self.engine, running=self.worker.num_running, waiting=self.worker.num_waiting)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def completions(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        began_s = time.monotonic()
        try:
            tenant = self.tenant(http.headers.get("Authorization", ""))
            body = await _read_json(http)
            request = parse(dialect.to_openai(body) if isinstance(body, Mapping) else body, tenant)
            response = await self._complete(http, dialect, request, began_s)
        except asyncio.CancelledError:
            self.metrics.cancelled += 1
            raise
        except ConnectionError:  # the client went away while we wrote: nobody reads this answer, and nothing is wrong
            self.metrics.cancelled += 1
            return web.Response(status=CLIENT_GONE)
        except Exception as error:
            self.metrics.answered[as_bad_request(error).status] += 1
            raise
        self.metrics.answered[response.status] += 1
        self.metrics.latency_s += time.monotonic() - began_s
        self.metrics.latencies += 1
        return response

    def tenant(self, authorization: str) -> str:
        """Whose request this is; where keys are set, one of them must come with it."""
        if self.keys is None:
            return ""
        kind, _, key = authorization.partition(" ")
        tenant = self.keys.tenant(key.strip()) if kind.lower() == "bearer" else None
        if tenant is None:
            raise BadRequest(None, "no valid key: send Authorization: Bearer KEY", status=401, code="invalid_api_key")
        return tenant

    def check(self, request: CompletionRequest) -> None:
        """Refuse what this server does not serve, or not now."""
        if request.model is not None and request.model != self.engine.name:
            message = f"model {request.model[:80]!r} is not served here; this is {self.engine.name!r}"
            raise BadRequest("model", message, status=404, code="model_not_found")
        if self.draining:
            raise BadRequest(None, "the server is shutting down", status=503)

    async def _complete(
        self, http: web.Request, dialect: Dialect, request: CompletionRequest, began_s: float
    ) -> web.StreamResponse:
        self.check(request)
        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(self.encoders, rows_of, self.engine, request)
        job = Job(rows, request.supersede)
        try:
            self.worker.submit(job)
        except QueueFull:
            message = f"{self.worker.max_waiting} requests are waiting already; try again later"
            raise BadRequest(None, message, status=429, code="queue_full") from None
        results = job.results(RESULT_TIMEOUT_S)
        frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.engine.name,
        }
        prompt_tokens = sum(len(row.prompt) for row in rows[:: request.n])
        self.metrics.prompt_tokens += prompt_tokens
        try:
            if request.stream:
                return await self._stream(http, dialect, request, frame, prompt_tokens, results, began_s)
            pieces = [item async for item in results]
        finally:
            self.worker.cancel(job)
        choices = []
        for index, row in enumerate(rows):
            mine = [piece for at, piece in pieces if at == index]
            reason = mine[-1].finish_reason
            assert reason is not None
            logprobs = [item for piece in mine for item in piece.logprobs or ()]
            text = "".join(piece.text for piece in mine)
            shown = None if row.sampling.logprobs is None else _logprobs(self.engine, logprobs, 0)
            choices.append(_choice(index, text, reason, shown))
            self.metrics.finished[reason] += 1
        tokens = sum(len(piece.tokens) for _, piece in pieces)
        self.metrics.generation_tokens += tokens
        usage = _usage(prompt_tokens, tokens, sum(row.num_cached for row in rows))
        return web.json_response(dialect.render(Answered(frame, choices, usage, is_piece=False)))

    async def _stream(
        self,
        http: web.Request,
        dialect: Dialect,
        request: CompletionRequest,
        frame: dict[str, Any],
        prompt_tokens: int,
        results: AsyncIterator[tuple[int, Chunk]],
        began_s: float,
    ) -> web.StreamResponse:
        """Server-sent events: `data: {...}` and an empty line for each piece, `data: [DONE]` at the end."""
        first = await anext(results)  # an error before the first piece is still a plain answer
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)

        async def send(data: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(data)}\n\n".encode())

        tokens = 0
        offsets: Counter[int] = Counter()
        self.metrics.first_token_s += time.monotonic() - began_s
        self.metrics.first_tokens += 1
        try:
            async for index, piece in _after(first, results):
                tokens += len(piece.tokens)
                self.metrics.generation_tokens += len(piece.tokens)
                if piece.finish_reason is not None:
                    self.metrics.finished[piece.finish_reason] += 1
                shown = None
                if piece.logprobs is not None:
                    shown = _logprobs(self.engine, piece.logprobs, offsets[index])
                    offsets[index] += len(piece.text)
                choice = _choice(index, piece.text, piece.finish_reason, shown)
                await send(dialect.render(Answered(frame, [choice], None, is_piece=True)))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - the status line has gone out: say it in the stream
            await send(as_bad_request(error).as_dict())
            await response.write_eof()
            return response
        if request.include_usage:
            await send(dialect.render(Answered(frame, [], _usage(prompt_tokens, tokens, 0), is_piece=True)))
        if dialect.last_line is not None:
            await response.write(f"data: {dialect.last_line}\n\n".encode())
        await response.write_eof()
        return response


async def _after(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for item in rest:
        yield item


def rows_of(engine: Engine, request: CompletionRequest) -> list[Row]:
    """In a thread: tokenize, check the length; one row for every choice."""
    sampling = request.sampling
    if sampling.max_tokens >= engine.spec.context:
        found = f"max_tokens: {sampling.max_tokens} leaves no room in a context of {engine.spec.context} tokens"
        raise BadRequest("max_tokens", found)
    deadline_s = None if request.timeout_s is None else engine.clock() + request.timeout_s
    rows = []
    copies: Counter[tuple[int, ...]] = Counter()
    for prompt in request.prompts:
        if request.suffix is not None and isinstance(prompt, str):
            ids = engine.infill(prompt, request.suffix, sampling.max_tokens, request.order)
        else:
            ids = engine.encode(prompt)
            if len(ids) + sampling.max_tokens > engine.spec.context:
                found = f"prompt: {len(ids)} tokens and max_tokens {sampling.max_tokens} are more than the context"
                found += f" of {engine.spec.context}"
                raise BadRequest("prompt", found, code="context_length_exceeded")
            ids = engine.cut(ids, sampling)
        for _ in range(request.n):
            rule = _stop_rule(request.stop_rule, prompt)
            row = engine.row(ids, sampling, copy=copies[ids], tenant=request.tenant, deadline_s=deadline_s, rule=rule)
            rows.append(row)
            copies[ids] += 1
    return rows


def _stop_rule(kind: str | None, prompt: object) -> StopRule | None:
    if kind is None:
        return None
    line = prompt.rpartition("\n")[2] if isinstance(prompt, str) else ""
    return StopRule(kind, columns(line[: len(line) - len(line.lstrip(" \t"))]))


def _choice(index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(engine: Engine, items: Sequence[Logprobs], offset: int) -> dict[str, Any]:
    """OpenAI's form: parallel lists. Half a character is spelt as U+FFFD."""

    def spell(token: int) -> str:
        return engine.tokenizer.decode([token], show_special=True)

    tokens = [spell(item.token) for item in items]
    offsets = [offset + sum(len(token) for token in tokens[:index]) for index in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [{spell(token): logprob for token, logprob in item.top} for item in items],
        "text_offset": offsets,
    }


def _usage(prompt_tokens: int, tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


# --- errors -------------------------------------------------------------------------------------------------


async def _read_json(http: web.Request) -> object:
    try:
        body = await asyncio.wait_for(http.read(), READ_TIMEOUT_S)
    except TimeoutError:
        raise BadRequest(None, f"the body did not come within {READ_TIMEOUT_S:g} s", status=408) from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest(None, "the body is not JSON") from None


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client has gone
    except Exception as error:  # noqa: BLE001 - the one place where errors become answers
        answer = as_bad_request(error)
        headers = {"Retry-After": "1"} if answer.status in (429, 503) else {}
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return web.json_response(answer.as_dict(), status=answer.status, headers=headers)


def as_bad_request(error: Exception) -> BadRequest:
    if isinstance(error, BadRequest):
        return error
    if isinstance(error, UserError):
        return BadRequest(error.where, str(error))
    if isinstance(error, Superseded):
        return BadRequest(None, "a newer request took this one's place", status=409, code="superseded")
    if isinstance(error, Stopped):
        return BadRequest(None, "the server is shutting down", status=503)
    if isinstance(error, TimeoutError):
        return BadRequest(None, f"no answer within {RESULT_TIMEOUT_S:g} s", status=503, code="timeout")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BadRequest(None, "the body is too large", status=413)
    if isinstance(error, web.HTTPException):
        return BadRequest(None, error.reason, status=error.status)
    log.error("a request failed", exc_info=error)
    return BadRequest(None, "internal error", status=500)


# --- life ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running(
    engine: Engine,
    host: str,
    port: int,
    *,
    drain_s: float = DRAIN_S,
    max_waiting: int = MAX_WAITING,
    max_body_bytes: int = MAX_BODY_BYTES,
    keys: Keys | None = None,
) -> AsyncIterator[Server]:
    """A server that answers inside the block; `url` has the real port where 0 was asked for.

    At the end it takes no new requests and gives those at work `drain_s` to finish; the rest end with
    "abort".
    """
    server = Server(engine, max_waiting=max_waiting, max_body_bytes=max_body_bytes, keys=keys)
    runner = web.AppRunner(server.app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise _cannot_listen(host, port, error) from None
        real_port = runner.addresses[0][1]
        server.url = f"http://{f'[{host}]' if ':' in host else host}:{real_port}"
        try:
            yield server
        finally:
            server.draining = True
            await site.stop()
            await server.worker.drain(drain_s)
    finally:
        await runner.cleanup()
        server.encoders.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(server.worker.close, CLOSE_S)


def serve(
    engine: Engine,
    host: str,
    port: int,
    *,
    ready: Callable[[str, str | None], None] = lambda url, grpc_address: None,
    drain_s: float = DRAIN_S,
    keys: Keys | None = None,
    grpc_address: tuple[str, int] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` hears the addresses (HTTP, gRPC) once requests are answered."""
    asyncio.run(_serve(engine, host, port, ready, drain_s, keys, grpc_address))


async def _serve(
    engine: Engine,
    host: str,
    port: int,
    ready: Callable[[str, str | None], None],
    drain_s: float,
    keys: Keys | None,
    grpc_address: tuple[str, int] | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(running(engine, host, port, drain_s=drain_s, keys=keys))
        also = None
        if grpc_address is not None:
            from lakh.server import grpc

            also = await stack.enter_async_context(grpc.running(server, *grpc_address))
        ready(server.url, also)
        await stop.wait()
        log.info("stopping: requests at work have %g s", drain_s)


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    where = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return UserError(where, "the port is in use", "choose another, or 0 for any free one: --http HOST:PORT")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UserError(where, "this port needs more rights", "choose one from 1024 up: --http HOST:PORT")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return UserError(where, "is no address of this machine", "use 127.0.0.1 or 0.0.0.0: --http HOST:PORT")
    return UserError(where, f"cannot be listened on ({error.strerror or error})", "choose another: --http HOST:PORT")

"""The HTTP face: OpenAI-style completions over one engine.

    POST /v1/completions    prompt, suffix, max_tokens, temperature, top_p, top_k, n, stop, seed, stream
    GET  /v1/models  /health  /metrics

The engine works in one thread (worker.py); the event loop reads requests and writes answers. A full queue
is a 429, a client that goes away cancels its generation. Whatever a client sends, it gets a short JSON
error and never a traceback; a 500 is a bug of ours and is logged. With `suffix` the server builds the fill-
in-the-middle prompt and cuts it to the context around the cursor; a plain prompt that does not fit together
with max_tokens is refused.

There is no authentication: beyond 127.0.0.1, put a proxy in front.
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
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from lakh.errors import UserError
from lakh.server.engine import Chunk, Completion, Engine
from lakh.server.metrics import CONTENT_TYPE, Metrics
from lakh.server.requests import BadRequest, CompletionRequest, parse
from lakh.server.worker import Job, QueueFull, Stopped, Worker

__all__ = ["Server", "running", "serve"]

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
MAX_WAITING = 64
READ_TIMEOUT_S = 30.0  # for a request's body
RESULT_TIMEOUT_S = 600.0  # for the next piece of an answer, the time in the queue included
DRAIN_S = 10.0  # for running requests, once we were asked to stop
CLOSE_S = 5.0  # for connections and the thread, after that


@dataclass(frozen=True)
class Started:
    """A job's first result: the prompts were accepted."""

    prompt_tokens: int


Result = Started | tuple[int, Completion] | tuple[int, Chunk]


class Server:
    """The application and its state. `app` is what aiohttp serves."""

    def __init__(self, engine: Engine, *, max_waiting: int = MAX_WAITING, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.engine = engine
        self.worker = Worker(max_waiting)
        self.metrics = Metrics()
        self.draining = False
        self.url = ""
        self._created = int(time.time())
        self.app = web.Application(client_max_size=max_body_bytes, middlewares=[_errors])
        self.app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
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
        text = self.metrics.text(running=self.worker.num_running, waiting=self.worker.num_waiting)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def completions(self, http: web.Request) -> web.StreamResponse:
        began_s = time.monotonic()
        try:
            request = parse(await _read_json(http))
            response = await self._complete(http, request, began_s)
        except asyncio.CancelledError:
            self.metrics.cancelled += 1
            raise
        except Exception as error:
            self.metrics.answered[_as_bad_request(error).status] += 1
            raise
        self.metrics.answered[response.status] += 1
        self.metrics.latency_s += time.monotonic() - began_s
        self.metrics.latencies += 1
        return response

    async def _complete(self, http: web.Request, request: CompletionRequest, began_s: float) -> web.StreamResponse:
        if request.model is not None and request.model != self.engine.name:
            message = f"model {request.model[:80]!r} is not served here; this is {self.engine.name!r}"
            raise BadRequest("model", message, status=404, code="model_not_found")
        if self.draining:
            raise BadRequest(None, "the server is shutting down", status=503)
        job: Job[Result] = Job(lambda cancelled: _work(self.engine, request, cancelled))
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
        try:
            started = await anext(results)
            assert isinstance(started, Started)
            self.metrics.prompt_tokens += started.prompt_tokens
            if request.stream:
                return await self._stream(http, request, frame, started, results, began_s)
            completions = [item async for item in results]
        finally:
            self.worker.cancel(job)
        choices = []
        tokens = 0
        for item in completions:
            assert isinstance(item, tuple)
            index, completion = item
            assert completion.finish_reason is not None
            choices.append(_choice(index, completion.text, completion.finish_reason))
            self.metrics.finished[completion.finish_reason] += 1
            tokens += len(completion.tokens)
        self.metrics.generation_tokens += tokens
        return web.json_response({**frame, "choices": choices, "usage": _usage(started.prompt_tokens, tokens)})

    async def _stream(
        self,
        http: web.Request,
        request: CompletionRequest,
        frame: dict[str, Any],
        started: Started,
        results: AsyncIterator[Result],
        began_s: float,
    ) -> web.StreamResponse:
        """Server-sent events: `data: {...}` and an empty line for each piece, `data: [DONE]` at the end."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)

        async def send(data: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(data)}\n\n".encode())

        more = {"usage": None} if request.include_usage else {}
        tokens = 0
        try:
            async for item in results:
                assert isinstance(item, tuple)
                index, piece = item
                if tokens == 0:
                    self.metrics.first_token_s += time.monotonic() - began_s
                    self.metrics.first_tokens += 1
                tokens += len(piece.tokens)
                self.metrics.generation_tokens += len(piece.tokens)
                if piece.finish_reason is not None:
                    self.metrics.finished[piece.finish_reason] += 1
                await send({**frame, "choices": [_choice(index, piece.text, piece.finish_reason)], **more})
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - the status line has gone out: say it in the stream
            await send(_as_bad_request(error).as_dict())
            await response.write_eof()
            return response
        if request.include_usage:
            await send({**frame, "choices": [], "usage": _usage(started.prompt_tokens, tokens)})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _work(engine: Engine, request: CompletionRequest, cancelled: Callable[[], bool]) -> Iterator[Result]:
    """In the worker's thread: tokenize, check the length, generate."""
    sampling = request.sampling
    if sampling.max_tokens >= engine.spec.context:
        found = f"max_tokens: {sampling.max_tokens} leaves no room in a context of {engine.spec.context} tokens"
        raise BadRequest("max_tokens", found)
    prompts = []
    for prompt in request.prompts:
        if request.suffix is not None and isinstance(prompt, str):
            prompts.append(engine.infill(prompt, request.suffix, sampling.max_tokens))
            continue
        ids = engine.encode(prompt)
        if len(ids) + sampling.max_tokens > engine.spec.context:
            found = f"prompt: {len(ids)} tokens and max_tokens {sampling.max_tokens} are more than the context"
            found += f" of {engine.spec.context}"
            raise BadRequest("prompt", found, code="context_length_exceeded")
        prompts.append(ids)
    yield Started(sum(len(ids) for ids in prompts))
    choices = [ids for ids in prompts for _ in range(request.n)]
    if not request.stream:
        yield from enumerate(engine.generate(choices, sampling, cancelled=cancelled))
        return
    copies: Counter[tuple[int, ...]] = Counter()
    for index, ids in enumerate(choices):
        for chunk in engine.stream(ids, sampling, cancelled=cancelled, copy=copies[ids]):
            yield index, chunk
        copies[ids] += 1


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
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
        answer = _as_bad_request(error)
        headers = {"Retry-After": "1"} if answer.status in (429, 503) else {}
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return web.json_response(answer.as_dict(), status=answer.status, headers=headers)


def _as_bad_request(error: Exception) -> BadRequest:
    if isinstance(error, BadRequest):
        return error
    if isinstance(error, UserError):
        return BadRequest(error.where, str(error))
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
) -> AsyncIterator[Server]:
    """A server that answers inside the block; `url` has the real port where 0 was asked for.

    At the end it takes no new requests and gives those at work `drain_s` to finish; the rest end with
    "abort".
    """
    server = Server(engine, max_waiting=max_waiting, max_body_bytes=max_body_bytes)
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
        await asyncio.to_thread(server.worker.close, CLOSE_S)


def serve(
    engine: Engine,
    host: str,
    port: int,
    *,
    ready: Callable[[str], None] = lambda url: None,
    drain_s: float = DRAIN_S,
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` hears the address once requests are answered."""
    asyncio.run(_serve(engine, host, port, ready, drain_s))


async def _serve(engine: Engine, host: str, port: int, ready: Callable[[str], None], drain_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(engine, host, port, drain_s=drain_s) as server:
        ready(server.url)
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

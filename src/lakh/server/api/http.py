"""The HTTP API: completions in several dialects over one backend.

    POST /v1/completions    prompt, suffix, max_tokens, temperature, top_p, top_k, n, stop, seed, logprobs, echo;
                            lakh's own: stop_rule, order, timeout_ms, supersede, reuse, heal; vLLM's cache_salt
    POST /v1/fim/completions, /infill, /api/generate    the same for other clients (dialects/)
    POST /v1/chat/completions, /api/chat    messages, and tools that the answer may call
    POST /v1/feedback       {"event": "shown" | "accepted"}: what the user did with a suggestion
    GET  /  a page to try it; /v1/models  /v1/models/NAME  /health  /ready  /metrics  /openapi.json

A full queue or an exceeded quota is a 429; a client that disconnects cancels its request. Every error is a short JSON
body, never a traceback; a 500 is a bug and is logged. Without API keys everyone who reaches the port is served: beyond
127.0.0.1, use keys and TLS.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lakh.metrics import CONTENT_TYPE
from lakh.server.api import openapi, playground, responses
from lakh.server.api.connections import ConnectionLimits
from lakh.server.api.dialects import Dialect, dialects_by_path
from lakh.server.api.editor_routes import ollama_routes, tabby_routes
from lakh.server.api.json_body import read_json
from lakh.server.api.operator_routes import Operator, operator_routes
from lakh.server.api.request_handler import CLIENT_GONE, RequestHandler, to_request_error
from lakh.server.request import RequestError, parse

__all__ = ["HttpApi"]

PROBES = ("/health", "/ready", "/metrics")  # answered even where no further connection is
DRAINING = "draining"  # a gateway reads it: other reasons for a 503 mean that the engine's requests are lost


class HttpApi:
    """The aiohttp application: `app`."""

    def __init__(
        self,
        handler: RequestHandler,
        connections: ConnectionLimits,
        *,
        max_body_bytes: int,
        cors: str | None = None,
        operator: Operator | None = None,
    ) -> None:
        """`cors`: the origin of web pages that may use this API, or *; None for none but our own."""
        self.handler = handler
        self._created = int(time.time())
        self.app = web.Application(client_max_size=max_body_bytes, middlewares=[_limit(connections), _errors_to_json])
        self.app.add_routes(
            [
                *[web.post(path, partial(self.completions, among)) for path, among in dialects_by_path().items()],
                *ollama_routes(handler),
                *tabby_routes(handler),
                *operator_routes(operator),
                web.post("/v1/feedback", self.feedback),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model:.+}", self.model),
                web.get("/", self.index),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics_page),
                web.get("/openapi.json", self.openapi),
            ]
        )
        if cors is not None:
            _allow_origin(self.app, cors)

    async def completions(self, among: Sequence[Dialect], http: web.Request) -> web.StreamResponse:
        handler = self.handler
        try:
            with handler.observed(http.path, http.headers) as record:
                tenant = handler.tenant(http.headers.get("Authorization", ""))
                body = await read_json(http)
                dialect = _meant(among, body)
                request = parse(dialect.to_openai(body) if isinstance(body, Mapping) else body, tenant)
                envelope = {
                    "id": f"cmpl-{record.id}",
                    "object": "text_completion",
                    "created": int(time.time()),
                    "model": handler.model(request),
                }
                if isinstance(body, Mapping) and dialect.only_loads(body):
                    return responses.respond_loaded(dialect, envelope)
                async with contextlib.aclosing(handler.complete(request, record)) as items:
                    if request.stream:
                        return await responses.stream(http, dialect, request, envelope, items)
                    return await responses.respond(dialect, request, envelope, items)
        except ConnectionError:  # the client disconnected while we wrote
            return web.Response(status=CLIENT_GONE)

    async def feedback(self, http: web.Request) -> web.Response:
        tenant = self.handler.tenant(http.headers.get("Authorization", ""))
        return web.json_response(await self.handler.record_feedback(tenant, await read_json(http)))

    async def models(self, http: web.Request) -> web.Response:
        self.handler.tenant(http.headers.get("Authorization", ""))
        return web.json_response({"object": "list", "data": self._cards()})

    async def model(self, request: web.Request) -> web.Response:
        self.handler.tenant(request.headers.get("Authorization", ""))
        name = request.match_info["model"]
        card = next((card for card in self._cards() if card["id"] == name), None)
        if card is None:
            raise RequestError("model", f"model {name[:80]!r} is not served here", status=404, code="model_not_found")
        return web.json_response(card)

    def _cards(self) -> list[dict[str, Any]]:
        common = {"object": "model", "created": self._created, "owned_by": "lakh"}
        cards = self.handler.backend.models()
        return [
            {"id": card.id, **common, "context": card.context, "weights": card.weights, "tools": card.has_tools}
            | ({} if card.base is None else {"parent": card.base})  # vLLM's name for the base of an adapter
            for card in cards
        ]

    async def index(self, _: web.Request) -> web.Response:
        return web.Response(text=playground.page(), content_type="text/html", headers=playground.HEADERS)

    async def health(self, _: web.Request) -> web.Response:
        """Liveness: false if only a restart helps."""
        health = self.handler.backend.health()
        if not health.is_alive:
            return web.json_response({"status": health.problem}, status=503)
        return web.json_response({"status": DRAINING if self.handler.is_draining else "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """Readiness: requests are accepted."""
        problem = self.handler.backend.health().problem
        if self.handler.is_draining or problem is not None:
            return web.json_response({"status": DRAINING if self.handler.is_draining else problem}, status=503)
        return web.json_response({"status": "ok", "model": self.handler.backend.models()[0].id})

    async def metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self.handler.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response(openapi.document())


def _meant(among: Sequence[Dialect], body: object) -> Dialect:
    """The dialect of a body, of those that share a path."""
    if not isinstance(body, Mapping):
        return among[-1]
    return next((one for one in among if one.is_meant(body)), among[-1])


def _limit(connections: ConnectionLimits) -> Middleware:
    @web.middleware
    async def limited(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            with connections.request(request.protocol, is_probe=request.path in PROBES):
                return await handler(request)
        except RequestError as refusal:
            response = web.json_response(refusal.as_dict(), status=refusal.status, headers={"Retry-After": "1"})
            response.force_close()
            return response

    return limited


def _allow_origin(app: web.Application, origin: str) -> None:
    """Cross-origin requests of web pages (CORS), for editors in a browser. Credentials are never allowed: a key is sent
    in a header that the page sets itself.
    """
    preflight = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}

    async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update({"Access-Control-Allow-Origin": origin, "Vary": "Origin"})

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not is_preflight:
            return await handler(request)
        # All that the page asks for: OpenAI's client sends headers of its own, and * would not cover Authorization.
        asked = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
        return web.Response(status=204, headers={**preflight, "Access-Control-Allow-Headers": asked})

    app.on_response_prepare.append(add_headers)
    app.middlewares.append(answer_preflight)


@web.middleware
async def _errors_to_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client disconnected
    except Exception as error:  # noqa: BLE001 - the one place where errors become responses
        refusal = to_request_error(error)
        headers = {"Retry-After": str(math.ceil(refusal.retry_after_s))} if refusal.status in (429, 503) else {}
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return web.json_response(responses.error_body(request, refusal), status=refusal.status, headers=headers)

"""The HTTP API: completions in several dialects over one backend.

    POST /v1/completions    prompt, suffix, max_tokens, temperature, top_p, top_k, n, stop, seed, logprobs, stream;
                            lakh's own: stop_rule, order, timeout_ms, supersede, reuse, heal; vLLM's cache_salt
    POST /v1/fim/completions, /infill    the same for other clients (dialects/)
    POST /v1/feedback       {"event": "shown" | "accepted"}: what the user did with a suggestion
    GET  /v1/models  /v1/models/NAME  /health  /ready  /metrics  /openapi.json

A full queue or an exceeded quota is a 429; a client that disconnects cancels its request. Every error is a short JSON
body, never a traceback; a 500 is a bug and is logged. Without API keys everyone who reaches the port is served: beyond
127.0.0.1, use keys and TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from lakh.metrics import CONTENT_TYPE
from lakh.server.api import openapi, responses
from lakh.server.api.dialects import DIALECTS, Dialect
from lakh.server.api.request_handler import RequestHandler, to_request_error
from lakh.server.request import RequestError, parse

__all__ = ["HttpApi"]

CLIENT_GONE = 499
BODY_TIMEOUT_S = 30.0


class HttpApi:
    """The aiohttp application: `app`."""

    def __init__(self, handler: RequestHandler, *, max_body_bytes: int) -> None:
        self.handler = handler
        self._created = int(time.time())
        self.app = web.Application(client_max_size=max_body_bytes, middlewares=[_errors_to_json])
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

    async def completions(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        handler = self.handler
        try:
            with handler.count_status():
                tenant = handler.tenant(http.headers.get("Authorization", ""))
                body = await _read_json(http)
                request = parse(dialect.to_openai(body) if isinstance(body, Mapping) else body, tenant)
                envelope = {
                    "id": f"cmpl-{uuid.uuid4().hex}",
                    "object": "text_completion",
                    "created": int(time.time()),
                    "model": handler.model(request),
                }
                async with contextlib.aclosing(handler.complete(request)) as items:
                    if request.stream:
                        return await responses.stream(http, dialect, request, envelope, items)
                    return await responses.respond(dialect, request, envelope, items)
        except ConnectionError:  # the client disconnected while we wrote
            return web.Response(status=CLIENT_GONE)

    async def feedback(self, http: web.Request) -> web.Response:
        tenant = self.handler.tenant(http.headers.get("Authorization", ""))
        return web.json_response(await self.handler.record_feedback(tenant, await _read_json(http)))

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self._cards()})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        card = next((card for card in self._cards() if card["id"] == name), None)
        if card is None:
            raise RequestError("model", f"model {name[:80]!r} is not served here", status=404, code="model_not_found")
        return web.json_response(card)

    def _cards(self) -> list[dict[str, Any]]:
        common = {"object": "model", "created": self._created, "owned_by": "lakh"}
        cards = self.handler.backend.models()
        return [{"id": card.id, **common, "context": card.context, "weights": card.weights} for card in cards]

    async def health(self, _: web.Request) -> web.Response:
        """Liveness: the process runs."""
        return web.json_response({"status": "draining" if self.handler.is_draining else "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """Readiness: requests are accepted."""
        models = [card.id for card in self.handler.backend.models()]
        if self.handler.is_draining or not models:
            return web.json_response({"status": "draining" if self.handler.is_draining else "no engine"}, status=503)
        return web.json_response({"status": "ok", "model": models[0]})

    async def metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self.handler.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response(openapi.document())


async def _read_json(http: web.Request) -> object:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):  # `wait_for` would create a task (Python 3.11)
            body = await http.read()
    except TimeoutError:
        raise RequestError(None, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
    except web.RequestPayloadError as error:  # a wrong content-encoding or a malformed chunk
        raise RequestError(None, f"the body cannot be read ({error})"[:200]) from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(None, "the body is not JSON in UTF-8") from None


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
        return web.json_response(refusal.as_dict(), status=refusal.status, headers=headers)

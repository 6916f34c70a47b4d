"""The desk between the faces and what answers: whose request, may it come in, what is counted.

HTTP and gRPC hand their requests over here, so both have the same keys, quotas, refusals and figures. Knows a backend,
keys and a store; knows nothing of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from lakh.errors import UserError
from lakh.server.backend import Backend, CompletionDelta, Usage
from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.quota import QuotaTracker
from lakh.server.metrics import Metrics, page
from lakh.server.request import RequestError, CompletionRequest
from lakh.server.store import CacheStore

__all__ = ["FEEDBACK", "RequestHandler", "refusal"]

log = logging.getLogger(__name__)

FEEDBACK = ("shown", "accepted")
FEEDBACK_TTL_S = 400 * 86_400.0
CHARS_PER_TOKEN = 4  # of code, about: what an answer is charged for where its tokens are not known (a gateway's)


class RequestHandler:
    def __init__(self, backend: Backend, *, keys: ApiKeys | None = None, store: CacheStore | None = None) -> None:
        self.backend, self.keys, self.store = backend, keys, store
        self.quotas = QuotaTracker({} if keys is None else keys.quotas, store)
        self.metrics = Metrics()
        self.draining = False

    def tenant(self, authorization: str) -> str:
        """Whose request this is; where keys are set, one of them must come with it."""
        if self.keys is None:
            return ""
        kind, _, key = authorization.partition(" ")
        tenant = self.keys.tenant(key.strip()) if kind.lower() == "bearer" else None
        if tenant is None:
            raise RequestError(None, "no valid key: send Authorization: Bearer KEY", status=401, code="invalid_api_key")
        return tenant

    def model(self, request: CompletionRequest) -> str:
        """The model that answers; a RequestError for what is not served, or not now."""
        if self.draining:
            raise RequestError(None, "the server is shutting down", status=503)
        served = [card.id for card in self.backend.models()]
        if not served:
            raise RequestError(None, "no engine can be reached; try again later", status=503, code="no_engine")
        if request.model is None:
            return served[0]
        if request.model not in served:
            message = f"model {request.model[:80]!r} is not served here; this is {', '.join(map(repr, served))}"
            raise RequestError("model", message, status=404, code="model_not_found")
        return request.model

    async def answer(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        """Everything between a request that was understood and its pieces. Cancel it, and the work ends."""
        metrics = self.metrics
        began_s = last_s = time.monotonic()
        is_first = True
        num_tokens = 0  # to be paid for, also by a client that goes away before the end
        self.model(request)
        metrics.asked_tokens.add(request.sampling.max_tokens)
        metrics.asked_choices.add(request.n)
        async with (
            self.quotas.admitted(request.tenant) as charge,
            contextlib.aclosing(self.backend.complete(request)) as items,
        ):
            async for item in items:
                now_s = time.monotonic()
                if isinstance(item, Usage):
                    metrics.prompt_tokens += item.prompt_tokens
                    metrics.generation_tokens += item.completion_tokens
                    metrics.prompt_sizes.add(item.prompt_tokens)
                    metrics.generation_sizes.add(item.completion_tokens)
                    metrics.latency.add(now_s - began_s)
                    charge(max(item.prompt_tokens + item.completion_tokens, num_tokens))
                else:
                    (metrics.first_token if is_first else metrics.between_pieces).add(now_s - last_s)
                    is_first = False
                    num_tokens += len(item.tokens) or -(-len(item.text) // CHARS_PER_TOKEN)
                    charge(num_tokens)
                    if item.finish_reason is not None:
                        metrics.finished[item.finish_reason] += 1
                last_s = now_s
                yield item

    async def feedback(self, tenant: str, body: object) -> None:
        """An editor says what became of a suggestion. Counted here, and in the store for all servers together."""
        kind = body.get("event") if isinstance(body, Mapping) else None
        if kind not in FEEDBACK:
            raise RequestError("event", f"event: is none of {', '.join(FEEDBACK)}")
        self.metrics.feedback[kind] += 1
        if self.store is not None:
            await self.store.add(f"suggestions:{kind}:{tenant}", 1, FEEDBACK_TTL_S)

    async def accepted_by_tenant(self, tenant: str) -> dict[str, int | None]:
        """What all servers on the same store have counted; None where the store cannot say."""
        if self.store is None:
            return dict.fromkeys(FEEDBACK)
        return {kind: await self.store.add(f"suggestions:{kind}:{tenant}", 0, FEEDBACK_TTL_S) for kind in FEEDBACK}

    def page(self) -> str:
        return page(self.metrics, self.backend, [] if self.store is None else self.store.metric_families())

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around everything that one completion request is: counts how it was answered."""
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            self.metrics.cancelled += 1
            raise
        except Exception as error:
            self.metrics.answered[refusal(error).status] += 1
            raise
        self.metrics.answered[200] += 1


def refusal(error: Exception) -> RequestError:
    """What a client is told. A bug of ours is a short 500, and logged."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserError):
        return RequestError(error.where, str(error))
    status: Any = getattr(error, "status", None)  # aiohttp's own refusals
    if isinstance(status, int) and 400 <= status < 500:
        words = "the body is too large" if status == 413 else str(getattr(error, "reason", "refused"))
        return RequestError(None, words, status=status)
    if not getattr(error, "_is_logged", False):
        log.error("a request failed", exc_info=error)
        error._is_logged = True  # type: ignore[attr-defined]  # asked for once to count and once to answer
    return RequestError(None, "internal error", status=500)

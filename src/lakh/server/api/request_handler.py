"""Handles requests between the API and the backend: authentication, quotas, cached completions, metrics, errors.

HTTP and gRPC share it, so both have the same keys, quotas, errors and metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from typing import Any

from lakh.errors import PeerLost, UserError
from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.quota import QuotaTracker
from lakh.server.backend import Backend, CompletionDelta, Usage
from lakh.server.backends.completion_cache import CompletionCache
from lakh.server.metrics import MetricSource, ServerMetrics
from lakh.server.observability.request_record import RequestObserver, RequestRecord
from lakh.server.request import CompletionRequest, RequestError, ServerStopping
from lakh.server.store import CacheStore

__all__ = ["CLIENT_GONE", "FEEDBACK", "RequestHandler", "to_request_error"]

log = logging.getLogger(__name__)

CLIENT_GONE = 499
FEEDBACK = ("shown", "accepted")
FEEDBACK_TTL_S = 400 * 86_400.0
CHARS_PER_TOKEN = 4  # of code, roughly: the charge where a gateway's engine does not report tokens


class RequestHandler:
    def __init__(
        self,
        backend: Backend,
        *,
        keys: ApiKeys | None = None,
        store: CacheStore | None = None,
        metric_sources: Iterable[MetricSource] = (),
        observers: Iterable[RequestObserver] = (),
    ) -> None:
        """`observers` are told about every completion request."""
        self.backend, self.keys, self.store = backend, keys, store
        self.quotas = QuotaTracker({} if keys is None else keys.quotas, store)
        self.cache = None if store is None else CompletionCache(backend, store)
        own = [one for one in (self.cache, store) if one is not None]
        self.metrics = ServerMetrics(backend, [*own, *metric_sources])
        self.is_draining = False
        self._observers = list(observers)

    def tenant(self, authorization: str) -> str:
        """The tenant of a request. Raises a 401 if keys are configured and the request has none of them."""
        if self.keys is None:
            return ""
        kind, _, key = authorization.partition(" ")
        tenant = self.keys.tenant(key.strip()) if kind.lower() == "bearer" else None
        if tenant is None:
            raise RequestError(None, "no valid key: send Authorization: Bearer KEY", status=401, code="invalid_api_key")
        return tenant

    def model(self, request: CompletionRequest) -> str:
        """The model for a request. Raises a RequestError if it is not served, or not now."""
        if self.is_draining:
            raise ServerStopping
        problem = self.backend.health().problem
        if problem is not None:
            raise RequestError(None, f"{problem}; try again later", status=503, code="no_engine")
        served = [card.id for card in self.backend.models()]
        if request.model is None:
            return served[0]
        if request.model not in served:
            message = f"model {request.model[:80]!r} is not served here; this is {', '.join(map(repr, served))}"
            raise RequestError("model", message, status=404, code="model_not_found")
        return request.model

    async def complete(
        self, request: CompletionRequest, record: RequestRecord | None = None
    ) -> AsyncGenerator[CompletionDelta | Usage, None]:
        """The backend's deltas, with quotas and metrics. Closing the generator stops the work."""
        record = record or RequestRecord("")
        record.request = request
        metrics = self.metrics
        began_s = last_s = time.monotonic()
        is_first = True
        # Charged even if the client disconnects before the end. Text beyond the context costs work too.
        num_tokens = request.num_chars // CHARS_PER_TOKEN
        echoed = request.num_echoed_chars
        model = record.model = self.model(request)
        if request.max_tokens is not None:
            metrics.max_tokens.observe(request.max_tokens)
        metrics.num_choices.observe(request.n)
        async with (
            self.quotas.admit(request.tenant) as charge,
            contextlib.aclosing((self.cache or self.backend).complete(request)) as items,
        ):
            charge(num_tokens)
            async for item in items:
                now_s = time.monotonic()
                if isinstance(item, Usage):
                    record.usage = item
                    metrics.prompt_tokens.inc(item.prompt_tokens)
                    num_generated = 0 if item.is_cached else item.completion_tokens
                    metrics.generation_tokens.inc(num_generated)
                    metrics.model_requests.labels(model).inc()
                    metrics.model_prompt_tokens.labels(model).inc(item.prompt_tokens)
                    metrics.model_generation_tokens.labels(model).inc(num_generated)
                    metrics.prompt_sizes.observe(item.prompt_tokens)
                    metrics.generation_sizes.observe(item.completion_tokens)
                    metrics.e2e_latency.observe(now_s - began_s)
                    charge(max(item.prompt_tokens + item.completion_tokens, num_tokens))
                else:
                    (metrics.first_token if is_first else metrics.inter_token).observe(now_s - last_s)
                    if is_first:
                        record.first_text_s = record.elapsed_s()
                    is_first = False
                    repeated = min(echoed, len(item.text))
                    echoed -= repeated
                    num_new = len(item.text) - repeated + len(item.reasoning)
                    num_tokens += len(item.tokens) or -(-num_new // CHARS_PER_TOKEN)
                    charge(num_tokens)
                    if item.finish_reason is not None:
                        metrics.finished.labels(item.finish_reason).inc()
                        record.finish_reasons.append(item.finish_reason)
                last_s = now_s
                yield item

    async def record_feedback(self, tenant: str, body: object) -> dict[str, int | None]:
        """Count a suggestion as shown or accepted. Returns the totals of all servers on the same store."""
        kind = body.get("event") if isinstance(body, Mapping) else None
        if kind not in FEEDBACK:
            raise RequestError("event", f"event: is none of {', '.join(FEEDBACK)}")
        self.metrics.feedback[kind].inc()
        if self.store is None:
            return dict.fromkeys(FEEDBACK)
        return {
            each: await self.store.increment(f"suggestions:{each}:{tenant}", int(each == kind), FEEDBACK_TTL_S)
            for each in FEEDBACK
        }

    @contextlib.contextmanager
    def observed(self, path: str, headers: Mapping[str, str]) -> Iterator[RequestRecord]:
        """Around the handling of a completion request: counts its HTTP status, tells the observers and raises errors as
        RequestErrors.
        """
        record = RequestRecord(path, headers)
        for observer in self._observers:
            observer.begin(record)
        try:
            yield record
        except (asyncio.CancelledError, ConnectionError):
            self.metrics.cancelled.inc()
            record.status, record.error = CLIENT_GONE, "client_gone"
            raise
        except Exception as error:  # noqa: BLE001 - to_request_error logs bugs
            refusal = to_request_error(error)
            self.metrics.requests.labels(refusal.status).inc()
            record.status, record.error = refusal.status, refusal.code or "invalid_request"
            raise refusal from None
        else:
            self.metrics.requests.labels(200).inc()
        finally:
            record.total_s = record.elapsed_s()
            for observer in self._observers:
                observer.finish(record)


def to_request_error(error: Exception) -> RequestError:
    """What the client sees. A bug becomes a short 500 and is logged."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserError):
        return RequestError(error.where, str(error))
    if isinstance(error, PeerLost):  # of a tensor-parallel engine, which restarts
        return RequestError(None, "the engine lost a process; try again later", status=503, code="engine_gone")
    status: Any = getattr(error, "status", None)  # aiohttp's own errors
    if isinstance(status, int) and 400 <= status < 500:
        message = "the body is too large" if status == 413 else str(getattr(error, "reason", "refused"))
        return RequestError(None, message, status=status)
    log.error("a request failed", exc_info=error)
    return RequestError(None, "internal error", status=500)

"""The gateway: several engines as one backend, with routing, failover, superseding and draining.

A request goes to the replica that served its file before, unless it is overloaded. If a replica refuses, breaks off or
goes silent, the request is retried on another: greedy and seeded completions are the same everywhere, so the text that
was already sent is skipped and the client sees one stream. To make that work, a request without a seed gets one here.
If the other replica's completion starts differently, the stream ends with an error instead of mixed text.

A newer request with the same `supersede` key, or the deadline, ends a request here, whatever the engines support.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lakh.metrics import MetricsRegistry
from lakh.server.backend import BackendHealth, CompletionDelta, ModelCard, Usage, wait_until
from lakh.server.fairness import Share, has_room
from lakh.server.gateway.replica import Replica, ReplicaBusy, ReplicaFailed
from lakh.server.gateway.replica_set import ReplicaSet
from lakh.server.metrics import PREFIX, MetricFamily, PhaseLatencies, counter, gauge
from lakh.server.request import CompletionRequest, RequestError, ServerStopping, Superseded

__all__ = ["Gateway"]

log = logging.getLogger(__name__)

MAX_RUNNING = 2048
POLL_S = 0.05
GRACE_S = 0.2  # after the deadline, for an engine to end the completion itself and to count its tokens
MAX_ENGINES = 4  # tried per request: a request that breaks an engine must not break them all


class _RoutedRequest:
    """One request: its items so far, and the task that tries replicas."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.items: asyncio.Queue[CompletionDelta | Usage | Exception] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.replica: Replica | None = None
        self.arrived_s = time.monotonic()
        self.started_s: float | None = None
        """When the first replica was asked."""
        self.first_token_s: float | None = None
        self.has_calls = False
        """Calls of tools were sent, whose ids another replica would not give."""
        self.is_lost = False
        """Its replica went down while it was streaming."""


@dataclass
class _SentText:
    """Of one choice, to the client."""

    text: str = ""
    reasoning: str = ""


class Gateway:
    def __init__(self, engines: Iterable[str], **options: Any) -> None:
        """`engines` and `options` are those of ReplicaSet."""
        self._set = ReplicaSet(engines, on_down=self._fail_over, **options)
        self._requests: set[_RoutedRequest] = set()
        self._by_key: dict[Hashable, _RoutedRequest] = {}
        self.num_failovers = self.num_superseded = 0
        self.routed: Counter[str] = Counter()
        self._registry = MetricsRegistry(PREFIX)
        self._latencies = PhaseLatencies(self._registry)
        self._registry.collect_from(self._gateway_families)

    @property
    def replicas(self) -> dict[str, Replica]:
        return self._set.by_url

    @property
    def num_running(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return sum(routed.replica is None for routed in self._requests)

    def models(self) -> list[ModelCard]:
        """Models of the usable replicas; different weights of one model are listed together."""
        cards: dict[str, ModelCard] = {}
        for replica in self._set.usable():
            for card in replica.cards:
                known = cards.get(card.id)
                weights = card.weights if known is None else "+".join(sorted({*known.weights.split("+"), card.weights}))
                cards[card.id] = replace(card, weights=weights)
        return list(cards.values())

    def health(self) -> BackendHealth:
        if self._set.usable():
            return BackendHealth()
        found = Counter(replica.found for replica in self.replicas.values())
        reasons = "; ".join(f"{count} engines: {reason}" for reason, count in found.items())
        return BackendHealth(f"no engine can be reached ({reasons or 'none is known'})")

    def metric_families(self) -> list[MetricFamily]:
        return self._registry.families()

    def _gateway_families(self) -> list[MetricFamily]:
        by_state = Counter(replica.state for replica in self.replicas.values())
        running = {url: replica.num_running for url, replica in self.replicas.items()}
        return [
            gauge("gateway_replicas", "Engines by state.", by_state, "state"),
            gauge("gateway_replica_requests", "Running requests by engine.", running, "engine"),
            counter("gateway_routed_total", "Requests sent, by engine.", self.routed, "engine"),
            counter("gateway_failovers_total", "Requests retried on another engine.", self.num_failovers),
            counter("requests_superseded_total", "Superseded requests.", self.num_superseded),
        ]

    # --- a request ---

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        if len(self._requests) >= MAX_RUNNING and not has_room(
            [routed.share for routed in self._requests], request.share, MAX_RUNNING
        ):
            raise RequestError(None, "too many requests are running; try again later", status=429, code="queue_full")
        if request.sampling.temperature > 0 and request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=random.getrandbits(62)))
        deadline_s = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        routed = _RoutedRequest(request.share)
        self._supersede(request.supersede, routed)
        self._requests.add(routed)
        routed.task = asyncio.create_task(self._run(routed, request, deadline_s))
        open_choices = set(range(request.num_choices))
        has_text = False
        try:
            while True:
                try:
                    left_s = None if deadline_s is None else max(deadline_s + GRACE_S - time.monotonic(), 0.0)
                    async with asyncio.timeout(left_s):
                        item: CompletionDelta | Usage | Exception | None = await routed.items.get()
                except TimeoutError:
                    item = None
                if item is None or (isinstance(item, ServerStopping) and has_text):
                    for index in sorted(open_choices):  # end with the text that was sent
                        yield CompletionDelta(index, "", "abort")
                    yield Usage(0, 0)
                    return
                if isinstance(item, Exception):
                    raise item
                self._observe(routed, item)
                yield item
                if isinstance(item, Usage):
                    return
                has_text = has_text or bool(item.text or item.reasoning)
                if item.finish_reason is not None:
                    open_choices.discard(item.index)
        finally:
            self._requests.discard(routed)
            if request.supersede is not None and self._by_key.get(request.supersede) is routed:
                del self._by_key[request.supersede]
            routed.task.cancel()

    def _observe(self, routed: _RoutedRequest, item: CompletionDelta | Usage) -> None:
        now_s = time.monotonic()
        routed.first_token_s = routed.first_token_s or now_s
        if isinstance(item, Usage):
            self._latencies.observe_completion(routed, now_s, item.completion_tokens)

    def _supersede(self, key: Hashable, routed: _RoutedRequest) -> None:
        if key is None:
            return
        older = self._by_key.get(key)
        if older is not None:
            older.items.put_nowait(Superseded())
            self.num_superseded += 1
        self._by_key[key] = routed

    async def _run(self, routed: _RoutedRequest, request: CompletionRequest, deadline_s: float | None) -> None:
        try:
            await self._try_replicas(routed, request, deadline_s)
        except Exception as error:  # noqa: BLE001 - the reader raises it
            routed.items.put_nowait(error)

    async def _try_replicas(self, routed: _RoutedRequest, request: CompletionRequest, deadline_s: float | None) -> None:
        """Try one replica after another until one completes the request; all items go to the request's queue."""
        sent = [_SentText() for _ in range(request.num_choices)]
        ended: set[int] = set()
        failed: set[str] = set()
        num_busy = 0
        while True:
            replica = await self._set.choose(request, failed) if len(failed) < MAX_ENGINES else None
            if replica is None:
                if num_busy:
                    raise RequestError(None, "all engines are full; try again later", status=429, code="queue_full")
                raise RequestError(None, "no engine can be reached; try again later", status=503, code="no_engine")
            routed.replica = replica
            routed.started_s = routed.started_s or time.monotonic()
            self.routed[replica.url] += 1
            try:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                async with contextlib.aclosing(replica.stream(request, left_s)) as items:
                    await self._forward(routed, request, items, sent, ended)
                return
            except ReplicaBusy:
                num_busy += 1
            except ReplicaFailed as error:
                self.num_failovers += 1
                log.warning("%s %s: trying others", replica.url, error)
                if replica.state == "up" and error.is_gone:
                    replica.state, replica.found = "down", str(error)
            except asyncio.CancelledError:
                if not routed.is_lost:
                    raise
                routed.is_lost = False  # cancelled by `_fail_over`: this task continues with another replica
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                self.num_failovers += 1
            failed.add(replica.url)

    async def _forward(
        self,
        routed: _RoutedRequest,
        request: CompletionRequest,
        items: AsyncGenerator[CompletionDelta | Usage, None],
        sent: list[_SentText],
        ended: set[int],
    ) -> None:
        """Move deltas to the request's queue, without the text that an earlier replica has sent."""
        skip = [replace(one) for one in sent]
        has_ids = request.sampling.logprobs is not None or request.return_token_ids
        if (has_ids and any(one.text or one.reasoning for one in sent)) or routed.has_calls:
            raise RequestError(None, "the engine failed during the completion", status=503, code="engine_lost")
        async for item in items:
            if isinstance(item, Usage):
                routed.items.put_nowait(item)
                continue
            at = item.index
            text, left = _after(skip[at].text, item.text)
            reasoning, left_reasoning = _after(skip[at].reasoning, item.reasoning)
            skip[at] = _SentText(left, left_reasoning)
            if item.finish_reason is not None and (left or left_reasoning):
                raise _differs()
            sent[at].text += text
            sent[at].reasoning += reasoning
            routed.has_calls |= bool(item.tool_calls)
            has_news = text or reasoning or item.tool_calls or item.finish_reason is not None
            if at not in ended and (has_news or request.tools is not None):  # without text: a sign of life
                routed.items.put_nowait(replace(item, text=text, reasoning=reasoning))
            if item.finish_reason is not None:
                ended.add(at)

    def _fail_over(self, replica: Replica) -> None:
        """Retry the requests of a replica that is down on others."""
        for routed in self._requests:
            task = routed.task
            if routed.replica is replica and task is not None and not routed.is_lost and not task.done():
                routed.is_lost = True
                task.cancel()

    # --- lifecycle ---

    async def start(self) -> None:
        await self._set.start()

    async def drain(self, timeout_s: float) -> None:
        if not await wait_until(lambda: not self._requests, timeout_s):
            for routed in self._requests:
                routed.items.put_nowait(ServerStopping())
            await asyncio.sleep(POLL_S)  # for their readers

    async def close(self) -> None:
        await self._set.close()


def _after(sent: str, new: str) -> tuple[str, str]:
    """What another engine's text adds to what was sent, and the rest of that, which it has still to repeat."""
    size = min(len(sent), len(new))
    if new[:size] != sent[:size]:
        raise _differs()
    return new[size:], sent[size:]


def _differs() -> RequestError:
    message = "the engine failed, and another engine's completion differs"
    return RequestError(None, message, status=503, code="engine_lost")

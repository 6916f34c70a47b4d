"""Several engines as one backend: routing, failover, superseding and drain, behind the same faces.

A request goes to the replica that had its file before (affinity.py), as long as that is not too busy. Replicas are
asked how they are every CHECK_S; one that refuses, breaks off or falls silent gets no more, and what it was doing is
asked of another: greedy and seeded answers come out alike, so the text that was sent already is skipped and the client
sees one stream. For that, a request without a seed gets one here. Where another replica's answer begins differently,
the stream ends with an error rather than with mixed text.

A newer request with the same `supersede` key ends the older one here, whatever engines know of it. A deadline ends a
request here too, with what there is. Knows replicas and a store; knows nothing of models or of HTTP's server side.
Every wait has a limit: connecting, silence, checks, draining.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Hashable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from lakh.errors import UserError
from lakh.server.backend import MetricFamily, ModelCard, CompletionDelta, Usage
from lakh.server.gateway.routing import HashRing, choose
from lakh.server.gateway.fim_template import FimTemplate
from lakh.server.gateway.replica import Replica, ReplicaBusy, ReplicaFailed
from lakh.server.metrics import labelled
from lakh.server.metrics import PhaseLatencies
from lakh.server.request import RequestError, CompletionRequest
from lakh.server.store import CacheStore

__all__ = ["Gateway", "route_key"]

log = logging.getLogger(__name__)

CHECK_S = 1.0
FIRST_CHECK_S = 5.0  # for all replicas, before the gateway says that it is there
RESOLVE_S = 5.0
ROUTE_TTL_S = 600.0
HEAD_CHARS = 256  # of a prompt that names no file: what tells two files apart
MAX_AT_WORK = 2048
POLL_S = 0.05
MAX_ENGINES = 4  # asked for one request: what breaks an engine must not break them all
LINE_BYTES = 1 << 20  # of one event
DNS = "dns:"


class _Job:
    """One request on its way: what came for it, and the task that asks replicas."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[CompletionDelta | Usage | Exception] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.replica: Replica | None = None
        self.arrived_s = time.monotonic()
        self.began_s: float | None = None
        """When the first replica was asked."""
        self.first_s: float | None = None
        self.is_lost = False
        """Its replica went down while it was read from."""


class Gateway:
    def __init__(
        self,
        engines: Sequence[str],
        *,
        store: CacheStore | None = None,
        template: FimTemplate | None = None,
        key: str = "",
        stall_s: float = 30.0,
        seed: int | None = None,
    ) -> None:
        """`engines`: URLs, or dns:HOST:PORT for every address behind a name."""
        for engine in engines:
            _check_address(engine)
        self._engines, self._store = list(engines), store
        self._options: dict[str, Any] = {"template": template, "key": key, "stall_s": stall_s}
        self._session: aiohttp.ClientSession | None = None
        self.replicas: dict[str, Replica] = {}
        self._ring = HashRing(())
        self._jobs: set[_Job] = set()
        self._by_key: dict[Hashable, _Job] = {}
        self._watching: asyncio.Task[None] | None = None
        self._random = random.Random(seed)
        self.num_failovers = self.num_superseded = 0
        self.routed: Counter[str] = Counter()
        self.phases = PhaseLatencies()

    # --- what it is ---

    @property
    def num_running(self) -> int:
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        return sum(job.replica is None for job in self._jobs)

    def models(self) -> list[ModelCard]:
        """Of the replicas that can be used; weights that differ between them are named together."""
        cards: dict[str, ModelCard] = {}
        for replica in self._usable():
            for card in replica.cards:
                known = cards.get(card.id)
                weights = card.weights if known is None else "+".join(sorted({*known.weights.split("+"), card.weights}))
                cards[card.id] = replace(card, weights=weights)
        return list(cards.values())

    def metric_families(self) -> list[MetricFamily]:
        by_state = Counter(replica.state for replica in self.replicas.values())
        at_work = Counter({name: replica.num_at_work for name, replica in self.replicas.items()})
        return [
            MetricFamily("gateway_replicas", "gauge", "Engines by state.", labelled("state", by_state)),
            MetricFamily("gateway_replica_requests", "gauge", "Requests at work by engine.", labelled("engine", at_work)),
            MetricFamily("gateway_routed_total", "counter", "Requests sent, by engine.", labelled("engine", self.routed)),
            MetricFamily("gateway_failovers_total", "counter", "Requests asked of another.", [("", self.num_failovers)]),
            MetricFamily("requests_superseded_total", "counter", "Overtaken.", [("", self.num_superseded)]),
            *self.phases.metric_families(),
        ]

    # --- a request ---

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        if len(self._jobs) >= MAX_AT_WORK:
            raise RequestError(None, "too many requests are at work; try again later", status=429, code="queue_full")
        if request.sampling.temperature > 0 and request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=self._random.getrandbits(62)))
        until_s = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        job = _Job()
        self._supersede(request.supersede, job)
        self._jobs.add(job)
        job.task = asyncio.create_task(self._ask(job, request, until_s))
        open_choices = set(range(request.num_choices))
        has_text = False
        try:
            while True:
                try:
                    async with asyncio.timeout(None if until_s is None else max(until_s - time.monotonic(), 0)):
                        item = await job.items.get()
                except TimeoutError:
                    item = _Late()
                if isinstance(item, _Stop | _Late) and (has_text or isinstance(item, _Late)):
                    for index in sorted(open_choices):  # with what there is
                        yield CompletionDelta(index, "", "abort")
                    yield Usage(0, 0)
                    return
                if isinstance(item, Exception):
                    raise item
                self._count_phases(job, item)
                yield item
                if isinstance(item, Usage):
                    return
                has_text = has_text or bool(item.text)
                if item.finish_reason is not None:
                    open_choices.discard(item.index)
        finally:
            self._jobs.discard(job)
            if request.supersede is not None and self._by_key.get(request.supersede) is job:
                del self._by_key[request.supersede]
            job.task.cancel()

    def _count_phases(self, job: _Job, item: CompletionDelta | Usage) -> None:
        now_s = time.monotonic()
        if job.first_s is None:
            job.first_s = now_s
        if isinstance(item, Usage) and job.began_s is not None:
            self.phases.add(
                arrived_s=job.arrived_s,
                began_s=job.began_s,
                first_s=job.first_s,
                last_s=now_s,
                num_tokens=item.completion_tokens,
            )

    def _supersede(self, key: Hashable, job: _Job) -> None:
        if key is None:
            return
        older = self._by_key.get(key)
        if older is not None:
            message = "a newer request took this one's place"
            older.items.put_nowait(RequestError(None, message, status=409, code="superseded"))
            self.num_superseded += 1
        self._by_key[key] = job

    async def _ask(self, job: _Job, request: CompletionRequest, until_s: float | None) -> None:
        """EditorRequest one replica after another until one has answered to the end; everything goes into the job's queue."""
        try:
            await self._ask_each(job, request, until_s)
        except Exception as error:  # noqa: BLE001 - it is the reader's to handle
            job.items.put_nowait(error)

    async def _ask_each(self, job: _Job, request: CompletionRequest, until_s: float | None) -> None:
        sent = [""] * request.num_choices
        ended: set[int] = set()
        failed: set[str] = set()
        num_busy = 0
        while True:
            replica = await self._choose(request, failed) if len(failed) < MAX_ENGINES else None
            if replica is None:
                if num_busy:
                    raise RequestError(None, "all engines are full; try again later", status=429, code="queue_full")
                raise RequestError(None, "no engine can be reached; try again later", status=503, code="no_engine")
            job.replica = replica
            job.began_s = job.began_s or time.monotonic()
            self.routed[replica.url] += 1
            try:
                left_s = None if until_s is None else until_s - time.monotonic()
                async with contextlib.aclosing(replica.stream(request, left_s)) as items:
                    await self._pass_on(job, request, items, sent, ended)
                return
            except ReplicaBusy:
                num_busy += 1
            except ReplicaFailed as error:
                self._failed(replica, error)
            except asyncio.CancelledError:
                if not job.is_lost:
                    raise
                job.is_lost = False  # its replica went down: the cancellation was ours, and this task goes on
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                self.num_failovers += 1
            failed.add(replica.url)

    async def _pass_on(
        self,
        job: _Job,
        request: CompletionRequest,
        items: AsyncGenerator[CompletionDelta | Usage, None],
        sent: list[str],
        ended: set[int],
    ) -> None:
        """Pieces into the job's queue, without what an earlier replica had sent."""
        skip = list(sent)
        has_ids = request.sampling.logprobs is not None or request.return_token_ids
        if has_ids and any(sent):
            raise RequestError(None, "the engine went away in mid-answer", status=503, code="engine_lost")
        async for item in items:
            if isinstance(item, Usage):
                job.items.put_nowait(item)
                continue
            at = item.index
            size = min(len(skip[at]), len(item.text))
            if item.text[:size] != skip[at][:size] or (item.finish_reason is not None and len(skip[at]) > size):
                message = "the engine went away, and another one answers differently"
                raise RequestError(None, message, status=503, code="engine_lost")
            skip[at] = skip[at][size:]
            sent[at] += item.text[size:]
            if at not in ended and (item.text[size:] or item.finish_reason is not None):
                job.items.put_nowait(replace(item, text=item.text[size:]))
            if item.finish_reason is not None:
                ended.add(at)

    async def _choose(self, request: CompletionRequest, failed: set[str]) -> Replica | None:
        usable = [
            replica
            for replica in self._usable()
            if replica.url not in failed and any(request.model in (None, card.id) for card in replica.cards)
        ]
        loads = {replica.url: replica.num_at_work for replica in usable}
        key = route_key(request)
        kept = None if self._store is None or len(usable) < 2 else await self._store.get(f"route:{key}")
        known = None if kept is None else kept.decode("utf-8", "replace")
        choice = choose(self._ring, key, loads, known)
        if choice is None:
            return None
        if self._store is not None and len(usable) > 1 and choice.name != known:
            self._store.put(f"route:{key}", choice.name.encode(), ROUTE_TTL_S)
        return self.replicas.get(choice.name)

    # --- replicas ---

    def _usable(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state == "up" and replica.cards]

    def _failed(self, replica: Replica, error: ReplicaFailed) -> None:
        self.num_failovers += 1
        log.warning("%s %s: asking others", replica.url, error)
        if replica.state == "up" and error.is_gone:
            replica.state, replica.found = "down", str(error)

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=60.0)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=LINE_BYTES)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECK_S):
                await self._resolve()
                await asyncio.gather(*[replica.check() for replica in self.replicas.values()])
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        resolved_s = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_S)
            if time.monotonic() - resolved_s >= RESOLVE_S:
                await self._resolve()
                resolved_s = time.monotonic()
            await asyncio.gather(*[self._check(replica) for replica in list(self.replicas.values())])

    async def _check(self, replica: Replica) -> None:
        before = replica.state
        await replica.check()
        if replica.state != before:
            log.warning("%s is %s: %s", replica.url, replica.state, replica.found)
        if replica.state == "down":
            for job in self._jobs:
                if job.replica is replica and job.task is not None and not job.is_lost and not job.task.done():
                    job.is_lost = True
                    job.task.cancel()

    async def _resolve(self) -> None:
        """The replicas of now: those given, and those that names stand for."""
        assert self._session is not None
        urls: list[str] = []
        for engine in self._engines:
            if not engine.startswith(DNS):
                urls.append(engine.rstrip("/"))
                continue
            host, _, port = engine.removeprefix(DNS).rpartition(":")
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):  # the name has no address now (or can have none): keep what we know
                urls += [url for url, replica in self.replicas.items() if replica.state != "down"]
                continue
            addresses = sorted({str(address[4][0]) for address in found})
            urls += [f"http://[{one}]:{port}" if ":" in one else f"http://{one}:{port}" for one in addresses]
        for url in dict.fromkeys(urls):
            if url not in self.replicas:
                self.replicas[url] = Replica(url, self._session, **self._options)
        for url in [url for url, one in self.replicas.items() if url not in urls and not one.num_at_work]:
            del self.replicas[url]
        self._ring = HashRing(self.replicas)

    # --- end ---

    async def drain(self, deadline_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._jobs:
                    await asyncio.sleep(POLL_S)
                return
        for job in list(self._jobs):
            job.items.put_nowait(_Stop(None, "the server is shutting down", status=503))
        await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


class _Stop(RequestError):
    """The gateway ends."""


class _Late(RequestError):
    def __init__(self) -> None:
        super().__init__(None, "no answer in time", status=408, code="timeout")


def route_key(request: CompletionRequest) -> str:
    """What goes to the same replica: one file of one user, or else prompts that begin alike."""
    if request.supersede is not None:
        words: list[Any] = [request.tenant, request.cache_salt, repr(request.supersede)]
    else:
        prompt = request.prompts[0]
        head = prompt[:HEAD_CHARS]
        words = [request.tenant, request.cache_salt, request.user, head]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _check_address(engine: str) -> None:
    todo = "write e.g. http://10.0.0.1:8000, or dns:NAME:PORT for every address behind a name"
    try:
        parts = urlsplit(engine.replace(DNS, "http://", 1) if engine.startswith(DNS) else engine)
        is_good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or not engine.startswith(DNS))
    except ValueError:
        is_good = False
    if not is_good:
        raise UserError(f"engine {engine}", "is no address", todo)

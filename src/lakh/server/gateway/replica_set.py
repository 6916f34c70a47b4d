"""The replicas behind a gateway: resolved from addresses, checked every CHECK_S, chosen per request."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from lakh.errors import UserError
from lakh.server.gateway.replica import Replica
from lakh.server.gateway.routing import choose_replica
from lakh.server.request import CompletionRequest
from lakh.server.store import CacheStore

__all__ = ["ReplicaSet", "route_key"]

log = logging.getLogger(__name__)

CHECK_S = 1.0
FIRST_CHECK_S = 5.0  # for all replicas, before the gateway is ready
RESOLVE_S = 5.0
ROUTE_TTL_S = 600.0
HEAD_CHARS = 256  # of a prompt that names no file: identifies the file
EVENT_BYTES = 1 << 20
DNS = "dns:"


class ReplicaSet:
    def __init__(
        self,
        engines: Iterable[str],
        *,
        store: CacheStore | None = None,
        on_down: Callable[[Replica], None] = lambda replica: None,
        **replica_options: Any,
    ) -> None:
        """`engines`: URLs, or dns:HOST:PORT for every address of a name. Calls `on_down` at each check of a replica
        that is down. `replica_options` are those of Replica.
        """
        self._engines = list(engines)
        for engine in self._engines:
            _check_address(engine)
        self._store, self._on_down, self._options = store, on_down, replica_options
        self._session: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None
        self.by_url: dict[str, Replica] = {}

    def usable(self) -> list[Replica]:
        return [replica for replica in self.by_url.values() if replica.state == "up" and replica.cards]

    async def choose(self, request: CompletionRequest, excluded: set[str]) -> Replica | None:
        """A usable replica for the request: the one that served its file before, if it is not overloaded."""
        usable = [
            replica
            for replica in self.usable()
            if replica.url not in excluded and any(request.model in (None, card.id) for card in replica.cards)
        ]
        loads = {replica.url: replica.num_running for replica in usable}
        key = route_key(request)
        stored = None if self._store is None or len(usable) < 2 else await self._store.get(f"route:{key}")
        previous = None if stored is None else stored.decode("utf-8", "replace")
        decision = choose_replica(key, loads, previous)
        if decision is None:
            return None
        if self._store is not None and len(usable) > 1 and decision.name != previous:
            self._store.put(f"route:{key}", decision.name.encode(), ROUTE_TTL_S)
        return self.by_url.get(decision.name)

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=60.0)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=EVENT_BYTES)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECK_S):
                await self._resolve()
                await asyncio.gather(*[replica.check() for replica in self.by_url.values()])
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _watch(self) -> None:
        resolved_s = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_S)
            if time.monotonic() - resolved_s >= RESOLVE_S:
                await self._resolve()
                resolved_s = time.monotonic()
            await asyncio.gather(*[self._check(replica) for replica in list(self.by_url.values())])

    async def _check(self, replica: Replica) -> None:
        before = replica.state
        await replica.check()
        if replica.state != before:
            log.warning("%s is %s: %s", replica.url, replica.state, replica.found)
        if replica.state == "down":
            self._on_down(replica)

    async def _resolve(self) -> None:
        """Update the replicas to the given URLs and the current addresses of names."""
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
            except (OSError, UnicodeError):  # the name has no address now: keep the known replicas
                urls += [url for url, replica in self.by_url.items() if replica.state != "down"]
                continue
            addresses = sorted({str(address[4][0]) for address in found})
            urls += [f"http://[{one}]:{port}" if ":" in one else f"http://{one}:{port}" for one in addresses]
        for url in dict.fromkeys(urls):
            if url not in self.by_url:
                self.by_url[url] = Replica(url, self._session, **self._options)
        for url in [url for url, one in self.by_url.items() if url not in urls and not one.num_running]:
            del self.by_url[url]


def route_key(request: CompletionRequest) -> str:
    """Requests with the same key go to the same replica: one file of one user, or prompts with the same beginning."""
    if request.supersede is not None:
        identity: list[Any] = [request.tenant, request.cache_salt, repr(request.supersede)]
    else:
        identity = [request.tenant, request.cache_salt, request.user, _head(request)]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _head(request: CompletionRequest) -> Any:
    return request.messages[:2] if request.messages else request.prompts[0][:HEAD_CHARS]


def _check_address(engine: str) -> None:
    todo = "write e.g. http://10.0.0.1:8000, or dns:NAME:PORT for every address of a name"
    try:
        parts = urlsplit(engine.replace(DNS, "http://", 1) if engine.startswith(DNS) else engine)
        is_good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or not engine.startswith(DNS))
    except ValueError:
        is_good = False
    if not is_good:
        raise UserError(f"engine {engine}", "is not an address", todo)

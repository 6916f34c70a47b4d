"""A small store of bytes and counts beside the servers: in this process, or in Redis (or Valkey) for many of them.

    get(key)             the bytes, or None
    put(key, value)      soon, and without waiting for it
    add(key, amount)     a count's new total, or None where the store cannot say

A store is a help and never a need: where Redis is slow, gone or refuses, `get` and `add` say None within LIMIT_S and
`put` forgets. After a failure it is left alone for RETRY_S, so that a dead Redis costs one request a second its
LIMIT_S and all others nothing; after a late answer for LATE_REST_S, so that a request waits for one of its questions
and not for each. Values live for a time, then go. Knows nothing of what the bytes mean; speaks RESP only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from lakh.errors import UserError
from lakh.server.backend import MetricFamily

__all__ = ["MemoryCacheStore", "RedisStore", "CacheStore", "open_store"]

log = logging.getLogger(__name__)

LIMIT_S = 0.020  # somebody waits
WRITE_LIMIT_S = 1.0  # nobody does
RETRY_S = 1.0
SLOW_TIMES = 3  # late answers in a row that count as a failure; a refused connection is one at once
LATE_REST_S = 0.05  # after a late answer: what else the same request would ask goes unasked
MAX_AT_ONCE = 64
MAX_WRITES = 512  # under way; more are forgotten
MEMORY_BYTES = 64 << 20
ENTRY_BYTES = 200  # what an entry costs besides its own bytes, about
PREFIX = "lakh:"

T = TypeVar("T")


class CacheStore(Protocol):
    async def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, value: bytes, ttl_s: float) -> None: ...

    async def add(self, key: str, amount: int, ttl_s: float) -> int | None: ...

    def metric_families(self) -> list[MetricFamily]: ...

    async def close(self) -> None: ...


class MemoryCacheStore:
    """The least recently used go first when the bytes run out."""

    def __init__(self, max_bytes: int = MEMORY_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._entries: OrderedDict[str, tuple[float, bytes | int]] = OrderedDict()
        self._bytes = 0

    async def get(self, key: str) -> bytes | None:
        value = self._find(key)
        return value if isinstance(value, bytes) else None

    def put(self, key: str, value: bytes, ttl_s: float) -> None:
        self._set(key, value, self._clock() + ttl_s)

    async def add(self, key: str, amount: int, ttl_s: float) -> int | None:
        value = self._find(key)
        total = amount + (value if isinstance(value, int) else 0)
        self._set(key, total, self._clock() + ttl_s)
        return total

    def metric_families(self) -> list[MetricFamily]:
        return [MetricFamily("store_bytes", "gauge", "Bytes of kept texts and counts.", [("", self._bytes)])]

    async def close(self) -> None:
        self._entries.clear()

    def _find(self, key: str) -> bytes | int | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry[0] <= self._clock():
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def _set(self, key: str, value: bytes | int, until_s: float) -> None:
        self._drop(key)
        self._entries[key] = (until_s, value)
        self._bytes += _size_bytes(key, value)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= _size_bytes(key, entry[1])


class RedisCacheStore:
    def __init__(self, url: str, *, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        from redis import asyncio as redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        self._limit_s, self._clock = limit_s, clock
        self._errors = (RedisError, OSError, ValueError)
        try:
            self._redis: Any = redis.Redis.from_url(
                url,
                # asyncio's own limit is the one that counts; these only close what hangs.
                socket_timeout=1.0,
                socket_connect_timeout=1.0,
                retry=Retry(NoBackoff(), 0),
                max_connections=2 * MAX_AT_ONCE,
            )
        except ValueError as error:
            raise UserError(f"--cache {_without_password(url)}", f"is no Redis URL ({error})", FORM) from None
        self._url = _without_password(url)
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._writes: set[asyncio.Task[Any]] = set()
        self._rest_until_s = 0.0
        self._late = 0
        self.num_failures = 0
        self.is_up = True

    async def get(self, key: str) -> bytes | None:
        return await self._ask(lambda: self._redis.get(PREFIX + key))

    def put(self, key: str, value: bytes, ttl_s: float) -> None:
        if len(self._writes) < MAX_WRITES and self._may_ask():
            task = asyncio.create_task(
                self._ask(lambda: self._redis.set(PREFIX + key, value, px=max(int(ttl_s * 1000), 1)), WRITE_LIMIT_S)
            )
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def add(self, key: str, amount: int, ttl_s: float) -> int | None:
        async def both() -> int:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.incrby(PREFIX + key, amount)
                pipe.pexpire(PREFIX + key, max(int(ttl_s * 1000), 1))
                return int((await pipe.execute())[0])

        return await self._ask(both)

    def metric_families(self) -> list[MetricFamily]:
        return [
            MetricFamily("store_up", "gauge", "1 while Redis answers.", [("", int(self.is_up))]),
            MetricFamily("store_failures_total", "counter", "Calls that Redis failed.", [("", self.num_failures)]),
        ]

    async def close(self) -> None:
        for task in self._writes:
            task.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._redis.aclose()

    def _may_ask(self) -> bool:
        return self._clock() >= self._rest_until_s

    async def _ask(self, call: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T | None:
        if not self._may_ask():
            return None
        if not self.is_up:
            self._rest_until_s = self._clock() + RETRY_S  # one tries, the others do without
        try:
            async with asyncio.timeout(limit_s or self._limit_s), self._at_once:
                result = await call()
        except TimeoutError:
            self._late += 1
            self._failed("is slow", is_down=self._late >= SLOW_TIMES)
            return None
        except self._errors as error:
            self._failed(f"fails ({type(error).__name__}: {error})", is_down=True)
            return None
        if not self.is_up:
            log.warning("%s answers again", self._url)
        self.is_up, self._late, self._rest_until_s = True, 0, 0.0
        return result

    def _failed(self, found: str, *, is_down: bool) -> None:
        self.num_failures += 1
        if is_down:
            if self.is_up:
                log.warning("%s %s: going on without it", self._url, found)
            self.is_up = False
        self._rest_until_s = self._clock() + (RETRY_S if is_down else LATE_REST_S)


FORM = "write --cache memory, off, or redis://HOST:PORT/DATABASE (rediss:// with TLS, unix:// for a socket)"


def open_store(address: str) -> CacheStore | None:
    """memory, off, or a Redis URL. A Redis that does not answer is no error: it may come later."""
    if address == "off":
        return None
    if address == "memory":
        return MemoryCacheStore()
    if address.partition("://")[0] in ("redis", "rediss", "unix"):
        return RedisCacheStore(address)
    raise UserError(f"--cache {_without_password(address)}", "is no cache", FORM)


def _size_bytes(key: str, value: bytes | int) -> int:
    return ENTRY_BYTES + len(key) + (len(value) if isinstance(value, bytes) else 8)


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://...@{tail}" if at else url

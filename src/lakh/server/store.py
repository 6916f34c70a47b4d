"""A small key-value store for cached completions, quotas and counts: in this process, or in Redis (or Valkey) for
several servers.

The store is optional by design: if Redis is slow, down or refuses, `get` and `increment` return None within LIMIT_S and
`put` drops the value. After a failure Redis is not asked for RETRY_S, so a dead Redis costs one request per second its
LIMIT_S and all others nothing; after a late answer it is not asked for LATE_PAUSE_S, so a request waits for one of its
calls and not for each. Values expire. Uses RESP only.

Values in Redis are signed (HMAC-SHA256 over key and value) with a secret that all servers share: a client that can
write to Redis but does not have the secret cannot put text into completions. A value with another signature or of
another type counts as missing. Counts are not signed; a server never counts less than what it has seen itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from lakh.errors import UserError
from lakh.server.metrics import MetricFamily, counter, gauge

__all__ = ["CacheStore", "MemoryCacheStore", "RedisCacheStore", "open_store"]

log = logging.getLogger(__name__)

LIMIT_S = 0.020  # for reads: a request waits
WRITE_LIMIT_S = 1.0
RETRY_S = 1.0
MAX_LATE = 3  # late answers in a row that count as a failure; a refused connection counts at once
LATE_PAUSE_S = 0.05
MAX_CONCURRENT = 64
MAX_PENDING_WRITES = 512  # more are dropped
MEMORY_BYTES = 64 << 20
ENTRY_BYTES = 200  # approximate overhead of an entry
PREFIX = "lakh:"
SIGNATURE_BYTES = 32
SHORTEST_SECRET = 16

T = TypeVar("T")


class CacheStore(Protocol):
    async def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Write in the background."""
        ...

    async def increment(self, key: str, amount: int, ttl_s: float) -> int | None:
        """The new total of a count; None if the store does not answer."""
        ...

    def metric_families(self) -> list[MetricFamily]: ...

    async def close(self) -> None: ...


class MemoryCacheStore:
    """Evicts the least recently used entries when it exceeds `max_bytes`."""

    def __init__(self, max_bytes: int = MEMORY_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._entries: OrderedDict[str, tuple[float, bytes | int]] = OrderedDict()
        self._bytes = 0

    async def get(self, key: str) -> bytes | None:
        value = self._find(key)
        return value if isinstance(value, bytes) else None

    def put(self, key: str, value: bytes, ttl_s: float) -> None:
        self._set(key, value, self._clock() + ttl_s)

    async def increment(self, key: str, amount: int, ttl_s: float) -> int | None:
        value = self._find(key)
        total = amount + (value if isinstance(value, int) else 0)
        self._set(key, total, self._clock() + ttl_s)
        return total

    def metric_families(self) -> list[MetricFamily]:
        return [gauge("store_bytes", "Bytes of cached completions and counts.", self._bytes)]

    async def close(self) -> None:
        self._entries.clear()

    def _find(self, key: str) -> bytes | int | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry[0] <= self._clock():
            self._remove(key)
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def _set(self, key: str, value: bytes | int, expires_s: float) -> None:
        self._remove(key)
        self._entries[key] = (expires_s, value)
        self._bytes += _size_bytes(key, value)
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= _size_bytes(key, entry[1])


class RedisCacheStore:
    def __init__(
        self,
        url: str,
        secret: bytes | None = None,
        *,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a `secret`, values are signed with a random one, and no other server can read them."""
        from redis import asyncio as redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError, ResponseError

        self._secret = secret or secrets.token_bytes(32)
        self._limit_s, self._clock = limit_s, clock
        self._errors, self._refusal = (RedisError, OSError, ValueError), ResponseError
        try:
            self._redis: Any = redis.Redis.from_url(
                url,
                # asyncio's own limit is the one that counts; these only close hanging connections.
                socket_timeout=1.0,
                socket_connect_timeout=1.0,
                retry=Retry(NoBackoff(), 0),
                max_connections=2 * MAX_CONCURRENT,
            )
        except ValueError as error:
            raise UserError(f"--cache {_without_password(url)}", f"is not a Redis URL ({error})", FORM) from None
        self._url = _without_password(url)
        self._concurrent = asyncio.Semaphore(MAX_CONCURRENT)
        self._writes: set[asyncio.Task[Any]] = set()
        self._retry_at_s = 0.0
        self._num_late = 0
        self.num_failures = self.num_forged = 0
        self.is_up = True

    async def get(self, key: str) -> bytes | None:
        signed: bytes | None = await self._call(lambda: self._value_of(self._redis.get(PREFIX + key)))
        if signed is None:
            return None
        value = signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signed[:SIGNATURE_BYTES], self._sign(key, value)):
            self.num_forged += 1
            return None
        return value

    def _sign(self, key: str, value: bytes) -> bytes:
        return hmac.new(self._secret, key.encode() + b"\0" + value, hashlib.sha256).digest()

    def put(self, key: str, value: bytes, ttl_s: float) -> None:
        value = self._sign(key, value) + value
        if len(self._writes) < MAX_PENDING_WRITES and self._may_call():
            task = asyncio.create_task(
                self._call(lambda: self._redis.set(PREFIX + key, value, px=max(int(ttl_s * 1000), 1)), WRITE_LIMIT_S)
            )
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def increment(self, key: str, amount: int, ttl_s: float) -> int | None:
        async def pipelined() -> int | None:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.incrby(PREFIX + key, amount)
                pipe.pexpire(PREFIX + key, max(int(ttl_s * 1000), 1))
                found = await self._value_of(pipe.execute())
                return None if found is None else int(found[0])

        return await self._call(pipelined)

    async def _value_of(self, reply: Awaitable[Any]) -> Any:
        """None where Redis refuses the command for this key, whose value is of another type: it answers, and other
        keys are fine. Refusals that concern all keys (memory, rights, loading) have classes of their own.
        """
        try:
            return await reply
        except self._refusal as error:
            if type(error) is not self._refusal:
                raise
            self.num_forged += 1
            return None

    def metric_families(self) -> list[MetricFamily]:
        return [
            gauge("store_up", "1 while Redis answers.", int(self.is_up)),
            counter("store_failures_total", "Failed Redis calls.", self.num_failures),
            counter("store_forged_values_total", "Values of another type or secret.", self.num_forged),
        ]

    async def close(self) -> None:
        for task in self._writes:
            task.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._redis.aclose()

    def _may_call(self) -> bool:
        return self._clock() >= self._retry_at_s

    async def _call(self, call: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T | None:
        if not self._may_call():
            return None
        if not self.is_up:
            self._retry_at_s = self._clock() + RETRY_S  # one call probes, the others skip Redis
        try:
            async with asyncio.timeout(limit_s or self._limit_s), self._concurrent:
                result = await call()
        except TimeoutError:
            self._num_late += 1
            self._failed("is slow", is_down=self._num_late >= MAX_LATE)
            return None
        except self._errors as error:
            self._failed(f"fails ({type(error).__name__}: {error})", is_down=True)
            return None
        if not self.is_up:
            log.warning("%s answers again", self._url)
        self.is_up, self._num_late, self._retry_at_s = True, 0, 0.0
        return result

    def _failed(self, found: str, *, is_down: bool) -> None:
        self.num_failures += 1
        if is_down:
            if self.is_up:
                log.warning("%s %s: continuing without it", self._url, found)
            self.is_up = False
        self._retry_at_s = self._clock() + (RETRY_S if is_down else LATE_PAUSE_S)


FORM = "write --cache memory, off, or redis://HOST:PORT/DATABASE (rediss:// with TLS, unix:// for a socket)"


def open_store(address: str, secret: bytes | None = None) -> CacheStore | None:
    """`address` is memory, off, or a Redis URL. A Redis that does not answer is not an error: it may come up later.
    `secret` signs values in Redis.
    """
    if address == "off":
        return None
    if address == "memory":
        return MemoryCacheStore()
    if address.partition("://")[0] in ("redis", "rediss", "unix"):
        return RedisCacheStore(address, secret)
    raise UserError(f"--cache {_without_password(address)}", "is not a cache", FORM)


def _size_bytes(key: str, value: bytes | int) -> int:
    return ENTRY_BYTES + len(key) + (len(value) if isinstance(value, bytes) else 8)


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://...@{tail}" if at else url

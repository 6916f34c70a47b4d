"""Quotas of a tenant: requests and tokens per minute, and concurrent requests.

Counts are kept per tenant and minute in a store, so all servers with the same Redis share them; while the store does
not answer, each process counts alone. Tokens are counted after a completion, so a tenant may exceed its limit by what
is running; a request that finds the server full or stopping costs none. An exceeded quota is a 429
(RESOURCE_EXHAUSTED) with the time to retry.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from lakh.server.request import RequestError
from lakh.server.store import CacheStore, MemoryCacheStore

__all__ = ["Quota", "QuotaDecision", "QuotaTracker", "decide"]

WINDOW_S = 60.0


@dataclass(frozen=True)
class Quota:
    """None means no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and completion tokens together; at least one for four characters that were sent."""
    at_once: int | None = None
    """Concurrent requests in one server."""

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]


class QuotaDecision(NamedTuple):
    allowed: bool
    retry_after_s: float
    reason: str


def decide(what: str, used: int, limit: int | None, now_s: float) -> QuotaDecision:
    """`used`: in this minute, including this request."""
    if limit is None or used <= limit:
        return QuotaDecision(True, 0.0, f"{used} {what} of {limit} this minute")
    left_s = WINDOW_S - now_s % WINDOW_S
    return QuotaDecision(False, left_s, f"more than {limit} {what} a minute; retry in {left_s:.0f} s")


class QuotaTracker:
    def __init__(
        self, quotas: Mapping[str, Quota], store: CacheStore | None, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` is wall time: servers that share a store share the minute."""
        self._quotas, self._store, self._clock = quotas, store, clock
        self._local = MemoryCacheStore()
        self._running: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def admit(self, tenant: str) -> AsyncIterator[Callable[[int], None]]:
        """Raises a 429 if the quota is exceeded. Yields a function that sets the tokens to charge at the end."""
        used = [0]

        def charge(tokens: int) -> None:
            used[0] = tokens

        quota = self._quotas.get(tenant)
        if quota is None:
            yield charge
            return
        if quota.at_once is not None and self._running[tenant] >= quota.at_once:
            raise _quota_error(f"more than {quota.at_once} concurrent requests; try again later")
        self._running[tenant] += 1
        try:
            await self._check(tenant, quota)
            yield charge
        except RequestError as error:
            if error.status in (429, 503):
                charge(0)
            raise
        finally:
            self._running[tenant] -= 1
            if quota.tokens_per_minute is not None and used[0]:
                await self._add(tenant, "tokens", used[0])

    async def _check(self, tenant: str, quota: Quota) -> None:
        checks = {"tokens": (quota.tokens_per_minute, 0), "requests": (quota.requests_per_minute, 1)}
        for what, (limit, amount) in checks.items():
            if limit is not None:
                used = await self._add(tenant, what, amount) + 1 - amount
                decision = decide(what, used, limit, self._clock())
                if not decision.allowed:
                    raise _quota_error(decision.reason, decision.retry_after_s)

    async def _add(self, tenant: str, what: str, amount: int) -> int:
        key = f"quota:{what}:{int(self._clock() // WINDOW_S)}:{tenant}"
        local = await self._local.increment(key, amount, 2 * WINDOW_S)
        shared = None if self._store is None else await self._store.increment(key, amount, 2 * WINDOW_S)
        return max(local or 0, shared or 0)


def _quota_error(reason: str, retry_after_s: float = 1.0) -> RequestError:
    return RequestError(None, reason, status=429, code="quota_exceeded", retry_after_s=max(retry_after_s, 1.0))

"""How much a tenant may ask: requests and tokens per minute, and requests at once.

EngineCounters are kept in a store by tenant and minute, so that all servers with the same Redis share them; where the store
cannot say, this process counts alone until it can. Tokens are counted when they are known, after the answer: a tenant
may go over by what is under way. A refusal is a 429 (RESOURCE_EXHAUSTED) that says when to come back.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from lakh.server.request import RequestError
from lakh.server.store import MemoryCacheStore, CacheStore

__all__ = ["Quota", "QuotaTracker", "QuotaDecision", "decide"]

WINDOW_S = 60.0


@dataclass(frozen=True)
class Quota:
    """None sets no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""
    at_once: int | None = None
    """Requests under way, in one server."""

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]


class QuotaDecision(NamedTuple):
    allowed: bool
    retry_after_s: float
    reason: str


def decide(what: str, used: int, limit: int | None, now_s: float) -> QuotaDecision:
    """`used` in this minute, the request in question included."""
    if limit is None or used <= limit:
        return QuotaDecision(True, 0.0, f"{used} {what} of {limit} this minute")
    left_s = WINDOW_S - now_s % WINDOW_S
    return QuotaDecision(False, left_s, f"more than {limit} {what} a minute; come back in {left_s:.0f} s")


class QuotaTracker:
    def __init__(
        self, quotas: Mapping[str, Quota], store: CacheStore | None, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` is the wall's: servers that share a store share the minute."""
        self._quotas, self._store, self._clock = quotas, store, clock
        self._alone = MemoryCacheStore()
        self._at_work: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def admitted(self, tenant: str) -> AsyncIterator[Callable[[int], None]]:
        """A RequestError where the tenant has had its share. What it gives hears how many tokens it came to so far; they
        are charged at the end, whichever way that comes.
        """
        used = [0]

        def charge(tokens: int) -> None:
            used[0] = tokens

        quota = self._quotas.get(tenant)
        if quota is None:
            yield charge
            return
        if quota.at_once is not None and self._at_work[tenant] >= quota.at_once:
            raise _refusal(QuotaDecision(False, 1.0, f"more than {quota.at_once} requests at once; try again later"))
        self._at_work[tenant] += 1
        try:
            await self._check(tenant, quota)
            yield charge
        finally:
            self._at_work[tenant] -= 1
            if quota.tokens_per_minute is not None and used[0]:
                await self._add(tenant, "tokens", used[0])

    async def _check(self, tenant: str, quota: Quota) -> None:
        now_s = self._clock()
        if quota.tokens_per_minute is not None:
            used = await self._add(tenant, "tokens", 0)
            verdict = decide("tokens", used + 1, quota.tokens_per_minute, now_s)
            if not verdict.allowed:
                raise _refusal(verdict)
        if quota.requests_per_minute is not None:
            used = await self._add(tenant, "requests", 1)
            verdict = decide("requests", used, quota.requests_per_minute, now_s)
            if not verdict.allowed:
                raise _refusal(verdict)

    async def _add(self, tenant: str, what: str, amount: int) -> int:
        key = f"quota:{what}:{int(self._clock() // WINDOW_S)}:{tenant}"
        alone = await self._alone.add(key, amount, 2 * WINDOW_S)
        shared = None if self._store is None else await self._store.add(key, amount, 2 * WINDOW_S)
        return max(alone or 0, shared or 0)


def _refusal(verdict: QuotaDecision) -> RequestError:
    return RequestError(
        None, verdict.reason, status=429, code="quota_exceeded", retry_after_s=max(verdict.retry_after_s, 1.0)
    )

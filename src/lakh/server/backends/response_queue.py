"""A queue of deltas for one reader in an event loop, with one timer for all its waits.

A reader that is slower than its writer gets several deltas of a choice merged into one, so a busy server writes fewer
and larger events. Costs one future per wait and nothing per item; `asyncio.wait_for` around a queue costs a task per
item (Python 3.11), which was most of the cost of a streamed token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import replace
from typing import Any

from lakh.server.backend import CompletionDelta, Usage
from lakh.server.request import CompletionRequest, RequestError

__all__ = ["ResponseQueue", "merge_deltas", "response_timeout_s"]

RESULT_TIMEOUT_S = 600.0  # for the next delta, including the time in the waiting queue
LATE_S = 5.0  # an engine ends a request at its deadline; one that is silent this long after it hangs


class ResponseQueue:
    """Deltas and a Usage, then None; or an exception."""

    def __init__(self, timeout_s: float) -> None:
        """Silence for `timeout_s` raises a 503 in the reader."""
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._items: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None
        self._last_item_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_finished = False
        """The reader has seen the end or an exception."""

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> AsyncGenerator[CompletionDelta | Usage, None]:
        """All items up to the end; raises exceptions that were put."""
        self._last_item_s = self._loop.time()
        self._timer = self._loop.call_later(self._timeout_s, self._check_timeout)
        try:
            while True:
                for item in merge_deltas(await self._take()):
                    self.is_finished = item is None or isinstance(item, Exception)
                    if item is None:
                        return
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            self._timer.cancel()

    async def _take(self) -> list[Any]:
        if not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._last_item_s = self._loop.time()
        items, self._items = self._items, []
        return items

    def _check_timeout(self) -> None:
        left_s = self._last_item_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_timeout)
            return
        self.put(RequestError(None, f"no answer within {self._timeout_s:g} s", status=503, code="timeout"))


def response_timeout_s(request: CompletionRequest) -> float:
    """How long a reader waits for the next delta."""
    return RESULT_TIMEOUT_S if request.timeout_s is None else min(request.timeout_s + LATE_S, RESULT_TIMEOUT_S)


def merge_deltas(items: Iterable[Any]) -> Iterator[Any]:
    """The same items, with consecutive deltas of one choice merged."""
    held: CompletionDelta | None = None
    for item in items:
        is_plain = isinstance(item, CompletionDelta) and item.logprobs is item.prompt_logprobs is None
        is_plain = is_plain and item.prompt_tokens is None
        if held is not None and is_plain and held.index == item.index:
            item = replace(
                item,
                text=held.text + item.text,
                reasoning=held.reasoning + item.reasoning,
                tokens=held.tokens + item.tokens,
                num_accepted=held.num_accepted + item.num_accepted,
                tool_calls=held.tool_calls + item.tool_calls,
            )
        elif held is not None:
            yield held
        held = item if is_plain and item.finish_reason is None else None
        if held is None:
            yield item
    if held is not None:
        yield held

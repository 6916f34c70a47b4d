"""What comes for one reader in an event loop: put by anyone in it, taken all at once, with one timer for all waits.

A reader that is slower than its writer finds several pieces of a text and passes them on as one, so that a busy server
writes fewer and larger events. StepCosts a future for each wait and nothing for each item; `asyncio.wait_for` around a
queue costs a task for each item (Python 3.11), which was most of what a streamed token cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from lakh.server.backend import CompletionDelta, Usage
from lakh.server.request import RequestError, CompletionRequest

__all__ = ["ResponseQueue", "merge_deltas", "response_timeout_s"]

RESULT_TIMEOUT_S = 600.0  # for the next piece of an answer, the time in the queue included
LATE_S = 5.0  # an engine ends a request at its deadline; one that has said nothing so long after it hangs


class ResponseQueue:
    """Pieces and a Usage, then None; or an exception."""

    def __init__(self, timeout_s: float) -> None:
        """Silence for so long is told to the reader, as a 503."""
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._items: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False
        """Nothing more comes: the reader has seen the end, or what went wrong."""

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> AsyncGenerator[CompletionDelta | Usage, None]:
        """To the end; raises what was put as an exception."""
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        try:
            while True:
                for item in merge_deltas(await self._take()):
                    self.is_over = item is None or isinstance(item, Exception)
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
        self._heard_s = self._loop.time()
        items, self._items = self._items, []
        return items

    def _look(self) -> None:
        """Has nothing come for too long?"""
        left_s = self._heard_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        message = f"no answer within {self._timeout_s:g} s"
        self.put(RequestError(None, message, status=503, code="timeout"))


def response_timeout_s(request: CompletionRequest) -> float:
    """How long a reader waits for the next piece."""
    return RESULT_TIMEOUT_S if request.timeout_s is None else min(request.timeout_s + LATE_S, RESULT_TIMEOUT_S)


def merge_deltas(items: Iterable[Any]) -> Iterator[Any]:
    """The same items, with pieces of one choice that follow each other as one."""
    last: Any = None
    for item in items:
        is_plain = isinstance(item, CompletionDelta) and item.logprobs is None
        if last is not None:
            if is_plain and last.index == item.index:
                last = CompletionDelta(last.index, last.text + item.text, item.finish_reason, last.tokens + item.tokens)
                if last.finish_reason is not None:
                    yield last
                    last = None
                continue
            yield last
            last = None
        if is_plain and item.finish_reason is None:
            last = item
        else:
            yield item
    if last is not None:
        yield last

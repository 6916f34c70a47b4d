"""A thread that computes the next items while the caller works on the present one.

Items are numbered and taken strictly in order. What the thread raises, the caller gets. The time that the
caller spent waiting is counted: a trainer that waits for data says so.

Knows nothing of tokens. Fails with PeerTimeout when an item takes longer than `timeout_s`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from lakh.errors import PeerTimeout

__all__ = ["Prefetcher"]

T = TypeVar("T")
TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 10.0


class Prefetcher(Generic[T]):
    """Items first, first + 1, ... last - 1 of `fetch`, up to `depth` of them ahead."""

    def __init__(
        self, fetch: Callable[[int], T], first: int, last: int, depth: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth {depth} is below 1")
        self.wait_s = 0.0
        """Seconds that the caller has waited in `get` so far."""
        self._fetch, self._next, self._last, self._depth = fetch, first, last, depth
        self._timeout_s = timeout_s
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, args=(first,), name="prefetch", daemon=True)
        self._thread.start()

    def get(self, index: int) -> T:
        """Item `index`, which must be the next one."""
        with self._changed:
            if index != self._next or index >= self._last:
                raise IndexError(f"asked for item {index}; the next is {self._next}, the last is {self._last - 1}")
            started_s = time.monotonic()
            arrived = self._changed.wait_for(
                lambda: self._ready or self._error is not None or self._closed, self._timeout_s
            )
            self.wait_s += time.monotonic() - started_s
            if self._ready:
                self._next += 1
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            assert not arrived
            raise PeerTimeout(
                f"prefetch of item {index}",
                f"nothing came within {self._timeout_s:g} s",
                "check the disk or network that holds the data, then try again",
            )

    def close(self) -> None:
        """Stop the thread. An item that is being computed is waited for, CLOSE_TIMEOUT_S at most, and thrown
        away.
        """
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self, first: int) -> None:
        for index in range(first, self._last):
            with self._changed:
                # No deadline: the caller may work on an item for as long as it likes, and `close` wakes us.
                self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
                if self._closed:
                    return
            try:
                item = self._fetch(index)
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if not self._closed:
                    self._ready.append(item)
                self._changed.notify_all()

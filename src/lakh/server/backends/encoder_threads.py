"""A few threads that tokenize prompts and compile forms of completions, shared fairly between tenants.

The next piece of work is that of the tenant with the fewest running (fairness.py), and a tenant never has all threads:
whatever it sends, the others wait for no work of its queue, nor for its running work.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lakh.server.fairness import Share, ShareCounts

__all__ = ["EncoderThreads"]

T = TypeVar("T")
NUM_THREADS, THREADS_PER_TENANT = 3, 2


@dataclass(eq=False)
class _Work(Generic[T]):
    share: Share
    compute: Callable[[], T]
    result: Future[T]


class EncoderThreads:
    """Thread-safe."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, "lakh-encode")
        self._lock = threading.Lock()
        self._waiting: list[_Work[Any]] = []
        self._running: list[Share] = []
        self._is_closed = False

    def submit(self, share: Share, compute: Callable[[], T]) -> Future[T]:
        """The result, later; work whose future was cancelled before it began is left out."""
        work = _Work(share, compute, Future[T]())
        with self._lock:
            self._waiting.append(work)
            self._start()
        return work.result

    def close(self) -> None:
        """Cancel what has not begun."""
        with self._lock:
            self._is_closed = True
            for work in self._waiting:
                work.result.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        self._waiting = [work for work in self._waiting if not work.result.cancelled()]
        while not self._is_closed and len(self._running) < NUM_THREADS:
            busy = Counter(share.tenant for share in self._running)
            ready = [work for work in self._waiting if busy[work.share.tenant] < THREADS_PER_TENANT]
            if not ready:
                return
            work = ready[ShareCounts(self._running).next_to_start([one.share for one in ready])]
            self._waiting.remove(work)
            self._running.append(work.share)
            self._executor.submit(self._run, work)

    def _run(self, work: _Work[Any]) -> None:
        try:
            if work.result.set_running_or_notify_cancel():
                work.result.set_result(work.compute())
        except BaseException as error:  # noqa: BLE001 - the waiting request handles it
            work.result.set_exception(error)
        finally:
            with self._lock:
                self._running.remove(work.share)
                self._start()

"""One thread that runs jobs in order of arrival, behind a queue with a limit.

The event loop submits a job and reads its results as they come; the thread runs it. A job that is cancelled
while it waits leaves the queue at once, so that clients who went away do not keep others out; one that runs
is told through `cancelled` and stops at its next step. An error inside a job belongs to that job: the
thread goes on.

Knows iterators and an event loop; knows nothing of models or HTTP. Every wait has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["Job", "QueueFull", "Stopped", "Worker"]

T = TypeVar("T")
_END = object()
POLL_S = 0.05


class QueueFull(Exception):
    """As many jobs wait as may; try again later."""


class Stopped(Exception):
    """The worker ended before it came to this job."""


class Job(Generic[T]):
    """Work that yields results. Made and read in the event loop, run in the worker's thread."""

    def __init__(self, work: Callable[[Callable[[], bool]], Iterator[T]]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[Any] = asyncio.Queue()
        self._cancelled = threading.Event()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    async def results(self, timeout_s: float) -> AsyncIterator[T]:
        """What the work yields, then its error if it had one. TimeoutError if nothing comes for so long."""
        while True:
            item = await asyncio.wait_for(self._results.get(), timeout_s)
            if item is _END:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def run(self) -> Exception | None:
        """In the worker's thread; returns the work's error. `end` follows."""
        try:
            for item in self._work(self.cancelled):
                self._post(item)
        except Exception as error:  # noqa: BLE001 - it is the reader's to handle
            return error
        return None

    def cancel(self) -> None:
        self._cancelled.set()

    def end(self, error: Exception | None) -> None:
        """Nothing more comes."""
        self._post(_END if error is None else error)

    def _post(self, item: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._results.put_nowait, item)


class Worker:
    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._waiting: deque[Job[Any]] = deque()
        self._running: Job[Any] | None = None
        self._closed = False
        self._changed = threading.Condition()
        # A daemon: a job that will not end cannot keep the process from ending.
        self._thread = threading.Thread(target=self._loop, name="lakh-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return int(self._running is not None)

    def submit(self, job: Job[Any]) -> None:
        with self._changed:
            if self._closed or len(self._waiting) >= self.max_waiting:
                raise QueueFull
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job[Any]) -> None:
        """The job's reader has gone. Of a finished job, this says nothing."""
        job.cancel()
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(job)

    async def drain(self, deadline_s: float) -> bool:
        """Wait until no job is left, at most so long; cancel the rest. True where all came to their end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._running is not None or self._waiting:
                    await asyncio.sleep(POLL_S)
                return True
        with self._changed:
            waiting, running = list(self._waiting), self._running
            self._waiting.clear()
        for job in waiting:
            job.end(Stopped())
        if running is not None:
            running.cancel()
        return False

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait(timeout=60)
                if self._closed:
                    return
                job = self._running = self._waiting.popleft()
            error = job.run()
            self._running = None  # first: whoever reads the end finds the worker free
            job.end(error)

"""One thread that steps the engine, and a door for the event loop: a bounded queue, results as they come.

The event loop makes a `EngineJob` of one or more rows and submits it; the thread adds its rows to the engine between two
steps, and after every step posts what became certain. A job that is cancelled leaves at the next step, its blocks
with it, whether it waited or ran. A job with a `key` supersedes the older job with that key: someone who types on no
longer waits for the answer to what was typed before. An error inside a step ends the jobs that were at work; the
thread goes on.

Knows an engine and an event loop; knows nothing of HTTP or gRPC. Every wait has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence

from lakh.server.gc_control import tidy_up
from lakh.server.engine import Engine
from lakh.server.sequence import Chunk, Sequence

__all__ = ["JobUpdate", "EngineJob", "QueueFull", "EngineStopped", "Superseded", "EngineThread"]

POLL_S = 0.05
IDLE_S = 60.0  # how long the thread sleeps before it looks again on its own
TIDY_AFTER_S = 1.0  # without work: what it left behind is collected now, when nobody waits
TIDY_LATEST_S = 600.0  # or then, whoever waits


class QueueFull(Exception):
    """As many rows wait as may; try again later."""


class EngineStopped(Exception):
    """The worker ended before this job did."""


class Superseded(Exception):
    """A newer job with the same key took this one's place."""


JobUpdate = tuple[int, Chunk] | Exception | None
"""A row's number and its piece; what went wrong; or None: nothing more comes."""


class EngineJob:
    """Rows of one request. Made in the event loop, which hears of it by `hear`; fed by the worker's thread."""

    def __init__(self, rows: Sequence[Sequence], hear: Callable[[JobUpdate], None], key: Hashable = None) -> None:
        self.rows, self.key, self.hear = list(rows), key, hear
        self.loop = asyncio.get_running_loop()
        self._ended: set[int] = set()

    # --- in the worker's thread ---

    def take(self) -> list[tuple[int, Chunk]]:
        """What is new, row by row."""
        new = []
        for index, row in enumerate(self.rows):
            chunk = None if index in self._ended else row.take_chunk()
            if chunk is not None:
                if chunk.finish_reason is not None:
                    self._ended.add(index)
                new.append((index, chunk))
        return new

    @property
    def is_over(self) -> bool:
        """Every row has ended, and its last piece was taken."""
        return len(self._ended) == len(self.rows)


class EngineThread:
    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self.num_superseded = 0
        self._new: deque[EngineJob] = deque()
        self._gone: deque[tuple[EngineJob, Exception | None]] = deque()
        self._jobs: dict[EngineJob, None] = {}  # with the engine, in the order of arrival
        self._by_key: dict[Hashable, EngineJob] = {}
        self._outbox: list[tuple[EngineJob, JobUpdate]] = []
        self._closed = False
        self._littered_s: float | None = None  # since when
        self._changed = threading.Condition()
        # A daemon: a step that will not end cannot keep the process from ending.
        self._thread = threading.Thread(target=self._loop, name="lakh-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting + sum(len(job.rows) for job in list(self._new))

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    def has(self, key: Hashable) -> bool:
        """A job with this key waits or works: another one would take its place."""
        return key is not None and key in self._by_key

    def submit(self, job: EngineJob) -> None:
        with self._changed:
            if self._closed:
                raise EngineStopped
            older = self._by_key.get(job.key) if job.key is not None else None
            if older is not None:
                self._gone.append((older, Superseded()))
                self.num_superseded += 1
            elif self.num_waiting >= self.max_waiting:
                raise QueueFull
            if job.key is not None:
                self._by_key[job.key] = job
            self._new.append(job)
            self._changed.notify()

    def cancel(self, job: EngineJob) -> None:
        """The job's reader has gone. Of a finished job, this says nothing."""
        with self._changed:
            if job in self._new:  # the thread has not seen it: it leaves the queue at once
                self._new.remove(job)
                self._forget_key(job)
                return
            self._gone.append((job, None))
            self._changed.notify()

    async def drain(self, deadline_s: float) -> bool:
        """Wait until no job is left, at most so long; end the rest. True where all came to their end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._new or self._jobs:
                    await asyncio.sleep(POLL_S)
                return True
        with self._changed:
            self._gone.extend((job, EngineStopped()) for job in [*self._jobs, *self._new])
            self._changed.notify()
        return False  # those that drew something answer with it

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    # --- in the thread ---

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._new or self._gone or self._jobs or self._closed):
                    if not self._changed.wait(timeout=IDLE_S if self._littered_s is None else TIDY_AFTER_S):
                        self._tidy_up()
                if self._closed:
                    break
                new, self._new = self._new, deque()
                gone, self._gone = self._gone, deque()
                for job in new:
                    self._jobs[job] = None
            for job, error in gone:
                self._leave(job, error)
            try:
                for job in new:
                    if job in self._jobs:
                        self.engine.submit(*job.rows)
                if self._jobs:
                    self._littered_s = self._littered_s or time.monotonic()
                    self.engine.step()
            except Exception as error:  # noqa: BLE001 - it is the readers' to handle
                for job in list(self._jobs):
                    self._leave(job, error)
            for job in list(self._jobs):
                self._outbox += [(job, piece) for piece in job.take()]
                if job.is_over:
                    self._leave(job, None)
            self._send()
            if self._littered_s is not None and time.monotonic() > self._littered_s + TIDY_LATEST_S:
                self._tidy_up()
        self._send()

    def _tidy_up(self) -> None:
        if self._littered_s is not None:
            tidy_up()
            self._littered_s = None

    def _send(self) -> None:
        """All that became certain in a step, in one call: waking the event loop costs more than what it then does."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[EngineJob, JobUpdate]]] = defaultdict(list)
        for job, heard in self._outbox:
            by_loop[job.loop].append((job, heard))
        self._outbox = []
        for loop, pairs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody reads any more
                loop.call_soon_threadsafe(_hear, pairs)

    def _leave(self, job: EngineJob, error: Exception | None) -> None:
        self.engine.abort(*job.rows)
        if isinstance(error, EngineStopped) and any(row.tokens for row in job.rows):
            error = None
        with self._changed:
            self._forget_key(job)
            known = self._jobs.pop(job, job) is None  # first: whoever reads the end finds the worker free
        if known:
            if error is None:
                self._outbox += [(job, piece) for piece in job.take()]
            self._outbox.append((job, error))

    def _forget_key(self, job: EngineJob) -> None:
        if job.key is not None and self._by_key.get(job.key) is job:
            del self._by_key[job.key]


def _hear(pairs: Sequence[tuple[EngineJob, JobUpdate]]) -> None:
    for job, heard in pairs:
        job.hear(heard)

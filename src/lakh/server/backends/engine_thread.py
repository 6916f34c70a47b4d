"""One thread that steps the engine, with a bounded queue for the event loop.

The event loop submits an `EngineJob` of one or more sequences; the thread adds them to the engine between two steps
and reports new chunks after every step. On a GPU it reports them while the next step computes: the event loop takes
Python's lock to send them, and the GPU would have no work meanwhile. A cancelled job leaves at the next step and frees
its blocks, waiting or running. A job with a `key` supersedes the older job with that key: a user who keeps typing no
longer waits for the previous completion. An error in a step fails the jobs that were running; the thread continues,
unless a tensor-parallel process is lost (PeerLost): no later step can succeed, so the thread ends and `health` says
why.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable

from lakh.errors import PeerLost
from lakh.server.backend import BackendHealth, wait_until
from lakh.server.engine import Engine
from lakh.server.fairness import Share, has_room
from lakh.server.gc_control import collect_now
from lakh.server.request import RequestError, ServerStopping, Superseded
from lakh.server.sequence import Chunk, Sequence

__all__ = ["EngineJob", "EngineThread", "JobUpdate"]

IDLE_S = 60.0  # the thread wakes up this often without work
COLLECT_IDLE_S = 1.0  # idle time after which garbage is collected
COLLECT_LATEST_S = 600.0  # collect garbage after this time even under load
STALLED_S = 30.0  # a step that takes longer, and three times as long as any before it, counts as stalled

JobUpdate = tuple[int, Chunk] | Exception | None
"""A sequence's index and its chunk; the error that ended the job; or None at its end."""


class EngineJob:
    """The sequences of one request. `on_update` runs in the event loop that created the job."""

    def __init__(self, seqs: Iterable[Sequence], on_update: Callable[[JobUpdate], None], key: Hashable = None) -> None:
        self.seqs, self.key, self.on_update = list(seqs), key, on_update
        self.loop = asyncio.get_running_loop()

    def take_chunks(self) -> list[tuple[int, Chunk]]:
        """What is new since the last call. For the engine's thread."""
        return [(index, chunk) for index, seq in enumerate(self.seqs) if (chunk := seq.take_chunk()) is not None]


class EngineThread:
    def __init__(self, engine: Engine, max_waiting: int, on_failure: Callable[[], None] = lambda: None) -> None:
        """Calls `on_failure` in the thread before it ends because of a lost process."""
        self.engine, self.max_waiting, self._on_failure = engine, max_waiting, on_failure
        self.num_superseded = 0
        self._submitted: deque[EngineJob] = deque()
        self._cancelled: deque[tuple[EngineJob, Exception | None]] = deque()
        self._jobs: dict[EngineJob, None] = {}  # submitted to the engine, in order of arrival
        self._by_key: dict[Hashable, EngineJob] = {}
        self._updates: list[tuple[EngineJob, JobUpdate]] = []
        self._closed = False
        self._failure: PeerLost | None = None
        self._step_began_s: float | None = None
        self._longest_step_s = 0.0
        self._garbage_since_s: float | None = None
        self._changed = threading.Condition()
        # A daemon: a step that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._loop, name="lakh-engine", daemon=True)
        engine.has_own_thread = True
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting + sum(len(job.seqs) for job in list(self._submitted))

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    def health(self) -> BackendHealth:
        if self._failure is not None:
            return BackendHealth(str(self._failure), is_alive=False)
        began_s = self._step_began_s
        took_s = 0.0 if began_s is None else time.monotonic() - began_s
        if took_s > max(STALLED_S, 3 * self._longest_step_s):
            return BackendHealth(f"the engine has been in one step for {took_s:.0f} s")
        return BackendHealth()

    def check_room(self, share: Share, key: Hashable, encoding: Collection[Share] = ()) -> None:
        """Raise a 429 if the waiting queue is full for this tenant, unless the job replaces another. `encoding`: more
        that wait.
        """
        if self.num_waiting + len(encoding) < self.max_waiting or (key is not None and key in self._by_key):
            return
        submitted = [seq.share for job in list(self._submitted) for seq in job.seqs]
        if not has_room([*self.engine.waiting_shares(), *submitted, *encoding], share, self.max_waiting):
            message = f"{self.max_waiting} requests are waiting already; try again later"
            raise RequestError(None, message, status=429, code="queue_full")

    def submit(self, job: EngineJob) -> None:
        """Raises a RequestError if the waiting queue is full or the thread has stopped."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise ServerStopping
            self.check_room(job.seqs[0].share, job.key)
            older = self._by_key.get(job.key) if job.key is not None else None
            if older is not None:
                self._cancelled.append((older, Superseded()))
                self.num_superseded += 1
            if job.key is not None:
                self._by_key[job.key] = job
            self._submitted.append(job)
            self._changed.notify()

    def cancel(self, job: EngineJob) -> None:
        """No-op for a finished job."""
        with self._changed:
            if job in self._submitted:  # the thread has not taken it yet
                self._submitted.remove(job)
                self._forget_key(job)
                return
            self._cancelled.append((job, None))
            self._changed.notify()

    async def drain(self, timeout_s: float) -> None:
        """Wait for all jobs, then stop the rest. Stopped jobs keep the text they have."""
        if not await wait_until(lambda: not (self._submitted or self._jobs), timeout_s):
            with self._changed:
                self._cancelled.extend((job, ServerStopping()) for job in [*self._jobs, *self._submitted])
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    # --- in the thread ---

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._submitted or self._cancelled or self._jobs or self._closed):
                    if not self._changed.wait(timeout=IDLE_S if self._garbage_since_s is None else COLLECT_IDLE_S):
                        self._collect_garbage()
                if self._closed:
                    break
                submitted, self._submitted = self._submitted, deque()
                cancelled, self._cancelled = self._cancelled, deque()
                for job in submitted:
                    self._jobs[job] = None
            for job, error in cancelled:
                self._remove(job, error)
            try:
                for job in submitted:
                    if job in self._jobs:
                        self.engine.submit(*job.seqs)
                if self._jobs:
                    self._garbage_since_s = self._garbage_since_s or time.monotonic()
                    self._step()
            except Exception as error:  # noqa: BLE001 - the jobs' readers handle it
                if isinstance(error, PeerLost):
                    with self._changed:
                        self._failure = error
                        self._jobs |= dict.fromkeys(self._submitted)
                        self._submitted.clear()
                        self._closed = True
                for job in list(self._jobs):
                    self._remove(job, error)
            self._send_updates()  # those of the last step, if this one had nothing to compute
            for job in list(self._jobs):
                failure = next((seq.failure for seq in job.seqs if seq.failure is not None), None)
                if failure is not None:
                    self._remove(job, failure)
                    continue
                self._updates += [(job, chunk) for chunk in job.take_chunks()]
                if job.seqs[-1].is_taken and all(seq.is_taken for seq in job.seqs):
                    self._remove(job, None)
            if not (self._jobs and self.engine.is_asynchronous):  # else the next step sends them while a GPU computes
                self._send_updates()
            if self._garbage_since_s is not None and time.monotonic() > self._garbage_since_s + COLLECT_LATEST_S:
                self._collect_garbage()
        self._send_updates()
        if self._failure is not None:
            self._on_failure()

    def _step(self) -> None:
        began_s = self._step_began_s = time.monotonic()
        try:
            if self.engine.is_asynchronous:
                self.engine.step(meanwhile=self._send_updates)
            else:
                self.engine.step()
        finally:
            self._step_began_s = None
            self._longest_step_s = max(self._longest_step_s, time.monotonic() - began_s)
        self.engine.share_cores()

    def _collect_garbage(self) -> None:
        if self._garbage_since_s is not None:
            collect_now()
            self._garbage_since_s = None

    def _send_updates(self) -> None:
        """All updates of a step in one call per event loop: waking the loop costs more than the updates."""
        if not self._updates:
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[EngineJob, JobUpdate]]] = defaultdict(list)
        for job, update in self._updates:
            by_loop[job.loop].append((job, update))
        self._updates = []
        for loop, updates in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop has closed: no reader is left
                loop.call_soon_threadsafe(_deliver, updates)

    def _remove(self, job: EngineJob, error: Exception | None) -> None:
        self.engine.abort(*job.seqs)
        if isinstance(error, ServerStopping) and any(seq.tokens for seq in job.seqs):
            error = None
        with self._changed:
            self._forget_key(job)
            was_running = self._jobs.pop(job, job) is None  # before the last update: its reader finds a free slot
        if was_running:
            if error is None:
                self._updates += [(job, chunk) for chunk in job.take_chunks()]
            self._updates.append((job, error))

    def _forget_key(self, job: EngineJob) -> None:
        if job.key is not None and self._by_key.get(job.key) is job:
            del self._by_key[job.key]


def _deliver(updates: Iterable[tuple[EngineJob, JobUpdate]]) -> None:
    for job, update in updates:
        job.on_update(update)

"""A pool of processes that run the tasks of a step, and are replaced when they die.

The driver hands out one task at a time. A worker that dies, or sends nothing for QUIET_TIMEOUT_S, costs its task's
time: the task runs again in a new process, one document at a time, and a document that kills its worker again is
skipped (task_progress.py). The kernel limits the memory of a worker to `memory_bytes`; one that comes close is replaced
after its task.

Fails with the task's own error, or with PeerLost if a task has lost all its workers.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lakh.child_process import ChannelClosed, ChildProcess, wait_readable
from lakh.corpus.task_progress import MARKER_BYTES, ProgressMarker, TaskProgress, decide_retry
from lakh.errors import PeerLost

__all__ = ["OUT_OF_MEMORY", "TaskDone", "WorkerPool", "rss_bytes"]

OUT_OF_MEMORY = 12
"""Exit code of a worker that hit its memory limit."""
QUIET_TIMEOUT_S = 1800.0
"""A worker that sends nothing for this long is considered stuck, killed and replaced."""
WAIT_S = 1.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

TaskFunction = Callable[[Any, int, TaskProgress], None]


@dataclass(frozen=True)
class TaskDone:
    """The message of a worker that has finished a task."""

    number: int
    cpu_seconds: float
    peak_rss_bytes: int


@dataclass
class _PoolWorker:
    child: ChildProcess
    marker: ProgressMarker
    task: int | None = None
    last_message_s: float = field(default_factory=time.monotonic)

    def is_stuck(self) -> bool:
        return self.task is not None and time.monotonic() - self.last_message_s > QUIET_TIMEOUT_S


class WorkerPool:
    """At most `count` processes, started when needed and kept from step to step."""

    def __init__(self, count: int, memory_bytes: int) -> None:
        self.count, self.memory_bytes = count, memory_bytes
        self._workers: list[_PoolWorker] = []

    def run(
        self,
        function: TaskFunction,
        argument: Any,
        numbers: Iterable[int],
        advanced: Callable[[int], None],
        done: Callable[[TaskDone], None],
    ) -> None:
        """Call function(argument, number, progress) for every number in some worker.

        `advanced` receives the progress in bytes; a negative amount takes back the progress of a lost task. The name of
        `argument` appears in errors.
        """
        waiting, progress = deque(numbers), defaultdict[int, int](int)
        deaths, skipped = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)

        def lost(worker: _PoolWorker) -> None:
            """Return the task of a dead worker to the queue, or give it up."""
            number, place = worker.task, worker.marker.read()
            ending = self._ending(worker)
            self._remove(worker)
            if number is None:
                return
            advanced(-progress.pop(number, 0))
            was_isolated = bool(deaths[number] or skipped[number])
            deaths[number].append(place if was_isolated else "")
            decision = decide_retry(deaths[number], len(skipped[number]))
            if decision.action == "give-up":
                todo = "give each worker more memory (--worker-memory), or look at that split's sources"
                raise PeerLost(f"step {argument.name}, task {number}", f"{decision.reason} ({ending})", todo)
            if decision.action == "skip":
                skipped[number].append(decision.place)
                deaths[number] = []
            waiting.appendleft(number)

        while waiting or any(worker.task is not None for worker in self._workers):
            self._start_workers(len(waiting))
            for worker in self._workers:
                if worker.task is None and waiting:
                    number = worker.task = waiting.popleft()
                    worker.last_message_s = time.monotonic()
                    worker.marker.write("")
                    isolate = bool(deaths[number] or skipped[number])
                    with contextlib.suppress(ChannelClosed):  # it died between two tasks: `receive` below finds out
                        worker.child.channel.send((function, argument, number, isolate, tuple(skipped[number])))
            for worker in self._ready():
                try:
                    message = worker.child.channel.receive()
                except ChannelClosed:
                    lost(worker)
                    continue
                worker.last_message_s = time.monotonic()
                if isinstance(message, int):
                    assert worker.task is not None
                    progress[worker.task] += message
                    advanced(message)
                else:
                    worker.task = None
                    done(message)
                    if rss_bytes(worker.child.pid) > self.memory_bytes * 3 // 4:
                        self._remove(worker)
            for worker in [worker for worker in self._workers if worker.is_stuck()]:
                lost(worker)

    def close(self) -> None:
        for worker in list(self._workers):
            self._remove(worker)

    def _start_workers(self, wanted: int) -> None:
        idle = sum(worker.task is None for worker in self._workers)
        for _ in range(min(wanted - idle, self.count - len(self._workers))):
            with tempfile.TemporaryFile() as file:
                file.truncate(MARKER_BYTES)
                child = ChildProcess.start(
                    "lakh.corpus.engines.worker:main",
                    file.fileno(),
                    self.memory_bytes,
                    pass_fds=[file.fileno()],
                    # Arrow's own allocator reserves a GiB at a time, which counts against the limit.
                    env={"ARROW_DEFAULT_MEMORY_POOL": "system"},
                )
                self._workers.append(_PoolWorker(child, ProgressMarker(file.fileno())))

    def _ready(self) -> list[_PoolWorker]:
        """The workers with a message, or whose channel has closed; waits up to WAIT_S for one."""
        ready = [worker for worker in self._workers if worker.child.channel.poll()]
        if not ready and wait_readable([worker.child.channel for worker in self._workers], WAIT_S):
            ready = [worker for worker in self._workers if worker.child.channel.poll()]
        return ready

    def _remove(self, worker: _PoolWorker) -> None:
        self._workers.remove(worker)
        worker.child.kill()  # everything it holds is committed
        worker.marker.close()

    def _ending(self, worker: _PoolWorker) -> str:
        reason = worker.child.exit_reason()
        if worker.child.exit_code == OUT_OF_MEMORY:
            return f"it was refused more than {self.memory_bytes / 1e6:,.0f} MB of memory"
        return reason


def rss_bytes(pid: int | None = None) -> int:
    """Resident memory of a process; 0 if it is gone or cannot be read."""
    try:
        with open(f"/proc/{pid or os.getpid()}/statm", "rb") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0

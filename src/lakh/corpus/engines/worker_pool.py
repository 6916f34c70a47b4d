"""Processes that run tasks of a step, and are replaced when they die.

The driver hands out one task at a time and listens to all pipes at once. A worker that dies, or says nothing for
QUIET_TIMEOUT_S, costs its task's time: the task goes to a fresh process, carefully, and a document that kills its
worker again and again is passed over (trail.py). The kernel gives no worker more than `memory_bytes`; one that has
come near is let go after its task and replaced. Workers end by themselves when their driver is gone: their pipe closes.

Knows functions, numbers and places; knows nothing of rows. Fails with the task's own LakhError, or with PeerLost where
a task has lost all its workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from lakh import errors
from lakh.corpus.task_progress import MARKER_BYTES, ProgressMarker, TaskProgress, decide_retry
from lakh.errors import PeerLost

__all__ = ["OUT_OF_MEMORY", "TaskDone", "WorkerPool", "rss_bytes"]

OUT_OF_MEMORY = 12
"""How a worker ends that was refused memory."""
QUIET_TIMEOUT_S = 1800.0
"""A worker that says nothing for so long is taken for stuck, killed and replaced."""
GOODBYE_TIMEOUT_S = 30.0
"""How long a process that was killed may take to go."""
WAIT_S = 1.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Task = Callable[[Any, int, TaskProgress], Any]


@dataclass(frozen=True)
class TaskDone:
    """What a worker says when a task is finished."""

    number: int
    result: Any
    cpu_seconds: float
    peak_rss_bytes: int


@dataclass
class _WorkerProcess:
    process: Any
    pipe: Connection
    mark: ProgressMarker
    task: int | None = None
    heard_s: float = field(default_factory=time.monotonic)


class WorkerPool:
    """At most `count` processes, started when first needed, kept from step to step."""

    def __init__(self, count: int, memory_bytes: int) -> None:
        self.count, self.memory_bytes = count, memory_bytes
        self._workers: list[_WorkerProcess] = []

    def run(
        self,
        task: Task,
        argument: Any,
        numbers: Iterable[int],
        ticked: Callable[[int], None],
        done: Callable[[TaskDone], None],
    ) -> None:
        """Call task(argument, number, trail) for every number; `ticked` hears ticks, negative ones for a lost task."""
        waiting, ticks = deque(numbers), dict[int, int]()
        deaths, skipped = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)

        def lost(worker: _WorkerProcess) -> None:
            """The worker is gone: its task goes back, unless there is no hope."""
            number, place = worker.task, worker.mark.read()
            self._dismiss(worker)
            if number is None:
                return
            ticked(-ticks.pop(number, 0))
            was_careful = bool(deaths[number] or skipped[number])
            deaths[number].append(place if was_careful else "")
            decision = decide_retry(deaths[number], len(skipped[number]))
            if decision.action == "give-up":
                ended = _ending(worker.process.returncode, self.memory_bytes)
                todo = "give each worker more memory (--worker-memory), or look at that split's sources"
                raise PeerLost(f"step {argument_name(argument)}, task {number}", f"{decision.reason} ({ended})", todo)
            if decision.action == "skip":
                skipped[number].append(decision.place)
                deaths[number] = []
            waiting.appendleft(number)

        while waiting or any(worker.task is not None for worker in self._workers):
            self._staff(len(waiting))
            for worker in self._workers:
                if worker.task is None and waiting:
                    worker.task = waiting.popleft()
                    worker.heard_s = time.monotonic()
                    with contextlib.suppress(OSError):  # it died between two tasks: its pipe will say so
                        careful = bool(deaths[worker.task] or skipped[worker.task])
                        worker.mark.write("")
                        worker.pipe.send((task, argument, worker.task, careful, tuple(skipped[worker.task])))
            for pipe in wait([worker.pipe for worker in self._workers], timeout=WAIT_S):
                worker = next(item for item in self._workers if item.pipe is pipe)
                message = self._hear(worker)
                number = worker.task
                if message is None:  # the process is gone
                    lost(worker)
                elif isinstance(message, int):
                    assert number is not None
                    ticks[number] = ticks.get(number, 0) + message
                    ticked(message)
                elif isinstance(message, TaskDone):
                    worker.task = None
                    done(message)
                    if rss_bytes(worker.process.pid) > self.memory_bytes * 3 // 4:
                        self._dismiss(worker)
                else:
                    self._raise(message)
            for worker in [w for w in self._workers if w.task is not None and _is_quiet(w)]:
                lost(worker)

    def close(self) -> None:
        for worker in list(self._workers):
            self._dismiss(worker)

    def _staff(self, wanted: int) -> None:
        idle = sum(worker.task is None for worker in self._workers)
        for _ in range(min(wanted - idle, self.count - len(self._workers))):
            ours, theirs = socket.socketpair()
            with tempfile.TemporaryFile() as file:
                file.truncate(MARKER_BYTES)
                self._start(ours, theirs, file.fileno())

    def _start(self, ours: socket.socket, theirs: socket.socket, mark: int) -> None:
        # A program of its own, not a fork: none of our threads, files or locks, and no second run of the caller's
        # main module.
        command = [sys.executable, "-m", "lakh.corpus.engines.worker", str(theirs.fileno()), str(mark)]
        # Arrow's own allocator reserves a GiB at a time, which the kernel counts as had.
        process = subprocess.Popen(
            [*command, str(self.memory_bytes)],
            pass_fds=[theirs.fileno(), mark],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},
        )
        theirs.close()
        self._workers.append(_WorkerProcess(process, Connection(ours.detach()), ProgressMarker(mark)))

    def _hear(self, worker: _WorkerProcess) -> Any:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=GOODBYE_TIMEOUT_S)
            return None
        worker.heard_s = time.monotonic()
        return message

    def _dismiss(self, worker: _WorkerProcess) -> None:
        self._workers.remove(worker)
        worker.pipe.close()
        if worker.process.poll() is None:
            worker.process.kill()  # it holds nothing that is not committed
        worker.process.wait(timeout=GOODBYE_TIMEOUT_S)
        worker.mark.close()

    @staticmethod
    def _raise(message: Any) -> None:
        kind, content = message
        if kind == "lakh":
            raise errors.from_dict(content)
        raise RuntimeError(f"in a worker:\n{content}")


def _is_quiet(worker: _WorkerProcess) -> bool:
    return time.monotonic() - worker.heard_s > QUIET_TIMEOUT_S


def _ending(code: int | None, memory_bytes: int) -> str:
    if code == OUT_OF_MEMORY:
        return f"it was refused more than {memory_bytes / 1e6:,.0f} MB of memory"
    return f"killed by signal {-code}" if code is not None and code < 0 else f"exit {code}"


def argument_name(argument: Any) -> str:
    return str(getattr(argument, "name", "step"))


def rss_bytes(pid: int | None = None) -> int:
    """Resident memory of a process now; 0 where it is gone or cannot be asked."""
    try:
        with open(f"/proc/{pid or os.getpid()}/statm", "rb") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0

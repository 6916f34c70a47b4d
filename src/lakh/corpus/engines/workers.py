"""Processes that run tasks of a step, and are replaced when they die.

The driver hands out one task at a time and listens to all pipes at once. A worker that is killed costs its task's time:
the task goes to a fresh process, up to TASK_ATTEMPTS times. A worker that has grown past `memory_bytes` is let go after
its task and replaced. Workers end by themselves when their driver is gone: their pipe closes.

Knows functions and numbers; knows nothing of rows. Fails with the task's own LakhError, or with PeerLost where a task
has lost all its workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from lakh import errors
from lakh.errors import PeerLost, PeerTimeout

__all__ = ["Done", "Workers", "rss_bytes"]

TASK_ATTEMPTS = 3
QUIET_TIMEOUT_S = 1800.0
"""A worker that says nothing for so long is taken for stuck, killed and replaced."""
GOODBYE_TIMEOUT_S = 30.0
"""How long a process that was killed may take to go."""
WAIT_S = 1.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Task = Callable[[Any, int, Callable[[int], None]], Any]


@dataclass(frozen=True)
class Done:
    """What a worker says when a task is finished."""

    number: int
    result: Any
    cpu_seconds: float
    peak_rss_bytes: int


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    task: int | None = None
    heard_s: float = field(default_factory=time.monotonic)


class Workers:
    """At most `count` processes, started when first needed, kept from step to step."""

    def __init__(self, count: int, memory_bytes: int) -> None:
        self.count, self.memory_bytes = count, memory_bytes
        self._workers: list[_Worker] = []

    def run(
        self,
        task: Task,
        argument: Any,
        numbers: Iterable[int],
        ticked: Callable[[int], None],
        done: Callable[[Done], None],
    ) -> None:
        """Call task(argument, number, tick) for every number; `ticked` hears ticks, negative ones for a lost task."""
        waiting, attempts, ticks = deque(numbers), dict[int, int](), dict[int, int]()
        while waiting or any(worker.task is not None for worker in self._workers):
            self._staff(len(waiting))
            for worker in self._workers:
                if worker.task is None and waiting:
                    worker.task = waiting.popleft()
                    worker.heard_s = time.monotonic()
                    with contextlib.suppress(OSError):  # it died between two tasks: its pipe will say so
                        worker.pipe.send((task, argument, worker.task))
            for pipe in wait([worker.pipe for worker in self._workers], timeout=WAIT_S):
                worker = next(item for item in self._workers if item.pipe is pipe)
                message = self._hear(worker)
                number = worker.task
                if message is None:  # the process is gone
                    self._dismiss(worker)
                    if number is not None:
                        ticked(-ticks.pop(number, 0))
                        attempts[number] = attempts.get(number, 0) + 1
                        if attempts[number] == TASK_ATTEMPTS:
                            found = f"its worker died {TASK_ATTEMPTS} times (last exit: {worker.process.returncode})"
                            todo = (
                                "look at that split in listing.parquet of the work folder; -9 is often a lack of memory"
                            )
                            raise PeerLost(f"step {argument_name(argument)}, task {number}", found, todo)
                        waiting.appendleft(number)
                elif isinstance(message, int):
                    assert number is not None
                    ticks[number] = ticks.get(number, 0) + message
                    ticked(message)
                elif isinstance(message, Done):
                    worker.task = None
                    done(message)
                    if rss_bytes(worker.process.pid) > self.memory_bytes * 3 // 4:
                        self._dismiss(worker)
                else:
                    self._raise(message)
            self._check_quiet()

    def close(self) -> None:
        for worker in list(self._workers):
            self._dismiss(worker)

    def _staff(self, wanted: int) -> None:
        idle = sum(worker.task is None for worker in self._workers)
        for _ in range(min(wanted - idle, self.count - len(self._workers))):
            ours, theirs = socket.socketpair()
            # A program of its own, not a fork: none of our threads, files or locks, and no second run of the caller's
            # main module.
            command = [sys.executable, "-m", "lakh.corpus.engines.worker", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
            self._workers.append(_Worker(process, Connection(ours.detach())))

    def _hear(self, worker: _Worker) -> Any:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=GOODBYE_TIMEOUT_S)
            return None
        worker.heard_s = time.monotonic()
        return message

    def _dismiss(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.pipe.close()
        if worker.process.poll() is None:
            worker.process.kill()  # it holds nothing that is not committed
        worker.process.wait(timeout=GOODBYE_TIMEOUT_S)

    def _check_quiet(self) -> None:
        for worker in list(self._workers):
            if worker.task is not None and time.monotonic() - worker.heard_s > QUIET_TIMEOUT_S:
                task = worker.task
                self._dismiss(worker)
                found = f"its worker said nothing for QUIET_TIMEOUT_S = {QUIET_TIMEOUT_S:g} s"
                raise PeerTimeout(f"task {task}", found, "run the command again")

    @staticmethod
    def _raise(message: Any) -> None:
        kind, content = message
        if kind == "lakh":
            raise errors.from_dict(content)
        raise RuntimeError(f"in a worker:\n{content}")


def argument_name(argument: Any) -> str:
    return str(getattr(argument, "name", "step"))


def rss_bytes(pid: int | None = None) -> int:
    """Resident memory of a process now; 0 where it is gone or cannot be asked."""
    try:
        with open(f"/proc/{pid or os.getpid()}/statm", "rb") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0

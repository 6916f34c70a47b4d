"""How many threads a process computes with, while other processes use some of its cores. Linux; independent of torch.

    threads = ComputeThreads(limit=8)
    threads.adjust()      # between two steps: the new number, or None if it stays

A parallel operation ends when its last thread ends. A thread that shares its core gets half of it or less, and each
time it wakes up it waits until the scheduler interrupts the other process (a tick: 4 ms with 250 Hz), so that one
busy process makes a step of many short operations take several times as long. With one thread fewer none of them waits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ComputeThreads", "CoreTimes", "CoreUse", "fewer_threads", "others_are_busy"]

INTERVAL_S = 1.0
"""The shortest time between two looks: /proc/stat counts in units of 10 ms."""
LOOK_S = 0.2
"""A single look: 20 of these units."""
WAITING_THREADS = 0.25
"""Own threads that wait for a core, on average: fewer are noise."""
OTHERS_CORES = 0.25
"""Cores that other processes use, on average: with less, the waiting threads wait for each other."""
IDLE_CORES = 0.9
"""An idle core is worth one more thread; a core that another process leaves half idle is not."""
FIRST_HOLD_S, LAST_HOLD_S = 2.0, 60.0
"""How long a lower number stays at least. It doubles each time a higher number was wrong."""
WRONG_S = 10.0
"""A higher number was wrong if others use the cores again within this time."""


@dataclass(frozen=True)
class CoreTimes:
    """Counters since the process or the machine started, in seconds."""

    now_s: float
    waiting_s: float
    """Time that threads of this process waited for a core."""
    own_s: float
    """CPU time of this process."""
    busy_s: float
    """CPU time of all processes on the cores that this one may use."""
    idle_s: float

    @staticmethod
    def read(proc: Path = Path("/proc")) -> CoreTimes | None:
        """None where the kernel does not count waiting times."""
        waiting_ns = 0
        try:
            for task in (proc / "self/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
                    waiting_ns += int((task / "schedstat").read_text().split()[1])
            busy, idle = _busy_and_idle_ticks((proc / "stat").read_text(), os.sched_getaffinity(0))
        except (OSError, ValueError, IndexError, AttributeError):
            return None
        tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        return CoreTimes(time.monotonic(), waiting_ns * 1e-9, time.process_time(), busy * tick_s, idle * tick_s)


def _busy_and_idle_ticks(stat: str, cores: set[int]) -> tuple[int, int]:
    busy = idle = 0
    for line in stat.splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, idle_ticks, iowait, irq, softirq, steal = map(int, numbers[:8])
            busy += user + nice + system + irq + softirq + steal
            idle += idle_ticks + iowait
    return busy, idle


@dataclass(frozen=True)
class CoreUse:
    """The use of the cores in an interval, in cores: 1.0 is one core all the time."""

    waiting: float
    """Threads of this process that waited for a core."""
    others: float
    """Cores that processes used which do not belong to this run."""
    idle: float

    @staticmethod
    def between(before: CoreTimes, after: CoreTimes, ranks: int) -> CoreUse:
        """`ranks`: processes of the run on this machine. Each is taken to use as much as this one."""
        seconds = after.now_s - before.now_s
        others_s = after.busy_s - before.busy_s - ranks * (after.own_s - before.own_s)
        return CoreUse(
            waiting=(after.waiting_s - before.waiting_s) / seconds,
            others=max(0.0, others_s / seconds),
            idle=(after.idle_s - before.idle_s) / seconds,
        )


def fewer_threads(threads: int, use: CoreUse, ranks: int) -> int:
    """The number of threads that leaves other processes the cores they use; `threads` if none of ours waits."""
    if use.waiting < WAITING_THREADS or use.others < OTHERS_CORES:
        return threads
    return max(1, threads - max(1, round(use.others / ranks)))


def others_are_busy(
    read: Callable[[], CoreTimes | None] = CoreTimes.read, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Whether other processes use a part of a core now; True where that cannot be told."""
    before = read()
    sleep(LOOK_S)
    after = read()
    return before is None or after is None or CoreUse.between(before, after, ranks=1).others >= OTHERS_CORES


class ComputeThreads:
    """The number of threads of this process: `limit`, or fewer beside other busy processes."""

    def __init__(
        self,
        limit: int,
        ranks: int = 1,
        read: Callable[[], CoreTimes | None] = CoreTimes.read,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ranks`: processes of this run on this machine."""
        self.count = self._limit = limit
        self._ranks, self._read, self._clock = ranks, read, clock
        self._before = read() if limit > 1 else None
        self._hold_s, self._fell_s, self._rose_s = FIRST_HOLD_S, -float("inf"), -float("inf")
        self.reason = ""
        """Why the number is what it is since the last change."""

    def adjust(self) -> int | None:
        """The new number if it changes. Call it between operations, as often as you like."""
        if self._before is None or self._clock() - self._before.now_s < INTERVAL_S:
            return None
        after = self._read()
        if after is None:
            return None
        use = CoreUse.between(self._before, after, self._ranks)
        self._before = after
        count = self._choose(use, after.now_s)
        if count == self.count:
            return None
        falls = count < self.count
        self.reason = f"other processes use {use.others:.1f} cores" if falls else f"{use.idle:.1f} cores are idle"
        self.count = count
        return count

    def _choose(self, use: CoreUse, now_s: float) -> int:
        count = fewer_threads(self.count, use, self._ranks)
        if count < self.count:
            was_wrong = now_s - self._rose_s < max(WRONG_S, self._hold_s)
            self._hold_s = min(2 * self._hold_s, LAST_HOLD_S) if was_wrong else FIRST_HOLD_S
            self._fell_s = now_s
        elif use.idle >= IDLE_CORES * self._ranks and now_s - self._fell_s >= self._hold_s:
            count = min(self._limit, self.count + max(1, int(use.idle / self._ranks)))
            self._rose_s = now_s if count > self.count else self._rose_s
        return count

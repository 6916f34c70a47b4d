"""Memory and activity of a process and its descendants, from /proc.

Memory is polled where no control group can be made; five times a second is enough, because a core fills memory at about
1 GB/s. A call reads one file per process of the machine, so it is only made while a program outlasts a tick.

A program that sleeps uses no CPU time, and its wall limit is generous. IdleWatch ends it sooner: a process that waits
for a CPU of a loaded machine is runnable, one that sleeps is not. The state of a process is that of its first thread,
which sleeps in a Java program whatever the others do, so every thread counts.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

__all__ = ["IdleWatch", "descendants", "resident_MiB"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SLEEPING = (b"S", b"T", b"Z")
IDLE_EVERY_S = 1.0
IDLE_CPU_FRACTION = 0.01  # less than this is a program that wakes up from time to time


@dataclass(frozen=True, slots=True)
class ProcessStat:
    parent: int
    pages: int
    cpu_s: float
    is_sleeping: bool


def resident_MiB(root: int) -> int:
    """Never too low: pages shared after a fork count for each process."""
    stats = _processes()
    return sum(stats[pid].pages for pid in {root} | descendants(root, stats) if pid in stats) * PAGE_BYTES >> 20


def descendants(root: int, stats: dict[int, ProcessStat] | None = None) -> set[int]:
    stats = _processes() if stats is None else stats
    found: set[int] = set()
    while more := {pid for pid, stat in stats.items() if stat.parent == root or stat.parent in found} - found:
        found |= more
    return found


class IdleWatch:
    """Whether all processes below `root` have slept for `timeout_s`. `is_idle` is called with the time now."""

    def __init__(self, root: int, timeout_s: float) -> None:
        self._root, self._timeout_s = root, timeout_s
        self._seen: deque[tuple[float, float]] = deque()  # time and CPU time, of looks at which all slept

    def is_idle(self, now_s: float) -> bool:
        if self._seen and now_s < self._seen[-1][0] + IDLE_EVERY_S:
            return False
        stats = _processes()
        ours = descendants(self._root, stats)
        if not all(stats[pid].is_sleeping and _all_threads_sleep(pid) for pid in ours):
            self._seen.clear()
            return False
        self._seen.append((now_s, sum(stats[pid].cpu_s for pid in ours)))
        while self._seen[-1][0] - self._seen[0][0] > self._timeout_s + IDLE_EVERY_S:
            self._seen.popleft()
        passed_s = self._seen[-1][0] - self._seen[0][0]
        used_s = self._seen[-1][1] - self._seen[0][1]
        return passed_s >= self._timeout_s and used_s <= IDLE_CPU_FRACTION * passed_s


def _processes() -> dict[int, ProcessStat]:
    found: dict[int, ProcessStat] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = _fields(folder)
            except OSError:
                continue  # the process has ended
            cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
            found[int(folder.name)] = ProcessStat(int(fields[1]), int(fields[21]), cpu_s, fields[0] in SLEEPING)
    return found


def _all_threads_sleep(pid: int) -> bool:
    try:
        return all(_fields(thread)[0] in SLEEPING for thread in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False  # one has ended just now


def _fields(folder: Path) -> list[bytes]:
    """What /proc says of a process or thread, from its state on."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()

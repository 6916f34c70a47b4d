"""How much memory a process and everything below it holds now, from /proc.

The limits of the kernel are per process; this is for the sum, which one program could drive to their number times
that. A cgroup would do it exactly, where one may make cgroups; looking five times a second needs no rights and is soon
enough: a core fills memory at about a gigabyte a second.

Costs one read per process of this machine, so it is only asked while a program runs for longer than a tick.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["below", "resident_MiB"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_MiB(root: int) -> int:
    """Pages that are shared after a fork count for each process: the figure is never too low."""
    parents, pages = _processes()
    return sum(pages.get(pid, 0) for pid in {root} | _descendants(root, parents)) * PAGE_BYTES >> 20


def below(root: int) -> set[int]:
    """The processes that descend from this one."""
    return _descendants(root, _processes()[0])


def _processes() -> tuple[dict[int, int], dict[int, int]]:
    """The parent of every process, and how many pages it holds."""
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            parents[int(folder.name)], pages[int(folder.name)] = int(fields[1]), int(fields[21])
    return parents, pages


def _descendants(root: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent == root or parent in found} - found:
        found |= more
    return found

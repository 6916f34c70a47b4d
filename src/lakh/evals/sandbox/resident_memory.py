"""Resident memory of a process and its descendants, from /proc.

The fallback where no control group can be made. Polling five times a second is enough, because a core fills memory at
about 1 GB/s. A call reads one file per process of the machine, so it is only made while a program outlasts a tick.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["descendants", "resident_MiB"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_MiB(root: int) -> int:
    """Never too low: pages shared after a fork count for each process."""
    parents, pages = _processes()
    return sum(pages.get(pid, 0) for pid in {root} | descendants(root, parents)) * PAGE_BYTES >> 20


def descendants(root: int, parents: dict[int, int] | None = None) -> set[int]:
    parents = _processes()[0] if parents is None else parents
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent == root or parent in found} - found:
        found |= more
    return found


def _processes() -> tuple[dict[int, int], dict[int, int]]:
    """Parent and number of resident pages of every process."""
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue  # the process has ended
            parents[int(folder.name)], pages[int(folder.name)] = int(fields[1]), int(fields[21])
    return parents, pages

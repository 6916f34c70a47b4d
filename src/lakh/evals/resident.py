"""How much memory a process and everything below it holds now, from /proc.

The limits of the kernel are per process; this is for the sum, which one program could drive to their number times
that. A cgroup would do it exactly, where one may make cgroups; looking five times a second needs no rights and is soon
enough: a core fills memory at about a gigabyte a second.

Costs one read per process of this machine, so it is only asked while a program runs for longer than a tick.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["resident_MiB"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_MiB(root: int) -> int:
    """Pages that are shared after a fork count for each process: the figure is never too low."""
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            parents[int(folder.name)], pages[int(folder.name)] = int(fields[1]), int(fields[21])
    below = {root}
    while found := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= found
    return sum(pages.get(pid, 0) for pid in below) * PAGE_BYTES >> 20

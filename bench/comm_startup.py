"""What it costs to start a group of N ranks, as threads of this process, each on a pretended host of its own.

    python bench/comm_startup.py [N ...]

Prints seconds, store requests, connections (data and control) and memory for the meeting and for a first barrier,
which connects each rank to log2(N) others. A full mesh, as Gloo makes it, would need N(N-1)/2 connections; that column
is arithmetic, not a measurement. Threads of one Python process take turns, so the total is what is measured, not the
wall time of N machines.
"""

from __future__ import annotations

import resource
import sys
import threading
import time

from lakh.c3.bootstrap import MemoryStore
from lakh.c3.group import Group


class CountingStore(MemoryStore):
    requests = 0

    def set(self, key: str, value: object) -> None:
        self.requests += 1
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return super().get(key)


def measure(size: int) -> str:
    store, groups = CountingStore(300), [None] * size
    marks: list[float] = []
    ready = threading.Barrier(size, action=lambda: marks.append(time.perf_counter()))

    def one(rank: int) -> None:
        group = Group.meet(store, rank, size, name=f"start{size}", place=(f"h{rank}", "", ""))
        groups[rank] = group
        ready.wait(300)
        group.run("barrier", 6, -1, -1, 0, 0, 0)
        ready.wait(300)

    start = time.perf_counter()
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connections = sum(group.counters()["connections"] for group in groups) // 2
    memory_MB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for group in groups:
        group.close()
    meet, first = marks[0] - start, marks[1] - marks[0]
    mesh = size * (size - 1) // 2
    return (
        f"| {size} | {meet:.3f} | {1e3 * meet / size:.2f} | {store.requests / size:.1f} | {first:.3f} "
        f"| {connections} | {mesh} | {memory_MB:.0f} |"
    )


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or [8, 16, 32, 64, 128]
    print(
        "| ranks | meet, s | ms per rank | requests per rank | first barrier, s | connections | full mesh | peak MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for size in sizes:
        print(measure(size), flush=True)


if __name__ == "__main__":
    main()

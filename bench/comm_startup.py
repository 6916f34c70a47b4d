"""What it costs to start a group of N ranks, as threads of this process, each on a pretended host of its own.

    python bench/comm_startup.py [N ...]

Prints, for the meeting and for a first barrier (which connects each rank to log2(N) others), seconds, CPU seconds,
store requests and connections; beside it Gloo, whose ranks connect to all others when they meet, up to MAX_GLOO ranks:
its sockets are files of this process. Each row is measured in a process of its own. Threads of one Python process take
turns, so the totals are what counts, not the wall time of N machines.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

MAX_GLOO = 128
TIMEOUT_S = 300


def measure(size: int, join, barrier) -> tuple[float, float, float]:
    """Seconds to meet, CPU seconds for all, seconds of a first barrier."""
    marks: list[float] = []
    ready = threading.Barrier(size, action=lambda: marks.append(time.perf_counter()))

    def one(rank: int) -> None:
        group = join(rank)
        ready.wait(TIMEOUT_S)
        barrier(group)
        ready.wait(TIMEOUT_S)

    start, cpu = time.perf_counter(), time.process_time()
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return marks[0] - start, time.process_time() - cpu, marks[1] - marks[0]


def row(name: str, size: int, meet: float, cpu: float, first: float, requests: str, connections: str) -> str:
    memory_MB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"| {name} | {size} | {meet:.3f} | {first:.3f} | {cpu:.2f} | {1e3 * cpu / size:.1f} | {requests} "
        f"| {connections} | {memory_MB:.0f} |"
    )


def c3(size: int) -> str:
    from lakh.c3.bootstrap import InProcessStore
    from lakh.c3.group import CommGroup

    class CountingStore(InProcessStore):
        requests = 0

        def set(self, key: str, value: object) -> None:
            self.requests += 1
            super().set(key, value)

        def get(self, key: str) -> bytes:
            self.requests += 1
            return super().get(key)

    store, groups = CountingStore(TIMEOUT_S), {}

    def join(rank: int) -> CommGroup:
        groups[rank] = CommGroup.join(store, rank, size, name=f"start{size}", place=(f"h{rank}", "", ""))
        return groups[rank]

    figures = measure(size, join, lambda group: group.run("barrier", 6, -1, -1, 0, 0, 0))
    connections = sum(group.counters()["connections"] for group in groups.values()) // 2
    text = row("c3", size, *figures, f"{store.requests / size:.1f}", str(connections))
    for group in groups.values():
        group.close()
    return text


def gloo(size: int) -> str:
    import torch.distributed as dist

    store = dist.HashStore()
    kept = []

    def join(rank: int):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        group = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, size, timedelta(seconds=TIMEOUT_S))
        kept.append(group)
        return group

    figures = measure(size, join, lambda group: group.barrier().wait())
    files = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    sockets = sum(str(path.readlink()).startswith("socket:") for path in files)
    return row("gloo", size, *figures, "", f"{sockets // 2}")


def main() -> None:
    words = sys.argv[1:]
    if words and words[0] in ("c3", "gloo"):
        print({"c3": c3, "gloo": gloo}[words[0]](int(words[1])), flush=True)
        os._exit(0)  # hundreds of groups need not be taken down one by one
    print(
        "| | ranks | meet, s | first barrier, s | CPU s | CPU ms per rank | requests per rank | connections | peak MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for size in [int(word) for word in words] or [8, 32, 128, 512]:
        for name in ("c3", "gloo") if size <= MAX_GLOO else ("c3",):
            subprocess.run([sys.executable, __file__, name, str(size)], timeout=2 * TIMEOUT_S, check=False)


if __name__ == "__main__":
    main()

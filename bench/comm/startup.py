"""The cost of starting a group of N ranks, as threads of one process, each on its own pretended host.

    python -m bench.comm.startup [N ...]

Prints seconds, CPU seconds, store requests and connections of the rendezvous and of a first barrier (which connects
each rank to log2(N) others), for c3 and for Gloo, whose ranks connect to all others. Gloo is limited to MAX_GLOO ranks,
because its sockets are open files of one process. Each row is measured in its own process. The threads share one Python
process, so the totals count, not the wall time.
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

from bench.harness import module_command, module_environment

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
    import torch.distributed as dist

    from lakh.c3.group import CommGroup

    class CountingStore(dist.HashStore):
        requests = 0

        def set(self, key: str, value: str) -> None:
            self.requests += 1
            super().set(key, value)

        def get(self, key: str) -> bytes:
            self.requests += 1
            return super().get(key)

    store, groups = CountingStore(), {}
    store.set_timeout(timedelta(seconds=TIMEOUT_S))

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
        os._exit(0)  # skips the teardown of hundreds of groups
    print(
        "| | ranks | meet, s | first barrier, s | CPU s | CPU ms per rank | requests per rank | connections | peak MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for size in [int(word) for word in words] or [8, 32, 128, 512]:
        for name in ("c3", "gloo") if size <= MAX_GLOO else ("c3",):
            subprocess.run(
                module_command("bench.comm.startup", name, size),
                env=module_environment(),
                timeout=2 * TIMEOUT_S,
                check=False,
            )


if __name__ == "__main__":
    main()

"""The cost of more ranks than cores: a bare barrier in C, the same barrier under torch's all_reduce, c3, Gloo.

    python -m bench.comm.floor [RANKS [CALLS]]        # default: 4 ranks, 1000 calls; needs g++

Ranks are processes that are not bound to cores. All rows are measured in one run, in alternation: `futex` and `yield`
are barriers of 20 lines of C in a C loop; `torch + futex` and `torch + yield` call the same barriers through
`dist.all_reduce` of an otherwise empty process group; `c3 in C` calls c3's collective by ctypes; `c3` and `gloo` are
the public calls, 1 KB each. Every row has the time of the slowest rank (min, median), and the context switches and CPU
time of one rank, which other load on the machine changes little.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.harness import module_command, module_environment

TURNS = 5
BARRIERS = r"""
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// words[0]: arrivals in this round; words[32]: rounds that are over, on another cache line.
void barrier(_Atomic uint32_t *words, uint32_t size, int sleeps) {
  const uint32_t round = atomic_load(&words[32]);
  if (atomic_fetch_add(&words[0], 1) + 1 == size) {
    atomic_store(&words[0], 0);
    atomic_store(&words[32], round + 1);
    if (sleeps) syscall(SYS_futex, &words[32], FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    return;
  }
  while (atomic_load(&words[32]) == round) {
    if (sleeps) syscall(SYS_futex, &words[32], FUTEX_WAIT, round, NULL, NULL, 0);
    else sched_yield();
  }
}

void barriers(_Atomic uint32_t *words, uint32_t size, int sleeps, int calls, double *times_us) {
  for (int i = 0; i < calls; ++i) {
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    barrier(words, size, sleeps);
    clock_gettime(CLOCK_MONOTONIC, &b);
    times_us[i] = (b.tv_sec - a.tv_sec) * 1e6 + (b.tv_nsec - a.tv_nsec) * 1e-3;
  }
}
"""


def main(ranks: int, calls: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lakh-floor-") as folder:
        source = Path(folder) / "barriers.c"
        source.write_text(BARRIERS)
        subprocess.run(["g++", "-x", "c", "-O2", "-shared", "-fPIC", str(source), "-o", f"{folder}/b.so"], check=True)
        (Path(folder) / "words").write_bytes(bytes(4096))
        environment = module_environment(OMP_NUM_THREADS="1")
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = module_command("bench.comm.floor", "rank", folder, ranks, calls)
        running = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(ranks)]
        try:
            if any(process.wait(timeout=300) for process in running):
                sys.exit("a rank failed")
        finally:
            for process in running:
                process.kill()


def rank(folder: str, size: int, calls: int, me: int) -> None:
    import torch
    import torch.distributed as dist

    import lakh.c3.torch.backend  # noqa: F401 - registers the backend
    from lakh.c3 import native
    from lakh.c3.torch.work import CompletedWork

    library = ctypes.CDLL(f"{folder}/b.so")
    with (Path(folder) / "words").open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 4096)
    words = ctypes.byref((ctypes.c_uint32 * 64).from_buffer(shared))

    class BarrierOnly(dist.ProcessGroup):
        """A process group whose all_reduce is only the barrier."""

        sleeps = 0

        def allreduce(self, tensors: Any, _options: Any = None) -> Any:  # type: ignore[override]
            library.barrier(words, size, self.sleeps)
            return CompletedWork(tensors)

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("c3", store=store, rank=me, world_size=size, timeout=timedelta(seconds=60))
    c3: Any = dist.distributed_c10d._get_default_group()
    gloo = dist.new_group(backend="gloo")
    data = torch.zeros(256)
    address = data.data_ptr()
    sum_of_floats = (native.DTYPES["f32"], native.OPS["sum"])

    def in_c(sleeps: int) -> Callable[[int], list[float]]:
        def many(count: int) -> list[float]:
            times = (ctypes.c_double * count)()
            library.barriers(words, size, sleeps, count, times)
            return list(times)

        return many

    def each(call: Callable[[], Any]) -> Callable[[int], list[float]]:
        def many(count: int) -> list[float]:
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                call()
                times.append((time.perf_counter() - begin) * 1e6)
            return times

        return many

    def under_torch(sleeps: int) -> Callable[[int], list[float]]:
        group = BarrierOnly(me, size)  # type: ignore[call-arg]
        group.sleeps = sleeps
        dist.distributed_c10d._world.pg_group_ranks[group] = {peer: peer for peer in range(size)}
        return each(lambda: dist.all_reduce(data, group=group))

    fast, handle = c3.group.library.lakh_c3_collective, c3.group.handle
    ways = {
        "futex": in_c(1),
        "yield": in_c(0),
        "c3 in C": each(lambda: fast(handle, 0, *sum_of_floats, -1, address, address, 256)),
        "torch + futex": under_torch(1),
        "torch + yield": under_torch(0),
        "c3": each(lambda: dist.all_reduce(data)),
        "gloo": each(lambda: dist.all_reduce(data, group=gloo)),
    }
    slowest: dict[str, list[float]] = {name: [] for name in ways}
    cost = {name: [0.0, 0.0] for name in ways}
    for _ in range(TURNS):
        for name, many in ways.items():
            many(5)
            dist.barrier(group=gloo)
            before, count = resource.getrusage(resource.RUSAGE_SELF), max(1, calls // TURNS)
            measured = torch.tensor(many(count), dtype=torch.float64)
            after = resource.getrusage(resource.RUSAGE_SELF)
            cost[name][0] += (after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw) / count / TURNS
            cost[name][1] += (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e6 / count / TURNS
            dist.all_reduce(measured, dist.ReduceOp.MAX, group=gloo)
            slowest[name] += measured.tolist()
    if me == 0:
        medians = {name: statistics.median(times) for name, times in slowest.items()}
        print(f"{size} ranks, {os.cpu_count()} cores\n\n| | min us | median us | switches | CPU us | gloo / it |")
        print("|---|---|---|---|---|---|")
        for name, times in slowest.items():
            figures = f"{min(times):.1f} | {medians[name]:.1f} | {cost[name][0]:.2f} | {cost[name][1]:.1f}"
            print(f"| {name} | {figures} | {medians['gloo'] / medians[name]:.1f} |")
        print(json.dumps(medians), file=sys.stderr)
    dist.barrier(group=gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], *(int(word) for word in sys.argv[3:6]))
    else:
        main(*(int(word) for word in [*sys.argv[1:], *["4", "1000"][len(sys.argv) - 1 :]]))

"""One rank of the collectives benchmark: times c3 and its peers in alternation and writes the times to a file.

collectives.py starts it with a JSON document as its argument. The time of an operation is that of its slowest rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.comm.collectives import WARM_UP, calls_within, uneven_splits

ROUNDS = 5
"""Turns of each backend, so that a busy moment of the machine hits all of them."""


def main(job: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    from bench.comm.emulation import emulate_links
    from lakh.c3.metrics import serve_metrics
    from lakh.c3.topology import read_topology
    from lakh.c3.torch.backend import C3ProcessGroup

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if job["backends"] == ["mpi"]:
        return _mpi(job, torch)
    groups: dict[str, Any] = {}
    dist.init_process_group(
        "c3" if "c3" in job["backends"] else "gloo",
        init_method=f"file://{job['rendezvous']}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=job["timeout_s"]),
    )
    for backend in job["backends"]:
        groups[backend] = dist.new_group(backend=backend)
    if "c3" in groups:
        assert isinstance(groups["c3"], C3ProcessGroup)
        groups["c3"].codec = job["codec"]
        if job["shaper"]:
            emulate_links(groups["c3"].group, read_topology(job["emulate"], size), job["shaper"])
        if job["algorithm"]:
            groups["c3"].group.schedules.algorithm = job["algorithm"]
        if job["metrics_port"] is not None:
            serve_metrics(groups["c3"].group, job["metrics_port"] + rank)
    control = groups.get("gloo") or groups["c3"]
    report: dict[str, Any] = {"rows": [], "memcpy_GBps": _memcpy(torch, dist, control, size)}
    if job["find_slow"]:
        report["pairs"] = _pairs(torch, dist, groups["c3"])
    for op in job["ops"]:
        for dtype in job["dtypes"]:
            for size_bytes in job["sizes"]:
                row = {"op": op, "dtype": dtype, "size_bytes": size_bytes, "times_us": {}}
                for backend, times in _time(torch, dist, groups, control, op, dtype, size_bytes, job).items():
                    row["times_us"][backend] = times
                if "c3" in groups and op == "all_reduce":
                    group = groups["c3"].group
                    width = getattr(torch, dtype).itemsize
                    row["reason"] = (
                        "shared memory"
                        if group.on_one_host
                        else group.schedules.choose_all_reduce(size_bytes // width, width, job["codec"]).reason
                    )
                report["rows"].append(row)
    if rank == 0:
        if "c3" in groups:
            report["counters"] = groups["c3"].group.counters()
        Path(job["report"]).write_text(json.dumps(report), encoding="utf-8")
    dist.barrier(group=control)
    dist.destroy_process_group()
    return None


def _call(torch: Any, dist: Any, op: str, dtype: str, size_bytes: int, ranks: int, registered: bool) -> Any:
    """A function that runs the operation once on a group. `size_bytes` is the larger of input and output."""
    kind = getattr(torch, dtype)
    count = max(1, size_bytes // kind.itemsize)
    make = torch.empty
    if registered:
        from lakh.c3.torch.registered_memory import registered_empty

        make = registered_empty
    part = max(1, count // ranks)
    if op == "all_reduce":
        data = make(count, dtype=kind)
        data.zero_()
        return lambda group: dist.all_reduce(data, group=group)
    if op == "broadcast":
        data = make(count, dtype=kind)
        data.zero_()
        return lambda group: dist.broadcast(data, 0, group=group)
    whole, piece = make(part * ranks, dtype=kind), make(part, dtype=kind)
    whole.zero_()
    piece.zero_()
    if op == "all_gather":
        return lambda group: dist.all_gather_into_tensor(whole, piece, group=group)
    if op == "reduce_scatter":
        return lambda group: dist.reduce_scatter_tensor(piece, whole, group=group)
    if op == "all_to_all":
        other = make(part * ranks, dtype=kind)
        other.zero_()
        return lambda group: dist.all_to_all_single(whole, other, group=group)
    if op == "all_to_all_v":
        splits, rank = uneven_splits(count, ranks), dist.get_rank()
        sends, receives = splits[rank], [row[rank] for row in splits]
        source, target = make(sum(sends), dtype=kind), make(sum(receives), dtype=kind)
        source.zero_()
        target.zero_()
        return lambda group: dist.all_to_all_single(target, source, receives, sends, group=group)
    return lambda group: dist.barrier(group=group)


def _time(
    torch: Any, dist: Any, groups: Any, control: Any, op: str, dtype: str, size_bytes: int, job: dict[str, Any]
) -> dict[str, list[float]]:
    ranks = dist.get_world_size()
    call = _call(torch, dist, op, dtype, size_bytes, ranks, job["registered"])
    times: dict[str, list[float]] = {backend: [] for backend in groups}
    calls = job["repeats"][str(size_bytes)]

    def turn(group: Any, warmup: int, timed: int) -> list[float]:
        """Seconds of the slowest rank, the same on all ranks."""
        for _ in range(warmup):
            call(group)
        dist.barrier(group=control)
        mine = []
        for _ in range(timed):
            start = time.perf_counter()
            call(group)
            mine.append(time.perf_counter() - start)
        slowest = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
        return list(slowest.tolist())

    plan = {}
    for backend, group in groups.items():  # the first call opens connections and gives an estimate
        warmup, timed = calls_within(calls, turn(group, 0, 1)[0], ROUNDS)
        plan[backend] = (warmup, max(1, calls // ROUNDS) if job["as_asked"] else timed)
    for _ in range(ROUNDS):
        for backend, group in groups.items():
            times[backend] += [seconds * 1e6 for seconds in turn(group, *plan[backend])]
    return times


def _memcpy(torch: Any, dist: Any, control: Any, ranks: int) -> dict[str, float]:
    """GB/s that one rank copies while all ranks copy, by size: the bound of collectives in one host."""
    found = {}
    for size_bytes in (1 << 20, 64 << 20):
        source, target = torch.ones(size_bytes // 4), torch.empty(size_bytes // 4)
        best = float("inf")
        for _ in range(7):
            dist.barrier(group=control)
            start = time.perf_counter()
            target.copy_(source)
            best = min(best, time.perf_counter() - start)
        found[str(size_bytes)] = size_bytes / best / 1e9
    return found


def _pairs(torch: Any, dist: Any, group: Any, size_bytes: int = 4 << 20) -> list[dict[str, Any]]:
    """GB/s in both directions between every two ranks, one pair at a time."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found = []
    for low in range(size):
        for high in range(low + 1, size):
            dist.barrier(group=group)
            data = torch.zeros(size_bytes // 4)
            seconds = torch.zeros(1, dtype=torch.float64)
            if rank in (low, high):
                peer = high if rank == low else low
                for turn in range(3):
                    start = time.perf_counter()
                    for sender in (low, high):
                        (dist.send if rank == sender else dist.recv)(data, peer, group)
                    if turn:
                        seconds[0] = min(float(seconds[0]) or 1e9, time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
            found.append({"ranks": [low, high], "GBps": 2 * size_bytes / float(seconds[0]) / 1e9})
    return found


def _mpi(job: dict[str, Any], torch: Any) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    report: dict[str, Any] = {"rows": []}
    for op in job["ops"]:
        for dtype in job["dtypes"]:
            for size_bytes in job["sizes"]:
                row: dict[str, Any] = {"op": op, "dtype": dtype, "size_bytes": size_bytes, "times_us": {"mpi": None}}
                if op == "all_reduce" and dtype == "float32":
                    import numpy

                    data = numpy.zeros(size_bytes // 4, dtype=numpy.float32)
                    times = []
                    for turn in range(job["repeats"][str(size_bytes)] + WARM_UP):
                        world.Barrier()
                        start = time.perf_counter()
                        world.Allreduce(MPI.IN_PLACE, data)
                        mine = (time.perf_counter() - start) * 1e6
                        slowest = world.allreduce(mine, MPI.MAX)
                        if turn >= WARM_UP:
                            times.append(slowest)
                    row["times_us"]["mpi"] = times
                report["rows"].append(row)
    if world.Get_rank() == 0:
        Path(job["report"]).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(json.loads(sys.argv[1]))

"""CUDA tensors over c3 on one GPU: codec kernels beside a plain copy, and staged collectives beside their bound.

    python -m bench.comm.gpu            # codecs, then 2 processes on one GPU; one JSON line for each figure

The bound of a staged all_reduce is the bytes to the host and back at the measured pinned rate, both ways at once.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

from bench.harness import module_command, module_environment

IN_A_ROW = 5


def timed_ms(call, repeats: int = 20) -> float:
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(IN_A_ROW):  # the host's work for one overlaps with the one before
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / IN_A_ROW)
    return sorted(times)[len(times) // 2]


def codecs() -> None:
    import torch

    from lakh.c3.torch.gpu_codec import decode_sum, encode

    count = 1 << 28
    values, target = torch.randn(count, device="cuda"), torch.empty(count, device="cuda")
    copy_ms = timed_ms(lambda: target.copy_(values))
    print(json.dumps({"what": "plain copy", "elements": count, "ms": copy_ms, "TBps": 8 * count / copy_ms / 1e9}))
    for codec in ("int8", "int4"):
        wire = encode(codec, values)
        ms = timed_ms(lambda codec=codec: encode(codec, values))
        moved = 4 * count + wire.numel()
        print(json.dumps({"what": f"encode {codec}", "ms": ms, "TBps": moved / ms / 1e9}))
        residual = torch.zeros_like(values)
        ms = timed_ms(lambda codec=codec, residual=residual: encode(codec, values, residual))
        print(json.dumps({"what": f"encode {codec} + feedback", "ms": ms, "TBps": (moved + 8 * count) / ms / 1e9}))
        for packets in (1, 2, 8):
            wires = wire.repeat(packets)
            ms = timed_ms(lambda codec=codec, wires=wires: decode_sum(codec, wires, count, out=target))
            moved = 4 * count + packets * wire.numel()
            print(json.dumps({"what": f"decode_sum {codec} of {packets}", "ms": ms, "TBps": moved / ms / 1e9}))
    host = torch.empty(1 << 26).pin_memory()
    for name, call in (
        ("to host", lambda: host.copy_(target[: 1 << 26], non_blocking=True)),
        ("to device", lambda: target[: 1 << 26].copy_(host, non_blocking=True)),
    ):
        ms = timed_ms(call, 10)
        print(json.dumps({"what": f"pinned {name}", "ms": ms, "GBps": (1 << 28) / ms / 1e6}))


def rank(folder: str, number: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    import lakh.c3.torch.backend  # noqa: F401 - registers the backend

    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("c3", store=store, rank=number, world_size=size, timeout=timedelta(seconds=60))
    gloo = dist.new_group(backend="gloo")
    group: Any = dist.distributed_c10d._get_default_group()

    def measure(name: str, call, size_bytes: int) -> None:
        times = []
        for turn in range(7):
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if turn > 1:
                times.append(time.perf_counter() - begin)
        seconds = torch.tensor(sorted(times)[len(times) // 2])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if number == 0:
            figure = {
                "what": name,
                "bytes": size_bytes,
                "ms": float(seconds) * 1e3,
                "GBps": size_bytes / float(seconds) / 1e9,
            }
            print(json.dumps(figure), flush=True)

    for size_bytes in (1 << 20, 64 << 20, 256 << 20):
        data = torch.randn(size_bytes // 4, device="cuda")
        residual = torch.zeros_like(data)
        measure("all_reduce c3", lambda data=data: dist.all_reduce(data), size_bytes)
        measure("all_reduce gloo", lambda data=data: dist.all_reduce(data, group=gloo), size_bytes)
        encoded = lambda data=data, residual=residual: group.allreduce_encoded(data, "int4", residual).wait()  # noqa: E731
        measure("all_reduce c3 int4", encoded, size_bytes)
        part = torch.randn(size_bytes // 4 // size, device="cuda")
        measure("all_gather c3", lambda data=data, part=part: dist.all_gather_into_tensor(data, part), size_bytes)
        measure(
            "all_gather gloo",
            lambda data=data, part=part: dist.all_gather_into_tensor(data, part, group=gloo),
            size_bytes,
        )
        measure("reduce_scatter c3", lambda data=data, part=part: dist.reduce_scatter_tensor(part, data), size_bytes)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    codecs()
    with tempfile.TemporaryDirectory() as folder:
        environment = module_environment(GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
        command = [*module_command("bench.comm.gpu"), "rank", folder]
        ranks = [subprocess.Popen([*command, str(number), "2"], env=environment) for number in range(2)]
        sys.exit(max(process.wait(timeout=120) for process in ranks))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()

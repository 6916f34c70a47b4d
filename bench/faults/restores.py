"""Restore the state of a lost node's rank: from the memory of another node, and from S3.

    python -m bench.faults.restores JOB    one of two ranks, each with a memory folder of its own, as on two nodes

Rank 1 loses its folder. `restore_s` is the time until it has its tensors again, hashes checked, with both ways in the
same process. The S3 server (moto) and the network are this machine's own: on a cluster S3 is slower, memory is as fast
as the link.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

from bench.faults.job import s3_server
from bench.harness import BenchRow, run_ranks

__all__ = ["compare_restores"]

REPEATS = 3
TIMEOUT_S = 600.0


def compare_restores(folder: Path, *, megabytes: int) -> list[BenchRow]:
    out = folder / "restores.json"
    with s3_server(folder):
        run_ranks(__name__, {"folder": str(folder), "megabytes": megabytes, "out": str(out)}, 2, TIMEOUT_S)
    found: dict[str, float] = json.loads(out.read_text())
    size_bytes = megabytes << 20
    return [
        {
            "system": "lakh",
            "fault": f"lost node, restored from {place}",
            "restore_s": seconds,
            "bytes": size_bytes,
            "ratio": found["S3"] / seconds,
        }
        for place, seconds in found.items()
    ]


def main(job: dict[str, str | int]) -> None:
    import torch
    import torch.distributed as dist

    from lakh import checkpoint
    from lakh.checkpoint.memory_copies import CopyFacts, MemoryFolder
    from lakh.trainer.launch.world import World
    from lakh.trainer.recovery.peer_memory import PeerMemory

    rank, folder = int(os.environ["RANK"]), Path(str(job["folder"]))
    dist.init_process_group("gloo", init_method=f"file://{folder}/restores.store", rank=rank, world_size=2)
    world = World(rank, 2, torch.device("cpu"), "gloo", local_size=1)
    memory_folder = MemoryFolder(Path("/dev/shm") / f"lakh-bench-{folder.name}-{rank}")
    tensors = {f"model.{n}": torch.randn(int(job["megabytes"]) << 14) for n in range(16)}
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    facts = CopyFacts(1, rank, 2, "dp_shard=2", "id", "r", "d", 0, "", ())
    url = f"s3://bucket/{rank}/checkpoints/step-00000001"
    checkpoint.save(url, tensors, step=1, sequence_index=0, run_sha256="", data_sha256="", attachments={})
    times: dict[str, list[float]] = {"memory": [], "S3": []}
    try:
        memory = PeerMemory(memory_folder, world)
        memory.begin(facts, tensors)
        memory.finish()
        for _ in range(REPEATS):
            dist.barrier()
            if rank == 1:
                memory_folder.clear()
            dist.barrier()
            began_s = time.perf_counter()
            restored = memory.restore(facts, 0, into)
            times["memory"].append(time.perf_counter() - began_s)
            assert restored is not None
            assert restored[1] == [1]
            assert torch.equal(into["model.3"], tensors["model.3"])
            dist.barrier()
            if rank == 1:
                began_s = time.perf_counter()
                checkpoint.verify_chain(url)
                checkpoint.load(url, into)
                times["S3"].append(time.perf_counter() - began_s)
        if rank == 1:
            Path(str(job["out"])).write_text(
                json.dumps({name: statistics.median(all_) for name, all_ in times.items()})
            )
    finally:
        memory_folder.clear()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""A whole FSDP2 training step over c3 and over Gloo: same model, same data, in alternation.

The model is a plain transformer of about ten million parameters, sharded block by block, with AdamW. Both backends
train it from the same seed in the same processes and must reach the same losses. The time of a step is that of its
slowest rank. Run as a module, this file is one rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.harness import BenchRow, run_ranks
from lakh.errors import LakhError

__all__ = ["bench_fsdp"]

WIDTH, VOCABULARY = 256, 1024
ROUNDS = 5
"""Turns of each backend, so that a busy moment of the machine hits both."""


def bench_fsdp(
    *,
    ranks: int = 2,
    steps: int = 25,
    batch: int = 2,
    length: int = 64,
    blocks: int = 12,
    registered: bool = False,
    timeout_s: float = 600.0,
    log: Callable[[str], None] = lambda text: None,
) -> list[BenchRow]:
    """Rows of c3 and gloo: milliseconds per step, tokens per second and the ratio to Gloo."""
    log(f"{ranks} ranks: {steps} FSDP2 steps over c3 and gloo")
    with tempfile.TemporaryDirectory(prefix="lakh-bench-") as folder:
        report = Path(folder) / "report.json"
        job: dict[str, Any] = {"steps": steps, "batch": batch, "length": length, "blocks": blocks}
        job["registered"] = registered
        job |= {"timeout_s": timeout_s, "rendezvous": str(Path(folder) / "meet"), "report": str(report)}
        run_ranks("bench.comm.fsdp", job, ranks, timeout_s)
        found = json.loads(report.read_text(encoding="utf-8"))
    losses = found["losses"]
    if any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(losses["c3"], losses["gloo"], strict=True)):
        raise LakhError("bench", f"losses differ: {losses}", "report this: c3 and Gloo must train alike")
    medians = {name: statistics.median(times) for name, times in found["times_ms"].items()}
    return [
        {
            "backend": name,
            "ranks": ranks,
            "registered": registered and name == "c3",
            "parameters": found["parameters"],
            "tokens_per_step": ranks * batch * length,
            "min_ms": min(times),
            "median_ms": medians[name],
            "tokens_per_s": ranks * batch * length / medians[name] * 1e3,
            "last_loss": losses[name][-1],
            "ratio_to_gloo": medians["gloo"] / medians[name],
        }
        for name, times in found["times_ms"].items()
    ]


def _rank(job: dict[str, Any]) -> None:
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    import lakh.c3.torch.backend  # noqa: F401 - registers the backend
    from lakh.c3.torch.fsdp import register_buffers

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=job["timeout_s"])
    dist.init_process_group(
        "gloo", init_method=f"file://{job['rendezvous']}", rank=rank, world_size=size, timeout=limit
    )
    trained = {}
    for backend in ("c3", "gloo"):
        mesh = DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")
        trained[backend] = FsdpTraining(torch, mesh, rank, job)
        if backend == "c3" and job["registered"]:
            register_buffers(trained[backend].model)
    times_ms: dict[str, list[float]] = {backend: [] for backend in trained}
    for turn in range(ROUNDS):
        for backend, training in trained.items():
            training.step()  # not timed: the caches hold the other backend's data
            dist.barrier()
            mine = []
            for _ in range(max(1, job["steps"] // ROUNDS)):
                start_s = time.perf_counter()
                training.step()
                mine.append((time.perf_counter() - start_s) * 1e3)
            slowest = torch.tensor(mine, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times_ms[backend] += slowest.tolist() if turn or len(mine) == 1 else slowest.tolist()[1:]
    if rank == 0:
        found = {"times_ms": times_ms, "losses": {name: one.losses for name, one in trained.items()}}
        found["parameters"] = trained["c3"].parameters
        Path(job["report"]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class FsdpTraining:
    def __init__(self, torch: Any, mesh: Any, rank: int, job: dict[str, Any]) -> None:
        from torch.distributed.fsdp import fully_shard

        self.torch = torch
        torch.manual_seed(0)
        blocks = [
            torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(job["blocks"])
        ]
        embedding, head = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)
        self.model = torch.nn.Sequential(embedding, *blocks, head)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        generator = torch.Generator().manual_seed(rank)
        self.tokens = torch.randint(0, VOCABULARY, (job["batch"], job["length"] + 1), generator=generator)
        self.losses: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.tokens[:, :-1])
        loss = self.torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss))


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))

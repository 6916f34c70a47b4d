"""lakh bench experts: training steps of a mixture of experts that is split over ranks, beside one process.

The same small model and the same sequences on one process and on several ranks, over each backend. Each row shows the
largest difference of a loss from that of one process, and the bytes that rank 0 sent to the experts of other ranks in a
step beside those that the planner predicts. Run as a module, this file is one rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from bench.harness import BenchRow, out_option, result, run_ranks
from lakh.cli.output import CommandResult, console, print_result

__all__ = ["bench_experts", "experts"]

TIMEOUT_S = 600.0
SEQUENCE, BATCH = 64, 8
COLUMNS = ("backend", "ranks", "ep", "step_ms", "ratio_to_gloo", "loss_gap", "sent_bytes", "predicted_bytes", "machine")


@click.command()
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Ranks on this machine.")
@click.option("--ep", type=click.IntRange(min=2), help="Ranks that split the experts.  [default: all ranks]")
@click.option("--backends", default="gloo,c3", show_default=True, help="Comma-separated: gloo, c3.")
@click.option("--top-k", type=click.IntRange(1, 8), default=2, show_default=True, help="Experts of a token, of 8.")
@click.option(
    "--steps", type=click.IntRange(min=2), default=5, show_default=True, help="Steps; the first is not timed."
)
@out_option
@print_result
def experts(ranks: int, ep: int | None, backends: str, top_k: int, steps: int, out: str | None) -> CommandResult:
    """Measure expert parallelism beside one process.

    With --top-k 8 every token goes to every expert, and the bytes are exactly those that the planner predicts; with
    fewer they differ by the unevenness of the router.
    """
    names = [name.strip() for name in backends.split(",") if name.strip()]
    with console().status("measuring"):
        rows = bench_experts(ranks=ranks, ep=ep or ranks, backends=names, top_k=top_k, steps=steps)
    return result("experts", rows, out, columns=COLUMNS)


def bench_experts(*, ranks: int, ep: int, backends: list[str], top_k: int, steps: int) -> list[BenchRow]:
    is_busy = os.getloadavg()[0] > 0.5
    job = {"top_k": top_k, "steps": steps}
    whole = _measure({**job, "backend": "gloo", "ep": 1}, 1)
    found = {name: _measure({**job, "backend": name, "ep": ep}, ranks) for name in backends}
    gloo_ms = statistics.median(found["gloo"]["times_ms"]) if "gloo" in found else None
    rows = []
    for name, one in found.items():
        step_ms = statistics.median(one["times_ms"])
        gaps = [abs(here - there) for here, there in zip(one["losses"], whole["losses"], strict=True)]
        rows.append(
            {
                "backend": name,
                "ranks": ranks,
                "ep": ep,
                "top_k": top_k,
                "step_ms": step_ms,
                "ratio_to_gloo": None if gloo_ms is None else gloo_ms / step_ms,
                "loss_gap": max(gaps),
                "sent_bytes": one["sent_bytes"],
                "predicted_bytes": one["predicted_bytes"],
                "machine": "busy" if is_busy else "idle",
            }
        )
    return rows


def _measure(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lakh-bench-") as folder:
        report = Path(folder) / "report.json"
        run_ranks("bench.train.experts", {**job, "folder": folder, "report": str(report)}, ranks, TIMEOUT_S)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def _rank(job: dict[str, Any]) -> None:
    import torch

    from lakh.planner.execution_plan import plan_of_run
    from lakh.planner.timing.expert_exchange import exchanged_bytes
    from lakh.spec import Data, Mesh, Model, Optimizer, Run, Training
    from lakh.spec.model import Experts
    from lakh.spec.parallel_check import check_parallelism
    from lakh.trainer.launch.world import World
    from lakh.trainer.observability.traffic import TrafficCounter
    from lakh.trainer.optim.optimizer import build_optimizer
    from lakh.trainer.step import update
    from lakh.workloads.code.batch import Batch
    from lakh.workloads.code.model import CodeModel, init_weights
    from lakh.workloads.code.parallel import parallelise

    model = Model(
        layers=4,
        width=256,
        heads=8,
        kv_heads=4,
        ffn=512,
        vocab=512,
        context=SEQUENCE,
        tied=False,
        experts=Experts(count=8, top_k=job["top_k"], ffn=256),
    )
    train = Training(steps=job["steps"], precision="f32", device="cpu", backend=job["backend"], threads=1)
    data = Data(sequence=SEQUENCE, batch=BATCH, micro_batch=1)
    optim = Optimizer(warmup_steps=0)
    run = Run(name="experts", model=model, mesh=Mesh(ep=job["ep"]), data=data, optim=optim, train=train)
    os.environ["LAKH_RENDEZVOUS"] = f"{job['folder']}/meeting"
    with World.join(train) as world:
        mesh = check_parallelism(run, world.size)

        def build() -> CodeModel:
            built = CodeModel(model)
            init_weights(built, 1)
            return built

        groups = world.groups(mesh, train.peer_timeout_s)
        trained = parallelise(run, mesh, groups, build, bf16=False, device=world.device)
        optimizer = build_optimizer(trained, run.optim)
        losses, times_ms, sent = [], [], 0
        for step in range(job["steps"]):
            generator = torch.Generator().manual_seed(step)
            rows = torch.randint(0, model.vocab, (BATCH, SEQUENCE + 1), generator=generator)
            mine = rows.chunk(mesh.data_ranks)[mesh.data_rank(world.rank)].split(1)
            batches = [Batch(row[:, :-1], row[:, 1:]) for row in mine]
            began_s = time.perf_counter()
            with TrafficCounter(run.cluster) as traffic:
                done = update(trained, optimizer, batches, lr=1e-3, clip_norm=1.0)
            times_ms.append((time.perf_counter() - began_s) * 1e3)
            sent = sum(count for (_, kind), count in traffic.sent_bytes.items() if kind == "alltoall")
            losses.append(world.sum(float(done.loss))[0] / world.size)
        predicted = float(exchanged_bytes(model, plan_of_run(run, world.size), value_bytes=4.0))
        if world.rank == 0:
            found = {"losses": losses, "times_ms": times_ms[1:], "sent_bytes": sent, "predicted_bytes": predicted}
            Path(job["report"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))

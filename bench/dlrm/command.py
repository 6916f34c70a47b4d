"""lakh bench dlrm: recommendation workloads beside TorchRec, FBGEMM and torch."""

from __future__ import annotations

import click

from bench.harness import BenchRow, detect_peers, log, out_option, result
from lakh.cli.output import CommandResult, print_result

__all__ = ["dlrm"]

PARTS = ("planner", "operators", "steps", "checkpoints")
GPU_PART = "gpu"


@click.command("dlrm")
@click.option("--part", "parts", type=click.Choice([*PARTS, GPU_PART]), multiple=True, default=PARTS, show_default=True,
              help="What to measure. Repeatable.")  # fmt: skip
@click.option(
    "--ranks", type=click.IntRange(min=8), default=16, show_default=True, help="Ranks of the planned cluster."
)
@click.option("--batch", "batches", type=click.IntRange(min=1), multiple=True, default=(512, 2048, 4096),
              show_default=True, help="Samples per rank of the plans. Repeatable.")  # fmt: skip
@click.option(
    "--movielens", help="Also train on MovieLens-100k: the wheel of recbole, or a folder with its ml-100k files."
)
@click.option("--epochs", type=click.IntRange(min=1), default=5, show_default=True, help="Epochs on MovieLens-100k.")
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True, help="Seeds on MovieLens-100k.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds of each system.")
@out_option
@print_result
def dlrm(
    parts: tuple[str, ...],
    ranks: int,
    batches: tuple[int, ...],
    movielens: str | None,
    epochs: int,
    seeds: int,
    rounds: int,
    out: str | None,
) -> CommandResult:
    """Compare sharding plans and training steps with TorchRec's, and embedding operators with FBGEMM and torch."""
    rows: list[BenchRow] = []
    if "planner" in parts:
        from bench.dlrm.planners import TORCHREC, bench_planners

        present = detect_peers(["torchrec"], [TORCHREC], log)
        rows += bench_planners(ranks, batches, with_torchrec="torchrec" in present)
    if "operators" in parts:
        from bench.dlrm.operators import FBGEMM, OperatorShape, bench_operators

        present = detect_peers(["fbgemm"], [FBGEMM], log)
        rows += bench_operators(OperatorShape(), rounds, with_fbgemm="fbgemm" in present)
    if "steps" in parts:
        from bench.dlrm.planners import TORCHREC
        from bench.dlrm.steps import bench_steps

        present = detect_peers(["torchrec"], [TORCHREC], log)
        rows += bench_steps(rounds, with_torchrec="torchrec" in present)
    if GPU_PART in parts:
        from bench.dlrm.gpu import bench_gpu

        rows += bench_gpu(rounds)
    if "checkpoints" in parts:
        from bench.dlrm.checkpoints import bench_checkpoints

        rows += bench_checkpoints(movielens)
    if movielens:
        from bench.dlrm.movielens import bench_movielens

        rows += bench_movielens(movielens, epochs, seeds)
    return result("dlrm", rows, out)

"""lakh bench dlrm: recommendation workloads beside TorchRec."""

from __future__ import annotations

import click

from bench.harness import detect_peers, log, out_option, result
from lakh.cli.output import CommandResult, print_result

__all__ = ["dlrm"]


@click.command("dlrm")
@click.option(
    "--ranks", type=click.IntRange(min=8), default=16, show_default=True, help="Ranks of the planned cluster."
)
@click.option("--batch", "batches", type=click.IntRange(min=1), multiple=True, default=(512, 2048, 4096),
              show_default=True, help="Samples per rank. Repeatable.")  # fmt: skip
@out_option
@print_result
def dlrm(ranks: int, batches: tuple[int, ...], out: str | None) -> CommandResult:
    """Compare sharding plans of embedding tables with TorchRec's planner."""
    from bench.dlrm.planners import TORCHREC, bench_planners

    present = detect_peers(["torchrec"], [TORCHREC], log)
    rows = bench_planners(ranks, batches, with_torchrec="torchrec" in present)
    return result("dlrm", rows, out)

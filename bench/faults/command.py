"""lakh bench faults: how fast training continues after kill -9 of one of four replicas, beside torchft.

Both systems train the same model on four replicas of one process each. The third one is killed after some steps and
started again. `next_step_s` is the time from the kill to the next committed step of the others, `full_size_s` to the
first step of all four replicas. lakh repeats the interrupted step with the sequences of the lost replica; torchft
drops them. The restore of one rank's state from the memory of another node stands beside its restore from S3.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from bench.harness import BenchRow, Peer, detect_peers, out_option, result
from bench.harness.results import log
from bench.harness.rounds import SystemFailed
from lakh.cli.output import CommandResult, console, print_result

__all__ = ["faults"]

COLUMNS = (
    "system",
    "fault",
    "detect_s",
    "next_step_s",
    "full_size_s",
    "samples_lost",
    "decide_s",
    "goodput",
    "restore_s",
    "ratio",
    "failed",
)
SHARD = 64  # ranks of one simulated replica
TORCHFT = Peer("torchft", modules=("torchft",), install="pip install torchft==0.2.0 (wheels for x86-64 only)")


@click.command("faults")
@click.option("--replicas", type=click.IntRange(min=3), default=4, show_default=True, help="Replicas of one rank.")
@click.option("--steps", type=click.IntRange(min=60), default=150, show_default=True, help="Steps of each job.")
@click.option("--at-step", type=click.IntRange(min=5), default=30, show_default=True, help="Step of the kill.")
@click.option("--ranks", type=click.IntRange(min=1024), default=16384, show_default=True, help="Simulated ranks.")
@click.option("--restore/--no-restore", default=True, show_default=True, help="Also compare restores.")
@click.option("--megabytes", type=click.IntRange(min=1), default=64, show_default=True, help="State to restore.")
@out_option
@print_result
def faults(
    replicas: int, steps: int, at_step: int, ranks: int, restore: bool, megabytes: int, out: str | None
) -> CommandResult:
    """Compare the loss and return of a replica with torchft, and restores from memory with S3.

    Also simulates the membership decision of many ranks, and goodput at Llama 3's failure rates.
    """
    from bench.faults.restores import compare_restores
    from bench.faults.scale import RESTART_S, decide_at_scale, goodput_at_scale
    from bench.faults.survive import survive_with_lakh, survive_with_torchft

    systems = {"lakh": survive_with_lakh, "torchft": survive_with_torchft}
    present = detect_peers(list(systems), [TORCHFT], log)
    rows: list[BenchRow] = []
    with console().status("measuring") as status, tempfile.TemporaryDirectory(prefix="lakh-faults-") as folder:
        for name, measure in systems.items():
            row: BenchRow = {"system": name, "fault": f"kill 1 of {replicas} replicas"}
            if name not in present:
                row["failed"] = f"not installed: {TORCHFT.install}"
            else:
                status.update(f"{name}: {replicas} replicas")
                try:
                    row |= measure(Path(folder) / name, replicas=replicas, steps=steps, at_step=at_step)
                except SystemFailed as error:
                    row["failed"] = str(error)
            rows.append(row)
        status.update(f"{ranks:,} simulated ranks")
        measured = rows[0]
        row = decide_at_scale(ranks, shard=SHARD) | {"detect_s": measured.get("detect_s")}
        if "failed" not in measured:
            row |= goodput_at_scale(ranks, detect_s=row["detect_s"] + row["decide_s"], restart_s=RESTART_S)
        rows.append(row)
        if restore:
            status.update("restores")
            rows += compare_restores(Path(folder), megabytes=megabytes)
    return result("faults", rows, out, columns=COLUMNS)

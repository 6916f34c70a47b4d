"""lakh bench train: training speed beside the models of transformers, PEFT and torchtitan in the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import click

from bench.harness import Peer, detect_peers, log, out_option, result
from lakh.cli.output import CommandResult, console, print_result, set_option, table
from lakh.errors import UserError

__all__ = ["train"]

INSTALLED = [Peer("transformers", ("transformers",)), Peer("peft", ("transformers", "peft"))]
COLUMNS = (
    *("system", "shape", "micro_batch", "tok_per_s", "mfu", "mfu_palm", "peak_bytes", "ratio"),
    *("full_ratio", "full_memory", "cpu_s", "alternates_with", "failed"),
)
NOTE = "alternates_with: the systems whose steps were measured in turn with those of the row"


@click.command("train")
@click.option("--shapes", default="demo", show_default=True, help="Comma-separated model shapes.")
@click.option("--peers", default="transformers", show_default=True, help="Comma-separated peers, or none.")
@click.option("--torchtitan", metavar="DIR", help="Checkout of torchtitan, for the peer of that name.")
@click.option("--ablations", is_flag=True, help="On a GPU: also measure each feature, added one after the other.")
@click.option("--fp8", is_flag=True, help="On a GPU: also measure products of 8-bit floats.")
@click.option("--micro-batch", type=click.IntRange(min=1), help="Sequences per step, instead of each shape's own.")
@click.option("--repeats", type=click.IntRange(min=3), default=7, show_default=True, help="Timed steps of each system.")
@out_option
@click.option("--fit", metavar="RUN", help="Instead: find the fastest micro-batch of a run on this GPU.")
@set_option
@print_result
def train(
    shapes: str,
    peers: str,
    torchtitan: str | None,
    ablations: bool,
    fp8: bool,
    micro_batch: int | None,
    repeats: int,
    out: str | None,
    fit: str | None,
    sets: tuple[str, ...],
) -> CommandResult:
    """Compare training speed with transformers, PEFT and torchtitan on the same model."""
    if fit:
        return _fit(fit, sets)
    if sets:
        raise UserError("--set", "changes a run, and none is given", "name it with --fit RUN")
    from lakh.trainer.tuning.memory import keep_freed_memory

    keep_freed_memory()  # as in a rank, before torch is imported; the peer benefits in the same way
    from bench.train.shapes import PEERS, SHAPES
    from bench.train.steps import bench_train

    names = _chosen("--shapes", shapes, SHAPES)
    wanted = [] if peers.strip() in ("", "none") else _chosen("--peers", peers, PEERS)
    if torchtitan and "torchtitan" not in wanted:
        wanted.append("torchtitan")
    if "torchtitan" in wanted and not torchtitan:
        raise UserError("--peers torchtitan", "needs a checkout", "name one with --torchtitan DIR")
    present, err = detect_peers(wanted, INSTALLED, log), console()
    with err.status("measuring") as status:
        found = bench_train(
            names,
            peers=present,
            checkouts={"torchtitan": torchtitan} if torchtitan else None,
            ablations=ablations,
            fp8=fp8,
            repeats=repeats,
            micro_batch=micro_batch,
            progress=status.update,
            found=lambda row: err.print(f"{row.shape}, {row.system}: {row.failed or f'{row.tok_per_s:,.0f} tokens/s'}"),
        )
    return result("train", [asdict(row) for row in found], out, columns=COLUMNS, title=NOTE)


def _fit(name: str, sets: tuple[str, ...]) -> CommandResult:
    from lakh.spec import load_run
    from lakh.trainer.tuning.micro_batch import find_micro_batch

    run = load_run(name, sets)
    with console().status("measuring") as status:
        chosen = find_micro_batch(run, progress=lambda text: status.update(text))
    rows = [(row.micro_batch, row.peak_bytes and row.peak_bytes / 2**30, row.tok_per_s) for row in chosen.tried]
    title = f"--set data.micro_batch={chosen.micro_batch}: {chosen.reason}"
    return CommandResult(asdict(chosen), table(["micro_batch", "peak_GiB", "tok_per_s"], rows, title=title))


def _chosen(option: str, text: str, known: Mapping[str, object]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name}", "no such name", f"choose from: {', '.join(known)}")
    return names

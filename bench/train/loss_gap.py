"""lakh bench loss-gap: the cost of 8-bit products in loss.

The same model learns the same bytes of Python's standard library, once with bf16 and once with fp8 products of its
blocks, and float32 weights as in `lakh train`. `gap` is the relative difference of the mean loss over the last tenth of
the steps, on equal batches.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import click

from bench.harness import out_option, result
from bench.train.shapes import SHAPES
from lakh.cli.output import CommandResult, console, print_result
from lakh.errors import UserError

__all__ = ["loss_gap"]

COLUMNS = ("shape", "precision", "steps", "first_loss", "last_loss", "gap", "step_s")


@click.command("loss-gap")
@click.option("--shape", default="162m-2k", show_default=True, help="A shape of lakh bench train.")
@click.option("--steps", type=click.IntRange(min=10), default=2000, show_default=True, help="Steps of each run.")
@click.option("--micro-batch", type=click.IntRange(min=1), default=16, show_default=True, help="Sequences of a step.")
@click.option("--sequence", type=click.IntRange(min=16), default=2048, show_default=True, help="Bytes of a sequence.")
@click.option("--precisions", default="mixed,fp8-mixed", show_default=True, help="Precisions of the bench's systems.")
@out_option
@print_result
def loss_gap(
    shape: str, steps: int, micro_batch: int, sequence: int, precisions: str, out: str | None
) -> CommandResult:
    """Measure what 8-bit products cost in loss.

    Trains a shape on the source of Python's standard library, as bytes, once in each precision. The first precision is
    the one that the gap is relative to.
    """
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}", "no such shape", f"choose from: {', '.join(SHAPES)}")
    from bench.train.byte_training import train_on_bytes

    chosen = replace(SHAPES[shape], sequence=sequence, micro_batch=micro_batch, adapter=None)
    rows: list[dict[str, object]] = []
    with console().status("training") as status:
        for precision in precisions.split(","):
            status.update(f"{shape}, {precision}: {steps} steps")
            losses, step_s = train_on_bytes(chosen, precision, steps)
            last = statistics.fmean(losses[-max(1, steps // 10) :])
            base = rows[0]["last_loss"] if rows else last
            assert isinstance(base, float)
            rows.append(
                {
                    "shape": shape,
                    "precision": precision,
                    "steps": steps,
                    "first_loss": losses[0],
                    "last_loss": last,
                    "gap": last / base - 1,
                    "step_s": step_s,
                }
            )
    return result("loss-gap", rows, out, columns=COLUMNS)

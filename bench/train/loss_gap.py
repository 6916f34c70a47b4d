"""lakh bench loss-gap: the cost of 8-bit products in loss.

The same model learns the same bytes of Python's standard library with bf16 and with fp8 products of its blocks, as in
`lakh train`: initial weights, warm-up and decay of the learning rate, float32 weights. `gap` is the relative difference
of the mean loss over the last tenth of the steps, on equal batches. Two runs of equal precision with different kernels
of attention show how far rounding alone moves it (`--control`). `held_out_gap` is that of the trained weights on bytes
that no run has seen, all in the first precision: without what 8-bit products add to the loss of their own step. Without
a GPU: `--precisions f32,emulated-fp8`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace

import click

from bench.harness import out_option, result
from bench.train.shapes import FP8_RECIPES, SHAPES, BenchSystem
from lakh.cli.output import CommandResult, console, print_result
from lakh.errors import UserError

__all__ = ["loss_gap"]

COLUMNS = (
    "shape",
    "precision",
    "recipe",
    "bf16_ends",
    "attention",
    "seed",
    "steps",
    "first_loss",
    "last_loss",
    "gap",
    "held_out",
    "held_out_gap",
    "step_s",
)


@click.command("loss-gap")
@click.option("--shape", default="162m-2k", show_default=True, help="A shape of lakh bench train.")
@click.option("--steps", type=click.IntRange(min=10), default=2000, show_default=True, help="Steps of each run.")
@click.option("--micro-batch", type=click.IntRange(min=1), default=16, show_default=True, help="Sequences of a step.")
@click.option("--sequence", type=click.IntRange(min=16), default=512, show_default=True, help="Bytes of a sequence.")
@click.option("--precisions", default="mixed,fp8-mixed", show_default=True, help="Precisions of the bench's systems.")
@click.option("--recipes", default="tensorwise", show_default=True, help="Recipes of the 8-bit precisions.")
@click.option("--bf16-ends", default="0", show_default=True, help="First and last blocks in bf16, in 8-bit precisions.")
@click.option("--lr", type=float, default=7.5e-5, show_default=True, help="Peak learning rate.")
@click.option("--embedding-init-std", type=float, help="As in a run; by default 1, and 0.02 for tied embeddings.")
@click.option("--compile", "mode", default="auto", show_default=True, help="As train.compile of a run.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each, 0 and up.")
@click.option("--control", is_flag=True, help="Also run the first precision with another kernel of attention.")
@out_option
@print_result
def loss_gap(
    shape: str,
    steps: int,
    micro_batch: int,
    sequence: int,
    precisions: str,
    recipes: str,
    bf16_ends: str,
    lr: float,
    embedding_init_std: float | None,
    mode: str,
    seeds: int,
    control: bool,
    out: str | None,
) -> CommandResult:
    """Measure what 8-bit products cost in loss.

    Trains a shape on the source of Python's standard library, as bytes, once in each precision; the 8-bit ones once for
    each recipe and number of bf16 blocks at both ends. The first precision is the one that the gap is relative to. The
    default learning rate is that of recipes/sizes.py for 524,288 tokens a step, times the root of this batch's share.
    """
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}", "no such shape", f"choose from: {', '.join(SHAPES)}")
    from bench.train.byte_training import train_on_bytes

    chosen = replace(SHAPES[shape], sequence=sequence, micro_batch=micro_batch, adapter=None)
    embedding_std = embedding_init_std or (0.02 if chosen.model.tied else 1.0)
    systems = list(_systems(precisions.split(","), recipes.split(","), bf16_ends.split(","), mode, control))
    rows: list[dict[str, object]] = []
    with console().status("training") as status:
        for seed, (number, system) in itertools.product(range(seeds), enumerate(systems)):
            status.update(f"{shape}, {system.name}: {steps} steps")
            found = train_on_bytes(
                chosen, system, steps, lr=lr, embedding_std=embedding_std, evaluated_as=systems[0], seed=seed
            )
            tenth = max(1, steps // 10)
            last = statistics.fmean(found.losses[-tenth:])
            if not number:
                base, base_held_out = last, found.held_out
            gap, held_out_gap = last / base - 1, found.held_out / base_held_out - 1
            rows.append(
                {
                    "shape": shape,
                    "precision": system.precision,
                    "recipe": system.recipe if system.is_fp8 else "",
                    "bf16_ends": system.bf16_ends if system.is_fp8 else None,
                    "attention": system.attention,
                    "seed": seed,
                    "steps": steps,
                    "first_loss": found.losses[0],
                    "last_loss": last,
                    "gap": gap,
                    "held_out": found.held_out,
                    "held_out_gap": held_out_gap,
                    "step_s": found.step_s,
                    "losses": [statistics.fmean(found.losses[at : at + tenth]) for at in range(0, steps, tenth)],
                }
            )
            console().print(
                f"{system.name}: last loss {last:.4f}, gap {gap:+.3%}; held out {found.held_out:.4f}, "
                f"{held_out_gap:+.3%}; {found.step_s:.4f} s a step"
            )
    return result("loss-gap", rows, out, columns=COLUMNS)


def _systems(
    precisions: list[str], recipes: list[str], ends: list[str], mode: str, control: bool
) -> Iterator[BenchSystem]:
    from bench.train.emulated_fp8 import EMULATED

    known = {"emulated-fp8": EMULATED, "fp8": FP8_RECIPES}
    of_precision = {
        precision: [recipe for recipe in recipes if recipe in known.get(precision.removesuffix("-mixed"), ())]
        for precision in precisions
    }
    for recipe in recipes if any("fp8" in precision for precision in precisions) else ():
        if not any(recipe in found for found in of_precision.values()):
            fix = f"fp8 has {', '.join(FP8_RECIPES)}; emulated-fp8 has {', '.join(EMULATED)}"
            raise UserError(f"--recipes {recipe}", "no 8-bit precision of --precisions has it", fix)
    for number, precision in enumerate(precisions):
        plain = BenchSystem(precision, precision=precision, compile=mode)
        if plain.is_fp8:
            if precision.startswith("emulated"):
                plain = replace(plain, compile="none")
            for recipe, end in itertools.product(of_precision[precision], ends):
                name = f"{precision}, {recipe}, {end} blocks of each end in bf16"
                yield replace(plain, name=name, recipe=recipe, bf16_ends=int(end))
            continue
        yield plain
        if control and not number:
            yield replace(plain, name=f"{precision}, torch's attention", attention="torch")

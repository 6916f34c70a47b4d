"""lakh tune: fine-tune a model on your own code, on questions with answers, or on pairs of answers."""

from __future__ import annotations

import shlex
from typing import Any

import click

from lakh.cli.complete import complete_folders, complete_runs
from lakh.cli.format import bytes_text
from lakh.cli.output import CommandResult, console, fact_rows, print_result, set_option, table, verbose_option
from lakh.errors import UserError

__all__ = ["tune"]

_OTHER = {"sft": "dpo", "dpo": "sft"}
_TOO_LONG = ("examples longer than a sequence", "pairs with a side longer than half a sequence")


@click.command()
@click.argument("model", shell_complete=complete_runs)
@click.option(
    "--data",
    "sources",
    multiple=True,
    metavar="PATH",
    help="JSONL file of questions and answers, folder of code, or token set; repeatable.",
)
@click.option(
    "--method",
    type=click.Choice(["sft", "dpo"]),
    default="sft",
    show_default=True,
    help="sft learns the text of --data; dpo learns to prefer the chosen answers of --pairs.",
)
@click.option(
    "--pairs",
    multiple=True,
    metavar="FILE",
    help="With --method dpo: JSONL file of rows with prompt, chosen and rejected; repeatable.",
)
@click.option(
    "--beta",
    type=click.FloatRange(min=0.0, min_open=True),
    default=0.1,
    show_default=True,
    help="With --method dpo: how strongly the model is kept near the model before training.",
)
@click.option("--out", required=True, shell_complete=complete_folders, metavar="DIR", help="Folder of the run.")
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    default=16,
    show_default=True,
    help="Rank of the adapters; 0 trains every weight.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Optimizer steps.  [default: three passes over the data, one over pairs]",
)
@click.option(
    "--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks to start on this machine."
)
@set_option
@verbose_option
@print_result
def tune(
    model: str,
    sources: tuple[str, ...],
    method: str,
    pairs: tuple[str, ...],
    beta: float,
    out: str,
    rank: int,
    steps: int | None,
    nproc: int,
    sets: tuple[str, ...],
) -> CommandResult:
    """Fine-tune a model on your own code, on questions with answers, or on pairs of answers.

    MODEL is a run, a checkpoint, a Hugging Face directory or a GGUF file. Trains low-rank adapters (LoRA) and keeps the
    model itself as it is. Measures bits per byte on held-out documents before and after. DIR is a MODEL afterwards:
    lakh serve DIR, lakh export DIR. After a stop the same command continues.
    """
    needed, other = ("--data", "--pairs") if method == "sft" else ("--pairs", "--data")
    if pairs if method == "sft" else sources:
        found = f"learns from {needed}, and {other} is given"
        raise UserError(f"--method {method}", found, f"give {needed}, or --method {_OTHER[method]}")
    if not (sources or pairs):
        raise UserError(f"--method {method}", f"learns from {needed}, and none is given", f"give {needed}")
    screen = console()
    common: dict[str, Any] = {
        "rank": rank,
        "steps": steps,
        "sets": sets,
        "nproc": nproc,
        "say": lambda text: screen.print(text, style="dim", markup=False),
    }
    if method == "dpo":
        from lakh.finetuning.dpo import tune_on_pairs

        data = tune_on_pairs(model, pairs, out, beta=beta, **common)
    else:
        from lakh.finetuning.tune import tune as run_tuning

        data = run_tuning(model, sources, out, **common)
    words = ("serve {}", "export {} --out {}-merged")
    where = shlex.quote(out)
    return CommandResult(
        data,
        lambda: fact_rows(_rows(data)),
        details=lambda: table(["measurement", "value"], list(data.items())),
        next_commands=[f"lakh {word.format(where, where)}" for word in words],
    )


def _rows(data: dict[str, Any]) -> list[tuple[str, Any]]:
    speed = data["tok_per_s"]
    ending = [
        ("trained", f"{data['steps']:,} steps" + ("" if speed is None else f", {speed:,.0f} tokens/s")),
        ("left out", f"{data['too_long']} {_TOO_LONG[data['data'] == 'pairs']}" if data["too_long"] else None),
        ("adapter", f"{data['adapter']}, {bytes_text(data['adapter_bytes'])}" if data["adapter"] else None),
        ("run", data["run_dir"]),
    ]
    if data["data"] == "pairs":
        return [*_pair_rows(data), *ending]
    before, after = data["before"]["bits_per_byte"], data["after"]["bits_per_byte"]
    what = "held-out answers" if data["data"] == "examples" else "held-out documents"
    low, high = data["after"]["interval"]
    return [
        ("before", f"{before:.4f} bits per byte of {data['before']['documents']} {what}"),
        ("after", f"{after:.4f} bits per byte ({after / before - 1:+.1%}; 95 % interval {low:.4f} to {high:.4f})"),
        *ending,
    ]


def _pair_rows(data: dict[str, Any]) -> list[tuple[str, Any]]:
    before, after = data["before"], data["after"]
    return [
        (
            "before",
            f"{before['prefers_chosen']:.1%} of {before['pairs']} held-out pairs: the chosen answer is likelier",
        ),
        ("after", f"{after['prefers_chosen']:.1%}; the chosen answer gained more in {after['reward_accuracy']:.1%}"),
        ("loss", f"{before['loss']:.4f} to {after['loss']:.4f}"),
    ]

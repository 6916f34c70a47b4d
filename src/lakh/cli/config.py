"""lakh config: show, compare and check the settings of runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import click

from lakh import config as settings
from lakh.cli.complete import complete_recipes
from lakh.cli.format import bytes_text, count_text
from lakh.cli.groups import HintingGroup
from lakh.cli.output import CommandResult, fact_rows, print_result, set_option, styled, table, verbose_option
from lakh.spec import Run, load_run

__all__ = ["amounts", "config", "run_facts", "train_command"]


@click.group(cls=HintingGroup)
def config() -> None:
    """Show, compare and check the settings of runs."""


@config.command()
@click.argument("run", shell_complete=complete_recipes)
@set_option
@click.option("--plain", is_flag=True, help="Omit the comments.")
@print_result
def show(run: str, sets: tuple[str, ...], plain: bool) -> CommandResult:
    """Print a recipe or run as complete TOML."""
    loaded = load_run(run, sets)
    data = {"run": settings.to_dict(loaded), "sha256": settings.fingerprint(loaded)}
    return CommandResult(data, settings.to_toml(loaded, comments=not plain).rstrip())


@config.command()
@click.argument("left", shell_complete=complete_recipes)
@click.argument("right", shell_complete=complete_recipes)
@print_result
def diff(left: str, right: str) -> CommandResult:
    """List the settings in which two runs differ."""
    rows = settings.diff(load_run(left), load_run(right))
    data = {"differences": [{"path": path, "left": a, "right": b} for path, a, b in rows]}
    return CommandResult(data, table(["setting", left, right], rows) if rows else "no differences")


@config.command()
@click.argument("run", shell_complete=complete_recipes)
@set_option
@click.option("--ranks", type=click.IntRange(min=1), help="Check for this many ranks.")
@verbose_option
@print_result
def check(run: str, sets: tuple[str, ...], ranks: int | None) -> CommandResult:
    """Check a run and print its parameters, tokens, FLOPs and memory."""
    from lakh.spec.parallel_check import check_parallelism

    loaded = load_run(run, sets)
    num_ranks = ranks or loaded.mesh.ranks
    check_parallelism(loaded, num_ranks)
    data = {"ok": True, **amounts(loaded, num_ranks)}
    memory = [bytes_text(data[f"{kind}_bytes_per_rank"]) for kind in ("state", "activation")]
    rows = [
        ("settings", styled("ok", "good")),
        *run_facts(loaded, num_ranks),
        ("memory per rank", f"{memory[0]} of weights and optimizer state, {memory[1]} of activations"),
    ]
    return CommandResult(
        data,
        lambda: fact_rows(rows),
        details=lambda: table(["setting", "value"], list(data.items())),
        next_commands=[f"{train_command(run, sets, num_ranks)} --dry-run"],
    )


def train_command(run: str, sets: Sequence[str], ranks: int) -> str:
    """The command line that trains this run."""
    options = [word for item in sets for word in ("--set", item)] + ([] if ranks == 1 else ["--nproc", str(ranks)])
    return shlex.join(["lakh", "train", run, *options])


def run_facts(run: Run, ranks: int) -> list[tuple[str, Any]]:
    """The size of a run on `ranks` ranks, in rows for people."""
    accumulation = run.accumulation(ranks)
    in_turns = f" in {accumulation} micro-batches" if accumulation > 1 else ""
    mesh = str(run.mesh.resolve(ranks))
    return [
        ("run", f"{run.name}: {count_text(run.model.parameters)} parameters"),
        ("ranks", "1" if ranks == 1 else f"{ranks:,} ({mesh})"),
        ("each step", f"{run.tokens_per_step:,} tokens{in_turns}"),
        ("whole run", f"{run.train.steps:,} steps, {count_text(run.tokens)} tokens, {run.flops:.3g} FLOPs"),
    ]


def amounts(run: Run, ranks: int) -> dict[str, Any]:
    """Parameters, tokens, FLOPs and memory of a run on `ranks` ranks."""
    memory = run.memory_bytes(ranks)
    return {
        "run": run.name,
        "sha256": settings.fingerprint(run),
        "ranks": ranks,
        "mesh": str(run.mesh.resolve(ranks)),
        "parameters": run.model.parameters,
        "tokens_per_step": run.tokens_per_step,
        "tokens": run.tokens,
        "accumulation": run.accumulation(ranks),
        "flops_per_token": run.model.flops_per_token(run.data.sequence),
        "flops_per_token_palm": run.model.flops_per_token(run.data.sequence, causal=False),
        "flops": run.flops,
        "state_bytes_per_rank": memory["states"],
        "activation_bytes_per_rank": memory["activations"],
    }

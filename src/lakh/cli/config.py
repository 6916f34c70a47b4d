"""lakh config: show, compare and check the settings of runs."""

from __future__ import annotations

from typing import Any

import click

from lakh import config as settings
from lakh.cli.groups import HintingGroup
from lakh.cli.output import CommandResult, print_result, set_option, table
from lakh.spec import Run, load_run

__all__ = ["amounts", "config"]


@click.group(cls=HintingGroup)
def config() -> None:
    """Show, compare and check the settings of runs."""


@config.command()
@click.argument("run")
@set_option
@click.option("--plain", is_flag=True, help="Omit the comments.")
@print_result
def show(run: str, sets: tuple[str, ...], plain: bool) -> CommandResult:
    """Print a recipe or run as complete TOML."""
    loaded = load_run(run, sets)
    data = {"run": settings.to_dict(loaded), "sha256": settings.fingerprint(loaded)}
    return CommandResult(data, settings.to_toml(loaded, comments=not plain).rstrip())


@config.command()
@click.argument("left")
@click.argument("right")
@print_result
def diff(left: str, right: str) -> CommandResult:
    """List the settings in which two runs differ."""
    rows = settings.diff(load_run(left), load_run(right))
    data = {"differences": [{"path": path, "left": a, "right": b} for path, a, b in rows]}
    return CommandResult(data, table(["setting", left, right], rows) if rows else "no differences")


@config.command()
@click.argument("run")
@set_option
@click.option("--ranks", type=click.IntRange(min=1), help="Check for this many ranks.")
@print_result
def check(run: str, sets: tuple[str, ...], ranks: int | None) -> CommandResult:
    """Check a run and print its parameters, tokens, FLOPs and memory."""
    from lakh.spec.parallel_check import check_parallelism

    loaded = load_run(run, sets)
    check_parallelism(loaded, ranks or loaded.mesh.ranks)
    data = {"ok": True, **amounts(loaded, ranks or loaded.mesh.ranks)}
    return CommandResult(data, table(["what", "value"], list(data.items())))


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

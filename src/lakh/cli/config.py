"""lakh config: show, compare and check the settings of runs."""

from __future__ import annotations

import click

from lakh import config as settings
from lakh.cli.face import Answer, answers, set_option, table
from lakh.spec import load_run

__all__ = ["config"]


@click.group()
def config() -> None:
    """Show, compare and check the settings of runs."""


@config.command()
@click.argument("run")
@set_option
@click.option("--plain", is_flag=True, help="Leave the comments out.")
@answers
def show(run: str, sets: tuple[str, ...], plain: bool) -> Answer:
    """Print a recipe or run as complete TOML."""
    loaded = load_run(run, sets)
    data = {"run": settings.to_dict(loaded), "sha256": settings.fingerprint(loaded)}
    return Answer(data, settings.to_toml(loaded, comments=not plain).rstrip())


@config.command()
@click.argument("left")
@click.argument("right")
@answers
def diff(left: str, right: str) -> Answer:
    """List the settings in which two runs differ."""
    rows = settings.diff(load_run(left), load_run(right))
    data = {"differences": [{"path": path, "left": a, "right": b} for path, a, b in rows]}
    return Answer(data, table(["setting", left, right], rows) if rows else "no differences")


@config.command()
@click.argument("run")
@set_option
@click.option("--ranks", type=click.IntRange(min=1), help="Check for this many ranks.")
@answers
def check(run: str, sets: tuple[str, ...], ranks: int | None) -> Answer:
    """Check a run and print what it amounts to: parameters, tokens, FLOPs, memory."""
    loaded = load_run(run, sets)
    ranks = ranks or loaded.mesh.ranks
    memory = loaded.memory_bytes(ranks)
    data = {
        "ok": True,
        "run": loaded.name,
        "sha256": settings.fingerprint(loaded),
        "ranks": ranks,
        "mesh": str(loaded.mesh.resolve(ranks)),
        "parameters": loaded.model.parameters,
        "tokens_per_step": loaded.tokens_per_step,
        "tokens": loaded.tokens,
        "accumulation": loaded.accumulation(ranks),
        "flops_per_token": loaded.model.flops_per_token(loaded.data.sequence),
        "flops_per_token_palm": loaded.model.flops_per_token(loaded.data.sequence, causal=False),
        "flops": loaded.flops,
        "state_bytes_per_rank": memory["states"],
        "activation_bytes_per_rank": memory["activations"],
    }
    return Answer(data, table(["what", "value"], list(data.items())))

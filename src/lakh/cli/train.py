"""lakh train and lakh resume: start the ranks of a run on this machine, or be one of them (RANK is set)."""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Iterator
from typing import Any

import click

from lakh.cli.complete import complete_folders, complete_recipes, complete_runs
from lakh.cli.config import amounts, run_facts, train_command
from lakh.cli.format import bytes_text, seconds_text
from lakh.cli.output import CommandResult, console, fact_rows, print_result, set_option, table, verbose_option
from lakh.spec import Run, load_run
from lakh.trainer.launch.local import resume_here, train_here
from lakh.trainer.launch.rank import is_rank, run_rank
from lakh.trainer.preflight import estimate_run
from lakh.trainer.run_folder import require_run, with_absolute_paths

__all__ = ["resume", "train"]

nproc_option = click.option(
    "--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks to start on this machine."
)
restarts_option = click.option(
    "--max-restarts", type=click.IntRange(min=0), default=3, show_default=True, help="Restarts after a rank died."
)
fault_option = click.option(
    "--fault", "faults", multiple=True, metavar="FAULT", help="Inject a fault, e.g. 'kill(rank=1, step=12)'."
)


@click.command()
@click.argument("run", shell_complete=complete_recipes)
@set_option
@click.option("--out", shell_complete=complete_folders, help="Folder of the run.  [default: runs/NAME]")
@nproc_option
@restarts_option
@fault_option
@click.option("--dry-run", is_flag=True, help="Print the estimated memory and step time without training.")
@verbose_option
@print_result
def train(
    run: str,
    sets: tuple[str, ...],
    out: str | None,
    nproc: int,
    max_restarts: int,
    faults: tuple[str, ...],
    dry_run: bool,
) -> CommandResult:
    """Train a run, on this machine or as one rank of many.

    RUN is a recipe (recipes/laptop.py), a run.toml, or the name of a recipe that comes with lakh.
    """
    loaded = with_absolute_paths(load_run(run, sets))
    loaded.model.require_plain()
    run_dir = out or f"runs/{loaded.name}"
    if is_rank():
        return _as_result(run_rank(loaded, run_dir, faults))
    if dry_run:
        ranks = nproc if nproc > 1 else loaded.mesh.ranks
        data = {**amounts(loaded, ranks), **estimate_run(loaded, ranks)}
        command = train_command(run, sets, ranks) + (f" --out {shlex.quote(out)}" if out else "")
        return _dry_run_result(loaded, ranks, data, command)
    with _progress_bar(run_dir, loaded.train.steps):
        return _as_result(train_here(loaded, run_dir, nproc=nproc, max_restarts=max_restarts, faults=faults))


@click.command()
@click.argument("run_dir", shell_complete=complete_runs)
@set_option
@nproc_option
@restarts_option
@fault_option
@verbose_option
@print_result
def resume(
    run_dir: str, sets: tuple[str, ...], nproc: int, max_restarts: int, faults: tuple[str, ...]
) -> CommandResult:
    """Continue a run from its newest complete checkpoint.

    The number of ranks may change: the data continues at the same position in the same order.
    """
    require_run(run_dir)
    loaded = with_absolute_paths(load_run(run_dir, sets))
    if is_rank():
        return _as_result(run_rank(loaded, run_dir, faults))
    with _progress_bar(run_dir, loaded.train.steps):
        return _as_result(resume_here(run_dir, sets, nproc=nproc, max_restarts=max_restarts, faults=faults))


@contextlib.contextmanager
def _progress_bar(run_dir: str, steps: int) -> Iterator[None]:
    from lakh.cli.progress import show_training

    ended = threading.Event()
    bar = threading.Thread(target=show_training, args=(console(), run_dir, steps, ended.is_set), daemon=True)
    bar.start()
    try:
        yield
    finally:
        ended.set()
        bar.join(5.0)


def _dry_run_result(run: Run, ranks: int, data: dict[str, Any], command: str) -> CommandResult:
    whole_s = data["step_s"] * run.train.steps
    rows = [
        *run_facts(run, ranks),
        ("memory per GPU", f"{bytes_text(data['memory_bytes_per_gpu'])} of {bytes_text(data['memory_limit_bytes'])}"),
        ("step time", f"{data['step_s']:.3g} s ({data['step_s_low']:.3g} to {data['step_s_high']:.3g} s)"),
        ("speed", f"{data['tok_per_s']:,.0f} tokens/s, so {seconds_text(whole_s)} for the whole run"),
        ("bottleneck", data["binds"]),
    ]
    details = [(name, "; ".join(value) if isinstance(value, list) else value) for name, value in data.items()]
    return CommandResult(
        data,
        lambda: fact_rows(rows, title="simulated; nothing was started"),
        details=lambda: table(["estimate", "value"], details),
        next_commands=[command],
    )


def _as_result(data: dict[str, Any]) -> CommandResult:
    run_dir, goodput, attempts = data.get("run_dir"), data["goodput"], data.get("attempts", 1)
    productive = "" if goodput["ratio"] is None else f"{goodput['ratio']:.0%} of {seconds_text(goodput['total_s'])}"
    rows = [
        ("trained", f"{data['steps']:,} steps, {data['tokens']:,} tokens"),
        ("loss", f"{data['loss']:.3f}" if data["loss"] is not None else None),
        ("held-out loss", f"{data['val_loss']:.3f}" if data["val_loss"] is not None else None),
        ("goodput", f"{productive} in productive steps" if productive else None),
        ("restarts", f"{attempts - 1}" if attempts > 1 else None),
        ("checkpoint", data["checkpoint"]),
    ]
    next_commands = [f"lakh {word}" for word in (f"serve {run_dir}", f"eval {run_dir} --task humaneval")]
    return CommandResult(
        data,
        lambda: fact_rows(rows),
        details=lambda: table(["measurement", "value"], list(data.items())),
        next_commands=[*next_commands, f"lakh dashboard {run_dir}"] if run_dir else (),
    )

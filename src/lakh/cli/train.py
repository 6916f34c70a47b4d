"""lakh train and lakh resume: start the ranks of a run on this machine, or be one of them (RANK is set)."""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click

from lakh.cli.complete import complete_folders, complete_recipes, complete_runs
from lakh.cli.config import amounts, run_facts, train_command
from lakh.cli.format import bytes_text, seconds_text
from lakh.cli.output import (
    CommandResult,
    console,
    fact_rows,
    print_result,
    print_warning,
    set_option,
    table,
    verbose_option,
)
from lakh.spec import Run, load_run
from lakh.trainer.launch.local import resume_here, train_here
from lakh.trainer.launch.rank import is_rank, run_rank
from lakh.trainer.preflight import estimate_run
from lakh.trainer.run_folder import refuse_other_files, require_run, with_absolute_paths

__all__ = ["fault_option", "join", "nproc_option", "restarts_option", "resume", "show_progress", "train"]

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
    loaded.model.require_trainable()
    run_dir = out or f"runs/{loaded.name}"
    if is_rank():
        refuse_other_files(run_dir)
        return _as_result(run_rank(loaded, run_dir, faults))
    if dry_run:
        ranks = nproc if nproc > 1 else loaded.mesh.ranks
        data = {**amounts(loaded, ranks), **estimate_run(loaded, ranks)}
        command = train_command(run, sets, ranks) + (f" --out {shlex.quote(out)}" if out else "")
        return _dry_run_result(loaded, ranks, data, command)
    _print_warnings(loaded)
    watch = partial(show_progress, run_dir, loaded.train.steps)
    return _as_result(train_here(loaded, run_dir, nproc=nproc, max_restarts=max_restarts, faults=faults, watch=watch))


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
    _print_warnings(loaded)
    watch = partial(show_progress, run_dir, loaded.train.steps)
    return _as_result(resume_here(run_dir, sets, nproc=nproc, max_restarts=max_restarts, faults=faults, watch=watch))


@click.command()
@click.argument("run_dir", shell_complete=complete_runs)
@nproc_option
@print_result
def join(run_dir: str, nproc: int) -> CommandResult:
    """Add ranks to a run that trains on this machine.

    They form whole replicas, take the state from the memory of other ranks, and join at the next step. Ctrl-C ends
    them, and the others continue. The run must use c3 and have two replicas or more.
    """
    from lakh.trainer.launch.added import add_replicas

    return _as_result(add_replicas(run_dir, nproc=nproc))


def _print_warnings(run: Run) -> None:
    from lakh.tokens.loading.data_warnings import data_warnings

    if run.workload != "code":
        return
    for text in data_warnings(run.data, run.model.vocab):
        print_warning(text)


@contextlib.contextmanager
def show_progress(run_dir: str, steps: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that prints a line above the bar."""
    from lakh.cli.progress import show_training

    ended, screen = threading.Event(), console()
    bar = threading.Thread(target=show_training, args=(screen, run_dir, steps, ended.is_set), daemon=True)
    bar.start()
    try:
        yield screen.print
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
    run_dir = data.get("run_dir")  # missing for one rank of many, whose launcher has it
    words = ("serve {}", "eval {} --task humaneval", "dashboard {}")
    return CommandResult(
        data,
        lambda: fact_rows(_result_rows(data)),
        details=lambda: table(["measurement", "value"], list(data.items())),
        next_commands=[f"lakh {word.format(shlex.quote(str(run_dir)))}" for word in words] if run_dir else (),
    )


def _result_rows(data: dict[str, Any]) -> list[tuple[str, Any]]:
    """Rows for people. Ranks other than 0 know no held-out loss and no goodput."""
    loss, heldout, goodput = data["loss"], data["val_loss"], data["goodput"] or {}
    restarts, ratio = data.get("attempts", 1) - 1, goodput.get("ratio")
    return [
        ("trained", f"{data['steps']:,} steps, {data['tokens']:,} tokens"),
        ("loss", None if loss is None else f"{loss:.3f}"),
        ("held-out loss", None if heldout is None else f"{heldout:.3f}"),
        (
            "goodput",
            None if ratio is None else f"{ratio:.0%} of {seconds_text(goodput['total_s'])} productive",
        ),
        ("restarts", restarts or None),
        ("checkpoint", data["checkpoint"]),
    ]

"""lakh train and lakh resume: start the ranks of a run on this machine, or be one of them (RANK is set)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import click

from lakh.cli.config import amounts
from lakh.cli.output import CommandResult, console, print_result, set_option, table
from lakh.spec import load_run
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
@click.argument("run")
@set_option
@click.option("--out", help="Folder of the run.  [default: runs/NAME]")
@nproc_option
@restarts_option
@fault_option
@click.option("--dry-run", is_flag=True, help="Print the estimated memory and step time without training.")
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
        return _as_result(run_rank(loaded, run_dir, faults))
    if dry_run:
        ranks = nproc if nproc > 1 else loaded.mesh.ranks
        data = {**amounts(loaded, ranks), **estimate_run(loaded, ranks)}
        rows = [(name, "; ".join(value) if isinstance(value, list) else value) for name, value in data.items()]
        return CommandResult(data, table(["what", "value"], rows, title="dry run (simulated; nothing was started)"))
    with _progress_bar(run_dir, loaded.train.steps):
        return _as_result(train_here(loaded, run_dir, nproc=nproc, max_restarts=max_restarts, faults=faults))


@click.command()
@click.argument("run_dir")
@set_option
@nproc_option
@restarts_option
@fault_option
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


def _as_result(data: dict[str, object]) -> CommandResult:
    return CommandResult(data, table(["what", "value"], list(data.items())))

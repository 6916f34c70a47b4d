"""lakh train and lakh resume: start the ranks of a run here, or be one of them.

Called by a person, they start `--nproc` ranks and show a bar. Called by a launcher (RANK is set: torchrun, Slurm,
or our own), they are one rank.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import click

from lakh import config, storage
from lakh.cli.config import amounts
from lakh.cli.face import Answer, answers, console, set_option, table
from lakh.errors import UserError
from lakh.spec import Fault, Run, load_run

__all__ = ["resume", "run_ranks", "train"]

nproc_option = click.option(
    "--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks to start here."
)
restarts_option = click.option(
    "--max-restarts", type=click.IntRange(min=0), default=3, show_default=True, help="After a rank died."
)
fault_option = click.option("--fault", "faults", multiple=True, metavar="FAULT", help="e.g. 'kill(rank=1, step=12)'")


@click.command()
@click.argument("run")
@set_option
@click.option("--out", help="Folder of the run; runs/NAME by default.")
@nproc_option
@restarts_option
@fault_option
@click.option("--dry-run", is_flag=True, help="Print what would be trained, and stop.")
@answers
def train(
    run: str,
    sets: tuple[str, ...],
    out: str | None,
    nproc: int,
    max_restarts: int,
    faults: tuple[str, ...],
    dry_run: bool,
) -> Answer:
    """Train a run, here or as one rank of many.

    RUN is a recipe (recipes/laptop.py), a run.toml, or the name of a recipe that comes with lakh.
    """
    loaded = load_run(run, sets)
    run_dir = out or f"runs/{loaded.name}"
    if "RANK" in os.environ:
        return _be_a_rank(loaded, run_dir, faults)
    loaded.accumulation(nproc)
    if dry_run:
        plan = amounts(loaded, nproc)
        return Answer(plan, table(["what", "value"], list(plan.items()), title="would train (nothing was started)"))
    if storage.list_dir(storage.join(run_dir, "checkpoints")):
        raise UserError(run_dir, "holds a run already", f"go on with: lakh resume {run_dir}, or choose another --out")
    _prepare(loaded, run_dir)
    return run_ranks(loaded, run_dir, nproc=nproc, max_restarts=max_restarts, faults=faults)


@click.command()
@click.argument("run_dir")
@set_option
@nproc_option
@restarts_option
@fault_option
@answers
def resume(run_dir: str, sets: tuple[str, ...], nproc: int, max_restarts: int, faults: tuple[str, ...]) -> Answer:
    """Go on with a run from its newest complete checkpoint.

    The number of ranks may differ from before: the data goes on where it stopped, in the same order.
    """
    loaded = load_run(run_dir, sets)
    if "RANK" in os.environ:
        return _be_a_rank(loaded, run_dir, faults)
    loaded.accumulation(nproc)
    if sets:
        _prepare(loaded, run_dir)
    return run_ranks(loaded, run_dir, nproc=nproc, max_restarts=max_restarts, faults=faults)


def run_ranks(run: Run, run_dir: str, *, nproc: int, max_restarts: int, faults: tuple[str, ...] = ()) -> Answer:
    """Start the ranks, show a bar, and answer with what rank 0 said at the end."""
    from lakh.cli.progress import show_training
    from lakh.trainer.launch import launch

    for fault in faults:
        Fault.parse(fault)  # a misspelt fault is refused before anything starts
    ended = threading.Event()
    bar = threading.Thread(target=show_training, args=(console(), run_dir, run.train.steps, ended.is_set), daemon=True)
    bar.start()
    try:
        launched = launch(
            ["resume", run_dir],
            run_dir,
            ranks=nproc,
            max_restarts=max_restarts,
            first_only=[word for fault in faults for word in ("--fault", fault)],
        )
    finally:
        ended.set()
        bar.join(5.0)
    data = {**launched.result, "attempts": launched.attempts, "run_dir": run_dir}
    return Answer(data, table(["what", "value"], list(data.items())))


def _be_a_rank(run: Run, run_dir: str, faults: tuple[str, ...]) -> Answer:
    from lakh.trainer.orphan import die_with_launcher

    die_with_launcher()
    from lakh.trainer.loop import train as train_rank

    if os.environ["RANK"] == "0" and not storage.exists(storage.join(run_dir, "run.toml")):
        _prepare(run, run_dir)
    outcome = train_rank(
        run,
        run_dir,
        faults=[Fault.parse(text) for text in faults],
        restart_reason=os.environ.get("LAKH_RESTART_REASON", ""),
    )
    data: dict[str, Any] = {
        "steps": outcome.step,
        "tokens": outcome.tokens,
        "loss": outcome.loss,
        "val_loss": outcome.heldout_loss,
        "checkpoint": outcome.checkpoint,
    }
    return Answer(data, table(["what", "value"], list(data.items())))


def _prepare(run: Run, run_dir: str) -> None:
    """Write the complete settings, with an absolute data folder: a run must not depend on where it is resumed."""
    if storage.is_local(run.data.tokens):
        tokens = str(Path(run.data.tokens).absolute())
        run = config.from_dict(
            Run, {**config.to_dict(run), "data": {**config.to_dict(run.data), "tokens": tokens}}, origin="run"
        )
    storage.write_bytes(storage.join(run_dir, "run.toml"), config.to_toml(run).encode())

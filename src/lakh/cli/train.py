"""lakh train and lakh resume: start the ranks of a run here, or be one of them.

Called by a person, they start `--nproc` ranks and show a bar. Called by a launcher (RANK is set: torchrun, Slurm,
or our own), they are one rank.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import click

from lakh import storage
from lakh.cli.config import amounts
from lakh.cli.output import CommandResult, console, print_result, set_option, table
from lakh.errors import InfeasiblePlan, LakhError, UserError
from lakh.spec import Fault, Run, load_run
from lakh.trainer.run_folder import holding, record, require_run, with_absolute_paths

if TYPE_CHECKING:
    from lakh.planner.estimate import Estimate

__all__ = ["resume", "train"]

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
@click.option("--dry-run", is_flag=True, help="Print the plan, its memory per GPU and its step time, and stop.")
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
    """Train a run, here or as one rank of many.

    RUN is a recipe (recipes/laptop.py), a run.toml, or the name of a recipe that comes with lakh.
    """
    loaded = with_absolute_paths(load_run(run, sets))
    loaded.model.require_plain()
    run_dir = out or f"runs/{loaded.name}"
    if "RANK" in os.environ:
        return _be_a_rank(loaded, run_dir, faults)
    if dry_run:
        return _plan(loaded, nproc if nproc > 1 else loaded.mesh.ranks)
    _refuse_what_cannot_work(loaded, nproc, faults)
    with holding(run_dir) as lock:
        if storage.list_dir(storage.join(run_dir, "checkpoints")):
            todo = f"go on with: lakh resume {run_dir}, or choose another --out"
            raise UserError(run_dir, "holds a run already", todo)
        record(loaded, run_dir)
        return _run_ranks(loaded, run_dir, lock, nproc=nproc, max_restarts=max_restarts, faults=faults)


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
    """Go on with a run from its newest complete checkpoint.

    The number of ranks may differ from before: the data goes on where it stopped, in the same order.
    """
    require_run(run_dir)
    loaded = with_absolute_paths(load_run(run_dir, sets))
    if "RANK" in os.environ:
        return _be_a_rank(loaded, run_dir, faults)
    _refuse_what_cannot_work(loaded, nproc, faults)
    with holding(run_dir) as lock:
        return _run_ranks(loaded, run_dir, lock, nproc=nproc, max_restarts=max_restarts, faults=faults, sets=sets)


def _plan(run: Run, ranks: int) -> CommandResult:
    """What would be trained: counted, and estimated by the planner. A run that does not fit is refused."""
    from lakh.planner.estimate import estimate
    from lakh.spec.cuts import check
    from lakh.spec.placement import place_axes

    check(run, ranks)
    found = estimate(run, ranks)
    if not found.fits:
        raise _unfit(run, ranks, found)
    data = {
        **amounts(run, ranks),
        "placement": [
            f"{p.axis} over the {p.tier}: {p.reason}" for p in place_axes(run.mesh.resolve(ranks), run.cluster)
        ],
        "memory_bytes_per_gpu": round(found.memory_bytes["total"]),
        "memory_limit_bytes": round(found.memory_bytes["limit"]),
        "step_s": found.step_s,
        "step_s_low": found.error_bar["low_s"],
        "step_s_high": found.error_bar["high_s"],
        "tok_per_s": found.tok_per_s,
        "mfu": found.mfu,
        "binds": found.binds,
        "notes": found.notes,
    }
    shown = [(name, "; ".join(value) if isinstance(value, list) else value) for name, value in data.items()]
    return CommandResult(data, table(["what", "value"], shown, title="would train (simulated; nothing was started)"))


def _refuse_what_cannot_work(run: Run, ranks: int, faults: tuple[str, ...]) -> None:
    """In a moment, before ranks are started: misspelt faults, cuts that do not work, the memory, the data."""
    from lakh.spec.cuts import check
    from lakh.tokens.training_data import open_data

    for fault in faults:
        Fault.parse(fault)
    check(run, ranks)
    _refuse_what_cannot_fit(run, ranks)
    open_data(run)


def _refuse_what_cannot_fit(run: Run, ranks: int) -> None:
    """Before anything starts: weights, gradients and optimizer state are counted, not guessed, and must fit."""
    limit_GiB = run.cluster.gpu.memory_GiB
    states_GiB = run.memory_bytes(ranks)["states"] / 2**30
    if states_GiB <= limit_GiB:
        return
    from lakh.planner.estimate import estimate

    try:
        raise _unfit(run, ranks, estimate(run, ranks))
    except InfeasiblePlan:
        raise
    except LakhError:  # the planner knows no such cluster, but memory is memory
        found = f"weights, gradients and optimizer state take {states_GiB:.1f} GiB of {limit_GiB:g} GiB on each rank"
        raise InfeasiblePlan("memory of one GPU", found, "use more GPUs, or a smaller model") from None


def _unfit(run: Run, ranks: int, found: Estimate) -> InfeasiblePlan:
    names = {"micro_batch": "data.micro_batch", "shard": "mesh.dp_shard", "recompute": "train.recompute"}
    names |= {axis: f"mesh.{axis}" for axis in ("tp", "pp", "cp")}
    change = dict(found.nearest["change"]) if found.nearest else {}
    sets = [f"--set {names[key]}={value}" for key, value in change.items() if key in names]
    if "shard" in change:
        sets.append(f"--set mesh.dp_replicate={run.mesh.resolve(ranks).data_ranks // int(change['shard'])}")
    todo = _more_gpus(run, ranks) or "use more GPUs, or a smaller model"
    if found.nearest and sets:
        todo = f"the nearest that fits ({found.nearest['memory_bytes'] / 2**30:.1f} GiB): {' '.join(sets)}"
    limit_GiB = found.memory_bytes["limit"] / 2**30
    return InfeasiblePlan("memory of one GPU", f"{found.binds}; {limit_GiB:.1f} GiB can be used", todo)


def _more_gpus(run: Run, ranks: int) -> str:
    """What to do where the run fits on all GPUs of a node of its cluster; empty where it does not."""
    from lakh.planner.estimate import estimate

    node = run.cluster.node_size
    try:
        found = estimate(run, node) if node > ranks else None
    except LakhError:
        return ""
    if found is None or not found.fits:
        return ""
    return f"it fits on {node} GPUs ({found.memory_bytes['total'] / 2**30:.1f} GiB each): --nproc {node}"


def _run_ranks(
    run: Run,
    run_dir: str,
    lock: int,
    *,
    nproc: int,
    max_restarts: int,
    faults: tuple[str, ...],
    sets: tuple[str, ...] = (),
) -> CommandResult:
    """Start the ranks, show a bar, and answer with what rank 0 said at the end. `sets` are on top of run.toml."""
    from lakh.cli.progress import show_training
    from lakh.trainer.launch import can_lose_ranks, launch

    ended = threading.Event()
    bar = threading.Thread(target=show_training, args=(console(), run_dir, run.train.steps, ended.is_set), daemon=True)
    bar.start()
    try:
        launched = launch(
            ["resume", run_dir, *(word for item in sets for word in ("--set", item))],
            run_dir,
            ranks=nproc,
            max_restarts=max_restarts,
            keeps_open=(lock,),
            first_only=[word for fault in faults for word in ("--fault", fault)],
            may_lose=can_lose_ranks(run, nproc)[0],
        )
    finally:
        ended.set()
        bar.join(5.0)
    data = {**launched.result, "attempts": launched.attempts, "run_dir": run_dir}
    return CommandResult(data, table(["what", "value"], list(data.items())))


def _be_a_rank(run: Run, run_dir: str, faults: tuple[str, ...]) -> CommandResult:
    from lakh.trainer.memory import keep_freed_memory
    from lakh.trainer.orphan import die_with_launcher

    die_with_launcher()
    keep_freed_memory()
    from lakh.trainer.loop import train as train_rank

    with _held_by_this_rank(run_dir):
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
        "stream_sha256": outcome.stream_sha256,
        "goodput": outcome.goodput,
        "sent_bytes": outcome.sent_bytes,
        "checkpoint": outcome.checkpoint,
    }
    return CommandResult(data, table(["what", "value"], list(data.items())))


def _held_by_this_rank(run_dir: str) -> contextlib.AbstractContextManager[object]:
    """The run's folder, on rank 0; not where our own launcher holds it for all ranks."""
    is_first = os.environ["RANK"] == "0" and "LAKH_LAUNCHER_PID" not in os.environ
    return holding(run_dir) if is_first else contextlib.nullcontext()

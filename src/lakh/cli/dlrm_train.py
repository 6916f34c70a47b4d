"""lakh dlrm train and lakh dlrm demo: train a recommendation model."""

from __future__ import annotations

import shlex
from functools import partial
from typing import Any

import click

from lakh.cli.complete import complete_folders, complete_recipes
from lakh.cli.output import CommandResult, fact_rows, print_result, set_option, table, verbose_option
from lakh.cli.train import fault_option, nproc_option, restarts_option, show_progress
from lakh.errors import UserError
from lakh.spec import Run, load_run
from lakh.trainer.launch.local import train_here
from lakh.trainer.run_folder import with_absolute_paths

__all__ = ["demo", "train"]


@click.command()
@click.argument("run", shell_complete=complete_recipes)
@set_option
@click.option("--out", shell_complete=complete_folders, help="Folder of the run.  [default: runs/NAME]")
@nproc_option
@restarts_option
@fault_option
@verbose_option
@print_result
def train(
    run: str, sets: tuple[str, ...], out: str | None, nproc: int, max_restarts: int, faults: tuple[str, ...]
) -> CommandResult:
    """Train a recommendation model and measure its AUC.

    RUN is a recipe (dlrm.py:movielens, dlrm.py:mlperf) or a run.toml with workload = "dlrm". The AUC is that of the
    last 10 % of the samples at the step with the best AUC on the 10 % before.
    """
    loaded = with_absolute_paths(load_run(run, sets))
    if loaded.workload != "dlrm":
        raise UserError(run, f"has the workload {loaded.workload!r}", f"train it with: lakh train {run}")
    return _train(loaded, out or f"runs/{loaded.name}", nproc, max_restarts, faults)


@click.command()
@click.option(
    "--movielens", help="The wheel of recbole, or a folder with its ml-100k files  [default: synthetic clicks]"
)
@click.option("--dir", "folder", default="dlrm-demo", show_default=True, help="Folder of the run.")
@click.option("--steps", type=click.IntRange(min=20), default=200, show_default=True, help="Training steps.")
@verbose_option
@print_result
def demo(movielens: str | None, folder: str, steps: int) -> CommandResult:
    """Train a recommendation model on two ranks, one of which is killed on the way.

    The planner shards the tables over both ranks; the launcher restarts them from the last checkpoint.
    """
    sets = (f"train.steps={steps}", f"train.eval_every={steps // 5}", f"checkpoint.every={steps // 10}")
    if movielens:
        run = load_run("dlrm.py:movielens", (*sets, f"dlrm.dataset={movielens}"))
    else:
        run = load_run("dlrm.py:mlperf", sets)
    fault = f"kill(rank=1, step={steps // 2 + 3})"
    return _train(with_absolute_paths(run), f"{folder}/{run.name}", 2, 3, (fault,))


def _train(run: Run, run_dir: str, nproc: int, max_restarts: int, faults: tuple[str, ...]) -> CommandResult:
    from lakh.workloads.dlrm.result import training_result

    watch = partial(show_progress, run_dir, run.train.steps)
    trained = train_here(run, run_dir, nproc=nproc, max_restarts=max_restarts, faults=faults, watch=watch)
    data = {**trained, **training_result(run, run_dir, nproc)}
    return CommandResult(
        data,
        lambda: fact_rows(_rows(data)),
        details=lambda: table(["measurement", "value"], list(data.items())),
        next_commands=[f"lakh dashboard {shlex.quote(run_dir)}"],
    )


def _rows(data: dict[str, Any]) -> list[tuple[str, Any]]:
    wire = ", ".join(f"{name} {value:,}" for name, value in data["bytes_on_wire"].items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in data["plan"]["kinds"].items())
    restarts = data.get("attempts", 1) - 1
    return [
        ("trained", f"{data['steps']:,} steps, {data['tokens']:,} samples"),
        ("loss", f"{data['loss']:.4f}"),
        ("test AUC", None if data["auc"] is None else f"{data['auc']:.4f} at step {data['best_step']:,}"),
        ("validation", f"loss {data['val_loss']:.4f}, AUC {data['validation_auc']:.4f}"),
        ("bytes on the network per step", wire or None),
        ("shards", kinds),
        ("rows found in caches", None if data["cache_hit_rate"] is None else f"{data['cache_hit_rate']:.1%}"),
        ("restarts", restarts or None),
        ("checkpoint", data["checkpoint"]),
    ]

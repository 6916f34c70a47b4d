"""A run on this machine, from its settings to its result: check, lock the folder, start the ranks, wait.

`lakh train`, `lakh resume` and the Python API call these two functions. Independent of torch: the ranks import it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager

from lakh.errors import UserError
from lakh.spec import Run, load_run
from lakh.trainer.launch.launcher import launch
from lakh.trainer.launch.restart_plan import first_plan, plan_restart
from lakh.trainer.preflight import check_run
from lakh.trainer.run_folder import (
    has_checkpoints,
    lock_run_folder,
    refuse_other_files,
    require_run,
    with_absolute_paths,
    write_settings,
)

__all__ = ["Watch", "resume_here", "train_here"]

Watch = Callable[[], AbstractContextManager[Callable[[str], None]]]
"""Shows a run while its ranks work. Entered when the folder is locked, so that another process's run is not shown;
yields a function that is told what happens after a stop request."""


@contextlib.contextmanager
def _unwatched() -> Iterator[Callable[[str], None]]:
    yield lambda text: None


def train_here(
    run: Run,
    run_dir: str,
    *,
    nproc: int = 1,
    max_restarts: int = 3,
    faults: Sequence[str] = (),
    watch: Watch = _unwatched,
    also_written: Collection[str] = (),
) -> dict[str, object]:
    """Start a new run in `run_dir` with `nproc` ranks. Returns what rank 0 reports at the end.

    `also_written`: names in `run_dir` that the caller has written for this run.
    """
    run = with_absolute_paths(run)
    run.model.require_trainable()
    check_run(run, nproc, tuple(faults))
    refuse_other_files(run_dir, also_written=also_written)
    with lock_run_folder(run_dir, timeout_s=0.0) as lock:
        if has_checkpoints(run_dir):
            todo = f"continue it with: lakh resume {run_dir}, or choose another --out"
            raise UserError(run_dir, "already holds a run", todo)
        write_settings(run, run_dir)
        return _run_ranks(run, run_dir, lock, nproc, max_restarts, faults, (), watch)


def resume_here(
    run_dir: str,
    sets: Sequence[str] = (),
    *,
    nproc: int = 1,
    max_restarts: int = 3,
    faults: Sequence[str] = (),
    watch: Watch = _unwatched,
) -> dict[str, object]:
    """Continue a run from its newest complete checkpoint; `sets` are applied to its settings."""
    require_run(run_dir)
    run = with_absolute_paths(load_run(run_dir, tuple(sets)))
    check_run(run, nproc, tuple(faults))
    with lock_run_folder(run_dir) as lock:
        return _run_ranks(run, run_dir, lock, nproc, max_restarts, faults, sets, watch)


def _run_ranks(
    run: Run,
    run_dir: str,
    lock: int,
    nproc: int,
    max_restarts: int,
    faults: Sequence[str],
    sets: Sequence[str],
    watch: Watch,
) -> dict[str, object]:
    with watch() as on_stop:
        launched = launch(
            ["resume", run_dir, *(argument for item in sets for argument in ("--set", item))],
            run_dir,
            plan=first_plan(run, nproc),
            replan=lambda before, devices: plan_restart(run, before, devices),
            max_restarts=max_restarts,
            inherited_fds=(lock,),
            first_attempt_arguments=[argument for fault in faults for argument in ("--fault", fault)],
            peer_timeout_s=run.train.peer_timeout_s,
            on_stop=on_stop,
        )
    return {**launched.result, "attempts": launched.attempts, "run_dir": run_dir}

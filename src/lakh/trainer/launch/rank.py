"""Be one rank of a run: the entry point that lakh's launcher, torchrun and Slurm start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lakh.child_process import die_with_parent
from lakh.errors import Interrupted
from lakh.spec import Fault, Run
from lakh.trainer.run_folder import lock_run_folder
from lakh.trainer.tuning.memory import keep_freed_memory

if TYPE_CHECKING:
    from lakh.trainer.loop import TrainingResult

__all__ = ["describe_result", "is_rank", "run_rank"]

LAUNCHER_PID = "LAKH_LAUNCHER_PID"


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ


def run_rank(run: Run, run_dir: str, faults: Sequence[str]) -> dict[str, Any]:
    """Train as one rank. Returns the result as plain data."""
    launcher_pid = os.environ.get(LAUNCHER_PID)
    if launcher_pid is not None:  # torchrun and Slurm end their ranks themselves
        die_with_parent(int(launcher_pid))
    keep_freed_memory()
    from lakh.trainer.loop import train  # imports torch, after keep_freed_memory

    locks = os.environ["RANK"] == "0" and launcher_pid is None  # lakh's launcher holds the lock for its ranks
    try:
        with lock_run_folder(run_dir) if locks else contextlib.nullcontext():
            result = train(
                run,
                run_dir,
                faults=[Fault.parse(text) for text in faults],
                restart_reason=os.environ.get("LAKH_RESTART_REASON", ""),
                detected_s=float(os.environ.get("LAKH_RESTART_DETECTED_S") or 0.0) or None,
            )
    except KeyboardInterrupt:  # before the loop listens for signals, or the second one
        found, todo = "stopped without a checkpoint of this step", f"continue with: lakh resume {run_dir}"
        raise Interrupted(f"rank {os.environ['RANK']}", found, todo) from None
    return describe_result(result)


def describe_result(result: TrainingResult) -> dict[str, Any]:
    """What `lakh train --json` prints of it."""
    return {
        "steps": result.step,
        "tokens": result.tokens,
        "loss": result.loss,
        "val_loss": result.heldout_loss,
        "stream_sha256": result.stream_sha256,
        "goodput": result.goodput,
        "sent_bytes": result.sent_bytes,
        "checkpoint": result.checkpoint,
    }

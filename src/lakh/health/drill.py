"""A drill: train a run twice, once undisturbed and once with a fault, and measure detection and recovery.

    kill, stop                        SIGKILL or SIGSTOP of one rank, at an exact step
    kill-all, link-cut, disk-full ... faults from outside (lakh.health.faults.job), once or several times
    the name of a health check        the agent finds its injected fault and drains the node; the run is resumed

Both runs are `lakh train` processes, and every figure comes from their events and results.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakh import events
from lakh.errors import DataError, PeerTimeout, UserError
from lakh.events import (
    CheckpointFailed,
    CheckpointSkipped,
    Event,
    FaultInjected,
    RanksLost,
    Restarted,
    StepDone,
    StorageDelayed,
)
from lakh.health.checks import CHECKS
from lakh.health.faults.job import (
    JOB_FAULTS,
    RUN_TIMEOUT_S,
    STORE_FAULTS,
    TrainingJob,
    lakh_command,
    object_store_of,
    run_lakh,
)
from lakh.spec import load_run

__all__ = ["RANK_FAULTS", "DrillResult", "measure_drill", "run_drill"]

RANK_FAULTS = ("kill", "stop")
POLL_S = 0.2


@dataclass(frozen=True)
class DrillResult:
    fault: str
    detect_s: float | None
    """From the fault until the launcher, the other ranks or the agent noticed it."""
    next_step_s: float | None
    """From the fault until the next step was done; the longest of all repeats."""
    next_steps_s: tuple[float, ...]
    """The same for each repeat."""
    restarts: int
    samples_lost: int
    samples_repeated: int
    loss_gap: float
    """Difference of the last loss to that of the undisturbed run."""


def run_drill(
    run: str,
    fault: str,
    folder: Path,
    *,
    sets: Sequence[str] = (),
    nproc: int = 2,
    at_step: int = 5,
    repeat: int = 1,
    seed: int = 0,
    calm: dict[str, Any] | None = None,
) -> DrillResult:
    """Drill one fault on the ranks of a run; both runs are written below `folder`.

    The fault is injected at step `at_step`, and `repeat` - 1 more times, each `at_step` steps after the recovery.
    `calm`: what an undisturbed run with the same settings has reported, if there was one.
    """
    checks = {check.name for check in CHECKS}
    if fault not in {*JOB_FAULTS, *checks}:
        names = ", ".join((*JOB_FAULTS, *(check.name for check in CHECKS)))
        raise UserError(f"--fault {fault}", "no such fault", f"choose from: {names}")
    url = load_run(run, tuple(sets)).checkpoint.url
    if fault in STORE_FAULTS and not url.startswith("s3://"):
        found = f"the run writes its checkpoints to {url or 'its folder'}"
        raise UserError(f"--fault {fault}", found, "set checkpoint.url = s3://..., and AWS_ENDPOINT_URL")
    settings = [word for item in sets for word in ("--set", item)]
    train = ["train", run, *settings]
    ranks = ["--nproc", str(nproc)]
    elsewhere = ["--set", f"checkpoint.url={url}/calm"] if url else []
    calm = calm or run_lakh([*train, *ranks, *elsewhere, "--out", str(folder / "calm")])
    faulty_dir = folder / "faulty"
    if fault in RANK_FAULTS and repeat == 1:
        planned = f"{fault}(rank={nproc - 1}, step={at_step})"
        faulty = run_lakh([*train, *ranks, "--out", str(faulty_dir), "--fault", planned])
        return measure_drill(fault, events.read(faulty_dir), calm, faulty)
    if fault in checks:
        injected_s, detected_s = _drain([*train, *ranks], fault, faulty_dir, at_step)
        faulty = run_lakh(["resume", str(faulty_dir), *ranks])
        return measure_drill(fault, events.read(faulty_dir), calm, faulty, [injected_s], detected_s=detected_s)
    with object_store_of(url) as store, TrainingJob(train, faulty_dir, nproc=nproc, store=store) as job:
        dice, injected, recovered_s, step = random.Random(seed), [], 0.0, 0
        for _ in range(repeat):
            job.wait_for_step(step + at_step, after_s=recovered_s)
            injected.append(job.inject(fault, dice))
            recovered_s = job.wait_for_step(0, after_s=injected[-1])
            step = next(event.step for event in job.steps() if event.time_s >= recovered_s)
        faulty = job.result()
    return measure_drill(fault, events.read(faulty_dir), calm, faulty, injected)


def measure_drill(
    fault: str,
    found: Sequence[Event],
    calm: dict[str, Any],
    faulty: dict[str, Any],
    injected: Sequence[float] = (),
    *,
    detected_s: float | None = None,
) -> DrillResult:
    """The result of a drill from the events of the faulty run and from what both runs reported.

    `injected`: when faults were injected from outside; by default the events say so. Raises DataError if the runs have
    not read the same sequences: then their hashes of the data differ.
    """
    injected = injected or [event.time_s for event in found if isinstance(event, FaultInjected)][:1]
    if not injected:
        raise DataError(f"drill {fault}", "the fault was never injected", "choose an earlier step")
    injected_s = injected[0]
    after = [event for event in found if event.time_s >= injected_s]
    restarts = [event for event in after if isinstance(event, Restarted)]
    lost = [event for event in after if isinstance(event, RanksLost)]
    if detected_s is None and lost:
        detected_s = lost[0].time_s - lost[0].seconds
    if detected_s is None and restarts:
        detected_s = restarts[0].detected_s
    if detected_s is None:
        reports = (CheckpointFailed, CheckpointSkipped, *((StorageDelayed,) if fault in STORE_FAULTS else ()))
        noticed = [event.time_s for event in after if isinstance(event, reports)]
        detected_s = min(noticed, default=None)
    steps = [event.time_s for event in after if isinstance(event, StepDone)]
    begins = [detected_s or injected_s, *injected[1:]]
    next_steps_s = tuple(
        min(time_s for time_s in steps if time_s > begin) - fault_s
        for begin, fault_s in zip(begins, injected, strict=True)
        if any(time_s > begin for time_s in steps)
    )
    if calm["stream_sha256"] != faulty["stream_sha256"]:
        found_text = "the runs have read different sequences: samples were lost or repeated"
        raise DataError(f"drill {fault}", found_text, "report it: this is a bug in lakh")
    return DrillResult(
        fault=fault,
        detect_s=max(0.0, detected_s - injected_s) if detected_s is not None else None,
        next_step_s=max(next_steps_s, default=None),
        next_steps_s=next_steps_s,
        restarts=len(restarts),
        samples_lost=0,
        samples_repeated=0,
        loss_gap=abs(float(calm["loss"]) - float(faulty["loss"])),
    )


def _drain(train: Sequence[str], fault: str, run_dir: Path, at_step: int) -> tuple[float, float]:
    """Start the run, and at `at_step` an agent with the fault. Returns when it was injected and when it was found."""
    with subprocess.Popen(lakh_command([*train, "--out", str(run_dir)]), stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for_step(run_dir, at_step, process)
            injected_s = time.time()
            check = ["health", "agent", "--inject", fault, "--every", "0.1", "--drain-pid", str(process.pid)]
            done = subprocess.run(lakh_command([*check, "--rounds", "3"]), capture_output=True, timeout=RUN_TIMEOUT_S)
            detected_s = time.time()
            if done.returncode != 75:
                raise UserError(f"--fault {fault}", "does not drain a node: it is only watched", "choose another check")
            process.wait(RUN_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()
    return injected_s, detected_s


def _wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if any(isinstance(event, StepDone) and event.step >= step for event in events.read(run_dir, rank=0)):
            return
        if process.poll() is not None:
            raise UserError(
                "lakh health drill", f"the run ended before step {step}", "give it more steps (train.steps)"
            )
        time.sleep(POLL_S)
    raise PeerTimeout("lakh health drill", f"step {step} was not done within {RUN_TIMEOUT_S:g} s", "use a smaller run")

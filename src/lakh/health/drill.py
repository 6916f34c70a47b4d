"""A drill: train a run twice, once undisturbed and once with a fault, and measure detection and recovery.

    kill    SIGKILL of one rank         stop    SIGSTOP of one rank, until its peers give up
    the name of a health check          the agent finds its injected fault and drains the node; the run is resumed

Both runs are `lakh train` processes, and every figure comes from their events and results.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakh import events
from lakh.errors import DataError, LakhError, PeerTimeout, UserError, from_dict
from lakh.events import Event, FaultInjected, RanksLost, Restarted, StepDone
from lakh.health.checks import CHECKS

__all__ = ["RANK_FAULTS", "DrillResult", "measure_drill", "run_drill"]

RANK_FAULTS = ("kill", "stop")
RUN_TIMEOUT_S = 1800.0
POLL_S = 0.2


@dataclass(frozen=True)
class DrillResult:
    fault: str
    detect_s: float | None
    """From the fault until the launcher, the other ranks or the agent noticed it."""
    next_step_s: float | None
    """From the fault until the next step was done."""
    restarts: int
    samples_lost: int
    samples_repeated: int
    loss_gap: float
    """Difference of the last loss to that of the undisturbed run."""


def run_drill(
    run: str, fault: str, folder: Path, *, sets: Sequence[str] = (), nproc: int = 2, at_step: int = 5
) -> DrillResult:
    """Drill one fault on the ranks of a run; both runs are written below `folder`."""
    settings = [word for item in sets for word in ("--set", item)]
    train = ["train", run, *settings, "--nproc", str(nproc)]
    calm = _lakh([*train, "--out", str(folder / "calm")])
    faulty_dir = folder / "faulty"
    if fault in RANK_FAULTS:
        planned = f"{fault}(rank={nproc - 1}, step={at_step})"
        faulty = _lakh([*train, "--out", str(faulty_dir), "--fault", planned])
        return measure_drill(fault, events.read(faulty_dir), calm, faulty)
    if fault not in {check.name for check in CHECKS}:
        names = ", ".join((*RANK_FAULTS, *(check.name for check in CHECKS)))
        raise UserError(f"--fault {fault}", "no such fault", f"choose from: {names}")
    injected_s, detected_s = _drain(train, fault, faulty_dir, at_step)
    faulty = _lakh(["resume", str(faulty_dir), "--nproc", str(nproc)])
    return measure_drill(fault, events.read(faulty_dir), calm, faulty, injected_s=injected_s, detected_s=detected_s)


def measure_drill(
    fault: str,
    found: Sequence[Event],
    calm: dict[str, Any],
    faulty: dict[str, Any],
    *,
    injected_s: float | None = None,
    detected_s: float | None = None,
) -> DrillResult:
    """The result of a drill from the events of the faulty run and from what both runs reported.

    Raises DataError if the runs have not read the same sequences: then their hashes of the data differ.
    """
    if injected_s is None:
        injected_s = next((event.time_s for event in found if isinstance(event, FaultInjected)), None)
    if injected_s is None:
        raise DataError(f"drill {fault}", "the fault was never injected", "choose an earlier step")
    after = [event for event in found if event.time_s >= injected_s]
    restarts = [event for event in after if isinstance(event, Restarted)]
    lost = [event for event in after if isinstance(event, RanksLost)]
    if detected_s is None and lost:
        detected_s = lost[0].time_s - lost[0].seconds
    if detected_s is None and restarts:
        detected_s = restarts[0].detected_s
    steps = [
        event.time_s for event in after if isinstance(event, StepDone) and event.time_s > (detected_s or injected_s)
    ]
    if calm["stream_sha256"] != faulty["stream_sha256"]:
        found_text = "the runs have read different sequences: samples were lost or repeated"
        raise DataError(f"drill {fault}", found_text, "report it: this is a bug in lakh")
    return DrillResult(
        fault=fault,
        detect_s=max(0.0, detected_s - injected_s) if detected_s is not None else None,
        next_step_s=min(steps) - injected_s if steps else None,
        restarts=len(restarts),
        samples_lost=0,
        samples_repeated=0,
        loss_gap=abs(float(calm["loss"]) - float(faulty["loss"])),
    )


def _drain(train: Sequence[str], fault: str, run_dir: Path, at_step: int) -> tuple[float, float]:
    """Start the run, and at `at_step` an agent with the fault. Returns when it was injected and when it was found."""
    with subprocess.Popen(_command([*train, "--out", str(run_dir)]), stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for_step(run_dir, at_step, process)
            injected_s = time.time()
            check = ["health", "agent", "--inject", fault, "--every", "0.1", "--drain-pid", str(process.pid)]
            done = subprocess.run(_command([*check, "--rounds", "3"]), capture_output=True, timeout=RUN_TIMEOUT_S)
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


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "lakh", *arguments, "--json"]


def _lakh(arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON document that a command prints; raises the error that it reports."""
    try:
        done = subprocess.run(_command(arguments), stdout=subprocess.PIPE, timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        where = f"lakh {arguments[0]}"
        raise PeerTimeout(where, f"did not end within {RUN_TIMEOUT_S:g} s", "use a run with fewer steps") from None
    lines = done.stdout.decode(errors="replace").splitlines()
    document: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if done.returncode != 0:
        error = document.get("error")
        raise from_dict(error) if error else LakhError(f"lakh {arguments[0]}", "failed", "see what it printed")
    return document

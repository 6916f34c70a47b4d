"""Kill one of several replicas and start it again, with lakh and with torchft; times from what each system records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from bench.faults.job import as_options, settings
from bench.harness import BenchRow
from bench.harness.processes import module_command, module_environment
from bench.harness.rounds import SystemFailed
from lakh import events
from lakh.events import Event, FaultInjected, RanksJoined, RanksLost, RunStarted, StepDone
from lakh.health.faults.job import run_lakh

__all__ = ["survive_with_lakh", "survive_with_torchft"]

VICTIM = 2
TIMEOUT_S = 600.0
POLL_S = 0.02


def survive_with_lakh(folder: Path, *, replicas: int, steps: int, at_step: int) -> BenchRow:
    options = as_options(settings(steps, "train.backend=c3", f"mesh.dp_replicate={replicas}"))
    train = ["train", "laptop", *options, "--nproc", str(replicas)]
    calm = run_lakh([*train, "--out", str(folder / "calm")])
    run_dir = folder / "faulty"
    faulty = run_lakh([*train, "--out", str(run_dir), "--fault", f"kill(rank={VICTIM}, step={at_step})"])
    if faulty["stream_sha256"] != calm["stream_sha256"]:
        raise SystemFailed("samples were lost or repeated: the hashes of the streams differ")
    return _times(events.read(run_dir), replicas) | {"samples_lost": 0, "loss_gap": abs(faulty["loss"] - calm["loss"])}


def _times(found: list[Event], replicas: int) -> BenchRow:
    killed_s = next(event.time_s for event in found if isinstance(event, FaultInjected))
    after = [event for event in found if event.time_s > killed_s and event.rank == 0]
    lost = next((event for event in after if isinstance(event, RanksLost)), None)
    if lost is None:
        raise SystemFailed("the others did not continue")
    steps = [event.time_s for event in after if isinstance(event, StepDone) and event.time_s > lost.time_s]
    joined = next((event for event in after if isinstance(event, RanksJoined)), None)
    full = [event.time_s for event in after if isinstance(event, RunStarted) and event.world == replicas]
    full_size_s = min((time_s for time_s in steps if full and time_s > full[-1]), default=None)
    return {
        "detect_s": lost.time_s - lost.seconds - killed_s,
        "next_step_s": min(steps) - killed_s,
        "full_size_s": full_size_s - killed_s if joined is not None and full_size_s is not None else None,
    }


def survive_with_torchft(folder: Path, *, replicas: int, steps: int, at_step: int) -> BenchRow:
    folder.mkdir(parents=True)
    lighthouse = subprocess.Popen(
        module_command("bench.faults.torchft_replica", "lighthouse", replicas - 1),
        env=module_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        assert lighthouse.stdout is not None
        address = lighthouse.stdout.readline().strip()
        if not address:
            raise SystemFailed("torchft's lighthouse did not start")

        def start(replica: int) -> None:
            command = module_command("bench.faults.torchft_replica", address, replica, replicas, steps, folder)
            with (folder / f"{replica}.log").open("ab") as log:
                processes[replica] = subprocess.Popen(command, env=module_environment(), stdout=log, stderr=log)

        for replica in range(replicas):
            start(replica)
        _wait(lambda: _done(folder, 0, after_s=0.0, participants=replicas, step=at_step) is not None, processes, folder)
        os.kill(processes[VICTIM].pid, signal.SIGKILL)
        killed_s = time.time()
        processes[VICTIM].wait()
        start(VICTIM)
        _wait(lambda: _done(folder, 0, after_s=killed_s, participants=replicas) is not None, processes, folder)
        next_s = _done(folder, 0, after_s=killed_s, participants=0)
        full_s = _done(folder, 0, after_s=killed_s, participants=replicas)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        lighthouse.kill()
        lighthouse.wait()
    assert next_s is not None
    assert full_s is not None
    return {"next_step_s": next_s - killed_s, "full_size_s": full_s - killed_s}


def _done(folder: Path, replica: int, *, after_s: float, participants: int, step: int = 0) -> float | None:
    """When a replica committed a step with at least this many participants after a time."""
    file = folder / f"{replica}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    times = [
        line["time_s"]
        for line in lines
        if line["time_s"] > after_s and line["participants"] >= participants and line["step"] >= step
    ]
    return min(times, default=None)


def _wait(condition: Callable[[], bool], processes: dict[int, subprocess.Popen[bytes]], folder: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if processes[0].poll() is not None or time.monotonic() > deadline_s:
            raise SystemFailed((folder / "0.log").read_text(errors="replace")[-300:] or "no step in time")
        time.sleep(POLL_S)

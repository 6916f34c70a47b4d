"""lakh bench neighbour: the step time of a training run alone, and beside busy processes on the same cores.

A busy process takes its share of the cores. A step should not slow down by more than that; it did by ten times when
OpenMP threads spun while they waited (docs/how-to/training.md).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from bench.harness import out_option, result
from bench.harness.processes import ROOT
from lakh import events
from lakh.cli.output import CommandResult, console, print_result
from lakh.errors import PeerLost

__all__ = ["neighbour"]

TOKENS = ROOT / "tests" / "golden" / "tokens-1"
WARM_UP_STEPS = 3
TIMEOUT_S = 600.0
SETTINGS = (
    f"data.tokens={TOKENS}",
    "data.sequence=16",
    "data.batch=128",
    "data.micro_batch=64",
    "optim.warmup_steps=1",
    "train.eval_every=0",
    "train.device=cpu",
    "checkpoint.every=0",
)
COLUMNS = ("ranks", "neighbours", "step_s", "ratio", "failed")


@click.command()
@click.option("--ranks", default="1,2", show_default=True, help="Comma-separated numbers of ranks.")
@click.option("--neighbours", type=click.IntRange(min=1), default=1, show_default=True, help="Busy processes.")
@click.option("--steps", type=click.IntRange(min=5), default=15, show_default=True, help="Steps of each run.")
@out_option
@print_result
def neighbour(ranks: str, neighbours: int, steps: int, out: str | None) -> CommandResult:
    """Measure training steps beside a busy process.

    Trains the recipe "laptop" alone and beside busy processes; `ratio` is the median step beside them over the median
    step alone. Use an idle machine.
    """
    rows = []
    with console().status("measuring") as status:
        for count in map(int, ranks.split(",")):
            alone_s = 0.0
            for busy in (0, neighbours):
                status.update(f"{count} rank(s), {busy} busy process(es)")
                with _busy_processes(busy):
                    step_s = _median_step_s(count, steps)
                alone_s = alone_s or step_s
                rows.append({"ranks": count, "neighbours": busy, "step_s": step_s, "ratio": step_s / alone_s})
    return result("neighbour", rows, out, columns=COLUMNS)


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _median_step_s(ranks: int, steps: int) -> float:
    with tempfile.TemporaryDirectory(prefix="lakh-neighbour-") as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "lakh", "train", "laptop", "--out", str(run_dir), "--nproc", str(ranks)]
        for setting in (*SETTINGS, f"train.steps={steps}"):
            command += ["--set", setting]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            error = json.loads(done.stdout.splitlines()[-1])["error"] if done.stdout else {"found": done.stderr[-200:]}
            raise PeerLost("lakh train laptop", str(error["found"]), "run it alone to see why")
        found = [event.step_s for event in events.read(run_dir, rank=0) if isinstance(event, events.StepDone)]
    return statistics.median(found[WARM_UP_STEPS:])

"""lakh bench dashboard: from opening a large run to its curves, and to all of its events."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.dashboard.synthetic_events import write_run
from bench.harness import BenchRow, out_option, result
from lakh.cli.output import CommandResult, console, print_result
from lakh.dashboard.page import as_json
from lakh.dashboard.runs import RunCollection

__all__ = ["bench_dashboard", "dashboard"]

SHOWN = ("steps", "ranks", "events_MB", "open_s", "open_cpu_s", "page_kB", "read_s", "memory_MB")
COLUMNS = {name: name for name in SHOWN}
REFRESH_S = 0.25
"""What the server reads between two answers."""
MEASURE_TIMEOUT_S = 900.0


@click.command("dashboard")
@click.option("--steps", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Steps of the run.")
@click.option("--ranks", type=click.IntRange(min=1), default=1_024, show_default=True, help="Ranks of the run.")
@click.option("--folder", type=click.Path(file_okay=False), help="Where to write; a temporary folder by default.")
@out_option
@print_result
def dashboard(steps: int, ranks: int, folder: str | None, out: str | None) -> CommandResult:
    """Measure how long the dashboard takes to open a large run."""
    with console().status("writing events") as status, tempfile.TemporaryDirectory(dir=folder) as where:
        size_bytes = write_run(Path(where) / "run", steps=steps, ranks=ranks)
        status.update("reading")
        command = [sys.executable, "-m", "bench.dashboard.command", str(Path(where) / "run")]  # memory of its own
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=MEASURE_TIMEOUT_S, check=True)
    row = {"system": "lakh", "steps": steps, "ranks": ranks, "events_MB": round(size_bytes / 1e6, 1)}
    rows: list[BenchRow] = [row | json.loads(done.stdout)]
    return result("dashboard", rows, out, columns=COLUMNS, peer="none: it reads lakh's own events")


def bench_dashboard(run_dir: Path) -> dict[str, float]:
    """Seconds until the first data that covers the whole run, by the clock and of the CPU, and until all is read."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    runs = RunCollection(str(run_dir))
    more = runs.refresh(REFRESH_S)
    text = as_json(runs.data())
    open_s, open_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    while more:
        more = runs.refresh(REFRESH_S)
    read_s = time.monotonic() - began_s
    memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shown = {"open_s": open_s, "open_cpu_s": open_cpu_s, "page_kB": len(text) / 1e3, "read_s": read_s}
    shown["memory_MB"] = memory_bytes / 1e6
    return {name: round(value, 2) for name, value in shown.items()}


if __name__ == "__main__":
    print(json.dumps(bench_dashboard(Path(sys.argv[1]))))

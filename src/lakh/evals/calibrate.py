"""The CPU limit of each problem, from what its reference solution needs on this machine.

A fixed number of seconds is wrong twice: too long for the endless loops of a weak model, too short for the few problems
whose own solution is slow. The limit is the first of STEPS_S that is ten times the reference's CPU time: coarse steps,
so that noise in the measurement rarely changes it. What was used is part of the protocol, and a result is reproduced
with the limits it was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from lakh.evals.sandbox import Sandbox
from lakh.evals.task import Problem, Task
from lakh.evals.verdict import Limits, Verdict

__all__ = ["FACTOR", "STEPS_S", "calibrate", "cpu_limit", "with_cpu"]

FACTOR = 10
STEPS_S = (3, 6, 12, 24, 48, 96, 192)
WALL_START_S, WALL_PER_CPU = 60.0, 20.0  # a backstop that holds on a machine with twenty programs per core


def cpu_limit(reference: Verdict | None, default_s: int) -> tuple[int, str]:
    """Seconds, and why."""
    if reference is None or not reference.passed:
        return default_s, "no reference that passes: the default"
    wanted_s = FACTOR * reference.cpu_s
    step_s = next((step for step in STEPS_S if step >= wanted_s), STEPS_S[-1])
    return step_s, f"first step above {FACTOR} x {reference.cpu_s:.2f} s of the reference"


def with_cpu(limits: Limits, cpu_s: int) -> Limits:
    return replace(limits, cpu_s=cpu_s, wall_s=max(limits.wall_s, WALL_START_S + WALL_PER_CPU * cpu_s))


def calibrate(
    task: Task,
    problems: Sequence[Problem],
    sandbox: Sandbox,
    *,
    workers: int,
    progress: Callable[[int], None] | None = None,
) -> Mapping[str, int]:
    """Problem id -> CPU seconds."""
    longest = with_cpu(task.limits, STEPS_S[-1])

    def one(problem: Problem) -> Verdict | None:
        if not problem.canonical:
            return None
        built = task.build(problem, problem.canonical)
        return None if isinstance(built, Verdict) else sandbox.run(built, longest)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="lakh-calibrate")
    try:
        limits = {}
        for done, (problem, verdict) in enumerate(zip(problems, pool.map(one, problems), strict=True), start=1):
            limits[problem.id] = cpu_limit(verdict, task.limits.cpu_s)[0]
            if progress:
                progress(done)
        return limits
    except BaseException:
        sandbox.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

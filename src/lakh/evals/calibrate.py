"""The CPU limit of each problem, from what its reference solution needs on this machine.

A fixed number of seconds is wrong twice: too long for the endless loops of a weak model, too short for the few problems
whose own solution is slow. The limit is the first of STEPS_S that is ten times the reference's CPU time: coarse steps,
so that noise in the measurement rarely changes it. What was used is part of the protocol, and a result is reproduced
with the limits it was made with.

What references need is measured once on a machine and kept (calibration_cache.py). A later run asks only how fast the
machine is today (`probe_s`): slower, and the limits grow with it; much slower or faster, and all is measured again.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from lakh.evals.calibration_cache import CachedCalibration, key_of, read, text_of, write
from lakh.evals.sandbox import Sandbox
from lakh.evals.task import Problem, Task
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict

__all__ = ["FACTOR", "STEPS_S", "Calibration", "calibrate", "cpu_limit", "probe_s", "slowdown_since", "with_cpu"]

FACTOR = 10
STEPS_S = (3, 6, 12, 24, 48, 96, 192)
WALL_START_S, WALL_PER_CPU = 60.0, 20.0  # a backstop that holds on a machine with twenty programs per core

KEPT_DAYS = 30
NOISE = 1.25  # the probe was seen 10 % apart on an idle machine and a loaded one
OTHER_MACHINE = 2.0  # so much slower or faster, and what was measured then says little

PROBE_TRIES, PROBE_ROUNDS = 3, 8000


@dataclass(frozen=True)
class Calibration:
    reference_s: Mapping[str, float | None]
    """Problem id -> CPU seconds of its reference; None where there is none that passes."""
    measured_on: str
    slowdown: float = 1.0
    """How much slower the machine is than when that was measured, where it is more than noise."""

    def limits(self, default_s: int) -> dict[str, int]:
        """Problem id -> CPU limit."""
        return {
            name: cpu_limit(None if used_s is None else used_s * self.slowdown, default_s)[0]
            for name, used_s in self.reference_s.items()
        }

    def __str__(self) -> str:
        """Equal for runs that rest on the same measurement, whether it was made for them or kept."""
        named = hashlib.sha256(json.dumps(dict(sorted(self.reference_s.items()))).encode()).hexdigest()[:12]
        slower = f", {self.slowdown:.2f} times slower since" if self.slowdown > 1 else ""
        return f"{named} of {self.measured_on}{slower}"


def cpu_limit(reference_s: float | None, default_s: int) -> tuple[int, str]:
    """Seconds, and why. `reference_s` is None where no reference passes."""
    if reference_s is None:
        return default_s, "no reference that passes: the default"
    wanted_s = FACTOR * reference_s
    step_s = next((step for step in STEPS_S if step >= wanted_s), STEPS_S[-1])
    return step_s, f"first step above {FACTOR} x {reference_s:.2f} s of the reference"


@functools.lru_cache(maxsize=256)
def with_cpu(limits: SandboxLimits, cpu_s: int) -> SandboxLimits:
    return replace(limits, cpu_s=cpu_s, wall_s=max(limits.wall_s, WALL_START_S + WALL_PER_CPU * cpu_s))


def slowdown_since(kept: CachedCalibration, now_probe_s: float, today: datetime.date) -> tuple[float | None, str]:
    """By what to stretch what was measured then, or None where it is no use any more; and why."""
    age_days = (today - kept.measured_on).days
    if not 0 <= age_days <= KEPT_DAYS:
        return None, f"{age_days} days old"
    ratio = now_probe_s / kept.probe_s
    if not 1 / OTHER_MACHINE <= ratio <= OTHER_MACHINE:
        return None, f"the machine takes {ratio:.2f} times as long as then"
    if ratio <= NOISE:
        return 1.0, f"the machine takes {ratio:.2f} times as long as then: no more than noise"
    return ratio, f"the machine takes {ratio:.2f} times as long as then"


def probe_s(clock: Callable[[], float] = time.thread_time) -> float:
    """CPU seconds of a fixed piece of Python, the least of a few tries: how fast this machine is now."""

    def once() -> float:
        began_s = clock()
        table: dict[int, int] = {}
        for number in range(PROBE_ROUNDS):
            table[number & 255] = table.get(number & 255, 0) + number
        return clock() - began_s

    return min(once() for _ in range(PROBE_TRIES))


def calibrate(
    task: Task,
    problems: Sequence[Problem],
    sandbox: Sandbox,
    *,
    workers: int,
    progress: Callable[[int], None] | None = None,
    anew: bool = False,
) -> Calibration:
    """What references need: from the cache where it may be trusted, else measured and kept. `anew` asks no cache."""
    today, now_probe_s = datetime.datetime.now(datetime.UTC).date(), probe_s()
    key = key_of(task, sandbox.description)
    kept = None if anew else read(key)
    slowdown = slowdown_since(kept, now_probe_s, today)[0] if kept else None
    if kept is None or slowdown is None:
        kept, slowdown = CachedCalibration(today, now_probe_s, {}), 1.0
    texts = {problem.id: text_of(problem) for problem in problems}
    known = {name: kept.reference_s[name, text] for name, text in texts.items() if (name, text) in kept.reference_s}
    missing = [problem for problem in problems if problem.id not in known]
    passed_s = {
        problem.id: round(verdict.cpu_s / slowdown, 4)
        for problem, verdict in zip(missing, _measure(task, missing, sandbox, workers, progress), strict=True)
        if verdict is not None and verdict.passed
    }
    if passed_s:
        more = {(name, texts[name]): used_s for name, used_s in passed_s.items()}
        write(key, replace(kept, reference_s={**kept.reference_s, **more}))
    found = known | passed_s
    reference_s = {problem.id: found.get(problem.id) for problem in problems}
    return Calibration(reference_s, kept.measured_on.isoformat(), slowdown)


def _measure(
    task: Task,
    problems: Sequence[Problem],
    sandbox: Sandbox,
    workers: int,
    progress: Callable[[int], None] | None,
) -> list[SandboxVerdict | None]:
    longest = with_cpu(task.limits, STEPS_S[-1])

    def one(problem: Problem) -> SandboxVerdict | None:
        if not problem.canonical:
            return None
        built = task.build(problem, problem.canonical)
        return None if isinstance(built, SandboxVerdict) else sandbox.run(built, longest)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="lakh-calibrate")
    try:
        verdicts = []
        for done, verdict in enumerate(pool.map(one, problems), start=1):
            verdicts.append(verdict)
            if progress:
                progress(done)
        return verdicts
    except BaseException:
        sandbox.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

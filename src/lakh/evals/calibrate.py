"""The CPU limit of each problem, from the CPU time of its reference solution on this machine.

A fixed limit is too long for the endless loops of a weak model and too short for the few problems whose own solution is
slow. The limit is the first of STEPS_S that is at least ten times the reference's CPU time; the coarse steps keep noise
in the measurement from changing it. The limits are part of the protocol, and a reproduction uses the same ones.

References are measured once per machine and cached in $XDG_CACHE_HOME/lakh/calibrations/TASK-KEY.json. The key has
everything that the times depend on: task, data, versions, isolation, limits, processor and cores. A file is used only
if its key matches, its checksum is right and every time is a valid number. A folder that cannot be written is no error.

With cached times a run only measures the machine's speed (`probe_s`): if it is slower the limits grow with it, and if
it is much slower or faster everything is measured again.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lakh import __version__, storage
from lakh.errors import LakhError
from lakh.evals.sandbox import Sandbox, SandboxLimits, SandboxVerdict
from lakh.evals.task import Problem, Task
from lakh.storage import cache_folder

__all__ = ["CpuCalibration", "calibrate", "with_cpu"]

FACTOR = 10
STEPS_S = (3, 6, 12, 24, 48, 96, 192)
WALL_START_S, WALL_PER_CPU = 60.0, 20.0  # holds on a machine with twenty programs per core

CACHE_DAYS = 30
NOISE = 1.25  # the probe differed by 10 % between an idle and a loaded machine
OTHER_MACHINE = 2.0  # beyond this ratio the old measurement means little

PROBE_TRIES, PROBE_ROUNDS = 3, 8000
FORMAT = "lakh calibration 1"
CPU_FIELDS = ("model name", "CPU implementer", "CPU variant", "CPU part", "cpu model", "uarch")


@dataclass(frozen=True)
class CachedCalibration:
    measured_on: datetime.date
    probe_s: float
    """Speed of the machine at the time (probe_s)."""
    reference_s: Mapping[tuple[str, str], float]
    """(problem id, problem hash) -> CPU seconds of a reference that passed."""


@dataclass(frozen=True)
class CpuCalibration:
    reference_s: Mapping[str, float | None]
    """Problem id -> CPU seconds of its reference; None if it has none that passes."""
    measured_on: str
    slowdown: float = 1.0
    """How much slower the machine is now than at the measurement, if more than noise."""

    def limits(self, default_s: int) -> dict[str, int]:
        """Problem id -> CPU limit."""
        return {
            name: default_s if used_s is None else cpu_limit(used_s * self.slowdown)
            for name, used_s in self.reference_s.items()
        }

    def __str__(self) -> str:
        """Equal for runs that use the same measurement, whether new or cached."""
        digest = hashlib.sha256(json.dumps(dict(sorted(self.reference_s.items()))).encode()).hexdigest()[:12]
        slower = f", {self.slowdown:.2f} times slower since" if self.slowdown > 1 else ""
        return f"{digest} of {self.measured_on}{slower}"


def cpu_limit(reference_s: float) -> int:
    return next((step_s for step_s in STEPS_S if step_s >= FACTOR * reference_s), STEPS_S[-1])


@functools.lru_cache(maxsize=256)
def with_cpu(limits: SandboxLimits, cpu_s: int) -> SandboxLimits:
    return replace(limits, cpu_s=cpu_s, wall_s=max(limits.wall_s, WALL_START_S + WALL_PER_CPU * cpu_s))


def slowdown_since(cached: CachedCalibration, now_probe_s: float, today: datetime.date) -> float | None:
    """The factor for the cached times; None if they are too old, or the machine is much slower or faster than then."""
    ratio = now_probe_s / cached.probe_s
    is_recent = 0 <= (today - cached.measured_on).days <= CACHE_DAYS
    if not is_recent or not 1 / OTHER_MACHINE <= ratio <= OTHER_MACHINE:
        return None
    return 1.0 if ratio <= NOISE else ratio


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
    task: Task, problems: Sequence[Problem], sandbox: Sandbox, *, workers: int | None,
    progress: Callable[[int], None] | None = None, ignore_cache: bool = False,
) -> CpuCalibration:  # fmt: skip
    """CPU times of the references: from the cache if it is valid, otherwise measured and cached."""
    today, now_probe_s = datetime.datetime.now(datetime.UTC).date(), probe_s()
    key = cache_key(task, sandbox.description)
    cached = None if ignore_cache else read_cache(key)
    slowdown = slowdown_since(cached, now_probe_s, today) if cached else None
    if cached is None or slowdown is None:
        cached, slowdown = CachedCalibration(today, now_probe_s, {}), 1.0
    keys = {problem.id: (problem.id, problem_hash(problem)) for problem in problems}
    known = {name: cached.reference_s[one] for name, one in keys.items() if one in cached.reference_s}
    missing = [problem for problem in problems if problem.id not in known]
    longest = with_cpu(task.limits, STEPS_S[-1])

    def measure(problem: Problem) -> SandboxVerdict | None:
        built = task.build(problem, problem.canonical) if problem.canonical else None
        return None if built is None or isinstance(built, SandboxVerdict) else sandbox.run(built, longest)

    verdicts = sandbox.map(measure, missing, workers, progress=progress)
    measured = {
        problem.id: round(verdict.cpu_s / slowdown, 4)
        for problem, verdict in zip(missing, verdicts, strict=True)
        if verdict is not None and verdict.passed
    }
    if measured:
        more = {keys[name]: used_s for name, used_s in measured.items()}
        write_cache(key, replace(cached, reference_s={**cached.reference_s, **more}))
    found = known | measured
    reference_s = {problem.id: found.get(problem.id) for problem in problems}
    return CpuCalibration(reference_s, cached.measured_on.isoformat(), slowdown)


def cache_key(task: Task, sandbox: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "task": task.name,
        "data_sha256": task.data_sha256,
        "limits": asdict(task.limits),
        "sandbox": sandbox,
        "lakh": __version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def problem_hash(problem: Problem) -> str:
    """Identifies the reference and its test: another text needs another time."""
    text = "\0".join((problem.prompt, problem.canonical, problem.suffix, problem.test))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def cache_path(key: Mapping[str, Any]) -> Path:
    return cache_folder("calibrations") / f"{key['task']}-{_digest(key)[:16]}.json"


def read_cache(key: Mapping[str, Any]) -> CachedCalibration | None:
    try:
        document = json.loads(cache_path(key).read_bytes())
        if document.pop("sha256") != _digest(document) or document["key"] != key:
            return None
        rows = {(name, text): float(used_s) for name, text, used_s in document["reference_s"]}
        cached = CachedCalibration(
            datetime.date.fromisoformat(document["measured_on"]), float(document["probe_s"]), rows
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    times = [cached.probe_s, *rows.values()]
    return cached if cached.probe_s > 0 and all(math.isfinite(one) and one >= 0 for one in times) else None


def write_cache(key: Mapping[str, Any], cached: CachedCalibration) -> None:
    document = {
        "key": dict(key),
        "measured_on": cached.measured_on.isoformat(),
        "probe_s": cached.probe_s,
        "reference_s": [[name, text, used_s] for (name, text), used_s in cached.reference_s.items()],
    }
    with contextlib.suppress(LakhError, OSError):
        storage.write_bytes(cache_path(key), json.dumps(document | {"sha256": _digest(document)}).encode())


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _processor() -> str:
    """The types of core in this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {f"{key.strip()} {value.strip()}" for key, _, value in (line.partition(":") for line in lines)
            if key.strip() in CPU_FIELDS}  # fmt: skip
    return ", ".join([platform.machine(), *sorted(found)])

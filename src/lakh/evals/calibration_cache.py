"""CPU times of reference solutions on this machine, kept from run to run.

    $XDG_CACHE_HOME/lakh/calibrations/TASK-KEY.json

The key is everything that the times depend on: task, data, versions, isolation, limits, processor and cores. A file is
used only if its key matches, its checksum is right and every time is a valid number; otherwise everything is measured
and written again. A folder that cannot be written is not an error.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lakh import __version__, storage
from lakh.errors import LakhError
from lakh.evals.task import Problem, Task
from lakh.storage import cache_folder

__all__ = ["CachedCalibration", "cache_key", "path_of", "problem_hash", "read", "write"]

FORMAT = "lakh calibration 1"
CPU_FIELDS = ("model name", "CPU implementer", "CPU variant", "CPU part", "cpu model", "uarch")


@dataclass(frozen=True)
class CachedCalibration:
    measured_on: datetime.date
    probe_s: float
    """Speed of the machine at the time (calibrate.probe_s)."""
    reference_s: Mapping[tuple[str, str], float]
    """(problem id, problem hash) -> CPU seconds of a reference that passed."""


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


def path_of(key: Mapping[str, Any]) -> Path:
    return cache_folder("calibrations") / f"{key['task']}-{_digest(key)[:16]}.json"


def read(key: Mapping[str, Any]) -> CachedCalibration | None:
    try:
        document = json.loads(path_of(key).read_bytes())
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


def write(key: Mapping[str, Any], cached: CachedCalibration) -> None:
    document = {
        "key": dict(key),
        "measured_on": cached.measured_on.isoformat(),
        "probe_s": cached.probe_s,
        "reference_s": [[name, text, used_s] for (name, text), used_s in cached.reference_s.items()],
    }
    with contextlib.suppress(LakhError, OSError):
        storage.write_bytes(path_of(key), json.dumps(document | {"sha256": _digest(document)}).encode())


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

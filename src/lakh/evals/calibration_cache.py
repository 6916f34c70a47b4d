"""What reference solutions needed on this machine, kept from run to run.

    $XDG_CACHE_HOME/lakh/calibrations/TASK-KEY.json

The key is everything that the figures depend on: task, data, versions, walls, limits, processor and cores. A file is
used only where its key is ours, its checksum holds and every figure is one: whatever else is found there, torn, edited
or of another version, counts as nothing, and is measured and written again. Where nothing can be written nothing is
kept, and that is no error.
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

__all__ = ["CachedCalibration", "key_of", "path_of", "read", "text_of", "write"]

FORMAT = "lakh calibration 1"
CPU_FIELDS = ("model name", "CPU implementer", "CPU variant", "CPU part", "cpu model", "uarch")


@dataclass(frozen=True)
class CachedCalibration:
    measured_on: datetime.date
    probe_s: float
    """How fast the machine was then."""
    reference_s: Mapping[tuple[str, str], float]
    """(problem id, its text) -> CPU seconds of a reference that passed."""


def key_of(task: Task, walls: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "task": task.name,
        "data_sha256": task.data_sha256,
        "limits": asdict(task.limits),
        "sandbox": walls,
        "lakh": __version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def text_of(problem: Problem) -> str:
    """Stands for the reference and its test: another text needs another time."""
    text = "\0".join((problem.prompt, problem.canonical, problem.suffix, problem.test))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def path_of(key: Mapping[str, Any]) -> Path:
    return cache_folder("calibrations") / f"{key['task']}-{_digest(key)[:16]}.json"


def read(key: Mapping[str, Any]) -> CachedCalibration | None:
    try:
        document = json.loads(path_of(key).read_bytes())
        told = document.pop("sha256")
        if told != _digest(document) or document["key"] != key:
            return None
        rows = {(name, text): float(used_s) for name, text, used_s in document["reference_s"]}
        kept = CachedCalibration(datetime.date.fromisoformat(document["measured_on"]), float(document["probe_s"]), rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    figures = [kept.probe_s, *rows.values()]
    return kept if kept.probe_s > 0 and all(math.isfinite(one) and one >= 0 for one in figures) else None


def write(key: Mapping[str, Any], kept: CachedCalibration) -> None:
    document = {
        "key": dict(key),
        "measured_on": kept.measured_on.isoformat(),
        "probe_s": kept.probe_s,
        "reference_s": [[name, text, used_s] for (name, text), used_s in kept.reference_s.items()],
    }
    with contextlib.suppress(LakhError, OSError):
        storage.write_bytes(path_of(key), json.dumps(document | {"sha256": _digest(document)}).encode())


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _processor() -> str:
    """The kinds of core that this machine has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    told = {f"{key.strip()} {value.strip()}" for key, _, value in (line.partition(":") for line in lines)
            if key.strip() in CPU_FIELDS}  # fmt: skip
    return ", ".join([platform.machine(), *sorted(told)])

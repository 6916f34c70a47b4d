"""How a program ended, decided from what three parties say: the examiner, the first process inside, and the limits.

Pure: words in, verdict out. A pass needs the nonce from the examiner; whatever else is missing or odd is no pass.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lakh.config import require_positive
from lakh.errors import ConfigError

__all__ = ["Kind", "Limits", "Verdict", "decide"]

Kind = Literal["passed", "failed", "timeout", "memory", "output", "not_run", "sandbox_error"]

DETAIL_CHARS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    cpu_s: int = 10
    """CPU seconds of one process."""
    wall_s: float = 60.0
    """Wall-clock seconds of the whole program: a backstop."""
    memory_MiB: int = 1024
    """Address space of one process (in other languages: memory it may write to); all together may hold twice that."""
    file_MiB: int = 16
    """Size of one file."""
    tmp_MiB: int = 64
    """Size of /tmp."""
    processes: int = 16
    """Processes and threads at one time."""
    output_KiB: int = 1024
    """What may be written to stdout and stderr together."""

    def __post_init__(self) -> None:
        require_positive(self, "cpu_s", "memory_MiB", "file_MiB", "tmp_MiB", "processes", "output_KiB")
        if not 0 < self.wall_s < 86_400:
            raise ConfigError("wall_s", f"{self.wall_s} is out of range", "choose a number of seconds below a day")


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    detail: str = ""
    cpu_s: float = 0.0
    """Of the process that held the code under test."""
    wall_s: float = 0.0

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


def decide(report: Mapping[str, Any], said: bytes, nonce: str, limits: Limits) -> Verdict:
    """`report` is the first process's, `said` the examiner's words."""
    status, cpu_s = report["candidate"]
    kind, detail = _kind(report, said.decode("utf-8", "replace"), nonce, limits, status, cpu_s)
    words = " ".join(detail.encode("ascii", "backslashreplace").decode("ascii").split())
    return Verdict(kind, words[:DETAIL_CHARS], round(cpu_s, 4), round(report["wall_s"], 4))


def _kind(
    report: Mapping[str, Any], said: str, nonce: str, limits: Limits, status: int, cpu_s: float
) -> tuple[Kind, str]:
    word, _, rest = said.partition(" ")
    if report["stopped"] == "output":
        return "output", f"wrote more than {limits.output_KiB} KiB"
    if word == "passed" and rest == nonce:
        return "passed", ""
    if word in ("failed", "memory"):
        return ("memory" if word == "memory" else "failed"), rest
    if word == "broken":
        return "sandbox_error", f"the benchmark's own reference failed: {rest}"
    if word == "timeout" or _used_up(status, cpu_s, limits):
        return "timeout", f"CPU limit of {limits.cpu_s} s"
    if report["stopped"] == "wall":
        return "timeout", f"wall limit of {limits.wall_s:g} s"
    if word == "gone":
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return "failed", f"killed by signal {number} ({signal.strsignal(number)})"
        return "failed", f"ended before its test did (exit code {os.waitstatus_to_exitcode(status)})"
    if report["stopped"] == "examiner" or not word:
        return "failed", "the test's process ended: it was killed, or its own CPU limit was used up"
    return "sandbox_error", f"no verdict ({said[:80]!r})"


def _used_up(status: int, cpu_s: float, limits: Limits) -> bool:
    """Ended by the CPU limit. It is kept in whole ticks and cpu_s is exact: it was seen 15 % below the limit."""
    if not os.WIFSIGNALED(status):
        return False
    number = os.WTERMSIG(status)
    return number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s > limits.cpu_s * 0.8)

"""Limits of a program, and the verdict on how it ended. Pure: a verdict is a function of what the processes reported.

A pass needs the nonce from the examiner. Anything missing or unexpected is not a pass.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lakh.config import require_positive
from lakh.errors import ConfigError

__all__ = ["SandboxLimits", "SandboxVerdict", "VerdictKind", "decide"]

VerdictKind = Literal["passed", "failed", "timeout", "memory", "output", "not_run", "sandbox_error"]

DETAIL_CHARS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    cpu_s: int = 10
    """CPU seconds of one process. The real limit: it gives the same verdict on a loaded machine as on an idle one."""
    wall_s: float = 60.0
    """Wall-clock seconds of the whole program: a generous backstop for programs that wait."""
    idle_s: float = 20.0
    """Seconds for which all processes may sleep. In a container only the wall limit ends programs that sleep."""
    memory_MiB: int = 1024
    """Address space of one process (other languages: writable memory). All processes together may use twice that."""
    file_MiB: int = 16
    """Size of one file."""
    tmp_MiB: int = 64
    """Size of /tmp."""
    processes: int = 16
    """Processes and threads at one time."""
    output_KiB: int = 1024
    """Bytes written to stdout and stderr together."""

    def __post_init__(self) -> None:
        require_positive(self, "cpu_s", "memory_MiB", "file_MiB", "tmp_MiB", "processes", "output_KiB")
        for name, seconds in (("wall_s", self.wall_s), ("idle_s", self.idle_s)):
            if not 0 < seconds < 86_400:
                raise ConfigError(name, f"{seconds} is out of range", "choose a number of seconds below a day")


@dataclass(frozen=True, slots=True)
class SandboxVerdict:
    kind: VerdictKind
    detail: str = ""
    cpu_s: float = 0.0
    """CPU time of the process that ran the code under test."""
    wall_s: float = 0.0
    compiled: bool = True
    """False if a command before the last one failed."""

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


def decide(response: Mapping[str, Any], outcome: bytes, nonce: str, limits: SandboxLimits) -> SandboxVerdict:
    """The verdict from the zygote's response and the examiner's outcome."""
    cpu_s = response["candidate"][1]
    kind, detail = _kind(response, outcome.decode("utf-8", "replace"), nonce, limits)
    text = " ".join(detail.encode("ascii", "backslashreplace").decode("ascii").split())
    compiled = not outcome.startswith(b"uncompiled")
    return SandboxVerdict(kind, text[:DETAIL_CHARS], round(cpu_s, 4), round(response["wall_s"], 4), compiled)


def _kind(response: Mapping[str, Any], outcome: str, nonce: str, limits: SandboxLimits) -> tuple[VerdictKind, str]:
    (status, cpu_s), stopped = response["candidate"], response["stopped"]
    word, _, rest = outcome.partition(" ")
    if stopped == "output":
        return "output", f"wrote more than {limits.output_KiB} KiB"
    if word == "passed" and rest == nonce:
        return "passed", ""
    if word in ("failed", "uncompiled", "memory"):
        return ("memory" if word == "memory" else "failed"), rest
    if word == "broken":
        return "sandbox_error", f"the benchmark's own reference failed: {rest}"
    if word == "timeout" or _exceeded_cpu(status, cpu_s, limits):
        return "timeout", f"CPU limit of {limits.cpu_s} s"
    if stopped == "wall":
        return "timeout", f"wall limit of {limits.wall_s:g} s"
    if word == "exited":
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return "failed", f"killed by signal {number} ({signal.strsignal(number)})"
        return "failed", f"ended before its test did (exit code {os.waitstatus_to_exitcode(status)})"
    if stopped == "examiner" or not word:
        return "failed", "the test's process ended: it was killed or reached its own CPU limit"
    return "sandbox_error", f"no verdict ({outcome[:80]!r})"


def _exceeded_cpu(status: int, cpu_s: float, limits: SandboxLimits) -> bool:
    """Whether the CPU limit ended it. The kernel counts in ticks: exact CPU time was seen 15 % below the limit."""
    if not os.WIFSIGNALED(status):
        return False
    number = os.WTERMSIG(status)
    return number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s > limits.cpu_s * 0.8)

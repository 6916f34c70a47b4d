"""Every interruption of a run: its cause, how long detecting it took, how long recovering, and what was lost.

    began       the last event of rank 0 before it
    detected    the launcher noticed the failure, or the ranks agreed that others are gone
    recovered   the first step after it begins

A stop on request (a signal, a time limit) is an interruption whose time does not count as badput.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lakh.dashboard.numbers import finite
from lakh.goodput import LAST_STEP

__all__ = ["Interruption", "InterruptionLog"]

MAX_INTERRUPTIONS = 500
MAX_CAUSE_CHARS = 400


@dataclass
class Interruption:
    kind: str
    """restart, ranks lost, rewind or stop."""
    cause: str
    began_s: float
    step: int
    detection_s: float | None = None
    recovery_s: float | None = None
    """From detection, or from the beginning if that is not known, to the first step after it; None until then."""
    lost_steps: int = 0
    lost_s: float = 0.0


class InterruptionLog:
    """Finds interruptions in the records of rank 0, in order of time."""

    def __init__(self) -> None:
        self.found: list[Interruption] = []
        self.num_found = 0
        self._open: Interruption | None = None
        self._last_s: float | None = None
        self._step = 0
        self._step_s = array("d")
        """Seconds of the last steps, up to `_step`: those since the last checkpoint, which an interruption may lose."""
        self._ended: str | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        kind, time_s = record["kind"], float(record["time_s"])
        if kind == "step_done":
            self._add_step(record, time_s)
        elif kind == "restarted":
            self._begin("restart", str(record.get("reason", "")), time_s, finite(record.get("detected_s")))
        elif kind == "ranks_lost":
            seconds = finite(record.get("seconds")) or 0.0
            self._begin("ranks lost", str(record.get("reason", "")), time_s, time_s - seconds)
        elif kind == "rewound" and isinstance(record.get("to_step"), int):
            self._begin("rewind", str(record.get("reason", "")), time_s, time_s)
            self._lose_steps_after(record["to_step"])
        elif kind == "run_started":
            if self._open is None and self._ended not in (None, LAST_STEP):
                self._begin("stop", self._ended or "", time_s, self._last_s)
            self._lose_steps_after(record["step"])
        elif kind == "checkpoint_saved":
            kept = max(0, self._step - record["step"])
            self._step_s = self._step_s[max(0, len(self._step_s) - kept) :]
        if kind in ("run_ended", "run_started", "step_done"):
            self._ended = str(record.get("reason", "")) if kind == "run_ended" else None
        if kind not in ("restarted", "initialised", "run_started"):  # written by the next attempt
            self._last_s = time_s

    def as_dicts(self) -> list[dict[str, Any]]:
        """Newest first."""
        return [asdict(one) for one in reversed(self.found)]

    def _add_step(self, record: Mapping[str, Any], time_s: float) -> None:
        step_s = finite(record.get("step_s")) or 0.0
        if self._open is not None:
            detected_s = self._open.began_s + (self._open.detection_s or 0.0)
            self._open.recovery_s = max(0.0, time_s - step_s - detected_s)
            self._open = None
        if record["step"] != self._step + 1:
            self._step_s = array("d")
        self._step = record["step"]
        self._step_s.append(step_s)

    def _begin(self, kind: str, cause: str, time_s: float, detected_s: float | None) -> None:
        if self._open is not None and kind != "rewind":  # a failure while recovering belongs to the same interruption
            self._open.cause = f"{self._open.cause}; then {cause}"[:MAX_CAUSE_CHARS]
            return
        began_s = self._last_s if self._last_s is not None else time_s
        detection_s = max(0.0, detected_s - began_s) if detected_s is not None else None
        self._open = Interruption(kind, cause[:MAX_CAUSE_CHARS], began_s, self._step, detection_s)
        self.found = [*self.found[1 - MAX_INTERRUPTIONS :], self._open]
        self.num_found += 1

    def _lose_steps_after(self, step: int) -> None:
        lost = max(0, self._step - step)
        if self._open is not None and lost:
            self._open.lost_steps += lost
            self._open.lost_s += sum(self._step_s[-lost:])
        del self._step_s[max(0, len(self._step_s) - lost) :]
        self._step = min(self._step, step)

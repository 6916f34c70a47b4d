"""Goodput: how the time of a run divides into productive steps and badput, from its events.

    productive    steps that were kept, without their wait for data
    data_wait     waiting for data inside these steps
    lost          steps repeated after a restart or a rewind, or whose update was skipped
    evaluation    held-out loss and hooks
    checkpoint    training paused to copy the state or to complete a checkpoint
    init          from the start of an attempt to its first step
    down          from the last event of an attempt to the start of the next one
    other         the remainder, so that the classes sum to the total

The trainer and the dashboard both use this definition. The clock of rank 0 counts for all ranks. What follows the end
of a finished run counts only if training goes on: resuming it with nothing left to do costs no goodput.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from lakh.events import Event

__all__ = ["CLASSES", "LAST_STEP", "GoodputAccount", "goodput"]

CLASSES = ("productive", "data_wait", "lost", "evaluation", "checkpoint", "init", "down", "other")
LAST_STEP = "last step done"
"""The reason of `run_ended` when nothing is left to train."""
# Written by the next attempt before its `initialised`, which says when that attempt began.
_BEFORE_INITIALISED = frozenset({"restarted", "setting_changed", "checkpoint_skipped"})
_TIMED = {"evaluated": "evaluation", "checkpoint_saved": "checkpoint"}
Span = tuple[float, float]


class GoodputAccount:
    """Classifies the time of a run while rank 0's event records arrive in order of time."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.spans: dict[str, list[Span]] = {name: [] for name in ("evaluation", "checkpoint", "init", "down")}
        """(start, end) of the time outside of steps, by class."""
        self.step_ends, self.step_s, self.wait_s = array("d"), array("d"), array("d")
        self.kept = bytearray()
        """1 for each recorded step that counts; 0 where it was repeated, rewound or skipped."""
        self._kept_steps, self._kept_rows = array("d"), array("q")  # a stack, ascending by step
        self._skipped: set[int] = set()
        self._seconds = dict.fromkeys(CLASSES, 0.0)
        self._after_end: list[Mapping[str, Any]] | None = None
        """Events after the end of a finished run, until the first of another step."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one event as a mapping with `kind`, `time_s`, `step` and the fields of its kind."""
        if self._after_end is not None:
            self._after_end.append(record)
            if record["kind"] != "step_done":
                return
            waiting, self._after_end = self._after_end, None
            for earlier in waiting:
                self._add(earlier)
            return
        self._add(record)
        if record["kind"] == "run_ended" and record.get("reason") == LAST_STEP:
            self._after_end = []

    def _add(self, record: Mapping[str, Any]) -> None:
        kind, time_s = record["kind"], float(record["time_s"])
        if kind in _BEFORE_INITIALISED:
            return
        if kind == "step_done":
            self._add_step(record["step"], time_s, record)
        elif kind == "initialised":
            began_s = time_s - _seconds(record.get("seconds"))
            if self.last_s is not None:
                self._add_span("down", self.last_s, began_s)
            self._add_span("init", began_s, time_s)
            self.first_s = began_s if self.first_s is None else self.first_s
        elif kind in _TIMED:
            self._add_span(_TIMED[kind], time_s - _seconds(record.get("seconds")), time_s)
        elif kind == "step_skipped":
            self._skipped.add(record["step"])
        elif kind == "rewound" and isinstance(record.get("to_step"), int):
            self._go_back(record["to_step"])
        elif kind == "run_started":
            self._go_back(record["step"])
        self.first_s = time_s if self.first_s is None else self.first_s
        self.last_s = time_s

    def seconds(self) -> dict[str, float]:
        """Seconds by class; they sum to the total."""
        known_s = sum(self._seconds.values())
        total_s = max(known_s, (self.last_s or 0.0) - (self.first_s or 0.0))
        return self._seconds | {"other": total_s - known_s}

    def _add_span(self, name: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.spans[name].append((start_s, end_s))
            self._seconds[name] += end_s - start_s

    def _add_step(self, step: int, time_s: float, record: Mapping[str, Any]) -> None:
        self._go_back(step - 1)
        step_s = _seconds(record.get("step_s"))
        wait_s = min(step_s, _seconds(record.get("data_wait_s")))
        self.step_ends.append(time_s)
        self.step_s.append(step_s)
        self.wait_s.append(wait_s)
        if step in self._skipped:
            self._skipped.remove(step)
            self.kept.append(0)
            self._seconds["lost"] += step_s
            return
        self._kept_steps.append(step)
        self._kept_rows.append(len(self.kept))
        self.kept.append(1)
        self._seconds["productive"] += step_s - wait_s
        self._seconds["data_wait"] += wait_s

    def _go_back(self, to_step: int) -> None:
        """Count every recorded step after `to_step` as lost."""
        while self._kept_steps and self._kept_steps[-1] > to_step:
            self._kept_steps.pop()
            row = self._kept_rows.pop()
            self.kept[row] = 0
            self._seconds["productive"] -= self.step_s[row] - self.wait_s[row]
            self._seconds["data_wait"] -= self.wait_s[row]
            self._seconds["lost"] += self.step_s[row]


def goodput(events: Iterable[Event]) -> dict[str, Any]:
    """Total seconds, the productive share, and seconds by class, of one rank's events in order of time."""
    account = GoodputAccount()
    for event in events:
        account.add(event.as_dict())
    classes = account.seconds()
    total_s = sum(classes.values())
    return {"total_s": total_s, "ratio": classes["productive"] / total_s if total_s else None, "classes_s": classes}


def _seconds(value: Any) -> float:
    """A duration from a record of any version; 0 for anything that is not one."""
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0

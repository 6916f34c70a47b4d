"""Goodput: every second of a run is billed to one class, from its events.

    productive      steps that were kept, without the parts below
    data_wait       waiting for data inside these steps
    compile         torch.compile inside these steps
    straggler       the mean rank waiting for the slowest one inside these steps
    shrunk_batch    the share of the missing ranks, in steps on fewer ranks than the run started with
    lost            steps repeated after a restart or a rewind, or whose update was skipped
    evaluation      held-out loss and hooks
    checkpoint      training paused to copy the state or to complete a checkpoint
    init            from the start of the run, or of a resume, to its first step
    restart         from the last event before a failure until the next attempt is ready
    re_mesh         from the last step before ranks were lost or joined until training continues
    other           the remainder, so that the classes sum to the total

Time in which the run was stopped (between `run_ended` and a resume) does not count, nor does a resume of a finished
run, which takes no step. The trainer and the dashboard both use this definition. The clock of rank 0 counts for all
ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from lakh.events import Event

__all__ = ["CLASSES", "LAST_STEP", "STEP_PARTS", "GoodputAccount", "goodput"]

STEP_PARTS = ("data_wait", "compile", "straggler", "shrunk_batch")
"""Classes inside a step, in the order in which a timeline draws them."""
SPANS = ("evaluation", "checkpoint", "init", "restart", "re_mesh")
"""Classes outside of steps."""
CLASSES = ("productive", *STEP_PARTS, "lost", *SPANS, "other")
LAST_STEP = "last step done"
"""The reason of `run_ended` when nothing is left to train."""
# Also written by the next attempt before its `initialised`, which says when that attempt began.
_BEFORE_INITIALISED = frozenset(
    {
        "restarted",
        "setting_changed",
        "storage_delayed",
        "checkpoint_skipped",
        "ranks_lost",
        "ranks_joined",
        "memory_restored",
    }
)
_TIMED = {"evaluated": "evaluation", "checkpoint_saved": "checkpoint", "memory_copied": "checkpoint"}
Span = tuple[float, float]


class GoodputAccount:
    """Classifies the time of a run while rank 0's event records arrive in order of time."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.spans: dict[str, list[Span]] = {name: [] for name in (*SPANS, "stopped")}
        """(start, end) of the time outside of steps, by class; "stopped" does not count."""
        self.step_ends, self.step_s = array("d"), array("d")
        self.step_parts = {name: array("d") for name in STEP_PARTS}
        self.kept = bytearray()
        """1 for each recorded step that counts; 0 where it was repeated, rewound or skipped."""
        self._kept_steps, self._kept_rows = array("d"), array("q")  # a stack, ascending by step
        self._skipped: set[int] = set()
        self._seconds = dict.fromkeys(CLASSES, 0.0)
        self._stopped_s = 0.0
        self._ranks_changed = False
        self._ranks, self._full_ranks = 1, 1
        self._resumed: _Resumed | None = None
        """The state before a resume that has not taken a step yet."""
        self._has_ended = False

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one event as a mapping with `kind`, `time_s`, `step` and the fields of its kind."""
        kind, time_s = record["kind"], float(record["time_s"])
        if kind in _BEFORE_INITIALISED:
            self._ranks_changed |= kind in ("ranks_lost", "ranks_joined")
            return
        if kind == "step_done":
            self._resumed = None
            self._add_step(record["step"], time_s, record)
        elif kind == "initialised":
            self._begin_attempt(time_s - _seconds(record.get("seconds")), time_s)
        elif kind in _TIMED:
            self._add_span(_TIMED[kind], time_s - _seconds(record.get("seconds")), time_s)
        elif kind == "step_skipped":
            self._skipped.add(record["step"])
        elif kind == "rewound" and isinstance(record.get("to_step"), int):
            self._go_back(record["to_step"])
        elif kind == "run_started":
            self._go_back(record["step"])
            self._count_ranks(record.get("world"))
        elif kind == "run_ended" and self._resumed is not None:
            self._drop_resume(self._resumed, time_s)
        self._has_ended = kind == "run_ended"
        self.first_s = time_s if self.first_s is None else self.first_s
        self.last_s = time_s

    def seconds(self) -> dict[str, float]:
        """Seconds by class; they sum to the total."""
        known_s = sum(self._seconds.values())
        total_s = max(known_s, (self.last_s or 0.0) - (self.first_s or 0.0) - self._stopped_s)
        return self._seconds | {"other": total_s - known_s}

    def _begin_attempt(self, began_s: float, ready_s: float) -> None:
        if self.last_s is None:
            self.first_s = began_s
            self._add_span("init", began_s, ready_s)
        elif self._has_ended:
            self._resumed = _Resumed(self.last_s, dict(self._seconds), {name: len(v) for name, v in self.spans.items()})
            self._add_span("stopped", self.last_s, began_s)
            self._add_span("init", max(began_s, self.last_s), ready_s)
        else:
            self._add_span("re_mesh" if self._ranks_changed else "restart", self.last_s, ready_s)

    def _drop_resume(self, before: _Resumed, ended_s: float) -> None:
        """A resume that took no step, because the run was finished, does not count."""
        self._seconds = before.seconds
        self._stopped_s -= sum(end - start for start, end in self.spans["stopped"][before.num_spans["stopped"] :])
        for name, count in before.num_spans.items():
            del self.spans[name][count:]
        self._add_span("stopped", before.last_s, ended_s)
        self._resumed = None

    def _count_ranks(self, world: Any) -> None:
        self._ranks = world if isinstance(world, int) and world > 0 else 1
        self._full_ranks = max(self._full_ranks, self._ranks) if self._ranks_changed else self._ranks
        self._ranks_changed = False

    def _add_span(self, name: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.spans[name].append((start_s, end_s))
            if name == "stopped":
                self._stopped_s += end_s - start_s
            else:
                self._seconds[name] += end_s - start_s

    def _add_step(self, step: int, time_s: float, record: Mapping[str, Any]) -> None:
        self._go_back(step - 1)
        step_s = _seconds(record.get("step_s"))
        left_s = step_s
        for name in STEP_PARTS[:-1]:
            part_s = min(left_s, _seconds(record.get(f"{name}_s")))
            self.step_parts[name].append(part_s)
            left_s -= part_s
        self.step_parts["shrunk_batch"].append(left_s * (1 - self._ranks / self._full_ranks))
        self.step_ends.append(time_s)
        self.step_s.append(step_s)
        if step in self._skipped:
            self._skipped.remove(step)
            self.kept.append(0)
            self._seconds["lost"] += step_s
            return
        self._kept_steps.append(step)
        self._kept_rows.append(len(self.kept))
        self.kept.append(1)
        self._bill_step(len(self.kept) - 1, 1)

    def _go_back(self, to_step: int) -> None:
        """Count every recorded step after `to_step` as lost."""
        while self._kept_steps and self._kept_steps[-1] > to_step:
            self._kept_steps.pop()
            row = self._kept_rows.pop()
            self.kept[row] = 0
            self._bill_step(row, -1)
            self._seconds["lost"] += self.step_s[row]

    def _bill_step(self, row: int, sign: int) -> None:
        productive_s = self.step_s[row]
        for name, seconds in self.step_parts.items():
            self._seconds[name] += sign * seconds[row]
            productive_s -= seconds[row]
        self._seconds["productive"] += sign * productive_s


class _Resumed:
    def __init__(self, last_s: float, seconds: dict[str, float], num_spans: dict[str, int]) -> None:
        self.last_s, self.seconds, self.num_spans = last_s, seconds, num_spans


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

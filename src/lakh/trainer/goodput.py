"""Where the time of a run went, from its events: productive and retained step time over all time since it began.

    productive    steps that were kept, without their wait for data
    data_wait     waiting for data inside these steps
    lost          steps done once more after a restart or a rewind, or left out
    evaluation, init
    checkpoint    training stood still for it: copying the state, and making the checkpoint whole
    down          between the last word of an attempt and the first of the next
    other         what is left: the classes sum to the total by construction

Pure: events in, seconds out. The clock of rank 0 counts for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lakh.events import (
    CheckpointSaved,
    CheckpointSkipped,
    Evaluated,
    Event,
    Initialised,
    Restarted,
    SettingChanged,
    StepDone,
    StepSkipped,
)

__all__ = ["goodput"]

BEFORE_INITIALISED = (Restarted, SettingChanged, CheckpointSkipped)
CLASSES = ("productive", "data_wait", "lost", "evaluation", "checkpoint", "init", "down")


def goodput(events: Sequence[Event]) -> dict[str, Any]:
    """Seconds by class, their total, and the productive share of it. Takes one rank's events in order of time."""
    begins = {id(event): event.seconds for event in events if isinstance(event, Initialised)}
    skipped = {event.step for event in events if isinstance(event, StepSkipped)}
    kept = {event.step: id(event) for event in events if isinstance(event, StepDone) and event.step not in skipped}
    classes = dict.fromkeys(CLASSES, 0.0)
    first_s = before_s = None
    for event in events:
        if isinstance(event, BEFORE_INITIALISED):
            continue  # the next attempt is already on its way: its `initialised` tells when it began
        if id(event) in begins:
            began_s = event.time_s - begins[id(event)]
            classes["init"] += begins[id(event)]
            if before_s is not None:
                classes["down"] += max(0.0, began_s - before_s)
            first_s = began_s if first_s is None else first_s
        elif isinstance(event, StepDone):
            wait_s = min(event.data_wait_s, event.step_s)
            is_kept = kept.get(event.step) == id(event)
            classes["data_wait"] += wait_s if is_kept else 0.0
            classes["productive" if is_kept else "lost"] += event.step_s - (wait_s if is_kept else 0.0)
        elif isinstance(event, Evaluated):
            classes["evaluation"] += event.seconds
        elif isinstance(event, CheckpointSaved):
            classes["checkpoint"] += event.seconds
        before_s = event.time_s
    known_s = sum(classes.values())
    total_s = max(known_s, (before_s or 0.0) - (first_s or before_s or 0.0))
    classes["other"] = total_s - known_s
    return {"total_s": total_s, "ratio": classes["productive"] / total_s if total_s else None, "classes_s": classes}

"""The present state of a run and its reason. Pure: the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from lakh.goodput import LAST_STEP

__all__ = ["RunState", "run_state", "seconds_left"]

SILENT_AFTER_S = 60.0
SILENT_AFTER_STEPS = 20


@dataclass(frozen=True)
class RunState:
    word: str
    """waiting, starting, running, silent, done, stopped or unreadable."""
    reason: str


def run_state(
    *,
    now_s: float,
    last_s: float | None,
    step: int,
    steps: int | None,
    step_s: float,
    ended: str | None,
    unreadable: str = "",
) -> RunState:
    """`ended` is the reason of a final run_ended event; `step_s` is the typical step time, 0 before the first step;
    `unreadable` says which events cannot be read, and why."""
    if unreadable:
        return RunState("unreadable", unreadable)
    if last_s is None:
        return RunState("waiting", "no events yet")
    if ended is not None:
        done = ended == LAST_STEP or (steps is not None and step >= steps)
        return RunState("done" if done else "stopped", ended)
    silent_s = max(0.0, now_s - last_s)
    limit_s = max(SILENT_AFTER_S, SILENT_AFTER_STEPS * step_s)
    if silent_s > limit_s:
        return RunState("silent", f"no event for {silent_s:,.0f} s, which is over {limit_s:,.0f} s: it may have died")
    if not step_s:
        return RunState("starting", "no step done yet")
    return RunState("running", f"last event {silent_s:.0f} s ago")


def seconds_left(*, step: int, steps: int | None, step_s: float, overhead: float) -> float | None:
    """Time to the last step at the present pace; `overhead` is the time at work divided by step time."""
    if not steps or not step_s or step >= steps:
        return None
    return (steps - step) * step_s * max(1.0, overhead)

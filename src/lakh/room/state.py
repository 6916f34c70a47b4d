"""What a run is doing now, and why we think so. Pure: the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["State", "judge", "seconds_left"]

SILENT_AFTER_S = 60.0
SILENT_AFTER_STEPS = 20
LAST_STEP = "last step done"


@dataclass(frozen=True)
class State:
    word: str
    """waiting, starting, running, silent, done or stopped."""
    reason: str


def judge(
    *, now_s: float, last_s: float | None, step: int, steps: int | None, step_s: float, ended: str | None
) -> State:
    """`ended` is the reason of a run_ended that nothing followed; `step_s` a usual step, 0 where none was done."""
    if last_s is None:
        return State("waiting", "no events yet")
    if ended is not None:
        done = ended == LAST_STEP or (steps is not None and step >= steps)
        return State("done" if done else "stopped", ended)
    quiet_s = max(0.0, now_s - last_s)
    limit_s = max(SILENT_AFTER_S, SILENT_AFTER_STEPS * step_s)
    if quiet_s > limit_s:
        return State("silent", f"no event for {quiet_s:,.0f} s, which is over {limit_s:,.0f} s: it may have died")
    if not step_s:
        return State("starting", "no step done yet")
    return State("running", f"last event {quiet_s:.0f} s ago")


def seconds_left(*, step: int, steps: int | None, step_s: float, overhead: float) -> float | None:
    """Time to the last step at the present pace; `overhead` is all time over step time, 1 where steps are all."""
    if not steps or not step_s or step >= steps:
        return None
    return (steps - step) * step_s * max(1.0, overhead)

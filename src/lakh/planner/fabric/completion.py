"""Finish times of flows that start at different times and leave their bandwidth to others when they end.

Events are starts and ends only: between two events rates are constant. Flows whose remaining
time differs by less than a hundredth end at the same event, so that a phase needs few.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lakh.errors import InfeasiblePlan
from lakh.planner.fabric.max_min import flow_rates
from lakh.planner.fabric.topology import Floats

__all__ = ["finish_times"]

SAME_MOMENT = 1e-2


def finish_times(
    links: NDArray[np.int32], capacity: Floats, size_bytes: Floats, start_s: Floats | None = None, *, pfc: bool = False
) -> Floats:
    """Seconds at which each flow has sent its bytes."""
    left = np.array(size_bytes, dtype=np.float64)
    start = np.zeros(len(left)) if start_s is None else np.asarray(start_s, dtype=np.float64)
    finish = np.where(left > 0, np.nan, start)
    now = float(start.min()) if len(start) else 0.0
    while np.isnan(finish).any():
        waiting = np.isnan(finish)
        active = np.flatnonzero(waiting & (start <= now))
        later = start[waiting & (start > now)]
        if not len(active):
            now = float(later.min())
            continue
        rates, _ = flow_rates(links[active], capacity, pfc=pfc)
        if not rates.any() and not len(later):
            raise InfeasiblePlan("fabric", "a flow has no bandwidth: its path has a dead link", "use another routing")
        with np.errstate(divide="ignore"):
            ends = np.where(rates > 0, left[active] / rates, np.inf)
        step = float(ends.min())
        if len(later) and now + step > later.min():
            step = float(later.min()) - now
        now += step
        left[active] = np.maximum(left[active] - rates * step, 0.0)
        done = active[(ends <= step * (1 + SAME_MOMENT))]
        left[done] = 0.0
        finish[done] = now
    return finish

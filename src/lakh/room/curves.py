"""Curves as a page draws them: lists of steps, times and values, thinned, with the mean of each stretch beside them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lakh.room.thin import bucket_means, running_means, thin

__all__ = ["Sparse", "as_points", "curve", "ordained", "thinned"]

MEAN_POINTS = 80
SHORT_POINTS = 4 * MEAN_POINTS
Floats = NDArray[np.float64]


def curve(steps: Floats, times: Floats, values: Floats, most_points: int, *, rate: bool = False) -> dict[str, Any]:
    """The points that stay and the mean of each bucket; of a rate, so much in all over so much time in all."""
    kept = thin(values, most_points)
    averaged = 1 / np.where(values > 0, values, np.nan) if rate else values
    mean_x, mean_y = _means(steps, averaged)
    mean_t, _ = _means(times, averaged)
    if rate:
        mean_y = 1 / mean_y
    found = as_points(steps[kept], times[kept], values[kept])
    return {**found, "mean": as_points(mean_x, mean_t, mean_y)}


def ordained(steps: Floats, times: Floats, values: Floats, most_points: int) -> dict[str, Any]:
    """A curve that was set and not measured, such as the learning rate: it is its own mean."""
    found = thinned(steps, times, values, most_points)
    return {**found, "mean": found}


def _means(positions: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Of few points a mean that runs along with them; of many, one mean for each stretch."""
    if len(values) <= SHORT_POINTS:
        return running_means(positions, values, max(5, len(values) // 20))
    return bucket_means(positions, values, MEAN_POINTS)


def as_points(steps: Floats, times: Floats, values: Floats) -> dict[str, Any]:
    """Steps, times and values as lists; what is no number is None. Six digits are more than a screen shows."""
    return {
        "step": [round(step, 1) for step in steps.tolist()],
        "time_s": [round(time_s, 2) for time_s in times.tolist()],
        "value": [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()],
    }


def thinned(steps: Floats, times: Floats, values: Floats, most_points: int) -> dict[str, Any]:
    """The points that stay, without means: of what is measured now and then."""
    kept = thin(values, most_points)
    return as_points(steps[kept], times[kept], values[kept])


class Sparse:
    """Where something regular happened. Of too many, every second is forgotten, and of those to come too."""

    MOST = 512

    def __init__(self) -> None:
        self._every, self._seen = 1, 0
        self._rows: list[tuple[float, float]] = []

    def append(self, step: float, time_s: float) -> None:
        if self._seen % self._every == 0:
            self._rows.append((step, time_s))
        self._seen += 1
        if len(self._rows) > self.MOST:
            self._rows, self._every = self._rows[::2], 2 * self._every

    def points(self) -> dict[str, list[float]]:
        return {"step": [row[0] for row in self._rows], "time_s": [row[1] for row in self._rows]}

"""Curves for the page: lists of steps, times and values, downsampled, with running or bucket means."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lakh.dashboard.downsample import bucket_means, downsample, running_means

__all__ = ["Markers", "as_points", "curve", "downsampled", "exact_curve"]

MEAN_POINTS = 80
SHORT_POINTS = 4 * MEAN_POINTS
Floats = NDArray[np.float64]


def curve(steps: Floats, times: Floats, values: Floats, max_points: int, *, rate: bool = False) -> dict[str, Any]:
    """The downsampled points and their means. A rate is averaged harmonically: total amount over total time."""
    averaged = 1 / np.where(values > 0, values, np.nan) if rate else values
    mean_x, mean_y = _means(steps, averaged)
    mean_t, _ = _means(times, averaged)
    if rate:
        mean_y = 1 / mean_y
    return {**downsampled(steps, times, values, max_points), "mean": as_points(mean_x, mean_t, mean_y)}


def exact_curve(steps: Floats, times: Floats, values: Floats, max_points: int) -> dict[str, Any]:
    """A curve without noise, such as the learning rate: it is its own mean."""
    points = downsampled(steps, times, values, max_points)
    return {**points, "mean": points}


def _means(positions: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Running means of a short curve, bucket means of a long one."""
    if len(values) <= SHORT_POINTS:
        return running_means(positions, values, max(5, len(values) // 20))
    return bucket_means(positions, values, MEAN_POINTS)


def as_points(steps: Floats, times: Floats, values: Floats) -> dict[str, Any]:
    """Steps, times and values as lists with six digits; a value that is not finite becomes None."""
    return {
        "step": [round(step, 1) for step in steps.tolist()],
        "time_s": [round(time_s, 2) for time_s in times.tolist()],
        "value": [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()],
    }


def downsampled(steps: Floats, times: Floats, values: Floats, max_points: int) -> dict[str, Any]:
    """The downsampled points without means, for values that are measured only now and then."""
    kept = downsample(values, max_points)
    return as_points(steps[kept], times[kept], values[kept])


class Markers:
    """Positions of a regular event, such as checkpoints. Above MAX_MARKERS, only every second one is kept."""

    MAX_MARKERS = 512

    def __init__(self) -> None:
        self._every, self._seen = 1, 0
        self._positions: list[tuple[float, float]] = []

    def append(self, step: float, time_s: float) -> None:
        if self._seen % self._every == 0:
            self._positions.append((step, time_s))
        self._seen += 1
        if len(self._positions) > self.MAX_MARKERS:
            self._positions, self._every = self._positions[::2], 2 * self._every

    def points(self) -> dict[str, list[float]]:
        return {"step": [step for step, _ in self._positions], "time_s": [time_s for _, time_s in self._positions]}

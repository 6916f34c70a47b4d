"""Curves for the page: lists of steps, times and values, downsampled, with running or bucket means.

A curve of a million points is cut into equal buckets, and the minimum and maximum of each bucket are kept: at screen
width the line through these few hundred points looks like the line through all, and every spike is there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lakh.goodput import CLASSES, STEP_PARTS, GoodputAccount

__all__ = ["curve", "downsampled", "exact_curve", "goodput_timeline"]

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


def downsample(values: Floats, max_points: int) -> NDArray[np.int64]:
    """Ascending indices of at most `max_points` values: first, last, and the minimum and maximum of each bucket.

    A value that is not finite counts as the maximum of its bucket, so that a NaN loss stays visible.
    """
    count = len(values)
    if count <= max(4, max_points):
        return np.arange(count)
    rows = _rows(np.where(np.isfinite(values), values, np.inf), max(1, (max_points - 2) // 2))
    starts = np.arange(len(rows)) * rows.shape[1]
    minima = starts + np.nanargmin(rows, axis=1)
    maxima = starts + np.nanargmax(rows, axis=1)
    return np.unique(np.concatenate([[0], minima, maxima, [count - 1]]))


def bucket_means(positions: Floats, values: Floats, max_points: int) -> tuple[Floats, Floats]:
    """The mean position and mean finite value of each of at most `max_points` buckets; empty buckets are omitted."""
    finite = np.isfinite(values)
    positions, values = positions[finite], values[finite]
    if len(values) <= 1:
        return positions, values
    with np.errstate(over="ignore"):  # a mean that overflows is omitted
        x, y = (np.nanmean(_rows(column, max(1, max_points)), axis=1) for column in (positions, values))
    kept = np.isfinite(y)
    return x[kept], y[kept]


def running_means(positions: Floats, values: Floats, width: int) -> tuple[Floats, Floats]:
    """The mean of the `width` values around each finite value; the window shrinks symmetrically at the ends."""
    finite = np.isfinite(values)
    positions, values = positions[finite], values[finite]
    last = len(values) - 1
    reaches = [min(width // 2, at, last - at) for at in range(len(values))]
    with np.errstate(over="ignore"):  # no running sum: one huge value would spoil all later means
        means = np.array([values[at - reach : at + reach + 1].mean() for at, reach in enumerate(reaches)])
    kept = np.isfinite(means)
    return positions[kept], means[kept]


def _rows(values: Floats, buckets: int) -> Floats:
    """One row per bucket; the last row is padded with NaN and never consists of NaN alone."""
    width = -(-len(values) // buckets)
    filled = -(-len(values) // width)
    padded = np.full(filled * width, np.nan)
    padded[: len(values)] = values
    return padded.reshape(filled, width)


def goodput_timeline(account: GoodputAccount, parts: int) -> tuple[list[float], dict[str, list[float]]]:
    """Goodput over time, in equal parts of a run's clock: the edges of the parts, and the share of each class in them.

    The shares of a part sum to one, or to less where the run was stopped.
    """
    if account.first_s is None or account.last_s is None or account.last_s <= account.first_s:
        return [], {}
    edges = np.linspace(account.first_s, account.last_s, parts + 1)
    width_s = (account.last_s - account.first_s) / parts
    ends, step_s = np.array(account.step_ends), np.array(account.step_s)
    kept = np.array(account.kept, dtype=bool)
    spans = {name: np.array(found, dtype=float).reshape(-1, 2) for name, found in account.spans.items()}
    spans["lost"] = np.stack([ends - step_s, ends], axis=1)[~kept]
    at = ends - step_s
    for name in STEP_PARTS:
        after = at + np.array(account.step_parts[name])
        spans[name] = np.stack([at, after], axis=1)[kept]
        at = after
    spans["productive"] = np.stack([at, ends], axis=1)[kept]
    shares = {name: np.diff(_seconds_before(edges, found)) / width_s for name, found in spans.items()}
    known = sum(shares.values())
    shares["other"] = np.maximum(0.0, 1.0 - known)
    scale = np.maximum(1.0, known)  # spans may overlap a little
    return edges.tolist(), {name: (shares[name] / scale).tolist() for name in CLASSES}


def _seconds_before(edges: Floats, spans: Floats) -> Floats:
    """The length of the spans that lies before each edge."""
    if not len(spans):
        return np.zeros(len(edges))
    knots = np.concatenate([spans[:, 0], spans[:, 1]])
    slopes = np.concatenate([np.ones(len(spans)), -np.ones(len(spans))])
    order = np.argsort(knots, kind="stable")
    knots, open_spans = knots[order], np.cumsum(slopes[order])
    before = np.concatenate([[0.0], np.cumsum(np.diff(knots) * open_spans[:-1])])
    return np.interp(edges, knots, before)

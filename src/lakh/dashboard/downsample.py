"""Reduces a million points to a few hundred and keeps every spike.

Pure functions on arrays. A curve is cut into equal buckets, and the minimum and maximum of each bucket are kept: at
screen width the line through them looks like the line through all points.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["bucket_means", "downsample", "running_means"]

Floats = NDArray[np.float64]


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

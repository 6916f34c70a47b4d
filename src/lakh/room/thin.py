"""A million points as a few hundred, in which every spike is still there.

Pure functions on arrays. A curve is cut into buckets of equally many points, and of each the least and the greatest
stay: a line through them looks as the line through all would, at the width of a screen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["bucket_means", "running_means", "thin"]

Floats = NDArray[np.float64]


def thin(values: Floats, most_points: int) -> NDArray[np.int64]:
    """Ascending indices of at most `most_points` values: first, last, and each bucket's least and greatest.

    What is no number (NaN, infinity) counts as the greatest of its bucket: a loss that was lost must be seen.
    """
    count = len(values)
    if count <= max(4, most_points):
        return np.arange(count)
    rows = _rows(np.where(np.isfinite(values), values, np.inf), max(1, (most_points - 2) // 2))
    starts = np.arange(len(rows)) * rows.shape[1]
    least = starts + np.nanargmin(rows, axis=1)
    greatest = starts + np.nanargmax(rows, axis=1)
    return np.unique(np.concatenate([[0], least, greatest, [count - 1]]))


def bucket_means(positions: Floats, values: Floats, most_points: int) -> tuple[Floats, Floats]:
    """The mean position and mean finite value of each of at most `most_points` buckets; empty ones are left out."""
    finite = np.isfinite(values)
    positions, values = positions[finite], values[finite]
    if len(values) <= 1:
        return positions, values
    with np.errstate(over="ignore"):  # a mean past all numbers is left out
        x, y = (np.nanmean(_rows(column, max(1, most_points)), axis=1) for column in (positions, values))
    kept = np.isfinite(y)
    return x[kept], y[kept]


def running_means(positions: Floats, values: Floats, width: int) -> tuple[Floats, Floats]:
    """At every finite value, the mean of the `width` values around it; fewer at the ends, as many on either side."""
    finite = np.isfinite(values)
    positions, values = positions[finite], values[finite]
    last = len(values) - 1
    reaches = [min(width // 2, at, last - at) for at in range(len(values))]
    with np.errstate(over="ignore"):  # no running sum: one huge value would leave its error in all after it
        means = np.array([values[at - reach : at + reach + 1].mean() for at, reach in enumerate(reaches)])
    kept = np.isfinite(means)
    return positions[kept], means[kept]


def _rows(values: Floats, buckets: int) -> Floats:
    """One row for each bucket; the last is filled up with NaN. Never a row of NaN alone."""
    width = -(-len(values) // buckets)
    filled = -(-len(values) // width)
    padded = np.full(filled * width, np.nan)
    padded[: len(values)] = values
    return padded.reshape(filled, width)

"""95 % interval of a mean error: a bootstrap over configurations.

Rows of one configuration share most of their error, so they are resampled together. Deterministic: a seeded bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lakh.planner.calibration.measured_points import MeasuredPoint
from lakh.planner.stacked import Array
from lakh.planner.validation.accuracy import group_rows

__all__ = ["mape_interval"]

RESAMPLES = 2000


def mape_interval(
    points: Sequence[MeasuredPoint], predicted: Array, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """What 95 % of the resamples of these rows have as their mean absolute percentage error."""
    errors = np.abs(np.asarray(predicted) / np.array([point.step_s for point in points]) - 1)
    groups = list(group_rows(points, lambda point: f"{point.source}|{point.config}").values())
    sums, counts = (np.array([f(errors[rows]) for rows in groups], dtype=float) for f in (np.sum, np.size))
    rng = np.random.default_rng(seed)
    times = rng.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=resamples)
    low, high = np.quantile((times @ sums) / (times @ counts), (0.025, 0.975))
    return float(low), float(high)

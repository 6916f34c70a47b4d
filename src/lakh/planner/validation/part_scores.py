"""Scores of the parts of a planner's rows that are hardest to predict, and how far releases of one program differ.

A part is scored on rows that no fit has seen, with the share of them inside their error bar and a bootstrap interval of
the error. Two figures say how far rows of one configuration differ among themselves, where it was published more than
once: `release_spread` is the error of a perfect memory, each row predicted by the geometric mean of the others;
`release_floor` is the error of the best constant per configuration. No model that gives one number per configuration
has a smaller error than the floor on these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lakh.planner.calibration.fit import Calibration
from lakh.planner.calibration.measured_points import MeasuredPoint
from lakh.planner.stacked import Array
from lakh.planner.validation.accuracy import (
    accuracy_score,
    coverage,
    group_rows,
    predictions,
    unseen,
)
from lakh.planner.validation.mape_interval import mape_interval

__all__ = ["PARTS", "part_scores", "release_floor", "release_spread"]

Points = Sequence[MeasuredPoint]


def _has_experts(point: MeasuredPoint) -> bool:
    return bool(point.model.num_experts)


def _several_nodes(point: MeasuredPoint) -> bool:
    return float(point.plan.gpus) > point.cluster.node_size


PARTS: dict[str, Callable[[MeasuredPoint], bool]] = {
    "Blackwell": lambda point: point.kind == "Blackwell",
    "Blackwell, dense": lambda point: point.kind == "Blackwell" and not _has_experts(point),
    "Blackwell, experts": lambda point: point.kind == "Blackwell" and _has_experts(point),
    "experts": _has_experts,
    "H100, experts": lambda point: point.kind == "H100" and _has_experts(point),
    "several nodes, tp 1": lambda point: _several_nodes(point) and float(point.plan.tp) == 1,
    "several nodes, tp 2": lambda point: _several_nodes(point) and float(point.plan.tp) == 2,
    "several nodes, tp 4": lambda point: _several_nodes(point) and float(point.plan.tp) == 4,
    "several nodes, tp 8": lambda point: _several_nodes(point) and float(point.plan.tp) == 8,
}


def part_scores(points: Points, calibrations: Mapping[str, Calibration]) -> dict[str, dict[str, Any]]:
    """Part -> score of its unseen rows, their coverage, and the release spread of all its rows."""
    fresh = [points[i] for i in unseen(points, calibrations)]
    found = {}
    for name, belongs in PARTS.items():
        rows = [point for point in fresh if belongs(point)]
        if rows:
            predicted, all_rows = predictions(rows, calibrations), [p for p in points if belongs(p)]
            low, high = mape_interval(rows, predicted)
            found[name] = asdict(accuracy_score(rows, predicted)) | {
                "mape_low": low, "mape_high": high, "coverage": coverage(rows, calibrations)["all"],
                "releases": release_spread(all_rows), "floor": release_floor(all_rows),
            }  # fmt: skip
    return found


def _releases(points: Points) -> list[Array]:
    """Seconds of each configuration that was published more than once."""
    groups = group_rows(points, lambda point: f"{point.source}|{point.config}").values()
    return [np.array([points[i].step_s for i in rows]) for rows in groups if len(rows) > 1]


def release_floor(points: Points) -> dict[str, float] | None:
    """Mean error of the best constant per configuration, where it was published more than once; None without such rows.

    The constant with the least mean of |constant / measured - 1| is one of the measurements.
    """
    errors = [
        min((np.abs(one / seconds - 1) for one in seconds), key=lambda e: float(e.sum()))
        for seconds in _releases(points)
    ]
    if not errors:
        return None
    together = np.concatenate(errors)
    return {"n": len(together), "mape": float(together.mean())}


def release_spread(points: Points) -> dict[str, float] | None:
    """Mean and largest error of each row predicted by the other rows of its configuration; None without such rows."""
    errors: list[float] = []
    for logs in map(np.log, _releases(points)):
        others = (logs.sum() - logs) / (len(logs) - 1)
        errors += np.abs(np.expm1(others - logs)).tolist()
    if not errors:
        return None
    return {"n": len(errors), "mape": float(np.mean(errors)), "max": float(np.max(errors))}

"""Prediction error on published measurements, by source and model family, on rows that no fit has seen.

APE is |predicted/measured - 1|; bias its signed mean. Kendall's tau measures whether competing plans are ranked in the
right order, which is what a planner is for: pairs are compared only within one model, GPU type, GPU count and batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from lakh.errors import UserError
from lakh.planner.calibration.error_bands import COVERAGE, ErrorBand, configuration_kind, conformal_bands, with_fallback
from lakh.planner.calibration.fit import FIT_SETTINGS, Calibration, calibration_for, fit, is_held_out, predict
from lakh.planner.calibration.measured_points import Index, MeasuredPoint, MeasuredPoints
from lakh.planner.memory import memory_use
from lakh.planner.stacked import Array
from lakh.planner.timing.efficiency import Efficiency

__all__ = [
    "accuracy_report",
    "accuracy_score",
    "calibrate",
    "coverage",
    "leave_one_family_out",
    "predictions",
    "score_by",
    "transfer",
    "with_bands",
]

Points = Sequence[MeasuredPoint]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class AccuracyScore:
    n: int
    mape: float
    median_ape: float
    p95_ape: float
    bias: float
    kendall_tau: float | None
    """None where no two rows compete."""


def accuracy_score(points: Points, predicted: Array) -> AccuracyScore:
    ratio = np.asarray(predicted) / np.array([point.step_s for point in points])
    ape = np.abs(ratio - 1)
    agreement = plan_pairs(points, predicted).agreement
    return AccuracyScore(
        n=len(points),
        mape=float(ape.mean()),
        median_ape=float(np.median(ape)),
        p95_ape=float(np.quantile(ape, 0.95)),
        bias=float((ratio - 1).mean()),
        kendall_tau=float(agreement.mean()) if len(agreement) else None,
    )


def score_by(points: Points, predicted: Array, key: Callable[[MeasuredPoint], str]) -> dict[str, AccuracyScore]:
    """One score per group of points."""
    return {
        name: accuracy_score([points[i] for i in rows], np.asarray(predicted)[rows])
        for name, rows in sorted(group_rows(points, key).items())
    }


def _plain(scores: Mapping[str, AccuracyScore]) -> dict[str, Any]:
    return {name: asdict(score) for name, score in scores.items()}


def group_rows(points: Points, key: Callable[[MeasuredPoint], str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for i, point in enumerate(points):
        groups[key(point)].append(i)
    return groups


# --- ranking ---

TIE = 0.005  # differences below run-to-run noise have no right order


@dataclass(frozen=True)
class PlanPairs:
    """Pairs of competing rows with a measured order. Gaps are logarithms, left over right."""

    left: Index
    right: Index
    measured_gap: Array
    predicted_gap: Array

    @property
    def agreement(self) -> Array:
        """1 where the predicted order is right, -1 where it is wrong."""
        return np.sign(self.measured_gap) * np.sign(self.predicted_gap)


def plan_pairs(points: Points, predicted: Array) -> PlanPairs:
    """All pairs of competing rows, without measured ties and without one plan in two releases of a program."""
    groups = group_rows(points, lambda point: point.cluster_key).values()
    pairs = [(i, j) for rows in groups for i, j in combinations(rows, 2) if points[i].plan != points[j].plan]
    left, right = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
    measured, guess = np.log([point.step_s for point in points]), np.log(predicted)
    gap = measured[left] - measured[right]
    is_real = np.abs(gap) > TIE
    left, right = left[is_real], right[is_real]
    return PlanPairs(left, right, gap[is_real], guess[left] - guess[right])


# --- predictions with a calibration ---


def predictions(points: Points, calibrations: Mapping[str, Calibration] | None = None) -> Array:
    """Seconds per step of each point, with the calibration of its GPU type."""
    result = np.zeros(len(points))
    for kind, rows in group_rows(points, lambda point: point.kind).items():
        result[rows] = predict([points[i] for i in rows], calibration_for(kind, calibrations)[0])
    return result


def unseen(points: Points, calibrations: Mapping[str, Calibration] | None = None) -> list[int]:
    """Indices of rows whose configuration no fit has seen."""
    fitted = {kind: calibration_for(kind, calibrations)[0].fitted for kind in {point.kind for point in points}}
    return [i for i, point in enumerate(points) if point.config not in fitted[point.kind]]


def memory_errors(points: Points) -> dict[str, dict[str, float]]:
    """Error of the memory count per source, where a peak was measured and the micro-batch is stated.

    Programs report what their allocator used: the CUDA context and communicators are not included.
    """
    errors: dict[str, list[float]] = defaultdict(list)
    for point in points:
        if point.peak_bytes and len(point.candidates) == 1:
            used = memory_use(point.model, point.plan)
            errors[point.source].append(float((used.total_bytes - used.context_bytes) / point.peak_bytes) - 1)
    return {
        source: {"n": len(e), "mape": float(np.mean(np.abs(e))), "bias": float(np.mean(e)),
                 "median_ape": float(np.median(np.abs(e)))}
        for source, e in sorted(errors.items())
    }  # fmt: skip


def accuracy_report(
    points: MeasuredPoints, calibrations: Mapping[str, Calibration], *, only_unseen: bool = False, worst: int = 0
) -> dict[str, Any]:
    """Scores of all rows and of the unseen ones, by source and family, and the `worst` rows."""
    fresh = [points.kept[i] for i in unseen(points.kept, calibrations)]
    rows = fresh if only_unseen else points.kept
    if not rows:
        raise UserError("--unseen", "all configurations of this file were fitted", "omit --unseen")

    def scores(rows: Points, predicted: Array) -> dict[str, Any]:
        by_source = score_by(rows, predicted, lambda p: f"{p.source} ({p.kind})")
        return asdict(accuracy_score(rows, predicted)) | {"by_source": _plain(by_source)}

    predicted = predictions(rows, calibrations)
    report = scores(rows, predicted) | {
        "by_family": _plain(score_by(rows, predicted, lambda p: p.family)),
        "unseen": scores(fresh, predictions(fresh, calibrations)) if fresh else None,
        "coverage": coverage(fresh, calibrations) if fresh else None,
        "memory": memory_errors(points.kept),
        "left_out": dict(points.left_out),
        "factors": {kind: dict(one.program_factors) for kind, one in calibrations.items()},
    }
    if worst:
        errors = predicted / np.array([p.step_s for p in rows]) - 1
        report["worst"] = [
            {"id": rows[i].id, "source": rows[i].source, "error": float(errors[i]), "step_s": rows[i].step_s}
            for i in np.argsort(-np.abs(errors), kind="stable")[:worst]
        ]
    return report


# --- fits ---


def calibrate(points: Points, progress: Progress = lambda _: None) -> dict[str, Calibration]:
    """Fit every GPU type to its rows that are not held out, and measure the error on the held-out ones."""
    calibrations: dict[str, Calibration] = {}
    for kind, settings in FIT_SETTINGS.items():
        fitted, held_out = (
            [point for point in points if point.kind == kind and is_held_out(point.config) == out]
            for out in (False, True)
        )
        if len(fitted) < 3:
            continue
        progress(kind)
        start = calibrations.get(settings.start_from or "")
        one = fit(fitted, kind, start.efficiency if start else None)
        calibrations[kind] = replace(one, error=_held_out_error(held_out, one)) if held_out else one
    return with_bands([point for point in points if is_held_out(point.config)], calibrations)


def _held_out_error(points: Points, calibration: Calibration) -> dict[str, float]:
    score = asdict(accuracy_score(points, predict(points, calibration)))
    return {name: value for name, value in score.items() if value is not None and name != "kendall_tau"}


# --- error bars ---


def point_kind(point: MeasuredPoint) -> str:
    """Kind of configuration of a row, for its error band."""
    plan, node = point.plan, point.cluster.node_size
    return configuration_kind(point.model.num_experts, float(plan.low_precision), float(plan.gpus), node)


@dataclass(frozen=True)
class BandRows:
    """What error bands are made of, one entry per row: GPU type of its calibration, kind, measured over predicted."""

    types: list[str]
    kinds: list[str]
    ratios: Array

    @classmethod
    def of(cls, points: Points, calibrations: Mapping[str, Calibration]) -> BandRows:
        types = [calibration_for(point.kind, calibrations)[0].kind for point in points]
        ratios = np.array([point.step_s for point in points]) / predictions(points, calibrations)
        return cls(types, [point_kind(point) for point in points], ratios)

    def bands(self, rows: Sequence[int]) -> Callable[[str], dict[str, ErrorBand]]:
        """Bands from some of the rows, as a function of the GPU type."""

        def made_from(some: list[int]) -> dict[str, ErrorBand]:
            return conformal_bands([self.kinds[i] for i in some], self.ratios[some])

        pooled = made_from(list(rows))
        return lambda name: with_fallback(made_from([i for i in rows if self.types[i] == name]), pooled)

    def is_inside(self, row: int, bands: Mapping[str, ErrorBand]) -> bool:
        band = bands.get(self.kinds[row])
        return band is not None and band.low <= self.ratios[row] <= band.high


def with_bands(points: Points, calibrations: Mapping[str, Calibration]) -> dict[str, Calibration]:
    """The calibrations with error bands from these rows, which no fit has seen."""
    bands = BandRows.of(points, calibrations).bands(range(len(points)))
    return {name: replace(one, bands=bands(name)) for name, one in calibrations.items()}


def coverage(points: Points, calibrations: Mapping[str, Calibration]) -> dict[str, Any]:
    """Share of these rows inside their error bar: of all, by GPU type, and by kind of configuration.

    `left_out` is the same share with bands from the other configurations of these rows: where the bars were made from
    these rows, it is the figure without that advantage.
    """
    rows = BandRows.of(points, calibrations)
    inside = np.array([
        rows.is_inside(i, calibration_for(point.kind, calibrations)[0].bands) for i, point in enumerate(points)
    ], dtype=float)  # fmt: skip
    left_out = np.zeros(len(points))
    for own in group_rows(points, lambda point: point.config).values():
        mine = set(own)
        bands = rows.bands([i for i in range(len(points)) if i not in mine])
        left_out[own] = [rows.is_inside(i, bands(rows.types[i])) for i in own]
    groups: dict[str, Callable[[MeasuredPoint], str]] = {"by_gpu": lambda p: p.kind, "by_kind": point_kind}
    shares = {
        name: {label: float(inside[some].mean()) for label, some in sorted(group_rows(points, key).items())}
        for name, key in groups.items()
    }
    total = {"all": float(inside.mean()), "left_out": float(left_out.mean()), "stated": COVERAGE, "rows": len(points)}
    return total | shares


def starting_point(points: Points, kind: str) -> Efficiency | None:
    """The efficiencies from which the fit of a GPU type starts, if it starts from another type's."""
    other = FIT_SETTINGS[kind].start_from
    return fit(points, other).efficiency if other else None


def leave_one_family_out(points: Points, kind: str, progress: Progress = lambda _: None) -> dict[str, AccuracyScore]:
    """Each family predicted by a fit that has seen none of its rows."""
    rows = [point for point in points if point.kind == kind]
    start = starting_point(points, kind)
    result = {}
    for family in sorted({point.family for point in rows}):
        out = [point for point in rows if point.family == family]
        configs = {point.config for point in out}
        progress(f"without {family}")
        one = fit([p for p in rows if p.family != family and p.config not in configs], kind, start)
        result[family] = accuracy_score(out, predict(out, one))
    return result


def transfer(points: Points, source: str) -> dict[str, Any]:
    """Fit on one source alone, test on all other sources of the same GPU type. Programs that the source does not show
    have no factor."""
    own = [point for point in points if point.source.startswith(source)]
    if not own:
        raise UserError(f"transfer from {source!r}", "names no source of these points", "give the beginning of a name")
    result: dict[str, Any] = {}
    for kind in sorted({point.kind for point in own}):
        one = fit([point for point in own if not is_held_out(point.config)], kind)
        others = [point for point in points if point.kind == kind and not point.source.startswith(source)]
        if others:
            predicted = predict(others, one)
            result[kind] = _plain(score_by(others, predicted, lambda point: point.source))
            result[f"{kind}, all"] = asdict(accuracy_score(others, predicted))
    return result

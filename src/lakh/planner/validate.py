"""How wrong the planner is: errors on published measurements, by source and family, on rows that no fit has seen.

APE is |predicted/measured - 1|; bias its signed mean. Kendall's tau says whether layouts of one cluster are put in the
right order, which is a planner's real job: pairs are only compared inside one model, GPU type, GPU count and batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from lakh.errors import UserError
from lakh.planner.calibration import KINDS, Calibrated, calibrated, fit, is_held_out, predict
from lakh.planner.memory import memory
from lakh.planner.points import Index, Point, stack
from lakh.planner.shape import Array

__all__ = [
    "Pairs",
    "Score",
    "calibrate",
    "leave_one_family_out",
    "ordered_pairs",
    "peaks",
    "predictions",
    "score",
    "table",
    "transfer",
]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Score:
    n: int
    mape: float
    median_ape: float
    p95_ape: float
    bias: float
    kendall_tau: float | None
    """None where no cluster has two rows to compare."""


def score(points: Sequence[Point], predicted: Array) -> Score:
    ratio = np.asarray(predicted) / np.array([point.step_s for point in points])
    ape = np.abs(ratio - 1)
    return Score(
        n=len(points),
        mape=float(ape.mean()),
        median_ape=float(np.median(ape)),
        p95_ape=float(np.quantile(ape, 0.95)),
        bias=float((ratio - 1).mean()),
        kendall_tau=_kendall(points, np.asarray(predicted)),
    )


TIE = 0.005  # steps closer than run-to-run noise are no order to be right about


@dataclass(frozen=True)
class Pairs:
    """Rows of one cluster, two by two, whose order is worth getting right. Gaps are logarithms, left over right."""

    left: Index
    right: Index
    measured_gap: Array
    guessed_gap: Array

    @property
    def agreement(self) -> Array:
        """1 where the order is right, -1 where it is wrong."""
        return np.sign(self.measured_gap) * np.sign(self.guessed_gap)


def ordered_pairs(points: Sequence[Point], predicted: Array) -> Pairs:
    """All pairs inside clusters, less measured ties and one layout in two releases of a program: there is nothing to
    choose between."""
    clusters: dict[str, list[int]] = defaultdict(list)
    for i, point in enumerate(points):
        clusters[point.cluster].append(i)
    pairs = [pair for rows in clusters.values() for pair in combinations(rows, 2)]
    pairs = [(i, j) for i, j in pairs if points[i].layout != points[j].layout]
    left, right = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
    measured, guess = np.log([point.step_s for point in points]), np.log(predicted)
    gap = measured[left] - measured[right]
    real = np.abs(gap) > TIE
    left, right = left[real], right[real]
    return Pairs(left, right, gap[real], guess[left] - guess[right])


def _kendall(points: Sequence[Point], predicted: Array) -> float | None:
    """Concordant minus discordant pairs over all pairs, pooled over clusters."""
    agreement = ordered_pairs(points, predicted).agreement
    return float(agreement.mean()) if len(agreement) else None


def predictions(points: Sequence[Point], found: Mapping[str, Calibrated] | None = None) -> Array:
    """Seconds per step of each point, each with the calibration of its GPU type."""
    result = np.zeros(len(points))
    for kind in {point.kind for point in points}:
        rows = [i for i, point in enumerate(points) if point.kind == kind]
        one, _ = calibrated(kind, found)
        result[rows] = predict([points[i] for i in rows], one.fractions, one.codes)
    return result


def peaks(points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """How wrong the count of bytes is, per source, where a peak was measured and the micro-batch is stated.

    Programs report what their allocator held: the CUDA context and communicators are not in it.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    for point in points:
        if point.peak_bytes and len(point.candidates) == 1:
            shape, layout, _, _ = stack([point])
            used = memory(shape, layout)
            ratios[point.source].append(float((used.total_bytes - used.context_bytes)[0] / point.peak_bytes) - 1)
    return {
        source: {"n": len(e), "mape": float(np.mean(np.abs(e))), "bias": float(np.mean(e)),
                 "median_ape": float(np.median(np.abs(e)))}
        for source, e in sorted(ratios.items())
    }  # fmt: skip


def unseen(points: Sequence[Point], found: Mapping[str, Calibrated] | None = None) -> list[int]:
    """Rows whose configuration no shipped fit has seen."""
    tables = {kind: calibrated(kind, found)[0].fitted for kind in {point.kind for point in points}}
    return [i for i, point in enumerate(points) if point.config not in tables[point.kind]]


def table(points: Sequence[Point], predicted: Array, key: Callable[[Point], str]) -> dict[str, Score]:
    """One score per group of points."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, point in enumerate(points):
        groups[key(point)].append(i)
    return {
        name: score([points[i] for i in rows], np.asarray(predicted)[rows]) for name, rows in sorted(groups.items())
    }


def calibrate(points: Sequence[Point], progress: Progress = lambda _: None) -> dict[str, Calibrated]:
    """Fit every GPU type on its rows that are not held out, and measure the error on those that are."""
    found: dict[str, Calibrated] = {}
    for kind, plan in KINDS.items():
        rows = [point for point in points if point.kind == kind]
        seen = [point for point in rows if not is_held_out(point.config)]
        if len(seen) < 3:
            continue
        progress(kind)
        one = fit(seen, kind, found[plan.after].fractions if plan.after in found else None)
        held = [point for point in rows if is_held_out(point.config)]
        found[kind] = replace(one, error=_error(held, one)) if held else one
    return found


def _error(held: Sequence[Point], one: Calibrated) -> dict[str, float]:
    """The held-out error with every source counting the same, and the band that holds 80 % of it."""
    predicted = predict(held, one.fractions, one.codes)
    ratio = np.array([point.step_s for point in held]) / predicted
    by_source: dict[str, list[float]] = defaultdict(list)
    for point, value in zip(held, ratio, strict=True):
        by_source[point.source].append(float(value))
    grid = np.linspace(0, 1, 41)  # every source as a quantile curve: large tables do not drown small ones
    pooled = np.concatenate([np.quantile(values, grid) for values in by_source.values()])
    plain = {k: v for k, v in asdict(score(held, predicted)).items() if v is not None and k != "kendall_tau"}
    return {**plain, "low": float(np.quantile(pooled, 0.1)), "high": float(np.quantile(pooled, 0.9))}


def leave_one_family_out(points: Sequence[Point], kind: str, progress: Progress = lambda _: None) -> dict[str, Score]:
    """Each family predicted by a fit that has seen none of its rows."""
    rows = [point for point in points if point.kind == kind]
    elder = KINDS[kind].after
    start = fit(points, elder).fractions if elder else None
    result = {}
    for family in sorted({point.family for point in rows}):
        out = [point for point in rows if point.family == family]
        configs = {point.config for point in out}
        rest = [point for point in rows if point.family != family and point.config not in configs]
        progress(family)
        one = fit(rest, kind, start)
        result[family] = score(out, predict(out, one.fractions, one.codes))
    return result


def transfer(points: Sequence[Point], source: str) -> dict[str, Any]:
    """Calibrated on the rows of one source alone, tested on all other sources of the same GPU type: programs that the
    source does not show have no factor of their own."""
    own = [point for point in points if point.source.startswith(source)]
    if not own:
        raise UserError(f"transfer from {source!r}", "names no source of these points", "give the beginning of a name")
    kinds = {point.kind for point in own}
    result: dict[str, Any] = {}
    for kind in sorted(kinds):
        one = fit([point for point in own if not is_held_out(point.config)], kind)
        others = [point for point in points if point.kind == kind and not point.source.startswith(source)]
        if others:
            result[kind] = table(others, predict(others, one.fractions, one.codes), lambda point: point.source)
            result[f"{kind}, all"] = score(others, predict(others, one.fractions, one.codes))
    return result

"""Cross-validation of one source: every row predicted by fits that saw neither it nor its near duplicates.

A single split judges a small table by a dozen rows, and the ranking of its plans by a few dozen pairs. Here near
duplicates (same model, GPU count and degrees of parallelism: only the micro-batch differs, or nothing) form groups that
are dealt into folds, anew for each repeat; a fold is predicted by a fit on all other rows of the GPU type. The
prediction for a row is the geometric mean over the repeats. The interval of Kendall's tau is a bootstrap over rows,
that of the mean error one over configurations.

Costs folds x repeats fits per GPU type. Deterministic: folds by salted hash, a seeded bootstrap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lakh.errors import UserError
from lakh.planner.calibration.fit import FIT_SETTINGS, fit, predict
from lakh.planner.calibration.measured_points import MeasuredPoint
from lakh.planner.stacked import Array
from lakh.planner.validation.accuracy import (
    AccuracyScore,
    PlanPairs,
    accuracy_score,
    group_rows,
    plan_pairs,
    starting_point,
)
from lakh.planner.validation.mape_interval import mape_interval
from lakh.planner.validation.part_scores import PARTS, release_floor

__all__ = [
    "CrossValidation",
    "MisrankedPair",
    "cross_validate",
    "cross_validation_rows",
    "near_duplicate_key",
    "tau_interval",
]

FOLDS = 5
RESAMPLES = 2000


@dataclass(frozen=True)
class MisrankedPair:
    """Two competing plans that are predicted in the wrong order."""

    faster: str
    slower: str
    measured_gap: float
    """Extra time of the slower one."""
    predicted_gap: float
    """Negative: predicted to take less."""


@dataclass(frozen=True)
class CrossValidation:
    score: AccuracyScore
    mape_low: float
    mape_high: float
    """95 % of the bootstrap resamples have a mean error between mape_low and mape_high."""
    floor: dict[str, float] | None
    """Error of the best constant per configuration, of rows that were published more than once."""
    groups: int
    """Groups of near duplicates."""
    tau_low: float | None
    tau_high: float | None
    """95 % of the bootstrap resamples are between tau_low and tau_high."""
    pairs: int
    wrong: tuple[MisrankedPair, ...]
    """Nearest to a tie first."""


def cross_validate(
    points: Sequence[MeasuredPoint],
    source: str,
    *,
    repeats: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> CrossValidation:
    """Cross-validate a part of the rows (of PARTS), or the rows of the sources whose name begins with `source`."""
    tested = cross_validation_rows(points, source)
    groups = sorted({near_duplicate_key(point) for point in tested})
    if len(groups) < FOLDS:
        few = (
            f"has {len(groups)} groups of near duplicates" if groups else "names no source and no part of these points"
        )
        raise UserError(f"cross-validation of {source!r}", few, f"name a source with at least {FOLDS}")
    logs = np.zeros(len(tested))
    for repeat in range(repeats):
        for number, fold in enumerate(_folds(groups, repeat)):
            progress(f"repeat {repeat + 1} of {repeats}, fold {number + 1} of {FOLDS}")
            logs += _log_predictions(points, tested, fold)
    predicted = np.exp(logs / repeats)
    pairs = plan_pairs(tested, predicted)
    low, high = tau_interval(tested, pairs)
    score = accuracy_score(tested, predicted)
    mape_low, mape_high = mape_interval(tested, predicted)
    return CrossValidation(
        score, mape_low, mape_high, release_floor(tested), len(groups), low, high, len(pairs.left),
        _misranked(tested, pairs),
    )  # fmt: skip


def cross_validation_rows(points: Sequence[MeasuredPoint], source: str) -> list[MeasuredPoint]:
    """Rows of a part, or of the sources whose name begins with `source`, that a fit can predict."""
    part = PARTS.get(source)
    known = [point for point in points if point.kind in FIT_SETTINGS]
    return [point for point in known if (part(point) if part else point.source.startswith(source))]


def near_duplicate_key(point: MeasuredPoint) -> str:
    axes = ("tp", "pp", "cp", "ep", "shard", "chunks")
    return f"{point.cluster_key}|" + "/".join(f"{name}{getattr(point.plan, name):g}" for name in axes)


def _folds(groups: Sequence[str], repeat: int) -> list[frozenset[str]]:
    shuffled = sorted(groups, key=lambda name: hashlib.sha256(f"repeat {repeat} {name}".encode()).hexdigest())
    return [frozenset(shuffled[number::FOLDS]) for number in range(FOLDS)]


def _log_predictions(points: Sequence[MeasuredPoint], tested: Sequence[MeasuredPoint], fold: frozenset[str]) -> Array:
    """Logarithms of the seconds of the rows in a fold, by fits without them; 0 for the other rows."""
    out = [i for i, point in enumerate(tested) if near_duplicate_key(point) in fold]
    configs = {tested[i].config for i in out}
    result = np.zeros(len(tested))
    for kind in {tested[i].kind for i in out}:
        rest = [p for p in points if p.kind == kind and p.config not in configs and near_duplicate_key(p) not in fold]
        rows = [i for i in out if tested[i].kind == kind]
        one = fit(rest, kind, starting_point(points, kind))
        result[rows] = np.log(predict([tested[i] for i in rows], one))
    return result


def tau_interval(
    points: Sequence[MeasuredPoint], pairs: PlanPairs, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float | None, float | None]:
    """95 % interval of Kendall's tau when the competing rows are resampled with replacement."""
    if not len(pairs.left):
        return None, None
    rng = np.random.default_rng(seed)
    weight = np.zeros((resamples, len(points)))
    for rows in group_rows(points, lambda point: point.cluster_key).values():
        weight[:, rows] = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=resamples)
    both = weight[:, pairs.left] * weight[:, pairs.right]
    counted = both.sum(axis=1)
    some = counted > 0
    taus = (both @ pairs.agreement)[some] / counted[some]
    return float(np.quantile(taus, 0.025)), float(np.quantile(taus, 0.975))


def _misranked(points: Sequence[MeasuredPoint], pairs: PlanPairs) -> tuple[MisrankedPair, ...]:
    found = []
    for i in np.flatnonzero(pairs.agreement < 0):
        first, second = points[pairs.left[i]], points[pairs.right[i]]
        gap, guess = float(pairs.measured_gap[i]), float(pairs.predicted_gap[i])
        if gap > 0:  # the left one takes longer
            first, second, gap, guess = second, first, -gap, -guess
        found.append(MisrankedPair(first.id, second.id, float(np.exp(-gap)) - 1, float(np.exp(-guess)) - 1))
    return tuple(sorted(found, key=lambda pair: pair.measured_gap))

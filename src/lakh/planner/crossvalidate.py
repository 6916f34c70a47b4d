"""Every row of a source predicted by fits that saw neither it nor its near twins, several times over.

One split judges a small table by a dozen rows, and the order of its layouts by a few dozen pairs. Here near twins (one
model on so many GPUs, the same degrees of parallelism: only the micro-batch differs, or nothing) are dealt into folds,
anew for each repeat; a fold is predicted by a fit on all other rows of the GPU type. What a row is said to take is the
geometric mean over the repeats. The interval of Kendall's tau is a bootstrap over rows inside their clusters.

Knows what `validate` knows. Costs folds x repeats fits per GPU type. Deterministic: folds by salted hash, a seeded
bootstrap.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lakh.errors import UserError
from lakh.planner.calibration import KINDS, fit, predict
from lakh.planner.points import Point
from lakh.planner.shape import Array
from lakh.planner.validate import Pairs, Score, ordered_pairs, score

__all__ = ["CrossValidated", "WrongPair", "cross_validate", "tau_interval"]

FOLDS = 5
RESAMPLES = 2000


@dataclass(frozen=True)
class WrongPair:
    """Two layouts of one cluster that are put in the wrong order: the first is the faster one."""

    faster: str
    slower: str
    measured_gap: float
    """By how much the slower one takes longer."""
    predicted_gap: float
    """Negative: it is said to take less."""


@dataclass(frozen=True)
class CrossValidated:
    score: Score
    groups: int
    """Sets of near twins."""
    tau_low: float | None
    tau_high: float | None
    """95 % of bootstrap resamples lie between them."""
    pairs: int
    wrong: tuple[WrongPair, ...]
    """Nearest to a tie first."""


def cross_validate(
    points: Sequence[Point], source: str, *, repeats: int = 5, progress: Callable[[str], None] = lambda _: None
) -> CrossValidated:
    """The rows of the sources whose name begins so."""
    tested = [point for point in points if point.source.startswith(source) and point.kind in KINDS]
    groups = sorted({twins(point) for point in tested})
    if len(groups) < FOLDS:
        few = f"has {len(groups)} groups of near twins" if groups else "names no source of these points"
        raise UserError(f"cross-validation of {source!r}", few, f"name a source with at least {FOLDS}")
    logs = np.zeros(len(tested))
    for repeat in range(repeats):
        for number, fold in enumerate(_deal(groups, repeat)):
            progress(f"repeat {repeat + 1} of {repeats}, fold {number + 1} of {FOLDS}")
            logs += _predicted_without(points, tested, fold)
    predicted = np.exp(logs / repeats)
    found = score(tested, predicted)
    pairs = ordered_pairs(tested, predicted)
    low, high = tau_interval(tested, pairs)
    return CrossValidated(found, len(groups), low, high, len(pairs.left), _wrong(tested, pairs))


def twins(point: Point) -> str:
    """What near twins have in common."""
    degrees = "/".join(f"{name}{point.layout[name]:g}" for name in ("tp", "pp", "cp", "ep", "shard", "chunks"))
    return f"{point.cluster}|{degrees}"


def _deal(groups: Sequence[str], repeat: int) -> list[frozenset[str]]:
    shuffled = sorted(groups, key=lambda name: hashlib.sha256(f"repeat {repeat} {name}".encode()).hexdigest())
    return [frozenset(shuffled[number::FOLDS]) for number in range(FOLDS)]


def _predicted_without(points: Sequence[Point], tested: Sequence[Point], fold: frozenset[str]) -> Array:
    """Logarithms of the seconds of the rows in a fold, by fits without them; 0 for the other rows."""
    out = [i for i, point in enumerate(tested) if twins(point) in fold]
    configs = {tested[i].config for i in out}
    result = np.zeros(len(tested))
    for kind in {tested[i].kind for i in out}:
        rest = [p for p in points if p.kind == kind and p.config not in configs and twins(p) not in fold]
        elder = KINDS[kind].after
        one = fit(rest, kind, fit(points, elder).fractions if elder else None)
        rows = [i for i in out if tested[i].kind == kind]
        result[rows] = np.log(predict([tested[i] for i in rows], one.fractions, one.codes))
    return result


def tau_interval(
    points: Sequence[Point], pairs: Pairs, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float | None, float | None]:
    """Where 95 % of Kendall's taus lie when the rows of each cluster are drawn again, with replacement."""
    if not len(pairs.left):
        return None, None
    rng = np.random.default_rng(seed)
    weight = np.zeros((resamples, len(points)))
    clusters: dict[str, list[int]] = defaultdict(list)
    for i, point in enumerate(points):
        clusters[point.cluster].append(i)
    for rows in clusters.values():
        weight[:, rows] = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=resamples)
    both = weight[:, pairs.left] * weight[:, pairs.right]
    counted = both.sum(axis=1)
    some = counted > 0
    taus = (both @ pairs.agreement)[some] / counted[some]
    return float(np.quantile(taus, 0.025)), float(np.quantile(taus, 0.975))


def _wrong(points: Sequence[Point], pairs: Pairs) -> tuple[WrongPair, ...]:
    found = []
    for i in np.flatnonzero(pairs.agreement < 0):
        first, second = points[pairs.left[i]], points[pairs.right[i]]
        gap, guess = float(pairs.measured_gap[i]), float(pairs.guessed_gap[i])
        if gap > 0:  # the left one takes longer
            first, second, gap, guess = second, first, -gap, -guess
        found.append(WrongPair(first.id, second.id, float(np.exp(-gap)) - 1, float(np.exp(-guess)) - 1))
    return tuple(sorted(found, key=lambda pair: pair.measured_gap))

"""Verdicts to scores: unbiased pass@k, its bootstrap interval, and a table per problem.

pass@k is the probability that k of n samples, drawn without replacement, hold at least one of the c that passed:
1 - C(n-c, k) / C(n, k) (arXiv 2107.03374). 1 - (1 - c/n)^k, which draws with replacement, is too low.

Pure functions; randomness has a fixed seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from lakh.evals.sandbox.verdict import SandboxVerdict, VerdictKind

__all__ = ["ProblemScore", "ScoreSummary", "bootstrap_interval", "pass_at_k", "summarise"]

DEFAULT_KS = (1, 10, 100)
RESAMPLES = 2000
CONFIDENCE = 0.95


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k), as a product of factors below one: nothing overflows."""
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_passed} passed in {num_samples} samples")
    if num_samples - num_passed < k:
        return 1.0
    all_fail = 1.0
    for i in range(num_samples - num_passed + 1, num_samples + 1):
        all_fail *= 1.0 - k / i
    return 1.0 - all_fail


def bootstrap_interval(values: Sequence[float], sizes: Sequence[float] | None = None) -> tuple[float, float]:
    """95 % percentile interval of the mean, or of sum(values) / sum(sizes), over draws with replacement.

    Has no width if all values are equal.
    """
    import numpy as np

    if not values:
        raise ValueError("no values")
    above, below = np.asarray(values, dtype=float), np.asarray(sizes or [1.0] * len(values), dtype=float)
    drawn = np.random.default_rng(0).integers(0, len(above), (RESAMPLES, len(above)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(above[drawn].sum(axis=1) / below[drawn].sum(axis=1), [tail, 1 - tail])
    return float(low), float(high)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Bootstrap, or the exact binomial interval if all problems passed or none did and resampling has no spread."""
    if len(set(values)) > 1 or values[0] not in (0.0, 1.0):
        return bootstrap_interval(values)
    reach = ((1 - CONFIDENCE) / 2) ** (1 / len(values))
    return (0.0, 1 - reach) if values[0] == 0.0 else (reach, 1.0)


@dataclass(frozen=True, slots=True)
class ProblemScore:
    task_id: str
    num_samples: int
    num_passed: int
    kinds: dict[str, int]
    """Number of samples per kind of verdict, without zeros."""


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    passed: int
    total: int
    """Samples, over all problems."""
    pass_at_k: dict[int, float]
    intervals: dict[int, tuple[float, float]]
    """95 % intervals of pass@k, by k; empty if nothing could run."""
    kinds: dict[str, int]
    """Number of samples per kind of verdict, zeros included."""
    problems: tuple[ProblemScore, ...]

    @property
    def interval(self) -> tuple[float, float] | None:
        """That of pass@1."""
        return self.intervals.get(1)


def summarise(verdicts: Iterable[tuple[str, SandboxVerdict]], *, ks: Sequence[int] = DEFAULT_KS) -> ScoreSummary:
    """Scores from (task id, verdict) pairs; problems keep the order of their first sample.

    Includes each k of `ks` for which every problem has enough samples. Samples that could not run here (a language
    without its tools) are counted and are not part of the score.
    """
    by_problem: dict[str, list[VerdictKind]] = {}
    totals: dict[str, int] = dict.fromkeys(get_args(VerdictKind), 0)
    for task_id, verdict in verdicts:
        totals[verdict.kind] += 1
        if verdict.kind != "not_run":
            by_problem.setdefault(task_id, []).append(verdict.kind)
    if not by_problem:
        if not totals["not_run"]:
            raise ValueError("no verdicts")
        return ScoreSummary(0, 0, {}, {}, totals, ())
    problems = tuple(
        ProblemScore(task_id, len(kinds), kinds.count("passed"), dict(sorted(Counter(kinds).items())))
        for task_id, kinds in by_problem.items()
    )
    fewest = min(problem.num_samples for problem in problems)
    scores = {k: [pass_at_k(p.num_samples, p.num_passed, k) for p in problems] for k in (1, *ks) if k <= fewest}
    return ScoreSummary(
        passed=sum(problem.num_passed for problem in problems),
        total=sum(problem.num_samples for problem in problems),
        pass_at_k={k: sum(values) / len(values) for k, values in scores.items()},
        intervals={k: _interval(values) for k, values in scores.items()},
        kinds=totals,
        problems=problems,
    )

"""Verdicts to scores: unbiased pass@k, its bootstrap interval, and a table per problem.

pass@k asks: of n samples of which c passed, how likely is it that k drawn without replacement hold at least one that
passed? That is 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374); 1 - (1 - c/n)^k, which draws with replacement, is too low.

Pure functions; randomness comes in as a seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from lakh.evals.sandbox.verdict import Kind, SandboxVerdict

__all__ = [
    "DEFAULT_KS",
    "ProblemScore",
    "Summary",
    "bootstrap_interval",
    "bootstrap_ratio",
    "pass_at_k",
    "summarise",
]

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


def bootstrap_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean, over problems drawn with replacement.

    Has no width where all values are equal: none passed, or all did.
    """
    import numpy as np

    if not values:
        raise ValueError("no values")
    generator = np.random.default_rng(seed)
    table = np.asarray(values, dtype=np.float64)
    means = table[generator.integers(0, len(table), (RESAMPLES, len(table)))].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Bootstrap; where all problems passed or none did, and drawing again says nothing, the exact binomial one."""
    if len(set(values)) > 1 or values[0] not in (0.0, 1.0):
        return bootstrap_interval(values, seed=seed)
    reach = ((1 - CONFIDENCE) / 2) ** (1 / len(values))
    return (0.0, 1 - reach) if values[0] == 0.0 else (reach, 1.0)


def bootstrap_ratio(above: Sequence[float], below: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of sum(above) / sum(below), over pairs drawn with replacement."""
    import numpy as np

    generator = np.random.default_rng(seed)
    a, b = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    drawn = generator.integers(0, len(a), (RESAMPLES, len(a)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(a[drawn].sum(axis=1) / b[drawn].sum(axis=1), [tail, 1 - tail])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class ProblemScore:
    task_id: str
    num_samples: int
    num_passed: int
    kinds: dict[str, int]
    """How many samples ended in each class; classes that did not occur are left out."""


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    passed: int
    total: int
    """Samples, over all problems."""
    pass_at_k: dict[int, float]
    intervals: dict[int, tuple[float, float]]
    """95 % intervals of pass@k, by k; empty where nothing could be run."""
    kinds: dict[str, int]
    """How many samples ended in each class, zeros included."""
    problems: tuple[ProblemScore, ...]

    @property
    def interval(self) -> tuple[float, float] | None:
        """That of pass@1."""
        return self.intervals.get(1)


def summarise(verdicts: Iterable[tuple[str, SandboxVerdict]], *, ks: Sequence[int] = DEFAULT_KS, seed: int = 0) -> ScoreSummary:
    """Scores from (task id, verdict) pairs; problems keep the order of their first sample.

    Gives those of `ks` for which every problem has enough samples. What could not be run here (a language without its
    tools) is counted and is no part of the score.
    """
    by_problem: dict[str, list[Kind]] = {}
    not_run = 0
    for task_id, verdict in verdicts:
        if verdict.kind == "not_run":
            not_run += 1
        else:
            by_problem.setdefault(task_id, []).append(verdict.kind)
    problems = tuple(
        ProblemScore(task_id, len(kinds), kinds.count("passed"), dict(sorted(Counter(kinds).items())))
        for task_id, kinds in by_problem.items()
    )
    none_ran = dict.fromkeys(get_args(Kind), 0) | {"not_run": not_run}
    if not problems:
        if not not_run:
            raise ValueError("no verdicts")
        return ScoreSummary(0, 0, {}, {}, none_ran, ())
    fewest = min(problem.num_samples for problem in problems)
    scores = {k: [pass_at_k(p.num_samples, p.num_passed, k) for p in problems] for k in (1, *ks) if k <= fewest}
    return ScoreSummary(
        passed=sum(problem.num_passed for problem in problems),
        total=sum(problem.num_samples for problem in problems),
        pass_at_k={k: sum(values) / len(values) for k, values in scores.items()},
        intervals={k: _interval(values, seed=seed) for k, values in scores.items()},
        kinds={kind: none_ran[kind] + sum(problem.kinds.get(kind, 0) for problem in problems) for kind in none_ran},
        problems=problems,
    )

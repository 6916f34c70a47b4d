"""pass@k against its definition, intervals and summaries."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.evals.sandbox import SandboxVerdict
from lakh.evals.scoring.score import bootstrap_interval, pass_at_k, summarise


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_passed_sample(case: tuple[int, int, int]) -> None:
    n, c, k = case
    draws = list(itertools.combinations(range(n), k))
    share = Fraction(sum(any(i < c for i in draw) for draw in draws), len(draws))
    assert pass_at_k(n, c, k) == pytest.approx(float(share), abs=1e-12)


def test_pass_at_k_does_not_overflow() -> None:
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5)
    assert 0 < pass_at_k(100_000, 3, 50_000) < 1
    assert pass_at_k(100_000, 0, 50_000) == 0.0
    assert pass_at_k(5, 5, 5) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(1, 2, 1), (1, -1, 1), (3, 1, 4), (3, 1, 0)])
def test_pass_at_k_rejects_invalid_arguments(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_interval_is_repeatable_and_inside_the_range_of_values(values: list[float]) -> None:
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


def test_the_interval_narrows_with_more_problems() -> None:
    def width(n: int) -> float:
        low, high = bootstrap_interval([0.0, 1.0] * n)
        return high - low

    assert width(400) < width(100) < width(10)
    # Normal approximation: 2 x 1.96 x 0.5 / sqrt(800) = 0.069; a bootstrap of 2000 draws is within a tenth of it.
    assert width(400) == pytest.approx(0.0693, rel=0.1)


def test_a_summary_counts_every_kind_and_has_only_k_with_enough_samples() -> None:
    kinds = {"a": ["passed"] * 10, "b": ["failed"] * 9 + ["timeout"], "c": ["passed", *["memory"] * 10]}
    verdicts = [(task_id, SandboxVerdict(kind)) for task_id, of in kinds.items() for kind in of]  # type: ignore[arg-type]
    summary = summarise(verdicts)
    assert (summary.passed, summary.total) == (11, 31)
    assert list(summary.pass_at_k) == [1, 10]
    assert summary.pass_at_k[1] == pytest.approx((1 + 0 + 1 / 11) / 3)
    assert summary.pass_at_k[10] == pytest.approx((1 + 0 + 10 / 11) / 3)
    assert sum(summary.kinds.values()) == summary.total
    assert (summary.kinds["timeout"], summary.kinds["sandbox_error"]) == (1, 0)
    assert [problem.task_id for problem in summary.problems] == ["a", "b", "c"]
    assert summary.problems[1].kinds == {"failed": 9, "timeout": 1}


def test_the_interval_is_exact_if_all_or_none_pass() -> None:
    none = summarise([(f"{i}", SandboxVerdict("failed")) for i in range(164)]).interval
    all_ = summarise([(f"{i}", SandboxVerdict("passed")) for i in range(164)]).interval
    assert none == pytest.approx((0.0, 1 - 0.025 ** (1 / 164)))
    assert all_ == pytest.approx((0.025 ** (1 / 164), 1.0))


def test_samples_that_did_not_run_are_counted_and_not_scored() -> None:
    summary = summarise(
        [("a", SandboxVerdict("passed")), ("b", SandboxVerdict("not_run")), ("b", SandboxVerdict("not_run"))]
    )
    assert (summary.passed, summary.total, summary.kinds["not_run"]) == (1, 1, 2)
    assert summary.pass_at_k == {1: 1.0}
    nothing = summarise([("a", SandboxVerdict("not_run"))])
    assert (nothing.total, nothing.pass_at_k, nothing.interval) == (0, {}, None)


def test_every_k_has_an_interval() -> None:
    verdicts = [(f"{i}", SandboxVerdict("passed" if j < i % 4 else "failed")) for i in range(30) for j in range(10)]
    found = summarise(verdicts, ks=(1, 5, 10))
    assert set(found.intervals) == set(found.pass_at_k) == {1, 5, 10}
    assert all(low < found.pass_at_k[k] < high for k, (low, high) in found.intervals.items())
    assert found.interval == found.intervals[1]

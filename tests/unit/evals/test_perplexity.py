"""Bits per byte: windows and intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.evals.perplexity import windows
from lakh.evals.scoring.score import bootstrap_interval


@given(st.integers(0, 300), st.integers(2, 64))
def test_windows_score_every_token_but_the_first_once(length: int, context: int) -> None:
    counted: list[int] = []
    for start, end, first in windows(length, context):
        assert end - start <= context
        assert start < first <= end - 1 + 1
        counted += range(first, end)
    assert counted == list(range(1, length))


def test_tokens_late_in_a_text_have_half_a_context_before_them() -> None:
    for start, _, first in windows(1000, 64)[1:]:
        assert first - start >= 32 or first - start >= 31


def test_the_ratio_of_sums_is_in_its_interval() -> None:
    low, high = bootstrap_interval([1.0, 2.0, 9.0], [2.0, 2.0, 3.0])
    assert low <= 12 / 7 <= high
    assert bootstrap_interval([2.0, 4.0], [1.0, 2.0]) == pytest.approx((2.0, 2.0))

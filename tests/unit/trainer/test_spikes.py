"""What stands out, decided from the steps before."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lakh.trainer.spikes import MIN_HISTORY, judge_loss, norm_limit

CALM = [3.0 + 0.05 * (-1) ** i for i in range(40)]


def test_a_jump_is_a_spike_and_says_why() -> None:
    verdict = judge_loss(5.0, CALM, 4.0)
    assert verdict.is_spike
    assert "5.0000 is above" in verdict.reason
    assert not judge_loss(3.1, CALM, 4.0).is_spike
    assert not judge_loss(0.1, CALM, 4.0).is_spike  # a fall is no harm


def test_a_loss_that_is_no_number_is_always_one_and_the_beginning_never() -> None:
    assert judge_loss(math.nan, [], 4.0).is_spike
    assert not judge_loss(100.0, CALM[: MIN_HISTORY - 1], 4.0).is_spike


def test_one_bad_step_does_not_move_what_is_usual() -> None:
    assert judge_loss(5.0, [*CALM, 80.0, math.nan], 4.0).is_spike


@given(st.lists(st.floats(0.1, 10), min_size=MIN_HISTORY, max_size=80), st.floats(1.1, 10))
def test_the_limit_of_gradient_norms_is_above_half_of_them(norms: list[float], factor: float) -> None:
    recent = norms[-64:]
    assert sum(norm < norm_limit(norms, factor) for norm in recent) * 2 >= len(recent)


def test_without_history_every_gradient_may_pass() -> None:
    assert norm_limit([1.0] * 3, 2.0) == math.inf

"""Loss spikes, detected from the previous steps."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lakh.loss_spikes import MIN_HISTORY, SpikeDetector, detect_loss_spike, grad_norm_limit

CALM = [3.0 + 0.05 * (-1) ** i for i in range(40)]


def test_a_jump_is_a_spike_with_a_reason() -> None:
    decision = detect_loss_spike(5.0, CALM, 4.0)
    assert decision.is_spike
    assert "5.0000 is above" in decision.reason
    assert not detect_loss_spike(3.1, CALM, 4.0).is_spike
    assert not detect_loss_spike(0.1, CALM, 4.0).is_spike  # a fall is no harm


def test_nan_is_always_a_spike_and_the_first_steps_never() -> None:
    assert detect_loss_spike(math.nan, [], 4.0).is_spike
    assert not detect_loss_spike(100.0, CALM[: MIN_HISTORY - 1], 4.0).is_spike


def test_one_bad_step_does_not_move_the_median() -> None:
    assert detect_loss_spike(5.0, [*CALM, 80.0, math.nan], 4.0).is_spike


@given(st.lists(st.floats(0.1, 10), min_size=MIN_HISTORY, max_size=80), st.floats(1.1, 10))
def test_the_limit_of_gradient_norms_is_a_multiple_of_the_median(norms: list[float], factor: float) -> None:
    recent = norms[-64:]
    assert sum(norm < grad_norm_limit(norms, factor) for norm in recent) * 2 >= len(recent)


def test_without_history_every_gradient_is_accepted() -> None:
    assert grad_norm_limit([1.0] * 3, 2.0) == math.inf


@given(st.lists(st.floats(0.5, 20), min_size=70, max_size=160), st.floats(1.1, 10))
def test_the_streaming_detector_makes_the_same_decisions(losses: list[float], factor: float) -> None:
    detector = SpikeDetector(factor)
    for place, loss in enumerate(losses):
        expected = detect_loss_spike(loss, losses[:place], factor)
        assert (detector.check_loss(loss) is not None) == expected.is_spike

"""A rank that is slow for many steps is named; one that was slow once is not."""

import pytest

from lakh.trainer.observability.stragglers import WINDOW_STEPS, StragglerWatch


def watch(steps: list[tuple[int | None, float]], others_s: float = 1.0) -> list[tuple[int, float]]:
    found = StragglerWatch()
    return [result for rank, more_s in steps if (result := found.observe(rank, more_s, others_s)) is not None]


def test_a_slow_rank_is_named_once_per_window() -> None:
    found = watch([(3, 0.3)] * (2 * WINDOW_STEPS + 10))
    assert [rank for rank, _ in found] == [3, 3]
    assert [ratio for _, ratio in found] == pytest.approx([1.3, 1.3])


@pytest.mark.parametrize(
    "steps",
    [
        [(3, 0.1)] * WINDOW_STEPS,  # a tenth slower is not enough
        [(3, 0.3), (2, 0.3)] * (WINDOW_STEPS // 2),  # no rank is slow all the time
        [(3, 20.0)] + [(1, 0.0)] * (WINDOW_STEPS - 1),  # slow once
        [(None, 0.0)] * WINDOW_STEPS,  # not measured
        [(3, 0.3)] * (WINDOW_STEPS - 1),
    ],
)
def test_ranks_that_are_not_stragglers(steps) -> None:
    assert watch(steps) == []

"""What a drill reports follows from the events of its runs."""

from __future__ import annotations

import pytest

from lakh.errors import DataError
from lakh.events import Event, FaultInjected, RanksLost, Restarted, StepDone, StorageDelayed
from lakh.health.drill import measure_drill

CALM = {"loss": 2.5, "stream_sha256": "abc"}


def step(number: int, time_s: float) -> StepDone:
    values = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 1, "tokens_per_s": 1.0, "step_s": 1.0}
    return StepDone(step=number, time_s=time_s, data_wait_s=0.0, **values)


def faulty_events(*later: Event) -> list[Event]:
    return [step(1, 101.0), FaultInjected(step=2, time_s=102.0, fault="kill(rank=1, step=2)"), *later]


def test_a_restart_is_measured_from_the_fault() -> None:
    restarted = Restarted(attempt=1, reason="rank 1 was killed by SIGKILL", time_s=107.0, detected_s=102.25)
    found = faulty_events(restarted, step(1, 109.0), step(2, 110.0))
    result = measure_drill("kill", found, CALM, {"loss": 2.5 + 1e-6, "stream_sha256": "abc"})
    assert (result.detect_s, result.next_step_s, result.restarts) == (0.25, 7.0, 1)
    assert (result.samples_lost, result.samples_repeated) == (0, 0)
    assert result.loss_gap == pytest.approx(1e-6)


def test_ranks_that_continue_without_a_restart_are_measured_too() -> None:
    lost = RanksLost(step=2, time_s=103.0, lost=(1,), left=1, reason="", seconds=0.5)
    result = measure_drill("kill", faulty_events(lost, step(2, 104.0)), CALM, CALM)
    assert (result.detect_s, result.next_step_s, result.restarts) == (0.5, 2.0, 0)


def test_runs_that_read_different_sequences_fail_the_drill() -> None:
    with pytest.raises(DataError, match="samples were lost or repeated"):
        measure_drill("kill", faulty_events(step(2, 104.0)), CALM, {"loss": 2.5, "stream_sha256": "other"})


def test_a_fault_that_never_happened_fails_the_drill() -> None:
    with pytest.raises(DataError, match="never injected"):
        measure_drill("kill", [step(1, 101.0)], CALM, CALM)


def test_every_repeat_is_measured_and_the_longest_counts() -> None:
    found = [step(n, 100.0 + n) for n in range(4)] + [step(4, 110.0), step(5, 111.0), step(6, 113.5)]
    result = measure_drill("kill-all", found, CALM, CALM, [103.5, 111.5])
    assert result.next_steps_s == (6.5, 2.0)
    assert result.next_step_s == 6.5


def test_a_slow_object_store_is_detected_by_its_first_delay() -> None:
    delay = StorageDelayed(time_s=105.0, operation="write x", seconds=2.0, attempts=1, reason="is slow")
    found = [step(1, 101.0), step(2, 104.0), delay, step(3, 106.0)]
    assert measure_drill("s3-slow", found, CALM, CALM, [102.0]).detect_s == 3.0
    assert measure_drill("kill-all", found, CALM, CALM, [102.0]).detect_s is None

"""Interruptions of a run: cause, detection, recovery and loss, from its events."""

from __future__ import annotations

from typing import Any

import pytest

from lakh.dashboard.run_view import RunView


def interruptions(run: Any) -> list[dict[str, Any]]:
    view = RunView("run", run.run_dir)
    view.refresh()
    found: list[dict[str, Any]] = view.data(run.now_s, points=50)["interruptions"]
    return found


def test_a_run_without_failures_has_none(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 5)
    fake_run.event("run_ended", step=5, reason="last step done", seconds=5.0)
    fake_run.begin(5)  # a resume of a finished run
    assert interruptions(fake_run) == []


def test_a_killed_rank_costs_detection_recovery_and_the_steps_since_the_checkpoint(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 50)
    fake_run.event("checkpoint_saved", step=50, after_s=1.0, path="step-50", bytes=10, seconds=1.0)
    fake_run.steps(51, 70, step_s=2.0)
    last_s = fake_run.now_s
    fake_run.event("restarted", after_s=4.0, attempt=1, reason="rank 1 was killed", detected_s=last_s + 1.5)
    fake_run.begin(50, attempt=1, seconds=3.0)
    fake_run.steps(51, 60)
    (found,) = interruptions(fake_run)
    assert found == {
        "kind": "restart",
        "cause": "rank 1 was killed",
        "began_s": last_s,
        "step": 70,
        "detection_s": 1.5,
        "recovery_s": 5.5,  # from detection: 2.5 s until the new attempt writes, 3 s until its first step begins
        "lost_steps": 20,
        "lost_s": 40.0,
    }


def test_a_failure_while_recovering_belongs_to_the_same_interruption(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 3)
    for attempt in (1, 2):
        fake_run.event("restarted", after_s=4.0, attempt=attempt, reason=f"failure {attempt}")
        fake_run.begin(0, attempt=attempt)
    (found,) = interruptions(fake_run)
    assert found["cause"] == "failure 1; then failure 2"
    assert (found["recovery_s"], found["detection_s"]) == (None, None)
    fake_run.steps(1, 1)
    assert interruptions(fake_run)[0]["recovery_s"] == pytest.approx(14.0)


def test_a_stop_on_request_and_a_rewind(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 10)
    fake_run.event("run_ended", step=10, reason="stopped by SIGTERM", seconds=10.0)
    fake_run.now_s += 100.0
    fake_run.begin(10)
    fake_run.steps(11, 20)
    fake_run.event("rewound", step=20, to_step=12, reason="loss spike", skipped=[[0, 8]])
    fake_run.steps(13, 14)
    rewind, stop = interruptions(fake_run)
    assert (stop["kind"], stop["cause"], stop["lost_steps"]) == ("stop", "stopped by SIGTERM", 0)
    assert stop["recovery_s"] == pytest.approx(103.0)
    assert (rewind["kind"], rewind["lost_steps"], rewind["lost_s"]) == ("rewind", 8, 8.0)


def test_lost_ranks_are_detected_before_they_are_reported(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.steps(1, 10)
    fake_run.event("ranks_lost", step=10, after_s=5.0, lost=[1], left=1, reason="rank 1 closed", seconds=2.0)
    fake_run.steps(11, 12)
    (found,) = interruptions(fake_run)
    assert (found["kind"], found["detection_s"], found["recovery_s"]) == ("ranks lost", 3.0, 2.0)


def test_records_of_other_versions_are_read(fake_run: Any) -> None:
    fake_run.event("restarted")
    fake_run.event("rewound", to_step="x")
    fake_run.event("ranks_lost", lost=None, seconds="long")
    fake_run.event("step_done", step=1)
    assert [one["kind"] for one in interruptions(fake_run)] == ["restart"]

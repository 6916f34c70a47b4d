"""Goodput: classes of time that sum to the total."""

import pytest

from lakh.events import (
    CheckpointSaved,
    Evaluated,
    Initialised,
    Restarted,
    Rewound,
    RunEnded,
    RunStarted,
    SettingChanged,
    StepDone,
    StepSkipped,
)
from lakh.goodput import goodput


def step(number: int, time_s: float, seconds: float = 1.0, wait_s: float = 0.0) -> StepDone:
    return StepDone(
        step=number,
        time_s=time_s,
        loss=1.0,
        lr=0.1,
        grad_norm=1.0,
        tokens=number,
        tokens_per_s=1.0,
        step_s=seconds,
        data_wait_s=wait_s,
    )


def started(time_s: float, init_s: float, attempt: int = 0, step: int = 0) -> list:
    from dataclasses import replace

    told = replace(Initialised(seconds=init_s), time_s=time_s)
    names = {"backend": "gloo", "device": "cpu", "run_sha256": "", "data_sha256": ""}
    return [
        told,
        RunStarted(step=step, time_s=time_s, world=1, attempt=attempt, parameters=1, sequence_index=0, **names),
    ]


def test_a_killed_run_counts_its_lost_steps() -> None:
    first = [*started(102.0, 2.0), step(1, 103.0), step(2, 104.0, wait_s=0.25), step(3, 105.0)]
    saved = CheckpointSaved(step=2, time_s=104.5, path="", bytes=1, seconds=0.5)
    again = [Restarted(attempt=1, reason="rank 0 died", time_s=108.5), *started(110.0, 2.0, 1, step=2)]
    rest = [step(3, 111.0), StepSkipped(step=4, time_s=112.0, reason="nan"), step(4, 112.0)]
    end = [Evaluated(step=4, time_s=113.0, loss=1.0, sequences=1, seconds=1.0)]
    found = goodput([*first[:4], saved, first[4], *again, *rest, *end, RunEnded(time_s=114.0, reason="", seconds=14.0)])
    classes = found["classes_s"]
    assert found["total_s"] == pytest.approx(14.0)
    assert sum(classes.values()) == pytest.approx(14.0)
    assert classes["productive"] == pytest.approx(1.0 + 0.75 + 1.0)
    assert classes["lost"] == pytest.approx(2.0)  # step 3 of the first attempt, and the step that was left out
    assert classes["init"] == pytest.approx(4.0)
    assert classes["down"] == pytest.approx(3.0)  # from 105 to 108
    assert (classes["data_wait"], classes["checkpoint"], classes["evaluation"]) == pytest.approx((0.25, 0.5, 1.0))
    assert found["ratio"] == pytest.approx(2.75 / 14)


def test_the_time_until_a_resume_counts_as_down() -> None:
    changed = SettingChanged(step=1, time_s=109.5, path="mesh.tp", before=2, after=1)
    found = goodput([*started(102.0, 2.0), step(1, 103.0), changed, *started(110.0, 2.0, step=1), step(2, 111.0)])
    assert found["classes_s"]["down"] == pytest.approx(5.0)  # from 103 to 108
    assert found["classes_s"]["other"] == pytest.approx(0.0)


def test_no_events_give_no_time() -> None:
    assert goodput([])["total_s"] == 0
    assert goodput([])["ratio"] is None


def test_rewound_steps_are_lost_before_they_are_repeated() -> None:
    rewound = Rewound(step=3, time_s=106.0, to_step=1, reason="spike", skipped=[])
    found = goodput([*started(102.0, 2.0), step(1, 103.0), step(2, 104.0), step(3, 105.0), rewound])
    assert found["classes_s"]["lost"] == pytest.approx(2.0)
    assert sum(found["classes_s"].values()) == pytest.approx(found["total_s"])

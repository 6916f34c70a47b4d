"""The simulated membership decision, and the times that are read from events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.faults.scale import decide_at_scale
from bench.faults.soak import SoakRecord
from bench.faults.survive import _times
from bench.harness import SystemFailed

from lakh.events import Event, FaultInjected, RanksJoined, RanksLost, RunStarted, StepDone


def step(number: int, time_s: float) -> StepDone:
    values = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 1, "tokens_per_s": 1.0, "step_s": 1.0}
    return StepDone(step=number, time_s=time_s, data_wait_s=0.0, **values)


def started(world: int, time_s: float) -> RunStarted:
    words = dict.fromkeys(("backend", "device", "run_sha256", "data_sha256"), "")
    return RunStarted(time_s=time_s, world=world, attempt=0, parameters=1, sequence_index=0, **words)


def test_one_member_reads_all_registrations_and_the_others_only_the_decision() -> None:
    row = decide_at_scale(256, shard=8)
    assert row["left"] == 248
    assert row["requests_decider"] < 20  # the dead node has 8 ranks, each asked for by itself
    assert row["requests_member"] < 10


def test_times_of_a_lost_and_returning_replica() -> None:
    found: list[Event] = [
        started(4, 99.0),
        step(1, 100.0),
        FaultInjected(time_s=101.0, fault="kill(rank=2, step=1)"),
        RanksLost(time_s=102.0, lost=(2,), left=3, reason="", seconds=0.5),
        started(3, 102.5),
        step(2, 103.0),
        RanksJoined(time_s=104.0, joined=(2,), ranks=4, seconds=0.5),
        started(4, 104.5),
        step(3, 105.5),
    ]
    assert _times(found, 4) == {"detect_s": 0.5, "next_step_s": 2.0, "full_size_s": 4.5}
    assert _times(found[:6], 4)["full_size_s"] is None
    with pytest.raises(SystemFailed, match="did not continue"):
        _times(found[:3], 4)


def soaked(losses: list[float]) -> SoakRecord:
    record = SoakRecord(("kill",), steps=3, recovered={"kill": [2.0, 4.0], "stop": []})
    record.calm, record.calm_losses = {"loss": 1.0, "stream_sha256": "a"}, {1: 1.0, 2: 1.0, 3: 1.0}
    record.faulty_events = [started(2, 99.0)]
    for number, loss in enumerate(losses, 1):
        record.faulty_events.append(replace(step(number, 100.0 + number), loss=loss))
    return record


def test_the_result_of_an_interrupted_soak_covers_the_steps_that_were_done() -> None:
    record = soaked([1.0, 1.5])
    facts = record.facts()
    assert (facts["ended"], facts["same_stream"], facts["steps_done"]) == (False, None, 2)
    assert (facts["loss_gap"], facts["worst_loss_gap"]) == (0.5, 0.5)
    assert [(row["fault"], row["times"]) for row in record.rows()] == [("kill", 2), ("all", 2)]


def test_the_result_of_a_soak_compares_last_losses_and_streams() -> None:
    record = soaked([1.0, 1.5, 1.0])
    record.faulty = {"loss": 1.25, "stream_sha256": "b"}
    facts = record.facts()
    assert (facts["ended"], facts["same_stream"]) == (True, False)
    assert (facts["loss_gap"], facts["worst_loss_gap"], facts["first_step_apart"]) == (0.25, 0.5, 2)
    assert facts["goodput_sum"] == pytest.approx(1.0)
    assert facts["goodput"] == pytest.approx(3 / 4)

"""Goodput: classes of time that sum to the total."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.events import (
    CheckpointSaved,
    Evaluated,
    Initialised,
    RanksJoined,
    RanksLost,
    Restarted,
    Rewound,
    RunEnded,
    RunStarted,
    SettingChanged,
    StepDone,
    StepSkipped,
)
from lakh.goodput import CLASSES, GoodputAccount, goodput


def step(number: int, time_s: float, seconds: float = 1.0, wait_s: float = 0.0, **parts: float) -> StepDone:
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
        **parts,
    )


def started(time_s: float, init_s: float, attempt: int = 0, step: int = 0, world: int = 1) -> list:
    from dataclasses import replace

    told = replace(Initialised(seconds=init_s), time_s=time_s)
    names = {"backend": "gloo", "device": "cpu", "run_sha256": "", "data_sha256": ""}
    return [
        told,
        RunStarted(step=step, time_s=time_s, world=world, attempt=attempt, parameters=1, sequence_index=0, **names),
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
    assert classes["init"] == pytest.approx(2.0)
    assert classes["restart"] == pytest.approx(5.0)  # from 105 to 110
    assert (classes["data_wait"], classes["checkpoint"], classes["evaluation"]) == pytest.approx((0.25, 0.5, 1.0))
    assert found["ratio"] == pytest.approx(2.75 / 14)


def test_the_time_until_a_resume_after_a_failure_counts_as_restart() -> None:
    changed = SettingChanged(step=1, time_s=109.5, path="mesh.tp", before=2, after=1)
    found = goodput([*started(102.0, 2.0), step(1, 103.0), changed, *started(110.0, 2.0, step=1), step(2, 111.0)])
    assert found["classes_s"]["restart"] == pytest.approx(7.0)  # from 103 to 110
    assert found["classes_s"]["other"] == pytest.approx(0.0)


def test_no_events_give_no_time() -> None:
    assert goodput([])["total_s"] == 0
    assert goodput([])["ratio"] is None


def test_rewound_steps_are_lost_before_they_are_repeated() -> None:
    rewound = Rewound(step=3, time_s=106.0, to_step=1, reason="spike", skipped=[])
    found = goodput([*started(102.0, 2.0), step(1, 103.0), step(2, 104.0), step(3, 105.0), rewound])
    assert found["classes_s"]["lost"] == pytest.approx(2.0)
    assert sum(found["classes_s"].values()) == pytest.approx(found["total_s"])


def ended(time_s: float) -> RunEnded:
    return RunEnded(time_s=time_s, reason="stopped by SIGTERM", seconds=1.0)


def test_time_in_which_the_run_was_stopped_does_not_count() -> None:
    resumed = [*started(1000.0, 2.0, step=1), step(2, 1001.0)]
    found = goodput([*started(102.0, 2.0), step(1, 103.0), ended(103.5), *resumed, ended(1001.0)])
    assert found["total_s"] == pytest.approx(3.5 + 3.0)
    assert found["classes_s"]["init"] == pytest.approx(4.0)
    assert found["classes_s"]["productive"] == pytest.approx(2.0)
    assert sum(found["classes_s"].values()) == pytest.approx(found["total_s"])


def test_resuming_a_finished_run_does_not_change_its_goodput() -> None:
    finished = [*started(102.0, 2.0), step(1, 103.0), ended(103.5)]
    evaluated = Evaluated(step=1, time_s=202.5, loss=1.0, sequences=1, seconds=0.5)
    resumed = [*started(202.0, 5.0, step=1), evaluated, ended(203.0)]
    assert goodput([*finished, *resumed]) == goodput(finished)
    again = [*started(302.0, 5.0, step=1), ended(303.0)]
    assert goodput([*finished, *resumed, *again]) == goodput(finished)
    further = [*started(402.0, 2.0, step=1), step(2, 403.0), ended(403.0)]
    assert goodput([*finished, *resumed, *further])["total_s"] == pytest.approx(3.5 + 3.0)


def test_lost_ranks_cost_the_re_mesh_and_their_share_of_later_steps() -> None:
    lost = RanksLost(time_s=105.5, lost=(3,), left=3, reason="rank 3 died", seconds=0.5)
    after = [*started(106.0, 1.0, step=1, world=3), step(2, 107.0)]
    found = goodput([*started(102.0, 2.0, world=4), step(1, 103.0), lost, *after])
    classes = found["classes_s"]
    assert classes["re_mesh"] == pytest.approx(3.0)  # from 103 to 106
    assert classes["shrunk_batch"] == pytest.approx(0.25)
    assert classes["productive"] == pytest.approx(1.75)
    assert classes["restart"] == 0


def test_ranks_that_return_cost_a_re_mesh_and_end_the_shrunk_batch() -> None:
    lost = RanksLost(time_s=103.5, lost=(3,), left=3, reason="rank 3 died", seconds=0.5)
    joined = RanksJoined(time_s=107.5, joined=(3,), ranks=4, seconds=0.5)
    three = [*started(106.0, 1.0, step=1, world=3), step(2, 107.0)]
    four = [*started(108.0, 0.5, step=2, world=4), step(3, 109.0)]
    classes = goodput([*started(102.0, 2.0, world=4), step(1, 103.0), lost, *three, joined, *four])["classes_s"]
    assert classes["re_mesh"] == pytest.approx(3.0 + 1.0)
    assert classes["shrunk_batch"] == pytest.approx(0.25)
    assert classes["productive"] == pytest.approx(2.75)


def test_parts_of_a_step_are_billed_to_their_classes() -> None:
    found = goodput([*started(102.0, 2.0), step(1, 112.0, 10.0, wait_s=1.0, compile_s=6.0, straggler_s=0.5)])
    classes = found["classes_s"]
    assert (classes["data_wait"], classes["compile"], classes["straggler"]) == (1.0, 6.0, 0.5)
    assert classes["productive"] == pytest.approx(2.5)


KINDS = (
    "step_done",
    "initialised",
    "run_started",
    "run_ended",
    "ranks_lost",
    "ranks_joined",
    "evaluated",
    "checkpoint_saved",
    "rewound",
)


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.floats(0.01, 10.0), st.floats(0, 1)), max_size=30)
)
def test_any_order_of_events_sums_to_the_total(history: list[tuple[str, int, float, float]]) -> None:
    account, now_s = GoodputAccount(), 100.0
    account.add({"kind": "initialised", "time_s": now_s, "step": 0, "seconds": 2.0})
    for kind, number, passed_s, share in history:
        now_s += passed_s
        seconds = passed_s * share
        account.add(
            {
                "kind": kind,
                "time_s": now_s,
                "step": number,
                "to_step": 0,
                "world": number,
                "seconds": seconds,
                "step_s": seconds,
                "data_wait_s": seconds / 2,
                "compile_s": seconds / 2,
                "straggler_s": seconds,
            }
        )
    classes = account.seconds()
    assert set(classes) == set(CLASSES)
    assert all(value >= -1e-9 for value in classes.values())
    stopped_s = sum(end - start for start, end in account.spans["stopped"])
    total_s = (account.last_s or 0.0) - (account.first_s or 0.0) - stopped_s
    assert sum(classes.values()) == pytest.approx(total_s, abs=1e-6)

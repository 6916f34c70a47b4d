"""`lakh health drill` on real ranks, and the faults that are injected from outside."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from lakh import events
from lakh.events import CheckpointFailed, CheckpointSkipped, Event, Restarted, RunStarted
from lakh.health.drill import measure_drill, run_drill
from lakh.health.faults.job import TrainingJob

pytestmark = [pytest.mark.timeout(280), pytest.mark.slow]
OUTSIDE_SETTINGS = ("train.steps=180", "train.eval_every=0", "checkpoint.every=10", "checkpoint.keep=3")
STEPS_BETWEEN = 22
"""Two checkpoints and more."""


def test_a_drill_reports_detection_and_recovery(tiny_recipe: Path, run_lakh) -> None:
    found = run_lakh("health", "drill", str(tiny_recipe), "--fault", "kill", "--nproc", "1")
    assert found.keys() == {
        "fault",
        "detect_s",
        "next_step_s",
        "next_steps_s",
        "restarts",
        "samples_lost",
        "samples_repeated",
        "loss_gap",
    }
    assert found["restarts"] == 1
    check_drill(found)


def test_an_agent_that_finds_a_fault_drains_the_run(tiny_recipe: Path, tmp_path: Path, train_in_process) -> None:
    settings = ("train.steps=300", "train.eval_every=0", "checkpoint.every=0")  # steps enough to start the agent
    calm = train_in_process(tiny_recipe, tmp_path / "calm", *settings)
    found = run_drill(str(tiny_recipe), "row-remap-pending", tmp_path, sets=settings, nproc=1, calm=calm)
    assert found.restarts == 0
    check_drill(asdict(found))


def check_drill(found: dict) -> None:
    assert 0 <= found["detect_s"] < found["next_step_s"]
    assert (found["samples_lost"], found["samples_repeated"]) == (0, 0)
    assert found["loss_gap"] < 1e-5


@pytest.mark.timeout(600)
def test_one_run_survives_all_faults_from_outside(tiny_recipe: Path, tmp_path: Path, run_lakh) -> None:
    expected: dict[str, tuple[type[Event], ...]] = {
        "disk-full": (CheckpointFailed,),
        "link-cut": (Restarted,),
        "corrupt-chunk": (CheckpointSkipped, Restarted),
        "kill-all": (RunStarted,),
    }
    train = ["train", str(tiny_recipe), *(word for setting in OUTSIDE_SETTINGS for word in ("--set", setting))]
    calm = run_lakh(*train, "--nproc", "2", "--out", str(tmp_path / "calm"))
    dice, injected, recovered_s, step = random.Random(0), [], 0.0, 0
    with TrainingJob(train, tmp_path / "run", nproc=2) as job:
        for fault in expected:
            job.wait_for_step(step + STEPS_BETWEEN, after_s=recovered_s)
            injected.append(job.inject(fault, dice))
            recovered_s = job.wait_for_step(0, after_s=injected[-1])
            step = next(event.step for event in job.steps() if event.time_s >= recovered_s)
        faulty = job.result()
    found = events.read(tmp_path / "run")
    for (fault, kinds), begin_s, end_s in zip(expected.items(), injected, [*injected[1:], float("inf")], strict=True):
        after = [event for event in found if begin_s <= event.time_s < end_s]
        assert all(any(isinstance(event, kind) for event in after) for kind in kinds), fault
        drill = measure_drill(fault, after, calm, faulty, [begin_s])
        assert drill.next_step_s is not None
        assert drill.loss_gap < 1e-5


def test_pairs_of_ranks_are_tested(run_lakh) -> None:
    found = run_lakh("health", "pairs", "--nproc", "3", "--megabytes", "0.1", check=False)
    document = json.loads(found.stdout.splitlines()[-1])
    assert [(pair["first"], pair["second"]) for pair in document["pairs"]] == [(0, 1), (0, 2), (1, 2)]
    assert all(pair["is_right"] and pair["GBps"] > 0 for pair in document["pairs"])
    assert found.returncode == (75 if document["faulty"] else 0)  # a busy machine makes a link slow

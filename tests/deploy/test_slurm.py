"""deploy/slurm on a real Slurm: a job of two ranks is preempted, requeued, and ends as if it had not been."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tests.deploy.slurm_cluster import SlurmCluster

from lakh import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]
ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
# Steps take half a second until the test opens the gate, so that the job is in its middle when it is preempted.
PACE = """
import os, time

def pace(run, step, model):
    if not os.path.exists(os.environ["LAKH_TEST_GATE"]):
        time.sleep(0.5)
    return {}
"""


@pytest.fixture(scope="module")
def cluster():
    with SlurmCluster.start(cpus=2, gpus=2) as running:
        yield running


def test_a_preempted_job_is_requeued_and_resumes(cluster: SlurmCluster, tiny_recipe: Path, tmp_path: Path) -> None:
    run_dir, log, gate = tmp_path / "run", tmp_path / "job.log", tmp_path / "gate"
    (tmp_path / "pacing.py").write_text(PACE)
    settings = {"train.steps": STEPS, "train.eval_every": 1, "train.hooks": '["pacing:pace"]', "checkpoint.every": 1000}
    job = cluster.sbatch(
        "--nodes=1", "--gpus-per-node=2", "--cpus-per-task=2", f"--output={log}", f"--chdir={ROOT}",
        str(ROOT / "deploy/slurm/train.sbatch"), str(tiny_recipe), str(run_dir),
        *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
        PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin", PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}",
        LAKH_TEST_GATE=str(gate), OMP_NUM_THREADS="1",
    )  # fmt: skip

    def steps() -> list[int]:
        written = events.read(run_dir) if (run_dir / "events").exists() else ()
        return [event.step for event in written if isinstance(event, events.StepDone)]

    def wait_until(is_true, timeout_s: float = 90) -> None:
        until_s = time.monotonic() + timeout_s
        while not is_true():
            told = log.read_text()[-3000:] if log.exists() else cluster.state(job)
            assert time.monotonic() < until_s, told
            assert cluster.state(job)["JobState"] not in ("FAILED", "CANCELLED"), told
            time.sleep(0.2)

    wait_until(lambda: len(steps()) >= 5)
    urgent = cluster.sbatch("--partition=urgent", "--cpus-per-task=2", "--output=/dev/null", "--wrap", "true")
    cluster.wait_for(urgent, "COMPLETED", timeout_s=60)  # the job has given its CPUs back
    before = steps()
    checkpoint = run_dir / "checkpoints" / f"step-{before[-1]:08d}" / "manifest.json"
    assert checkpoint.exists(), log.read_text()[-3000:]

    wait_until(lambda: len(steps()) > len(before))
    gate.touch()
    ended = cluster.wait_for(job, "COMPLETED", timeout_s=90)
    assert ended["Restarts"] == "1", ended
    assert ended["ExitCode"] == "0:0"
    assert steps() == list(range(1, STEPS + 1))  # no step is lost and none is repeated
    written = list(events.read(run_dir))
    started = [event for event in written if isinstance(event, events.RunStarted)]
    assert {(event.rank, event.world, event.step) for event in started} == {
        (rank, 2, step) for rank in (0, 1) for step in (0, before[-1])
    }
    reasons = [event.reason for event in written if isinstance(event, events.RunEnded) and event.rank == 0]
    assert reasons == ["stopped by SIGTERM", "last step done"]

"""Ranks die during training over c3 and the others continue, and replicas join: same data stream, same losses."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lakh import checkpoint, events
from lakh.c3.directory_store import DirectoryStore
from lakh.health.faults.job import TrainingJob
from lakh.trainer.recovery.joining import JoinRequest, JoinRequests
from lakh.trainer.run_folder import find_rendezvous

pytestmark = pytest.mark.timeout(280)


def losses(run_dir: Path) -> dict[int, float]:
    return {e.step: e.loss for e in events.read(run_dir, rank=0) if isinstance(e, events.StepDone)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, train_in_process):
    """An undisturbed run on one rank: its output and its folder."""
    made = []

    def get(recipe: Path):
        if not made:
            folder = tmp_path_factory.mktemp("alone") / "run"
            made.append((train_in_process(recipe, folder), folder))
        return made[0]

    return get


@pytest.mark.parametrize(
    ("ranks", "mesh", "faults", "lost_ranks"),
    [
        (2, ["dp_replicate=2"], ["kill(rank=0, step=6)"], {0}),  # the rank that writes events
        (
            4,
            ["dp_replicate=4"],
            ["kill(rank=3, step=3)", "kill(rank=1, step=3)", "kill(rank=0, step=8)"],
            {0, 1, 3},
        ),
        pytest.param(4, ["dp_replicate=2"], ["kill(rank=3, step=6)"], {2, 3}, marks=pytest.mark.slow),  # HSDP
        pytest.param(4, ["dp_replicate=2", "tp=2"], ["kill(rank=0, step=6)"], {0, 1}, marks=pytest.mark.slow),
    ],
)
def test_the_others_continue_with_the_same_stream_and_losses(
    ranks: int,
    mesh: list[str],
    faults: list[str],
    lost_ranks: set[int],
    alone,
    tiny_recipe: Path,
    tmp_path: Path,
    run_launcher,
) -> None:
    """The rest of a replica that lost a rank leaves with it; the other replicas repeat the step."""
    calm, calm_dir = alone(tiny_recipe)
    hurt_dir = tmp_path / "run"
    options = [word for fault in faults for word in ("--fault", fault)]
    settings = [word for axis in mesh for word in ("--set", f"mesh.{axis}")]
    settings += ["--set", "train.backend=c3", "--max-restarts", "0"]
    hurt = run_launcher("train", str(tiny_recipe), "--out", str(hurt_dir), "--nproc", str(ranks), *settings, *options)
    assert hurt["attempts"] == 1
    found = events.read(hurt_dir)
    assert not [event for event in found if isinstance(event, events.Restarted)]
    lost = [event for event in found if isinstance(event, events.RanksLost)]
    assert sorted(rank for event in lost for rank in event.lost) == sorted(lost_ranks)
    assert lost[-1].left == ranks - len(lost_ranks)
    assert hurt["stream_sha256"] == calm["stream_sha256"]
    assert hurt["steps"] == calm["steps"]
    expected, got = losses(calm_dir), losses(hurt_dir)
    # A step may go unreported if a rank dies before its metrics arrive; its update is not lost.
    assert len(expected) - len(got) <= len(faults)
    for step, loss in got.items():
        assert loss == pytest.approx(expected[step], abs=1e-5)  # sums in another order
    assert hurt["val_loss"] == pytest.approx(calm["val_loss"], abs=1e-5)
    checkpoint.verify(checkpoint.find(hurt_dir))


def test_in_float64_lost_ranks_leave_the_weights_of_one_rank(
    tiny_recipe: Path, tmp_path: Path, run_launcher, train_in_process, assert_equal_bits
) -> None:
    """Four replicas, then three, with different numbers of micro-batches, then two: the same bits."""
    exact = "train.reduce_dtype=float64"
    calm = train_in_process(tiny_recipe, tmp_path / "calm", exact)
    options = ["--set", exact, "--set", "mesh.dp_replicate=4", "--set", "train.backend=c3", "--max-restarts", "0"]
    options += ["--fault", "kill(rank=3, step=3)", "--fault", "kill(rank=0, step=7)"]
    hurt = run_launcher("train", str(tiny_recipe), "--out", str(tmp_path / "hurt"), "--nproc", "4", *options)
    assert (hurt["steps"], hurt["stream_sha256"]) == (calm["steps"], calm["stream_sha256"])
    assert_equal_bits(tmp_path / "hurt", tmp_path / "calm")


@pytest.mark.slow
def test_a_lost_replica_returns_and_another_is_added(tiny_recipe: Path, tmp_path: Path, train_in_process) -> None:
    """2 replicas, then 1, then 2 again, then 3: 4 micro-batches do not divide by 3."""
    settings = ["train.steps=150", "train.eval_every=0", "checkpoint.every=0", "train.backend=c3"]
    options = [word for setting in settings for word in ("--set", setting)]
    calm = train_in_process(tiny_recipe, tmp_path / "calm", *settings)
    run_dir = tmp_path / "run"
    train = ["train", str(tiny_recipe), *options, "--set", "mesh.dp_replicate=2", "--fault", "kill(rank=0, step=6)"]
    join = [sys.executable, "-m", "lakh", "join", str(run_dir), "--nproc", "1", "--json"]
    with TrainingJob(train, run_dir, nproc=2) as job:
        wait_for(lambda: any(isinstance(event, events.RanksJoined) for event in events.read(run_dir, rank=0)), job)
        suspended = job.ranks()[0]  # so that the run is not over before the added rank has started
        os.kill(suspended, signal.SIGSTOP)
        with subprocess.Popen(join, stdout=subprocess.PIPE) as added:
            wait_for(lambda: 2 in [request.member for request in join_requests(run_dir)], job)
            os.kill(suspended, signal.SIGCONT)
            found = job.result()
            assert added.wait(60) == 0
    joined = [event for event in events.read(run_dir, rank=0) if isinstance(event, events.RanksJoined)]
    assert sorted(member for event in joined for member in event.joined) == [0, 2]
    assert joined[-1].ranks == 3
    assert found["attempts"] == 1
    assert found["stream_sha256"] == calm["stream_sha256"]
    expected, got = losses(tmp_path / "calm"), losses(run_dir)
    assert len(expected) - len(got) <= 1
    assert all(loss == pytest.approx(expected[step], abs=2e-3) for step, loss in got.items())  # sums in another order


def join_requests(run_dir: Path) -> list[JoinRequest]:
    return JoinRequests(DirectoryStore(f"{find_rendezvous(run_dir)[0]}.members")).waiting()


def wait_for(condition: Callable[[], bool], job: TrainingJob) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert not job.has_ended, "the run ended too early"
        assert time.monotonic() < deadline_s
        time.sleep(0.05)

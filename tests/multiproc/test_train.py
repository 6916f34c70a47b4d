"""Training with real processes: any number of ranks, interrupted or killed, ends with the same weights.

float32 on CPUs with one thread per rank: the sum of two gradients does not depend on their order, so equal means
bit for bit where the ranks are equally many, and 1e-5 (rounding of differently grouped sums) where they are not.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lakh import checkpoint, events
from lakh.errors import PeerError, PeerLost, PeerTimeout

pytestmark = pytest.mark.timeout(280)


def losses(run_dir: Path) -> dict[int, float]:
    """The last loss written for each step: a restarted run writes some steps twice."""
    return {e.step: e.loss for e in events.read(run_dir, rank=0) if isinstance(e, events.StepDone)}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, run_lakh, train_in_process):
    """Undisturbed runs of the tiny recipe on 1 and 2 ranks, made once: in this process, and by the command."""
    made: dict[int, Path] = {}

    def get(ranks: int, recipe: Path) -> Path:
        if ranks not in made:
            run_dir = tmp_path_factory.mktemp(f"calm{ranks}") / "run"
            if ranks == 1:
                train_in_process(recipe, run_dir)
            else:
                run_lakh("train", str(recipe), "--out", str(run_dir), "--nproc", str(ranks))
            made[ranks] = run_dir
        return made[ranks]

    return get


def test_two_ranks_give_the_losses_of_one(calm, tiny_recipe: Path) -> None:
    one, two = losses(calm(1, tiny_recipe)), losses(calm(2, tiny_recipe))
    assert one.keys() == two.keys() == set(range(1, 13))
    assert one[12] < one[1] - 1  # it learns at all
    for step in one:
        assert two[step] == pytest.approx(one[step], abs=1e-5)
    a, b = ([e.loss for e in events.read(calm(n, tiny_recipe)) if isinstance(e, events.Evaluated)] for n in (1, 2))
    assert a == pytest.approx(b, abs=1e-5)


def test_replicas_give_the_losses_of_shards(calm, tiny_recipe: Path, tmp_path: Path, run_launcher) -> None:
    copies = tmp_path / "run"
    done = run_launcher("train", str(tiny_recipe), "--out", str(copies), "--nproc", "2", "--set", "mesh.dp_replicate=2")
    assert sum(done["sent_bytes"].values()) > 4 * 512 * 32  # the gradient of the embedding is 512 x 32
    assert losses(copies) == pytest.approx(losses(calm(2, tiny_recipe)), abs=1e-5)
    manifest = checkpoint.verify(checkpoint.find(copies))
    assert {len(stored.slices) for stored in manifest.tensors.values()} == {1}  # each slice is written once


def test_replicas_may_exchange_compressed_gradients(calm, tiny_recipe: Path, tmp_path: Path, run_launcher) -> None:
    settings = ("train.backend=c3", "mesh.dp_replicate=2", "train.replica_codec=int8")
    arguments = [word for setting in settings for word in ("--set", setting)]
    done = run_launcher("train", str(tiny_recipe), "--out", str(tmp_path / "run"), "--nproc", "2", *arguments)
    found, exact = losses(tmp_path / "run"), losses(calm(2, tiny_recipe))
    assert found == pytest.approx(exact, abs=0.01)
    assert found != exact  # they were rounded
    (started, *_) = [e for e in events.read(tmp_path / "run", rank=0) if isinstance(e, events.RunStarted)]
    as_they_are = 4 * started.parameters  # two ranks: half of the bytes, twice
    assert sum(done["sent_bytes"].values()) < 0.3 * as_they_are


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_does_not_change_the_result(
    assert_equal_bits, ranks: int, calm, tiny_recipe: Path, tmp_path: Path, run_launcher
) -> None:
    hurt = tmp_path / "run"
    fault = f"kill(rank={ranks - 1}, step=6)"
    answer = run_launcher("train", str(tiny_recipe), "--out", str(hurt), "--nproc", str(ranks), "--fault", fault)
    assert answer["attempts"] == 2
    found = events.read(hurt)
    assert [e.fault for e in found if isinstance(e, events.FaultInjected)] == [fault]
    assert [e.step for e in found if isinstance(e, events.RunStarted) and e.attempt == 1] == [4] * ranks
    reasons = [e.reason for e in found if isinstance(e, events.Restarted)]
    assert reasons == [f"rank {ranks - 1} was killed by SIGKILL"]
    assert losses(hurt) == losses(calm(ranks, tiny_recipe))
    assert_equal_bits(hurt, calm(ranks, tiny_recipe))


def test_a_run_resumes_on_another_number_of_ranks(calm, tiny_recipe: Path, tmp_path: Path, run_launcher) -> None:
    changed = tmp_path / "run"
    with pytest.raises(PeerLost, match="rank 0 was killed by SIGKILL and no restarts are left"):
        run_launcher(
            *("train", str(tiny_recipe), "--out", str(changed), "--nproc", "2", "--max-restarts", "0"),
            *("--fault", "kill(rank=0, step=8)"),
        )
    run_launcher("resume", str(changed), "--nproc", "1")
    expected = losses(calm(1, tiny_recipe))
    for step, loss in losses(changed).items():
        assert loss == pytest.approx(expected[step], abs=1e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_writes_a_checkpoint_and_exits_with_75(
    number: signal.Signals, calm, tiny_recipe: Path, tmp_path: Path, run_launcher
) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "lakh", "train", str(tiny_recipe), "--out", str(run_dir), "--nproc", "2"]
    process = subprocess.Popen(
        [*command, "--set", "train.steps=100000", "--set", "checkpoint.every=0"], stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: len(losses(run_dir)) >= 3, "three steps")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "saving a checkpoint, then stopping; again to stop now" in err
    assert f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'} after the checkpoint" in err
    assert f"continue with: lakh resume {run_dir}" in err
    assert "Traceback" not in err
    (step, folder), *more = checkpoint.list_complete(run_dir)
    assert not more
    checkpoint.verify(folder)
    assert step == max(losses(run_dir))
    if number == signal.SIGTERM:  # it goes on exactly there
        run_launcher("resume", str(run_dir), "--nproc", "2", "--set", f"train.steps={step + 3}")
        assert losses(run_dir).keys() == set(range(1, step + 4))
        changed = [(e.path, e.before, e.after) for e in events.read(run_dir) if isinstance(e, events.SettingChanged)]
        assert changed == [("train.steps", 100000, step + 3)]


def test_a_second_interrupt_stops_ranks_that_do_not_answer(tiny_recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "lakh", "train", str(tiny_recipe), "--out", str(run_dir), "--nproc", "1"]
    process = subprocess.Popen([*command, "--fault", "stop(rank=0, step=3)"], stderr=subprocess.PIPE, text=True)
    stopped = lambda: any(isinstance(event, events.FaultInjected) for event in events.read(run_dir))  # noqa: E731
    wait_for(stopped, "the rank is suspended")
    said = ""
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    while "again to stop now" not in said:  # bounded by the timeout of the whole test
        said += process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert f"stopped at the second request, without a checkpoint; continue with: lakh resume {run_dir}" in err


def test_damaged_checkpoints_are_skipped_and_without_another_an_error(
    assert_equal_bits, calm, tiny_recipe: Path, tmp_path: Path, run_launcher, run_lakh
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(calm(1, tiny_recipe), run_dir)
    folders = [Path(folder) for _, folder in checkpoint.list_complete(run_dir)]
    assert [folder.name for folder in folders] == ["step-00000004", "step-00000008", "step-00000012"]
    truncate(folders[2])
    run_launcher("resume", str(run_dir))
    skipped = [e.path for e in events.read(run_dir) if isinstance(e, events.CheckpointSkipped)]
    assert skipped == [str(folders[2] / "rank-00000.safetensors")]
    assert_equal_bits(run_dir, calm(1, tiny_recipe))
    for folder in folders:
        truncate(folder)
    refused = run_lakh("resume", str(run_dir), check=False)
    assert refused.returncode == 65
    assert "Traceback" not in refused.stderr
    assert json.loads(refused.stdout)["error"]["kind"] == "CorruptCheckpoint"
    listed = run_lakh("checkpoint", "verify", str(run_dir), check=False)
    assert listed.returncode == 65


def test_a_rank_does_not_outlive_its_launcher(tiny_recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "lakh", "train", str(tiny_recipe), "--out", str(run_dir), "--nproc", "2"]
    process = subprocess.Popen([*command, "--set", "train.steps=100000"], stderr=subprocess.DEVNULL)
    wait_for(lambda: len(losses(run_dir)) >= 1, "the first step")
    (server,) = children_of(process.pid)
    ranks = children_of(server)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in (server, *ranks)), "the ranks to end")


def test_a_run_restarts_after_all_its_processes_but_the_launcher_were_killed(
    calm, tiny_recipe: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "lakh", "train", str(tiny_recipe), "--out", str(run_dir), "--nproc", "2", "--json"]
    # Suspended at step 6, so that the run is not over before it is killed.
    process = subprocess.Popen([*command, "--fault", "stop(rank=1, step=6)"], stdout=subprocess.PIPE, text=True)
    wait_for(lambda: any(isinstance(e, events.FaultInjected) for e in events.read(run_dir)), "the rank is suspended")
    (server,) = children_of(process.pid)
    for pid in (server, *children_of(server)):
        os.kill(pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert json.loads(out.splitlines()[-1])["attempts"] == 2
    assert losses(run_dir) == losses(calm(2, tiny_recipe))


@pytest.mark.slow
def test_a_run_restarts_on_fewer_devices_when_one_is_lost(
    calm, tiny_recipe: Path, tmp_path: Path, run_launcher
) -> None:
    run_dir = tmp_path / "run"
    run = ("train", str(tiny_recipe), "--out", str(run_dir), "--nproc", "2", "--fault", "lose(rank=0, step=6)")
    found = run_launcher(*run)
    assert found["attempts"] == 2
    (restarted,) = [event for event in events.read(run_dir) if isinstance(event, events.Restarted)]
    assert "1 ranks instead of 2 on 1 devices" in restarted.reason
    worlds = [event.world for event in events.read(run_dir, rank=0) if isinstance(event, events.RunStarted)]
    assert worlds == [2, 1]
    expected = losses(calm(2, tiny_recipe))
    assert losses(run_dir) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_single_rank_that_stays_stopped_ends_with_a_timeout(tiny_recipe: Path, tmp_path: Path, run_launcher) -> None:
    run = ("train", str(tiny_recipe), "--out", str(tmp_path / "run"), "--set", "train.peer_timeout_s=3")
    with pytest.raises(PeerTimeout, match=r"^rank 0: .*stopped by a signal for 3 s"):
        run_launcher(*run, "--max-restarts", "0", "--fault", "stop(rank=0, step=6)")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "restarts"), [("gloo", 0), ("c3", 0), ("gloo", 1)])
def test_a_stopped_rank_and_the_collective_it_did_not_enter_are_named(
    backend: str, restarts: int, tiny_recipe: Path, tmp_path: Path, run_launcher
) -> None:
    run = ("train", str(tiny_recipe), "--out", str(tmp_path / "run"), "--nproc", "2", "--max-restarts", str(restarts))
    # Shards cannot continue without a rank, so that the error ends the run or the attempt.
    wanted = ("train.peer_timeout_s=5", "checkpoint.every=0", f"train.backend={backend}", "mesh.dp_shard=2")
    settings = [word for setting in wanted for word in ("--set", setting)]
    command = (*run, *settings, "--fault", "stop(rank=1, step=6)")
    if restarts:  # without a checkpoint it begins again
        run_launcher(*command)
        (again,) = [e for e in events.read(tmp_path / "run", rank=0) if isinstance(e, events.Restarted)]
        assert "rank 1 did not enter all" in again.reason
        return
    with pytest.raises(PeerError, match="rank 1 did not enter all"):
        run_launcher(*command)
    steps = [e for e in events.read(tmp_path / "run", rank=0) if isinstance(e, events.StepDone)]
    assert {step.slowest_rank for step in steps} <= {0, 1}
    assert all(step.straggler_s <= step.step_s for step in steps)


@pytest.mark.slow
def test_a_limit_on_file_sizes_is_an_error_with_a_remedy(tiny_recipe: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lakh", "train", str(tiny_recipe), "--out", str(tmp_path / "run")]
    limited = ["sh", "-c", 'ulimit -f 100; exec "$@"', "sh", *command]  # 50 or 100 KB: less than a checkpoint
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "raise the limit (ulimit -f)" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_same_run_works_under_torchrun(calm, tiny_recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "lakh.trainer.torchrun", "--standalone", "--nproc-per-node", "2", "-m", "lakh"]
    done = subprocess.run(
        [*command, "train", str(tiny_recipe), "--out", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert losses(run_dir) == losses(calm(2, tiny_recipe))


def truncate(folder: Path) -> None:
    file = folder / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def wait_for(condition, what: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

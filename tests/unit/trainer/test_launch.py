"""The launcher's decision from the exit codes of the ranks is a pure function; ranks that were stopped are found."""

import os
import signal
import subprocess

import pytest

from lakh.spec import Mesh, Training
from lakh.trainer.launch.decision import can_continue_without_ranks, decide, find_lost_replicas
from lakh.trainer.launch.stopped import StoppedProcesses, is_stopped
from lakh.trainer.recovery.replicas import ReplicaLayout

CASES = [
    ((None, None), "wait", 0),
    ((0, None), "wait", 0),
    ((0, 0), "done", 0),
    ((None, -9), "restart", 1),
    ((75, -9), "restart", 1),  # the survivor lost its peer: the dead one is the cause
    ((75, None), "restart", 0),
    ((75, 2), "fail", 1),  # a wrong setting would be wrong again
    ((65, 75), "fail", 0),
    ((1, 75), "fail", 0),
]


@pytest.mark.parametrize(("codes", "action", "rank"), CASES)
def test_the_rank_that_failed_first_decides_the_action(codes: tuple[int | None, ...], action: str, rank: int) -> None:
    decision = decide(codes, stopping=False, restarts_left=1)
    assert (decision.action, decision.rank) == (action, rank)
    if action in ("restart", "fail"):
        assert f"rank {rank} " in decision.reason


def test_without_restarts_left_a_dead_rank_fails_the_run() -> None:
    decision = decide((75, -9), stopping=False, restarts_left=0)
    assert decision.action == "fail"
    assert "SIGKILL and no restarts are left" in decision.reason


def test_the_launcher_waits_for_ranks_that_stop_on_request() -> None:
    assert decide((75, None), stopping=True, restarts_left=3).action == "wait"
    assert decide((75, 75), stopping=True, restarts_left=3).action == "stopped"
    assert decide((0, 0), stopping=True, restarts_left=3).action == "done"


@pytest.mark.parametrize(
    ("codes", "action", "rank"),
    [
        ((None, -9), "wait", 1),  # the other continues
        ((-9, 0), "done", 1),  # and its answer is the run's
        ((75, 0, -9), "done", 1),
        ((75, -9), "restart", 1),  # no rank is left
        ((2, None, 75), "fail", 0),
        ((0, 0), "done", 0),
    ],
)
def test_an_elastic_run_continues_without_lost_ranks(codes, action: str, rank: int) -> None:
    decision = decide(codes, stopping=False, restarts_left=1, elastic=True)
    assert (decision.action, decision.rank) == (action, rank)


def test_ranks_can_be_lost_only_if_another_replica_remains_and_uses_c3() -> None:
    def asked(ranks: int, backend: str = "c3", **mesh: int) -> tuple[bool, str]:
        return can_continue_without_ranks(Training(backend=backend), Mesh(**mesh), ranks)

    assert asked(2, dp_replicate=2)[0]
    assert "gloo" in asked(2, "gloo", dp_replicate=2)[1]
    assert asked(4, dp_replicate=2)[0]
    assert asked(4, dp_replicate=2, tp=2)[0]
    assert "takes its part" in asked(4)[1]
    assert not asked(1)[0]


@pytest.mark.parametrize(
    ("codes", "lost"),
    [
        ((None, None, None, None), ()),
        ((None, None, -9, None), ()),  # the other rank of its replica has not noticed yet
        ((None, None, -9, 75), (2, 3)),
        ((-9, 75, 0, 0), (0, 1)),
        ((None, None, 2, 75), ()),  # an error that would happen again
    ],
)
def test_a_replica_is_started_again_when_all_its_ranks_have_ended(codes, lost: tuple[int, ...]) -> None:
    assert find_lost_replicas(codes, ReplicaLayout(Mesh(dp_replicate=2, dp_shard=2))) == lost


def test_a_rank_that_the_launcher_killed_is_reported_with_the_cause() -> None:
    reason = "rank 0 was stopped by a signal for 120 s"
    assert decide((-9,), stopping=False, restarts_left=1, timed_out={0: reason}).reason == reason


class StoppableProcesses:
    def __init__(self) -> None:
        self.stopped: set[int] = set()

    def watch(self, timeout_s: float) -> StoppedProcesses:
        return StoppedProcesses([10, 11], timeout_s, is_stopped=self.stopped.__contains__)


def test_a_process_that_stays_stopped_is_overdue_after_the_timeout() -> None:
    processes = StoppableProcesses()
    watch = processes.watch(timeout_s=5.0)
    processes.stopped.add(11)
    assert [second for second in range(10) if watch.find_overdue(float(second))] == [6, 7, 8, 9]
    assert watch.find_overdue(10.0) == [1]


def test_a_process_that_was_continued_is_not_overdue() -> None:
    processes = StoppableProcesses()
    watch = processes.watch(timeout_s=5.0)
    processes.stopped.add(10)
    watch.find_overdue(0.0)
    watch.find_overdue(4.0)
    processes.stopped.clear()
    watch.find_overdue(5.0)
    processes.stopped.add(10)
    assert watch.find_overdue(7.0) == []


def test_time_in_which_the_launcher_was_stopped_too_does_not_count() -> None:
    processes = StoppableProcesses()
    watch = processes.watch(timeout_s=5.0)
    processes.stopped.add(10)
    watch.find_overdue(0.0)
    assert watch.find_overdue(3600.0) == []


def test_the_kernel_says_whether_a_process_is_stopped() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)

"""The number of compute threads beside other busy processes: decided from counters, read from /proc."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from lakh.compute_threads import LAST_HOLD_S, ComputeThreads, CoreTimes, CoreUse, fewer_threads, others_are_busy

IDLE = CoreUse(waiting=0.0, others=0.0, idle=2.0)


class Machine:
    """Counters of a machine with fixed cores, moved by hand."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._times = CoreTimes(now_s=100.0, waiting_s=5.0, own_s=7.0, busy_s=50.0, idle_s=90.0)

    def read(self) -> CoreTimes:
        return self._times

    def clock(self) -> float:
        return self._times.now_s

    def run(self, seconds: float, *, own: float, others: float, waiting: float = 0.0) -> None:
        """Let time pass; the numbers are cores."""
        now = self._times
        self._times = dataclasses.replace(
            now,
            now_s=now.now_s + seconds,
            waiting_s=now.waiting_s + seconds * waiting,
            own_s=now.own_s + seconds * own,
            busy_s=now.busy_s + seconds * (own + others),
            idle_s=now.idle_s + seconds * (self._cores - own - others),
        )


@pytest.mark.parametrize(
    ("threads", "use", "ranks", "expected"),
    [
        (2, CoreUse(waiting=0.6, others=0.6, idle=0.3), 1, 1),  # one busy process on two cores
        (8, CoreUse(waiting=1.5, others=2.7, idle=1.0), 1, 5),
        (8, CoreUse(waiting=0.0, others=3.0, idle=0.0), 1, 8),  # others have cores of their own
        (2, CoreUse(waiting=0.9, others=0.1, idle=0.0), 1, 2),  # our own threads compete, e.g. one that saves
        (4, CoreUse(waiting=0.5, others=0.9, idle=0.0), 2, 3),  # two ranks of four threads
        (1, CoreUse(waiting=0.9, others=2.0, idle=0.0), 1, 1),
        (3, CoreUse(waiting=2.0, others=9.0, idle=0.0), 1, 1),
    ],
)
def test_threads_leave_busy_processes_their_cores(threads: int, use: CoreUse, ranks: int, expected: int) -> None:
    assert fewer_threads(threads, use, ranks) == expected


def test_a_busy_process_takes_a_thread_and_gives_it_back_when_it_ends() -> None:
    machine = Machine(cores=2)
    threads = ComputeThreads(2, read=machine.read, clock=machine.clock)
    machine.run(1.5, own=1.9, others=0.0)
    assert threads.adjust() is None
    machine.run(3.0, own=1.2, others=0.7, waiting=0.7)
    assert threads.adjust() == 1
    assert threads.reason == "other processes use 0.7 cores"
    for _ in range(5):
        machine.run(1.4, own=1.0, others=1.0)
        assert threads.adjust() is None
    machine.run(1.4, own=1.0, others=0.0)
    assert threads.adjust() == 2
    assert threads.reason == "1.0 cores are idle"


def test_counters_are_read_once_a_second_at_most() -> None:
    machine = Machine(cores=2)
    threads = ComputeThreads(2, read=machine.read, clock=machine.clock)
    for _ in range(3):
        machine.run(0.25, own=1.0, others=1.0, waiting=1.0)
        assert threads.adjust() is None
    machine.run(0.25, own=1.0, others=1.0, waiting=1.0)
    assert threads.adjust() == 1


def test_bursts_of_others_are_tried_less_and_less_often() -> None:
    machine = Machine(cores=2)
    threads = ComputeThreads(2, read=machine.read, clock=machine.clock)
    pauses = []
    for _ in range(8):
        machine.run(2.0, own=1.2, others=0.7, waiting=0.7)
        assert threads.adjust() == 1
        fell_s = machine.clock()
        while threads.count == 1:
            machine.run(1.0, own=1.0, others=0.0)
            threads.adjust()
        pauses.append(machine.clock() - fell_s)
    assert pauses[:3] == [2.0, 4.0, 8.0]
    assert pauses[-1] == LAST_HOLD_S


def test_one_thread_and_kernels_without_counters_change_nothing(tmp_path: Path) -> None:
    machine = Machine(cores=2)
    single = ComputeThreads(1, read=machine.read, clock=machine.clock)
    machine.run(5.0, own=1.0, others=1.0, waiting=1.0)
    assert single.adjust() is None
    assert CoreTimes.read(tmp_path) is None
    assert ComputeThreads(2, read=lambda: None).adjust() is None


def test_only_the_cores_that_the_process_may_use_count(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    elsewhere = max(allowed) + 1
    (tmp_path / "self/task/7").mkdir(parents=True)
    (tmp_path / "self/task/7/schedstat").write_text("1000 2500000000 3\n")
    lines = [f"cpu{core} 10 20 30 400 50 6 7 8 0 0" for core in (*allowed, elsewhere)]
    (tmp_path / "stat").write_text("\n".join(["cpu 1 1 1 1 1 1 1 1 1 1", *lines, "intr 5 5"]))
    times = CoreTimes.read(tmp_path)
    assert times is not None
    ticks = os.sysconf("SC_CLK_TCK")
    assert times.waiting_s == pytest.approx(2.5)
    assert times.busy_s == pytest.approx(len(allowed) * (10 + 20 + 30 + 6 + 7 + 8) / ticks)
    assert times.idle_s == pytest.approx(len(allowed) * 450 / ticks)


@pytest.mark.parametrize(("busy_s", "expected"), [(0.0, False), (0.04, False), (0.1, True)])
def test_one_look_tells_whether_others_are_busy(busy_s: float, expected: bool) -> None:
    looks = iter([CoreTimes(0.0, 0.0, 0.0, 5.0, 0.0), CoreTimes(0.2, 0.0, 0.0, 5.0 + busy_s, 0.3)])
    assert others_are_busy(lambda: next(looks), lambda seconds: None) == expected
    assert others_are_busy(lambda: None, lambda seconds: None)

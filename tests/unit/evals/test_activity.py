"""Programs that sleep are ended before their wall limit, and busy ones are not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lakh.errors import ConfigError
from lakh.evals.sandbox import Program, Sandbox, SandboxLimits, resident_memory
from lakh.evals.sandbox.resident_memory import IdleWatch, ProcessStat
from lakh.evals.tasks import bigcodebench


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> dict[int, ProcessStat]:
    found: dict[int, ProcessStat] = {}
    monkeypatch.setattr(resident_memory, "_processes", lambda: dict(found))
    monkeypatch.setattr(resident_memory, "_all_threads_sleep", lambda pid: True)
    return found


def idle_after(
    watch: IdleWatch, stats: dict[int, ProcessStat], *, cpu_s: float, is_sleeping: bool = True
) -> int | None:
    """Seconds until the watch reports that all sleep, with this CPU time per second; None if it never does."""
    for second in range(60):
        stats[2] = ProcessStat(1, 10, second * cpu_s, is_sleeping)
        stats[3] = ProcessStat(2, 10, 0.0, True)
        if watch.is_idle(float(second)):
            return second
    return None


def test_all_processes_have_to_sleep(stats: dict[int, ProcessStat]) -> None:
    assert idle_after(IdleWatch(1, 20.0), stats, cpu_s=0.0) == 20
    assert idle_after(IdleWatch(1, 45.0), stats, cpu_s=0.0) == 45
    assert idle_after(IdleWatch(1, 20.0), stats, cpu_s=0.005) == 20  # it wakes up from time to time
    assert idle_after(IdleWatch(1, 20.0), stats, cpu_s=0.1) is None  # other threads of it work
    assert idle_after(IdleWatch(1, 20.0), stats, cpu_s=0.0, is_sleeping=False) is None  # it waits for a CPU


@pytest.mark.parametrize(("work", "sleeps"), [("while True: pass", False), ("time.sleep(600)", True)])
def test_a_process_sleeps_if_all_of_its_threads_do(work: str, sleeps: bool) -> None:
    source = f"import threading, time\ndef work():\n    {work}\nthreading.Thread(target=work).start()\n"
    with subprocess.Popen([sys.executable, "-c", source]) as process:
        try:
            threads = Path(f"/proc/{process.pid}/task")
            deadline_s = time.monotonic() + 60.0
            while len(list(threads.iterdir())) < 2 or resident_memory._all_threads_sleep(process.pid) is not sleeps:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            while not resident_memory._processes()[process.pid].is_sleeping:  # the first thread waits for the other
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            assert resident_memory._all_threads_sleep(process.pid) is sleeps
        finally:
            process.kill()


def test_a_sleeping_program_is_a_timeout(sandbox: Sandbox) -> None:
    source = "import time\ndef answer():\n    while True: time.sleep(0.5)\n"
    sleeping = Program(source, "answer()", names=("answer",))
    verdict = sandbox.run(sleeping, SandboxLimits(wall_s=600, idle_s=2))
    assert (verdict.kind, verdict.detail) == ("timeout", "slept for 2 s")
    assert sandbox.run(Program("def answer(): return 1", "assert answer() == 1", names=("answer",))).passed


def test_a_program_may_sleep_for_as_long_as_its_task_says(sandbox: Sandbox) -> None:
    source = "import time\ndef answer():\n    time.sleep(4)\n    return 1\n"
    sleeping = Program(source, "assert answer() == 1", names=("answer",))
    verdict = sandbox.run(sleeping, SandboxLimits(wall_s=600, idle_s=1))
    assert (verdict.kind, verdict.detail) == ("timeout", "slept for 1 s")
    assert sandbox.run(sleeping, SandboxLimits(wall_s=600, idle_s=600)).passed


def test_tests_that_sleep_may_and_no_program_sleeps_for_two_minutes() -> None:
    assert SandboxLimits().idle_s == 20
    assert 75 < bigcodebench.LIMITS.idle_s < 120  # the tests of BigCodeBench/1104 sleep for 73 s


def test_the_limit_has_to_be_a_number_of_seconds() -> None:
    with pytest.raises(ConfigError, match="idle_s"):
        SandboxLimits(idle_s=0)

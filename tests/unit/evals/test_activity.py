"""Programs that sleep are ended before their wall limit, and busy ones are not."""

from __future__ import annotations

import pytest

from lakh.evals.sandbox import Program, Sandbox, SandboxLimits, resident_memory
from lakh.evals.sandbox.resident_memory import IdleWatch, ProcessStat


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> dict[int, ProcessStat]:
    found: dict[int, ProcessStat] = {}
    monkeypatch.setattr(resident_memory, "_processes", lambda: dict(found))
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
    assert idle_after(IdleWatch(1), stats, cpu_s=0.0) == 20
    assert idle_after(IdleWatch(1), stats, cpu_s=0.005) == 20  # it wakes up from time to time
    assert idle_after(IdleWatch(1), stats, cpu_s=0.1) is None  # other threads of it work
    assert idle_after(IdleWatch(1), stats, cpu_s=0.0, is_sleeping=False) is None  # it waits for a CPU


def test_a_sleeping_program_is_a_timeout(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_memory, "IDLE_TIMEOUT_S", 2.0)
    source = "import time\ndef answer():\n    while True: time.sleep(0.5)\n"
    verdict = sandbox.run(Program(source, "answer()", names=("answer",)), SandboxLimits(wall_s=600))
    assert (verdict.kind, verdict.detail) == ("timeout", "slept for 2 s")
    assert sandbox.run(Program("def answer(): return 1", "assert answer() == 1", names=("answer",))).passed

"""CPU limits from the reference solutions: measured, cached, and ignored if the cache is damaged."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.evals import calibrate as calibrate_module
from lakh.evals.calibrate import (
    STEPS_S,
    CachedCalibration,
    CpuCalibration,
    cache_key,
    cache_path,
    calibrate,
    cpu_limit,
    probe_s,
    problem_hash,
    read_cache,
    slowdown_since,
    write_cache,
)
from lakh.evals.generation.samples import canonical_samples
from lakh.evals.run import score_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict
from lakh.evals.scoring.protocol import Origin
from lakh.evals.task import CommandProgram, Program, Task

TODAY = datetime.date(2026, 11, 15)
KEPT = CachedCalibration(TODAY, 0.002, {})


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_module, "probe_s", lambda: 0.002)


class Counting:
    """A fake sandbox: every program passes with the given CPU time, and is counted."""

    description = "some isolation"

    def __init__(self, cpu_s: float = 0.01, kind: Any = "passed") -> None:
        self.cpu_s, self.kind, self.ran = cpu_s, kind, 0

    def run(self, program: Program | CommandProgram, limits: SandboxLimits) -> SandboxVerdict:
        self.ran += 1
        return SandboxVerdict(self.kind, cpu_s=self.cpu_s)

    def stop(self) -> None: ...

    map = Sandbox.map


def measure(task: Task, sandbox: Counting, **options: Any) -> CpuCalibration:
    return calibrate(task, task.problems, sandbox, workers=1, **options)  # type: ignore[arg-type]


def test_the_cpu_limit_follows_the_reference() -> None:
    assert cpu_limit(0.01) == 3
    assert cpu_limit(0.31) == 6
    assert cpu_limit(9.0) == 96
    assert cpu_limit(500.0) == 192
    assert CpuCalibration({"a": None, "b": 0.31}, "2026-11-15").limits(10) == {"a": 10, "b": 6}


@given(st.floats(0, 30), st.floats(1, 2))
def test_a_slowdown_never_shortens_a_limit(reference_s: float, slowdown: float) -> None:
    limits = [CpuCalibration({"a": reference_s}, "2026-11-15", by).limits(10)["a"] for by in (1.0, slowdown)]
    assert limits[0] <= limits[1]
    assert set(limits) <= set(STEPS_S)


@pytest.mark.parametrize(
    ("now_probe_s", "days", "slowdown"),
    [
        (0.002, 0, 1.0),
        (0.0024, 0, 1.0),  # noise
        (0.0011, 0, 1.0),  # faster: limits stay as wide as they were
        (0.003, 0, 1.5),
        (0.0041, 0, None),
        (0.0009, 0, None),
        (0.002, 30, 1.0),
        (0.002, 31, None),
        (0.002, -1, None),  # the clock was set back
    ],
)
def test_cached_times_are_scaled_or_discarded(now_probe_s: float, days: int, slowdown: float | None) -> None:
    found = slowdown_since(KEPT, now_probe_s, TODAY + datetime.timedelta(days))
    assert found == (pytest.approx(slowdown) if slowdown else None)


def test_the_probe_returns_the_minimum_of_its_tries() -> None:
    times = iter([0.0, 5.0, 5.0, 7.0, 7.0, 10.0])
    assert probe_s(clock=lambda: next(times)) == 2.0


def test_a_slow_reference_raises_its_own_limit_only(sandbox: Sandbox, toy_task: Task) -> None:
    slow = "    while time.process_time() < 0.5: pass\n"
    first, *rest = toy_task.problems
    heavy = replace(first, prompt=f"import time\n{first.prompt}", canonical=slow + first.canonical)
    task = replace(toy_task, problems=(heavy, *rest))
    limits = calibrate(task, task.problems, sandbox, workers=1).limits(10)
    assert limits["Toy/0"] >= 6
    assert limits["Toy/1"] == limits["Toy/2"] == 3


def test_references_run_once_and_later_runs_use_the_cache(toy_task: Task) -> None:
    sandbox = Counting()
    first, second = measure(toy_task, sandbox), measure(toy_task, sandbox)
    assert sandbox.ran == 3
    assert str(first) == str(second)
    assert first.limits(10) == second.limits(10) == {"Toy/0": 3, "Toy/1": 3, "Toy/2": 3}
    assert str(measure(toy_task, Counting(0.5), ignore_cache=True)) != str(first)


def test_only_problems_missing_from_the_cache_are_measured(toy_task: Task) -> None:
    sandbox = Counting()
    calibrate(toy_task, toy_task.problems[:1], sandbox, workers=1)  # type: ignore[arg-type]
    measure(toy_task, sandbox)
    assert sandbox.ran == 3
    changed = replace(toy_task.problems[1], test="def check(f):\n    pass\n")
    measure(replace(toy_task, problems=(toy_task.problems[0], changed)), sandbox)
    assert sandbox.ran == 4


def test_a_slower_machine_scales_limits_from_the_cache(toy_task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(toy_task, Counting(0.25)).limits(10)["Toy/0"] == 3
    monkeypatch.setattr(calibrate_module, "probe_s", lambda: 0.003)
    sandbox = Counting(0.25)
    slower = measure(toy_task, sandbox)
    assert slower.limits(10)["Toy/0"] == 6
    assert "1.50 times slower" in str(slower)
    assert sandbox.ran == 0


def test_a_failed_reference_is_not_cached(toy_task: Task) -> None:
    assert measure(toy_task, Counting(kind="sandbox_error")).limits(10)["Toy/0"] == 10
    assert measure(toy_task, Counting()).limits(10)["Toy/0"] == 3


def damage(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def changed(raw: bytes) -> bytes:
        document = json.loads(raw)
        change(document)
        return json.dumps(document).encode()

    return changed


DAMAGED = {
    "empty": lambda raw: b"",
    "torn": lambda raw: raw[: len(raw) // 2],
    "another document": lambda raw: b"[1, 2]",
    "a figure edited": damage(lambda d: d["reference_s"][0].__setitem__(2, 99.0)),
    "another machine's, renamed": damage(lambda d: d["key"].update(processor="another")),
    "no figures": damage(lambda d: d.pop("reference_s")),
    "no checksum": damage(lambda d: d.pop("sha256")),
    "deep": lambda raw: b"[" * 100_000,
    "not text": lambda raw: b"\xff\x00" * 40,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_cache_file_is_ignored(toy_task: Task, name: str) -> None:
    sandbox = Counting()
    measure(toy_task, sandbox)
    path = cache_path(cache_key(toy_task, sandbox.description))
    whole = path.read_bytes()
    path.write_bytes(DAMAGED[name](whole))
    assert read_cache(cache_key(toy_task, sandbox.description)) is None
    measure(toy_task, sandbox)
    assert sandbox.ran == 6
    assert json.loads(path.read_bytes())["reference_s"] == json.loads(whole)["reference_s"]


@pytest.mark.parametrize("figure", [-1.0, float("nan"), float("inf")])
def test_invalid_numbers_are_ignored_even_with_a_valid_checksum(toy_task: Task, figure: float) -> None:
    key = cache_key(toy_task, "some isolation")
    write_cache(key, CachedCalibration(TODAY, 0.002, {("Toy/0", problem_hash(toy_task.problems[0])): figure}))
    assert read_cache(key) is None


def test_isolation_data_and_limits_have_separate_calibrations(toy_task: Task) -> None:
    sandbox = Counting()
    measure(toy_task, sandbox)
    sandbox.description = "other isolation"
    measure(toy_task, sandbox)
    measure(replace(toy_task, data_sha256="1" * 64), sandbox)
    measure(replace(toy_task, limits=SandboxLimits(memory_MiB=99)), sandbox)
    assert sandbox.ran == 12


def test_a_cache_folder_that_cannot_be_written_is_not_an_error(
    toy_task: Task, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(calibrate_module, "cache_folder", lambda name: tmp_path / "file" / name)
    sandbox = Counting()
    for _ in range(2):
        assert measure(toy_task, sandbox).limits(10)["Toy/0"] == 3
    assert sandbox.ran == 6


def test_the_protocol_names_the_calibration(sandbox: Sandbox, toy_task: Task) -> None:
    samples = canonical_samples(toy_task)
    lines = [score_samples(toy_task, samples, sandbox, Origin("x")).protocol.line() for _ in range(2)]
    assert lines[0] == lines[1]
    assert ' | calibration="' in lines[0]
    assert 'calibration="given"' in score_samples(toy_task, samples, sandbox, Origin("x"), cpu_s=5).protocol.line()

"""Whole commands are timed, and one that fails says why."""

import sys
from pathlib import Path

import pytest
from bench.eval.commands import bench_commands, measure_command
from bench.harness import SystemFailed

from lakh.errors import UserError


def test_a_command_has_its_wall_and_its_cpu_time(tmp_path: Path) -> None:
    wall_s, cpu_s = measure_command([sys.executable, "-c", "sum(range(10**6))"], str(tmp_path), {})
    assert cpu_s > 0
    assert wall_s > 0


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ([sys.executable, "-c", "raise SystemExit('no data')"], "no data"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "exit code 3"),
        (["/no/such/command"], "No such file"),
    ],
)
def test_a_command_that_fails_keeps_its_reason(tmp_path: Path, line: list[str], why: str) -> None:
    with pytest.raises(SystemFailed, match=why):
        measure_command(line, str(tmp_path), {})


def test_a_peer_that_is_not_there_is_a_bad_argument() -> None:
    with pytest.raises(UserError, match=r"evalplus\.evaluate"):
        bench_commands(repeats=1, workers=1, data=None, evalplus="/no/such/evalplus", progress=print)
